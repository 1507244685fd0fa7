"""A plan says how many bytes are taken, before they are."""

from typing import Any

import pytest
import torch

import models
from hf_paged_eviction import PagedEvictionCache, plan
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.learned.measured import BYTES, RANDOM, Measured, Row
from hf_paged_eviction.planning.plan import Loss, loss_at
from hf_paged_eviction.planning.shapes import LiveBytes

CONTEXT, CHUNK = 512, 64
#: Family, bits and rows.
CASES: list[tuple[str, Any, int]] = [
    ("llama", None, 1),
    ("llama", 8, 1),
    ("llama", 4, 2),
    ("qwen2", (4, 2), 1),
    ("qwen2", None, 3),
    ("qwen3", 8, 2),
    ("gemma3", None, 1),
    ("gemma3", 4, 1),
    ("gpt_neox", None, 2),
    ("gpt_neox", 3, 1),
    ("phi3", 2, 1),
    ("phi3", None, 1),
]


@pytest.mark.parametrize(("family", "bits", "rows"), CASES)
@torch.inference_mode()
def test_what_is_planned_is_what_is_taken(family: str, bits: Any, rows: int) -> None:
    model = models.build(family, hidden_size=128, intermediate_size=512, head_dim=32)
    asked = {"context": CONTEXT, "rows": rows, "chunk": CHUNK, "bits": [bits]}
    (everything,) = plan(model, **asked).choices
    weights = plan(model, **asked).weights
    assert weights == sum(parameter.nbytes for parameter in [*model.parameters(), *model.buffers()])
    (choice,) = plan(model, memory=weights + (everything.peak_bytes - weights) * 7 // 8, **asked).choices
    assert 64 <= choice.tokens <= CONTEXT
    cache = PagedEvictionCache(model.config, budget=f"{choice.cache_bytes}B", policy="keydiff", bits=bits)
    ids = torch.randint(3, 99, (rows, CONTEXT), generator=torch.Generator().manual_seed(0))
    with LiveBytes() as live:
        for start in range(0, CONTEXT, CHUNK):
            mask = torch.ones(rows, start + CHUNK, dtype=torch.int64)
            more = {"attention_mask": mask, "logits_to_keep": 1, CACHE_ARGUMENT: cache}
            model(ids[:, start : start + CHUNK], **more)
    assert cache.budget == choice.tokens
    assert cache.stats().storage_bytes == pytest.approx(choice.cache_bytes, rel=0.001)
    assert weights + live.peak == pytest.approx(choice.peak_bytes, rel=0.02)


def test_a_configuration_is_enough_and_everything_that_fits_is_held() -> None:
    config = models.family_config("llama")
    planned = plan(config, "1k", dtype=torch.bfloat16)
    assert planned.full_bytes == 1024 * planned.token_bytes
    plain = planned.choices[0]
    assert (plain.tokens, plain.share, plain.loss) == (1024, 1.0, None)
    assert "1,024 (all)" in str(planned)
    assert all(len(line) <= 90 for line in str(planned).splitlines())


def test_less_memory_than_the_weights_take_fits_nothing() -> None:
    planned = plan(models.family_config("llama"), 1024, "10kB")
    assert all(choice.tokens == 0 for choice in planned.choices)
    assert "does not fit" in str(planned)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": "128kB"}, "'128k'"),
        ({"context": 0}, "context=0"),
        ({"memory": "8G"}, "'2GiB'"),
        ({"rows": 0}, "rows must be"),
        ({"chunk": "64"}, "chunk must be"),
        ({"profile": "no_such_profile"}, "no_such_profile"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(models.family_config("llama"), **{"context": 64, "memory": "1GiB", **changes})


def test_only_models_and_configurations_are_planned() -> None:
    with pytest.raises(TypeError, match="a model or its configuration"):
        plan("Qwen/Qwen3-8B", 64)  # type: ignore[arg-type]


def test_losses_say_where_they_were_measured() -> None:
    sizes = ((0.25, 0.01), (0.125, 0.04))
    rows = [Row("keydiff", "uniform", 4, BYTES, share, {"text": [loss]}) for share, loss in sizes]
    rows += [Row(RANDOM, "uniform", None, BYTES, share, {"text": [1.0]}) for share, _ in sizes]
    measured = Measured(tuple(rows), "float32")
    assert loss_at(measured, 4, 0.251, "text") == Loss(0.01, "measured")
    between = loss_at(measured, 4, 0.125 * 2**0.5, "text")
    assert between is not None and between.source == "between" and between.nats == pytest.approx(0.02)
    assert loss_at(measured, 4, 0.06, "text") == Loss(0.04, "extrapolated")
    assert loss_at(measured, None, 1.0, "text") == Loss(0.0, "measured")
    assert loss_at(measured, 8, 0.25, "text") is None and loss_at(None, 4, 0.25) is None
