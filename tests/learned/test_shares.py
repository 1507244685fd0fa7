"""Tables of shares: between what is known, and what is refused."""

from dataclasses import replace

import pytest
import torch

import models
from hf_paged_eviction import PagedEvictionCache, make_allocator
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.learned.shares import HeadShares
from hf_paged_eviction.preparing.fitting import KEPT, learn_shares


def test_between_two_tables_logarithms_are_interpolated() -> None:
    shares = HeadShares((1 / 16, 1 / 4), {0: torch.tensor([[4.0, 1.0], [1.0, 1.0]]), 2: torch.tensor([[1.0], [9.0]])})
    first, second = shares.at(torch.tensor([1 / 64, 1 / 16, 1 / 8, 1 / 4, 1.0]))
    torch.testing.assert_close(first[:, 0], torch.tensor([4.0, 4.0, 2.0, 1.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(second[:, 0], torch.tensor([1.0, 1.0, 3.0, 9.0, 9.0], dtype=torch.float64))


def test_one_table_is_the_same_everywhere() -> None:
    for kept_share in (0.01, 0.5, 1.0):
        (first,) = HeadShares.of([[2, 0.5]]).at(torch.tensor([kept_share]))
        assert first.tolist() == [[2.0, 0.5]]


@pytest.mark.parametrize(
    "table", ["[[0, 1]]", "[[1, -1]]", "[]", "[[1], 2]", "[[NaN]]", "[[[1]]]", "[['a']]", "[[1", "nowhere.safetensors"]
)
def test_what_is_no_table_is_refused(table: str) -> None:
    with pytest.raises(ValueError, match=table.strip("[]")[:1] or "table"):
        make_allocator(f"heads:{table}")


def test_a_table_is_a_label_and_back() -> None:
    heads = replace(Heads.of([[0.25, 1.75], [1, 1]]), power=2.0)
    assert make_allocator(heads.label) == heads
    (first, _) = heads.shares(2, 64, torch.tensor([100]))
    assert first.tolist() == [[0.0625, 3.0625]]


def test_a_table_of_another_model_is_refused() -> None:
    config = models.shared("llama", "paged_eviction").config
    with pytest.raises(ValueError, match=r"shares.*1.*2"):
        PagedEvictionCache(config, budget=64, policy="keydiff", allocator="heads:[[1, 1]]")
    cache = PagedEvictionCache(config, budget=64, policy="keydiff", allocator="heads:[[1, 1, 1], [1, 1, 1]]")
    model = models.shared("llama", "paged_eviction")
    with pytest.raises(ValueError, match=r"shares.*3.*2"), torch.no_grad():
        model(models.prompts([20])[0][None], **{CACHE_ARGUMENT: cache})


def test_shares_are_what_one_threshold_leaves() -> None:
    """Two heads of which one has all the high scores."""
    high, low = torch.linspace(10, 11, 400), torch.linspace(0, 1, 400)
    shares = learn_shares({3: [torch.stack([high, low])], 5: [torch.stack([low, low])]})
    assert shares.kept == KEPT and list(shares.layers) == [3, 5]
    quarter = torch.cat([table[KEPT.index(1 / 4)] for table in shares.layers.values()])
    assert quarter.argmax() == 0 and quarter[1:].max() < 0.1
    torch.testing.assert_close(quarter.mean(), torch.tensor(1.0))
