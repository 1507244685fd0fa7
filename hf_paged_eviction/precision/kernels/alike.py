"""The first kernel: what does not depend on codes."""

import triton
import triton.language as tl

from .numbers import LOWEST, waves


@triton.jit(do_not_specialize=["slots", "parts"])
def prepare(
    query, means, sizes, key_turn, frequencies, signs, scalings, positions, starts, lengths, places, alike, mixed,
    slots, set_slots, parts, part_slots,
    heads: tl.constexpr, group: tl.constexpr, together: tl.constexpr, place_count: tl.constexpr,
    key_bits: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    pairs: tl.constexpr, pair_step: tl.constexpr, pair_offset: tl.constexpr, still: tl.constexpr,
    queries: tl.constexpr, head_rows: tl.constexpr, channel_width: tl.constexpr,
    pair_width: tl.constexpr, place_width: tl.constexpr, slot_step: tl.constexpr, mixed_step: tl.constexpr,
    precise: tl.constexpr,
):  # fmt: skip
    """Of the KV heads that have the same positions (program 0): `alike` `[slot, group]` of each of them, the products
    of the queries with the mean key, which is the same for all tokens but for the turn, and `LOWEST` at slots of
    tokens in `Exact`, for a part of the slots (program 1). Further programs write `mixed`, the queries `[row and head,
    group, key_dim]` with the sizes and the mixed channels of the codes.

    Args:
        means, sizes: `[row and head, key_dim + value_dim]`, see `Exact`.
        frequencies, signs, scalings: of the channels of a head, see `Rotary`; channel `i * pair_step` turns with the
            one `pair_offset` after it, and those from `still` on do not turn. None = no channel turns.
        slots: to be read, of the `set_slots` that each row and KV head has.
        starts, lengths: `[row and head]`, where slots lie one after the other; None = side by side.
        together: KV heads that have the same positions: one, or all of a row.
        queries, head_rows, *_width: of tiles, powers of two, of queries of all heads together and of one.
    """
    part = tl.program_id(1)
    first_set = tl.program_id(0).to(tl.int64) * together
    if part < parts:
        _alike(
            query, means, frequencies, signs, scalings, positions, starts, lengths, places, alike,
            slots, set_slots, first_set, part, part_slots,
            group, together, place_count, key_bits, key_dim, value_dim, pairs, pair_step, pair_offset, still,
            queries, channel_width, pair_width, place_width, slot_step, precise,
        )  # fmt: skip
    elif key_bits > 0:
        own, member, channels = first_set + part - parts, tl.arange(0, head_rows), tl.arange(0, channel_width)
        is_query, is_channel = (member < group)[:, None], (channels < key_dim)[None, :]
        member_query = (own * group + member)[:, None] * key_dim
        result = tl.zeros([head_rows, channel_width], tl.float32)
        for start in range(0, key_dim, mixed_step):
            some = start + tl.arange(0, mixed_step)
            size = tl.load(sizes + own * (key_dim + value_dim) + some, some < key_dim, other=0).to(tl.float32)
            piece = tl.load(query + member_query + some[None, :], is_query & (some < key_dim)[None, :], other=0)
            turn = some[:, None] * key_dim + channels[None, :]
            turn = tl.load(key_turn + turn, (some < key_dim)[:, None] & is_channel, other=0)
            result = tl.dot(piece.to(tl.float32) * size[None, :], turn, result, input_precision="tf32x3")
        tl.store(mixed + member_query + channels[None, :], result, is_query & is_channel)


@triton.jit
def _alike(
    query, means, frequencies, signs, scalings, positions, starts, lengths, places, alike,
    slots, set_slots, first_set, part, part_slots,
    group: tl.constexpr, together: tl.constexpr, place_count: tl.constexpr,
    key_bits: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    pairs: tl.constexpr, pair_step: tl.constexpr, pair_offset: tl.constexpr, still: tl.constexpr,
    queries: tl.constexpr, channel_width: tl.constexpr, pair_width: tl.constexpr, place_width: tl.constexpr,
    slot_step: tl.constexpr, precise: tl.constexpr,
):  # fmt: skip
    """See `prepare`."""
    one = tl.arange(0, queries)
    is_query, own = one < together * group, first_set + one // group
    members = query + (first_set * group + one) * key_dim
    alike_means = means + own * (key_dim + value_dim)
    first, length = own * slots, slots
    if starts is not None:
        first, length = tl.load(starts + own, is_query), tl.load(lengths + first_set).to(tl.int32)
        positions += tl.load(starts + first_set)
    else:
        positions += first_set // together * set_slots
    targets = first * group + one % group
    unturned = tl.zeros([queries], tl.float32)
    if key_bits > 0:
        channels = tl.arange(0, channel_width)[:, None]
        is_still = is_query[None, :] & (channels >= still) & (channels < key_dim)
        queries_there = tl.load(members[None, :] + channels, is_still, other=0).to(tl.float32)
        unturned = tl.sum(queries_there * tl.load(alike_means[None, :] + channels, is_still, other=0).to(tl.float32), 0)
        if frequencies is not None:
            pair = tl.arange(0, pair_width)
            is_pair, left = pair < pairs, (pair * pair_step)[:, None]
            loaded = is_query[None, :] & is_pair[:, None]
            mean_one = tl.load(alike_means[None, :] + left, loaded, other=0).to(tl.float32)
            mean_other = tl.load(alike_means[None, :] + left + pair_offset, loaded, other=0).to(tl.float32)
            query_one = tl.load(members[None, :] + left, loaded, other=0).to(tl.float32)
            query_other = tl.load(members[None, :] + left + pair_offset, loaded, other=0).to(tl.float32)
            scale = tl.load(scalings + left, is_pair[:, None], other=0)
            sign = tl.load(signs + left, is_pair[:, None], other=0)
            even = (query_one * mean_one + query_other * mean_other) * scale
            odd = (query_one * mean_other - query_other * mean_one) * scale * sign
            frequency = tl.load(frequencies + pair * pair_step, is_pair, other=0)
    wave: tl.constexpr = "tf32x3" if precise else "tf32"
    end = tl.minimum((part + 1) * part_slots, length)
    for start in range(part * part_slots, end, slot_step):
        slot = start + tl.arange(0, slot_step)
        products = tl.zeros([slot_step, queries], tl.float32) + unturned[None, :]
        if key_bits > 0 and frequencies is not None:
            position = tl.load(positions + slot, slot < end, other=0).to(tl.float32)
            cosine, sine = waves(position[:, None] * frequency[None, :])
            products = tl.dot(cosine, even, products, input_precision=wave)
            products = tl.dot(sine, odd, products, input_precision=wave)
        tl.store(alike + slot[:, None] * group + targets[None, :], products, (slot < end)[:, None] & is_query[None, :])
    tl.debug_barrier()  # what is hidden is written over what was written
    place = tl.arange(0, place_width)
    held = tl.load(places + first_set * place_count + place, place < together * place_count, other=-1)
    here = (held >= part * part_slots) & (held < end)
    own = first_set + place // place_count
    first = own * slots
    if starts is not None:
        first = tl.load(starts + own, here, other=0)
    for member in tl.static_range(group):
        tl.store(alike + (first + held) * group + member, tl.full([place_width], LOWEST, tl.float32), here)
