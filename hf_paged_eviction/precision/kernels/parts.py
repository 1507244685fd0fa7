"""The second kernel: slots in parallel parts."""

import triton
import triton.language as tl

from .numbers import EXACT, HIDDEN, LOG2_E, LOWEST, multiplied, power_of_two
from .planes import add_weighted, dot_queries, no_sums, offset, read_planes, read_queries, store_sums


@triton.jit(do_not_specialize=["slots", "mask_row", "mask_head"])
def read_part(
    mixed, alike, key_codes, key_levels, value_codes, value_levels, starts, lengths,
    mask, mask_row, mask_head, mask_slot, sums,
    scaling, softcap, slots, set_slots, part_slots,
    heads: tl.constexpr, group: tl.constexpr,
    key_bits: tl.constexpr, value_bits: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    rows: tl.constexpr, key_width: tl.constexpr, value_width: tl.constexpr, slot_step: tl.constexpr,
    key_stored: tl.constexpr, value_stored: tl.constexpr, passes: tl.constexpr,
):  # fmt: skip
    """Of a row and KV head (program 0) and a part of its slots (program 1): the sums of values, still mixed,
    `sums` `[row and head, part, group, value_dim]`, and behind them `[row and head, part, 2, group]` the largest logits
    and the sums of exponentials.

    Args:
        mixed, alike: what `prepare` wrote.
        slots, set_slots, starts, lengths: see `prepare`.
        rows, *_width: of tiles, powers of two; widths of planes of `read_planes`.
        key_stored, value_stored: bytes of a token, or numbers.
        passes: how many parts of queries and weights are taken, see `dot`.
    """
    own, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    member = tl.arange(0, rows)
    is_query = (member < group)[None, :]
    first, length = own * set_slots, slots
    if starts is None:
        alike += own * slots * group
    else:
        first, length = tl.load(starts + own), tl.load(lengths + own).to(tl.int32)
        alike += first * group
    members = mixed + (own * group + member)[None, :] * key_dim
    queries, less = read_queries(members, is_query, key_bits, key_dim, key_width, passes)
    key_codes, key_levels = key_codes + first * key_stored, key_levels + first
    value_codes, value_levels = value_codes + first * value_stored, value_levels + first
    if mask is not None:
        mask += own // heads * mask_row
    query_heads = own % heads * group + tl.minimum(member, group - 1)

    most = tl.full([rows], HIDDEN, tl.float32)
    total, weighed = tl.zeros([slot_step, rows], tl.float32), tl.zeros([slot_step, rows], tl.float32)
    summed = no_sums(rows, value_bits, value_width)
    for start in range(part * part_slots, tl.minimum((part + 1) * part_slots, length), slot_step):
        slot = start + tl.arange(0, slot_step)
        inside = slot < length
        logits = tl.load(alike + slot[:, None] * group + member[None, :], inside[:, None] & is_query, other=LOWEST)
        hidden = logits < HIDDEN
        if mask is not None:
            bias = bias_of(mask, query_heads * mask_head, slot, mask_slot, inside)
            hidden |= bias < HIDDEN
        live = inside
        if key_bits == 0 or value_bits == 0:  # numbers that mean nothing may be NaN
            live = tl.min(hidden.to(tl.int32), 1) == 0
        readable = live if key_bits == 0 else inside
        planes = read_planes(key_codes, slot, readable, key_bits, key_stored, key_dim, key_width)
        products = dot_queries(planes, queries, passes)
        if key_bits > 0:
            logits += (products - less[None, :]) * _levels(key_levels + slot, inside)[:, None]
        else:
            logits += products
        logits = logits_of(logits, scaling, softcap)
        if mask is not None:
            logits += bias
        logits = tl.where(hidden, LOWEST, logits)
        new = tl.maximum(most, tl.max(logits, 0))
        factor = power_of_two((most - new) * LOG2_E)
        weights = power_of_two(logits * LOG2_E - (new * LOG2_E)[None, :])
        most = new
        total = total * factor[None, :] + weights
        if value_bits > 0:
            weights *= _levels(value_levels + slot, inside)[:, None]
        if offset(value_bits) != 0:
            weighed = weighed * factor[None, :] + multiplied(weights, EXACT, passes)
        readable = live if value_bits == 0 else inside
        planes = read_planes(value_codes, slot, readable, value_bits, value_stored, value_dim, value_width)
        summed = add_weighted(summed, factor, planes, weights, passes)

    ends = sums + tl.num_programs(0).to(tl.int64) * parts * group * value_dim
    end = ends + (own * parts + part) * 2 * group + member
    tl.store(end, most, member < group)
    tl.store(end + group, tl.sum(total, 0), member < group)
    less = tl.sum(weighed, 0) * offset(value_bits)
    target = sums + ((own * parts + part) * group + member)[None, :] * value_dim
    store_sums(target, summed, less, is_query, value_bits, value_dim, value_width)


@triton.jit
def _levels(levels, inside):
    """In float32; what lies at slots of no token is any number, but finite."""
    level = tl.load(levels, inside, other=0).to(tl.float32)
    return tl.where(tl.abs(level) < -LOWEST, level, 0.0)


@triton.jit
def logits_of(products, scaling, softcap):
    logits = products * scaling
    if softcap is not None:
        logits = (2 * tl.sigmoid(2 * logits / softcap) - 1) * softcap
    return logits


@triton.jit
def bias_of(mask, heads, slots, slot_stride, live):
    """`[n, heads]`, what is added to the logits of these slots; `mask` is bool (as bytes) or additive, or None."""
    bias = tl.where(live, 0.0, float("-inf"))[:, None] + tl.zeros_like(heads)[None, :]
    if mask is not None:
        shown = tl.load(mask + heads[None, :] + slots[:, None] * slot_stride, live[:, None], other=0)
        if shown.dtype == tl.uint8:
            bias = tl.where(shown != 0, bias, float("-inf"))
        else:
            bias += shown.to(tl.float32)
    return bias
