"""A chunk that reads held tokens and itself in two parts says what one softmax under a mask says."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import models
import modes
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.attention import in_order
from hf_paged_eviction.attention.in_order import InOrder

there = pytest.mark.skipif(in_order._FLASH is None, reason="torch lacks the operator that returns sums of exponentials")


@pytest.mark.parametrize("lengths", [None, [3, 0, 7, 5]])
def test_the_mask_is_what_a_loop_makes(lengths: list[int] | None) -> None:
    order, key = InOrder(7, 4, lengths), torch.zeros(2, 2, 11, 8)
    mask = order.mask(key, 3).expand(2, 2, -1, -1)
    for row in range(2):
        for head in range(2):
            length = 7 if lengths is None else lengths[2 * row + head]
            for query in range(3):  # the last three of the four new ones
                seen = [slot < length if slot < 7 else slot - 7 <= query + 1 for slot in range(11)]
                assert mask[row, head, query].tolist() == seen, (row, head, query)


@there
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [None, [300, 1, 77, 150]])
def test_two_parts_are_one_softmax(lengths: list[int] | None, dtype: torch.dtype) -> None:
    """Slots beyond the length of a head hold no number."""
    torch.manual_seed(0)
    order = InOrder(300, 50, lengths)
    query = torch.randn(2, 6, 50, 16)
    key, value = (torch.randn(2, 2, 350, 16) for _ in range(2))
    mask = order.mask(key, 50).expand(2, 2, -1, -1).repeat_interleave(3, 1)
    expected = scaled_dot_product_attention(
        query.double(),
        *(states.double().repeat_interleave(3, 1) for states in (key, value)),
        attn_mask=mask,
        scale=0.3,
    )
    for at, length in enumerate(lengths or ()):
        row, head = divmod(at, 2)
        key[row, head, length:300] = value[row, head, length:300] = float("nan")
    query, key, value = (states.to(dtype) for states in (query, key, value))
    assert order.readable(query, key, value)
    output, lse = order.read(query, key, value, 0.3)
    share = 1e-5 if dtype == torch.float32 else 2e-2
    assert_close(output.transpose(1, 2).double(), expected, share=share)
    products = 0.3 * query.double() @ key.double().repeat_interleave(3, 1).mT
    assert_close(lse.double(), products.masked_fill(~mask, float("-inf")).logsumexp(-1), share=1e-5)


@there
def test_what_cannot_be_read_is_known() -> None:
    order, query, key = InOrder(3, 2), torch.zeros(1, 2, 2, 8), torch.zeros(1, 1, 5, 8)
    assert order.readable(query, key, key)
    assert not order.readable(query[:, :, 1:], key, key)  # some models drop queries
    assert not order.readable(query.double(), key.double(), key.double())
    assert not order.readable(query, key, key[..., :4])
    assert not order.readable(query.clone().requires_grad_(), key, key)


#: A prompt that overflows, chunks, single tokens, and chunks again.
PLAN = [(0, 40), (40, 52), (52, 60), *((at, at + 1) for at in range(60, 70)), (70, 82), (82, 90)]


@there
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("policy", ["keydiff", "snapkv"])
def test_a_model_reads_chunks_as_under_masks(policy: str, bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In few bits, too: the codes of this text do not lie on the border of two."""
    model = models.shared("llama", "paged_eviction")
    ids, mask = models.left_pad(models.prompts([90], seed=1))
    sizes, draw = (model.config.num_hidden_layers, model.config.num_key_value_heads), torch.Generator().manual_seed(3)
    table: Any = Heads.of(torch.rand(sizes, generator=draw) + 0.2)
    reads: list[InOrder] = []
    read = InOrder.read
    monkeypatch.setattr(InOrder, "read", lambda order, *given: reads.append(order) or read(order, *given))

    def logits() -> torch.Tensor:
        settings: Any = {"budget": 32, "block_size": 4, "policy": policy, "heads": "separate", "bits": bits}
        cache = PagedEvictionCache(model.config, allocator=table, **settings)
        return torch.cat([modes.forward(model, cache, ids, mask, *part) for part in PLAN], 1)

    fast = logits()
    assert len(reads) >= 3 * model.config.num_hidden_layers
    assert all(order.held == 32 or order.lengths is not None for order in reads)
    monkeypatch.setattr(in_order, "_FLASH", None)
    count = len(reads)
    assert_close(fast, logits())
    assert len(reads) == count
