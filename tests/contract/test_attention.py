"""The masks of flash and flex attention: other formats, same promises."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

import models
import modes
from closeness import assert_close
from evicting import exact
from hf_paged_eviction.queries import attention
from hf_paged_eviction.queries.attention import paged_eviction_attention

pytestmark = pytest.mark.contract


def flash_on_cpu(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """What the kernels compute: a 2-D mask over the keys, causality aligned at the bottom right, a window."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    queries, keys = query.shape[2], key.shape[2]
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    allowed = (distance >= 0)[None, None]
    window = settings.get("sliding_window")
    if window is not None:
        allowed = allowed & (distance < window)
    if attention_mask is not None:
        assert attention_mask.ndim == 2
        assert attention_mask.shape[1] == keys, "flash attention unpads exactly the keys it is given"
        allowed = allowed & attention_mask.bool()[:, None, None]
    weights = query @ key.transpose(-1, -2) * settings["scaling"]
    weights = weights.masked_fill(~allowed, torch.finfo(weights.dtype).min).softmax(-1)
    return (weights @ value).transpose(1, 2), None


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash_on_cpu)
    yield


def flash_model(family: str) -> Any:
    model = models.build(family)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", ["greedy", "beam", "chunked_prefill", "direct", "prompt_lookup", "three_turns"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.usefixtures("flash")
def test_flash_is_exact(family: str, mode: str, padded: bool) -> None:
    if reason := models.cannot_crop(family, mode):
        pytest.skip(reason)
    model = flash_model(family)
    cache = models.paged(model.config, budget=24, block_size=4)
    with exact(model, cache, poison=True):
        modes.run(model, cache, mode, *modes.batch(mode, padded))


@pytest.mark.usefixtures("flash")
def test_flash_with_pads_in_the_middle() -> None:
    model = flash_model("llama")
    models.need_masks_of_single_tokens(model)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, models.VOCABULARY, (3, 50), generator=generator)
    mask = (torch.rand(3, 50, generator=generator) > 0.3).long()
    mask[:, 0] = mask[:, 11] = 1
    cache = models.paged(model.config, budget=16, block_size=4)
    with exact(model, cache, poison=True):
        for start, stop in [(0, 12), (12, 20), *((at, at + 1) for at in range(20, 44)), (44, 50)]:
            modes.forward(model, cache, ids, mask, start, stop)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", ["greedy", "direct"])
def test_flex_is_exact(mode: str, padded: bool) -> None:
    """Run without the compiler, which takes minutes and changes nothing about the mask."""
    model = models.build("llama", "flex_attention", head_dim=16)
    cache = models.paged(model.config, budget=24, block_size=4)
    with torch.compiler.set_stance("force_eager"), exact(model, cache, poison=True):
        modes.run(model, cache, mode, *modes.batch(mode, padded))


def test_dropout_may_be_given_in_order() -> None:
    """As transformers' own functions take it; software that wraps them all calls them so."""
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 1
    module.is_causal = True
    states = [torch.randn(1, 2, 5, 4) for _ in range(3)]
    named, _ = paged_eviction_attention(module, *states, None, dropout=0.0, scaling=0.3)
    in_order, _ = paged_eviction_attention(module, *states, None, 0.0, 0.3)
    assert torch.equal(named, in_order)


@pytest.mark.parametrize("mask_heads", ["one", "each"])
@pytest.mark.parametrize("mask_rows", [1, 2])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("query_rows", [1, 2])
def test_one_query_with_any_mask(query_rows: int, additive: bool, mask_rows: int, mask_heads: str) -> None:
    """Head by head; a mask and learned queries may have one row for all, and a mask may be wider than the keys."""
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]
    query, key, value = torch.randn(query_rows, 6, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 4)
    mask = torch.rand(mask_rows, 6 if mask_heads == "each" else 1, 1, 7) > 0.4
    mask[..., 2] = True
    bias = torch.where(mask, 0.0, float("-inf")) + additive * torch.randn(mask.shape)
    output, _ = paged_eviction_attention(module, query, key, value, bias if additive else mask, scaling=0.3)
    keys, values = (states.repeat_interleave(3, 1) for states in (key, value))
    weights = (query @ keys.mT * 0.3 + bias[..., :5]).softmax(-1)
    assert_close(output, (weights @ values).transpose(1, 2))


@pytest.mark.parametrize("query_rows", [1, 2])
def test_one_query_without_a_mask_is_read_by_kv_heads(query_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where one query at a time takes ten times as long in bfloat16."""
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]
    module.is_causal = True  # type: ignore[assignment]
    query, key, value = torch.randn(query_rows, 6, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 4)
    shapes, sdpa = [], attention.scaled_dot_product_attention
    monkeypatch.setattr(
        attention, "scaled_dot_product_attention", lambda *all, **how: shapes.append(all[0].shape) or sdpa(*all, **how)
    )
    output, _ = attention.paged_eviction_attention(module, query, key, value, None, scaling=0.3)
    keys, values = (states.repeat_interleave(3, 1) for states in (key, value))
    assert_close(output, ((query @ keys.mT * 0.3).softmax(-1) @ values).transpose(1, 2))
    assert shapes == [(query_rows, 2, 3, 8)]
