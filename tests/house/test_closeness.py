"""The bound of the tests of exactness lies far below what one wrong token does."""

import random

import pytest
import torch

import models
import modes
from closeness import assert_close, bound
from evicting import binding
from reference import Recorder, reference_logits


def test_it_follows_the_numbers() -> None:
    """What is nan or infinite says nothing of their size."""
    numbers = torch.tensor([3.0, -5.0, float("nan"), float("-inf")])
    assert bound(numbers, 0.1) == pytest.approx(0.5)
    assert_close(torch.tensor([1.0, 1e-9]), torch.tensor([1.0, 0.0]))
    for wrong in ([1.0, 1e-3], [1.0, float("nan")]):
        with pytest.raises(AssertionError, match="logits differ"):
            assert_close(torch.tensor(wrong), torch.tensor([1.0, 0.0]))
    with pytest.raises(AssertionError, match=r"\(1,\) and \(2,\)"):
        assert_close(torch.ones(1), torch.ones(2))


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_one_wrong_token_is_far_beyond_it(family: str) -> None:
    """In one layer, one head and one forward another token is seen than was held: the logits of that forward tell."""
    model, drawn = models.shared(family), random.Random(0)
    cache = binding(model, "direct", heads="separate", policy="random")
    with Recorder(model, cache) as recorder:
        modes.run(model, cache, "direct", *modes.batch("direct", padded=True))
    right, last, moved = reference_logits(model, recorder), recorder.columns[-1], []
    most = bound(right[torch.tensor([column.real for column in recorder.columns]).T])
    for _ in range(25):
        index, row = drawn.choice(cache.paged_layers)[0], drawn.randrange(len(last.real))
        sees = drawn.choice(last.visible[index][row])
        gone = [at for at, column in enumerate(recorder.columns) if column.real[row] and at not in sees]
        if gone:
            before = sorted(sees)
            sees ^= {drawn.choice(before[:-1]), drawn.choice(gone)}
            wrong = reference_logits(model, recorder)
            sees ^= sees ^ set(before)
            moved.append((wrong - right)[row, -1].abs().max().item() / most)
    assert min(moved) > 5
    assert sorted(moved)[len(moved) // 2] > 100
