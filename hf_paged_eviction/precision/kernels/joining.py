"""The third kernel: parts, tokens that are not rounded, and sinks become one output."""

import triton
import triton.language as tl

from .numbers import HIDDEN, LOWEST
from .parts import bias_of, logits_of


@triton.jit(do_not_specialize=["parts", "mask_row", "mask_head"])
def join_parts(
    query, keys, values, places, value_turn, mask, mask_row, mask_head, mask_slot, sinks, sums, output,
    scaling, softcap, parts,
    heads: tl.constexpr, group: tl.constexpr, place_count: tl.constexpr, value_bits: tl.constexpr,
    key_dim: tl.constexpr, value_dim: tl.constexpr,
    rows: tl.constexpr, key_width: tl.constexpr, value_width: tl.constexpr,
    place_step: tl.constexpr, mixed_step: tl.constexpr, piece_step: tl.constexpr,
):  # fmt: skip
    """Of a row and KV head the `output` `[row and head, group, value_dim]`: of the parts of `read_part`, of the tokens
    in `Exact`, whose `keys` and `values` are `[row and head, places, dim]`, and of `sinks` `[query_heads]`."""
    own = tl.program_id(0).to(tl.int64)
    member, key_channels, value_channels = tl.arange(0, rows), tl.arange(0, key_width), tl.arange(0, value_width)
    query_heads = own % heads * group + tl.minimum(member, group - 1)
    is_query, is_value = (member < group)[:, None], (value_channels < value_dim)[None, :]
    member_query = query + (own * group + member)[:, None] * key_dim + key_channels[None, :]
    queries = tl.load(member_query, is_query & (key_channels < key_dim)[None, :], other=0).to(tl.float32)
    most, total = tl.full([rows], LOWEST, tl.float32), tl.zeros([rows], tl.float32)
    result = tl.zeros([rows, value_width], tl.float32)
    for start in range(0, place_count, place_step):
        place = start + tl.arange(0, place_step)
        slot = tl.load(places + own * place_count + place, place < place_count, other=-1)
        live = slot >= 0
        of_mask = mask if mask is None else mask + own // heads * mask_row
        bias = tl.trans(bias_of(of_mask, query_heads * mask_head, slot, mask_slot, live))
        lies = own * place_count + place
        products = tl.dot(queries, tl.trans(_exact(keys, lies, live, key_dim, key_width)), input_precision="tf32x3")
        most, total, weights, factor = _add(most, total, products, bias, scaling, softcap)
        numbers = _exact(values, lies, live, value_dim, value_width)
        result = tl.dot(weights, numbers, result * factor[:, None], input_precision="tf32x3")

    before, pieces = most, parts * group  # a piece is a part for a query head
    ends = sums + tl.num_programs(0).to(tl.int64) * pieces * value_dim + own * parts * 2 * group
    sums += own * pieces * value_dim
    for start in range(0, pieces, piece_step):
        most_there, total_there, mine = _ends(ends, start + tl.arange(0, piece_step), member, pieces, group)
        new = tl.maximum(most, tl.max(tl.where(mine, most_there[None, :], LOWEST), 1))
        weights = tl.where(mine, tl.exp(most_there[None, :] - new[:, None]) * total_there[None, :], 0.0)
        total = total * tl.exp(most - new) + tl.sum(weights, 1)
        most = new
    if sinks is not None:
        sink = tl.load(sinks + query_heads).to(tl.float32)
        new = tl.maximum(most, sink)
        total = total * tl.exp(most - new) + tl.exp(sink - new)
        most = new
    result *= tl.exp(before - most)[:, None]
    for start in range(0, value_dim, mixed_step):
        some = start + tl.arange(0, mixed_step)
        mixed = tl.zeros([rows, mixed_step], tl.float32)
        for at in range(0, pieces, piece_step):
            piece = at + tl.arange(0, piece_step)
            most_there, total_there, mine = _ends(ends, piece, member, pieces, group)
            weights = tl.where(mine, tl.exp(most_there[None, :] - most[:, None]), 0.0)
            is_sum = (piece < pieces)[:, None] & (some < value_dim)[None, :]
            summed = tl.load(sums + piece[:, None] * value_dim + some[None, :], is_sum, other=0)
            mixed = tl.dot(weights, summed, mixed, input_precision="tf32x3")
        back = (some < value_dim)[:, None] & is_value
        if value_bits > 0:
            turn = tl.load(value_turn + value_channels[None, :] * value_dim + some[:, None], back, other=0)
        else:
            turn = tl.where(some[:, None] == value_channels[None, :], 1.0, 0.0)
        result = tl.dot(mixed, turn, result, input_precision="tf32x3")
    result /= tl.where(total > 0, total, 1.0)[:, None]
    target = output + (own * group + member)[:, None] * value_dim + value_channels[None, :]
    tl.store(target, result.to(output.dtype.element_ty), is_query & is_value)


@triton.jit
def _add(most, total, products, bias, scaling, softcap):
    """The largest logit and the sum of exponentials with these tokens too; their weights; the factor on all before."""
    hidden = bias < HIDDEN
    logits = tl.where(hidden, LOWEST, logits_of(products, scaling, softcap) + bias)
    new = tl.maximum(most, tl.max(logits, 1))
    weights = tl.where(hidden, 0.0, tl.exp(logits - new[:, None]))
    factor = tl.exp(most - new)
    return new, total * factor + tl.sum(weights, 1), weights, factor


@triton.jit
def _exact(numbers, lies, live, dim: tl.constexpr, width: tl.constexpr):
    """`[places, width]` of the tokens in `Exact` that lie there, in float32."""
    channel = tl.arange(0, width)[None, :]
    return tl.load(numbers + lies[:, None] * dim + channel, live[:, None] & (channel < dim), other=0).to(tl.float32)


@triton.jit
def _ends(ends, piece, member, pieces, group: tl.constexpr):
    """The largest logits and the sums of exponentials of these pieces, and `[members, pieces]`, whose they are."""
    end, is_piece = ends + piece // group * 2 * group + piece % group, piece < pieces
    most = tl.load(end, is_piece, other=LOWEST)
    total = tl.load(end + group, is_piece, other=0)
    return most, total, is_piece[None, :] & (piece[None, :] % group == member[:, None])
