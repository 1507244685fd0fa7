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
from hf_paged_eviction.layer import paged
from hf_paged_eviction.policies.modifiers.hybrid import Hybrid
from hf_paged_eviction.store.marks import Marks, MarkSource


class FirstNumbers(Marks):
    """Marks that nobody has to tell: the first number of each key."""

    def arrived(self, keys: Tensor) -> None:
        self.tell(keys[..., 0].float())
        super().arrived(keys)


@dataclass(frozen=True)
class Listening(EvictionPolicy):
    needs = Needs(heads="separate", marks=MarkSource("first numbers", "Tell them."))

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
def test_marks_move_with_their_tokens(mode: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "Marks", FirstNumbers)
    model = models.build("llama")
    runs: list[Any] = []
    for policy in (Listening(), Read()):
        recording = models.NEEDS_RECORDING_FLAG and mode in modes.SPECULATIVE
        cache = models.paged(model.config, budget=24, block_size=4, policy=policy, record_past=recording)
        tokens = modes.run(model, cache, mode, *modes.batch(mode, padded))
        runs.append((tokens, [layer.positions for _, layer in cache.paged_layers]))
    (tokens_told, where), (read, there) = runs
    assert torch.equal(torch.as_tensor(tokens_told), torch.as_tensor(read))
    for ours, other in zip(where, there, strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize(
    "options",
    [
        {"allocator": "ada_kv"},
        {"bits": 8},
        {"bits": 8, "allocator": "ada_kv"},
        {"positions": "cache"},
        {"static": True},
    ],
    ids=str,
)
def test_marks_lie_beside_their_keys(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where heads hold different numbers of tokens, and where keys are rounded. Their bytes count."""
    monkeypatch.setattr(paged, "Marks", FirstNumbers)
    model = models.build("llama")
    model.set_attn_implementation("paged_eviction")
    cache = models.paged(model.config, budget=24, block_size=4, policy=Listening(), **options)
    modes.run(model, cache, "direct", *modes.batch("direct", True))
    for _, layer in cache.paged_layers:
        marks, keys = layer.marks.of(layer.store.columns, layer.held), layer.store.read(layer.held)[0][..., 0]
        real = layer.positions >= 0
        torch.testing.assert_close(marks[real], keys[real], atol=0.1 if "bits" in options else 0, rtol=0)
        assert layer.stats().storage_parts["marks"] == 4 * layer.store.columns["marks"].numel()


def test_marks_count_in_a_budget_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "Marks", FirstNumbers)
    model = models.build("llama")
    sizes = []
    for policy in (Listening(), Read()):
        cache = models.paged(model.config, budget="20000B", block_size=1, policy=policy)
        modes.run(model, cache, "direct", *modes.batch("direct", False))
        tensors = [tensor for _, layer in cache.paged_layers for tensor in layer.store.columns.tensors.values()]
        sizes.append(cache.budget)
        assert sum(tensor.nbytes for tensor in tensors) == cache.stats().storage_bytes <= 20_000
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [(None, RuntimeError, "0 anything"), ((1, 2, 3), ValueError, r"2.*heads.*3")],
)
def test_what_was_not_told(shape: tuple[int, ...] | None, error: type[Exception], message: str) -> None:
    cache = models.paged(models.family_config("llama"), budget=24, block_size=4, policy=Listening())
    if shape is not None:
        cache.layers[0].marks.tell(torch.zeros(shape))
    with pytest.raises(error, match=message):
        cache.update(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), 0)


def test_two_sources_are_not_joined() -> None:
    one, other = (Needs(marks=MarkSource(name, "")) for name in ("one", "other"))
    assert Needs.together([one, Needs(), one]).marks == MarkSource("one", "")
    with pytest.raises(ValueError, match="different sources"):
        Needs.together([one, other])


def test_a_modifier_prepares_for_its_parts() -> None:
    prepared: list[Any] = []

    class Prepared(Read):
        def prepare_model(self, model: Any) -> None:
            prepared.append(model)

    Hybrid(Prepared(), Hybrid(Read(), Prepared())).prepare_model("model")
    assert prepared == ["model", "model"]
