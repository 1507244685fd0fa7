"""What a policy is told of tokens from outside moves with them: as good as reading it from the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from hf_paged_eviction import EvictionPolicy, Needs, ScoreContext
from hf_paged_eviction.integration.heads import LocalHeads
from hf_paged_eviction.learned.gates.marks import LayerMarks


class FirstNumbers(LayerMarks):
    """Marks that nobody has to tell: the first number of each key."""

    def arrived(self, keys: Tensor) -> None:
        self.tell(keys[..., 0].float())
        super().arrived(keys)


def first_numbers(label: str, layer_idx: int, local_heads: LocalHeads, static: bool) -> FirstNumbers:
    return FirstNumbers("", label, layer_idx, local_heads, static)


@dataclass(frozen=True)
class Told(EvictionPolicy):
    needs = Needs(heads="separate", marks=first_numbers)

    def score(self, context: ScoreContext) -> Tensor:
        assert context.marks is not None
        return context.marks


@dataclass(frozen=True)
class Read(EvictionPolicy):
    needs = Needs(heads="separate")

    def score(self, context: ScoreContext) -> Tensor:
        return context.keys[..., 0].float()


@pytest.mark.parametrize("mode", ["direct", "beam", "chunked_prefill", "two_turns", "prompt_lookup"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_marks_move_with_their_tokens(mode: str, padded: bool) -> None:
    model = models.build("llama")
    found: list[Any] = []
    for policy in (Told(), Read()):
        recording = models.NEEDS_RECORDING_FLAG and mode in modes.SPECULATIVE
        cache = models.paged(model.config, budget=24, block_size=4, policy=policy, record_past=recording)
        said = modes.run(model, cache, mode, *modes.batch(mode, padded))
        found.append((said, [layer.positions for _, layer in cache.paged_layers]))
    (told, where), (read, there) = found
    assert torch.equal(torch.as_tensor(told), torch.as_tensor(read))
    for ours, theirs in zip(where, there, strict=True):
        assert torch.equal(ours, theirs)
