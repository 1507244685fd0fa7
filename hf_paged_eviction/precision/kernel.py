"""Triton kernels for attention of single queries on codes. `fused` launches them.

The first kernel reads the slots of one row and KV head in parallel parts. The second kernel joins the parts with the
tokens in `Exact` and the sinks, weighted by their sums of exponentials. Everything is computed in float32; matrix
products take three passes of TF32, which are as exact as float32.
"""

import triton
import triton.language as tl

#: Logits of hidden tokens are below this.
_HIDDEN = tl.constexpr(-1e30)
_LOWEST = tl.constexpr(-3e38)


@triton.jit
def _numbers(codes, slots, channels, mask, bits: tl.constexpr, dim: tl.constexpr):
    """Distances from the middle in levels, see `codec.pack`; 0 where there is nothing. All of two dimensions."""
    if bits == 0:
        numbers = tl.load(codes + slots * dim + channels, mask, other=0).to(tl.float32)
    else:
        plane: tl.constexpr = 2 if bits == 3 else bits
        parts: tl.constexpr = 8 // plane
        width: tl.constexpr = (dim + parts - 1) // parts
        above: tl.constexpr = (dim + 7) // 8 if bits == 3 else 0  # bytes of the plane of the third bits
        first = codes + slots * (width + above)
        byte = tl.load(first + channels % width, mask, other=0).to(tl.int32)
        index = (byte >> (channels // width * plane)) & (2**plane - 1)
        if bits == 3:
            byte = tl.load(first + width + channels % above, mask, other=0).to(tl.int32)
            index += ((byte >> (channels // above)) & 1) * 4
        numbers = tl.where(mask, index.to(tl.float32) - (2**bits - 1) / 2, 0.0)
    return numbers


@triton.jit
def _waves(angles):
    """Cosine and sine of angles of any size: without the quarter turns, a half of pi in three pieces of few digits, so
    that their products are exact; of the rest by the Taylor series."""
    quarters = tl.floor(angles * 0.6366197723675814 + 0.5)
    many = tl.floor(quarters * (1 / 4096)) * 4096
    few = quarters - many
    rest = angles - many * 1.57080078125 - few * 1.57080078125
    rest = rest + many * 4.453584551811218e-06 + few * 4.453584551811218e-06 + quarters * 8.705515695504166e-10
    square = rest * rest
    own = 1 - square * (1 / 20) * (1 - square * (1 / 42) * (1 - square * (1 / 72)))
    own = rest * (1 - square * (1 / 6) * own)
    other = 1 - square * (1 / 30) * (1 - square * (1 / 56) * (1 - square * (1 / 90)))
    other = 1 - square * (1 / 2) * (1 - square * (1 / 12) * other)
    quarter = quarters.to(tl.int32) & 3
    cosine, sine = tl.where(quarter % 2 == 0, other, own), tl.where(quarter % 2 == 0, own, other)
    return tl.where((quarter == 1) | (quarter == 2), -cosine, cosine), tl.where(quarter >= 2, -sine, sine)


@triton.jit
def _bias(mask, heads, slots, slot_stride, live):
    """`[heads, n]`, what is added to the logits of these slots; `mask` is bool (as bytes) or additive, or None."""
    bias = tl.where(live, 0.0, float("-inf"))[None, :] + tl.zeros_like(heads)[:, None]
    if mask is not None:
        shown = tl.load(mask + heads[:, None] + slots[None, :] * slot_stride, live[None, :], other=0)
        if shown.dtype == tl.uint8:
            bias = tl.where(shown != 0, bias, float("-inf"))
        else:
            bias += shown.to(tl.float32)
    return bias


@triton.jit
def _add(most, total, products, bias, scaling, softcap):
    """The largest logit and the sum of exponentials with these tokens too; their weights; the factor on all before."""
    logits = products * scaling
    if softcap is not None:
        logits = (2 * tl.sigmoid(2 * logits / softcap) - 1) * softcap
    hidden = bias < _HIDDEN
    logits = tl.where(hidden, _LOWEST, logits + bias)
    new = tl.maximum(most, tl.max(logits, 1))
    weights = tl.where(hidden, 0.0, tl.exp(logits - new[:, None]))
    factor = tl.exp(most - new)
    return new, total * factor + tl.sum(weights, 1), weights, factor


@triton.jit(do_not_specialize=["slots", "mask_row", "mask_head"])
def read_part(
    query, means, sizes, key_turn, frequencies, signs, scalings, key_codes, key_levels, value_codes, value_levels,
    positions, starts, lengths, places, mask, mask_row, mask_head, mask_slot, sums, ends,
    scaling, softcap, slots, set_slots, part_slots,
    heads: tl.constexpr, group: tl.constexpr, shared: tl.constexpr, place_count: tl.constexpr,
    key_bits: tl.constexpr, value_bits: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    pairs: tl.constexpr, pair_step: tl.constexpr, pair_offset: tl.constexpr, still: tl.constexpr,
    rows: tl.constexpr, key_width: tl.constexpr, value_width: tl.constexpr, pair_width: tl.constexpr,
    slot_step: tl.constexpr, place_step: tl.constexpr, mixed_step: tl.constexpr,
):  # fmt: skip
    """Of a row and KV head (program 0) and a part of its slots (program 1): the sums of values, still mixed,
    `sums` `[row and head, part, group, value_dim]`, and in `ends` `[row and head, part, 2, group]` the largest logits
    and the sums of exponentials.

    Args:
        means, sizes: `[row and head, key_dim + value_dim]`, see `Exact`.
        frequencies, signs, scalings: of the channels of a head, see `Rotary`; channel `i * pair_step` turns with the
            one `pair_offset` after it, and those from `still` on do not turn. None = no channel turns.
        slots: to be read, of the `set_slots` that each row and KV head has.
        starts, lengths: `[row and head]`, where slots lie one after the other; None = side by side.
        shared: whether all KV heads of a row have the same positions.
        rows, *_width: of tiles, powers of two.
    """
    own, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    member, key_channels, value_channels = tl.arange(0, rows), tl.arange(0, key_width), tl.arange(0, value_width)
    row, first, length = own // heads, own * set_slots, slots
    if starts is not None:
        first, length = tl.load(starts + own), tl.load(lengths + own).to(tl.int32)
    query_heads = own % heads * group + tl.minimum(member, group - 1)
    member_query = query + (own * group + member)[:, None] * key_dim
    is_query = (member < group)[:, None]
    alike = own * (key_dim + value_dim)
    queries = tl.load(member_query + key_channels[None, :], is_query & (key_channels < key_dim)[None, :], other=0)
    queries = queries.to(tl.float32)
    if key_bits > 0:
        mean = tl.load(means + alike + key_channels, key_channels < key_dim, other=0).to(tl.float32)
        unturned = tl.sum(tl.where(key_channels >= still, mean, 0.0)[None, :] * queries, 1)[:, None]
        if frequencies is not None:
            pair = tl.arange(0, pair_width)
            one, is_pair = pair * pair_step, pair < pairs
            mean_one = tl.load(means + alike + one, is_pair, other=0).to(tl.float32)
            mean_other = tl.load(means + alike + one + pair_offset, is_pair, other=0).to(tl.float32)
            loaded = is_query & is_pair[None, :]
            query_one = tl.load(member_query + one[None, :], loaded, other=0).to(tl.float32)
            query_other = tl.load(member_query + one[None, :] + pair_offset, loaded, other=0).to(tl.float32)
            scale = tl.load(scalings + one, is_pair, other=0)[None, :]
            even = (query_one * mean_one[None, :] + query_other * mean_other[None, :]) * scale
            odd = (query_one * mean_other[None, :] - query_other * mean_one[None, :]) * scale
            odd *= tl.load(signs + one, is_pair, other=0)[None, :]
            frequency = tl.load(frequencies + one, is_pair, other=0)
        queries = tl.zeros([rows, key_width], tl.float32)
        for start in range(0, key_dim, mixed_step):
            some = start + tl.arange(0, mixed_step)
            size = tl.load(sizes + alike + some, some < key_dim, other=0).to(tl.float32)
            piece = tl.load(member_query + some[None, :], is_query & (some < key_dim)[None, :], other=0)
            mixed = (some < key_dim)[:, None] & (key_channels < key_dim)[None, :]
            turn = tl.load(key_turn + some[:, None] * key_dim + key_channels[None, :], mixed, other=0)
            queries = tl.dot(piece.to(tl.float32) * size[None, :], turn, queries, input_precision="tf32x3")

    most, total = tl.full([rows], _LOWEST, tl.float32), tl.zeros([rows], tl.float32)
    summed = tl.zeros([rows, value_width], tl.float32)
    for start in range(part * part_slots, tl.minimum((part + 1) * part_slots, length), slot_step):
        slot = start + tl.arange(0, slot_step)
        live = slot < length
        for place in range(0, place_count, place_step):
            places_here = place + tl.arange(0, place_step)
            held = tl.load(places + own * place_count + places_here, places_here < place_count, other=-1)
            live &= tl.max((held[None, :] == slot[:, None]).to(tl.int32), 1) == 0
        bias = _bias(mask if mask is None else mask + row * mask_row, query_heads * mask_head, slot, mask_slot, live)
        live &= tl.max(bias, 0) > _HIDDEN
        lies = first + slot
        is_key = live[None, :] & (key_channels < key_dim)[:, None]
        numbers = _numbers(key_codes, lies[None, :], key_channels[:, None], is_key, key_bits, key_dim)
        products = tl.dot(queries, numbers, input_precision="tf32x3")
        if key_bits > 0:
            products = products * tl.load(key_levels + lies, live, other=0).to(tl.float32)[None, :] + unturned
            if frequencies is not None:
                stands = row * set_slots + slot if shared else lies
                position = tl.load(positions + stands, live, other=0).to(tl.float32)
                cosine, sine = _waves(frequency[:, None] * position[None, :])
                products = tl.dot(even, cosine, products, input_precision="tf32x3")
                products = tl.dot(odd, sine, products, input_precision="tf32x3")
        most, total, weights, factor = _add(most, total, products, bias, scaling, softcap)
        if value_bits > 0:
            weights *= tl.load(value_levels + lies, live, other=0).to(tl.float32)[None, :]
        is_value = live[:, None] & (value_channels < value_dim)[None, :]
        numbers = _numbers(value_codes, lies[:, None], value_channels[None, :], is_value, value_bits, value_dim)
        summed = tl.dot(weights, numbers, summed * factor[:, None], input_precision="tf32x3")

    end = ends + (own * parts + part) * 2 * group + member
    tl.store(end, most, member < group)
    tl.store(end + group, total, member < group)
    target = sums + ((own * parts + part) * group + member)[:, None] * value_dim + value_channels[None, :]
    tl.store(target, summed, is_query & (value_channels < value_dim)[None, :])


@triton.jit(do_not_specialize=["parts", "mask_row", "mask_head"])
def join_parts(
    query, keys, values, places, value_turn, mask, mask_row, mask_head, mask_slot, sinks, sums, ends, output,
    scaling, softcap, parts,
    heads: tl.constexpr, group: tl.constexpr, place_count: tl.constexpr, value_bits: tl.constexpr,
    key_dim: tl.constexpr, value_dim: tl.constexpr,
    rows: tl.constexpr, key_width: tl.constexpr, value_width: tl.constexpr,
    place_step: tl.constexpr, mixed_step: tl.constexpr,
):  # fmt: skip
    """Of a row and KV head the `output` `[row and head, group, value_dim]`: of the parts of `read_part`, of the tokens
    in `Exact`, whose `keys` and `values` are `[row and head, places, dim]`, and of `sinks` `[query_heads]`."""
    own = tl.program_id(0).to(tl.int64)
    member, key_channels, value_channels = tl.arange(0, rows), tl.arange(0, key_width), tl.arange(0, value_width)
    query_heads = own % heads * group + tl.minimum(member, group - 1)
    is_query, is_value = (member < group)[:, None], (value_channels < value_dim)[None, :]
    member_query = query + (own * group + member)[:, None] * key_dim + key_channels[None, :]
    queries = tl.load(member_query, is_query & (key_channels < key_dim)[None, :], other=0).to(tl.float32)
    most, total = tl.full([rows], _LOWEST, tl.float32), tl.zeros([rows], tl.float32)
    result = tl.zeros([rows, value_width], tl.float32)
    for start in range(0, place_count, place_step):
        place = start + tl.arange(0, place_step)
        slot = tl.load(places + own * place_count + place, place < place_count, other=-1)
        live = slot >= 0
        of_mask = mask if mask is None else mask + own // heads * mask_row
        bias = _bias(of_mask, query_heads * mask_head, slot, mask_slot, live)
        lies = own * place_count + place
        is_key = live[None, :] & (key_channels < key_dim)[:, None]
        numbers = _numbers(keys, lies[None, :], key_channels[:, None], is_key, 0, key_dim)
        products = tl.dot(queries, numbers, input_precision="tf32x3")
        most, total, weights, factor = _add(most, total, products, bias, scaling, softcap)
        numbers = _numbers(values, lies[:, None], value_channels[None, :], live[:, None] & is_value, 0, value_dim)
        result = tl.dot(weights, numbers, result * factor[:, None], input_precision="tf32x3")

    end = ends + own * parts * 2 * group + member
    before = most
    for part in range(0, parts):
        most = tl.maximum(most, tl.load(end + part * 2 * group, member < group, other=_LOWEST))
    if sinks is not None:
        sink = tl.load(sinks + query_heads).to(tl.float32)
        most = tl.maximum(most, sink)
    total *= tl.exp(before - most)
    result *= tl.exp(before - most)[:, None]
    for part in range(0, parts):
        factor = tl.exp(tl.load(end + part * 2 * group, member < group, other=_LOWEST) - most)
        total += factor * tl.load(end + part * 2 * group + group, member < group, other=0)
    if sinks is not None:
        total += tl.exp(sink - most)
    for start in range(0, value_dim, mixed_step):
        some = start + tl.arange(0, mixed_step)
        mixed = tl.zeros([rows, mixed_step], tl.float32)
        for part in range(0, parts):
            factor = tl.exp(tl.load(end + part * 2 * group, member < group, other=_LOWEST) - most)
            source = sums + ((own * parts + part) * group + member)[:, None] * value_dim + some[None, :]
            mixed += factor[:, None] * tl.load(source, is_query & (some < value_dim)[None, :], other=0)
        back = (some < value_dim)[:, None] & is_value
        if value_bits > 0:
            turn = tl.load(value_turn + value_channels[None, :] * value_dim + some[:, None], back, other=0)
        else:
            turn = tl.where(some[:, None] == value_channels[None, :], 1.0, 0.0)
        result = tl.dot(mixed, turn, result, input_precision="tf32x3")
    result /= tl.where(total > 0, total, 1.0)[:, None]
    target = output + (own * group + member)[:, None] * value_dim + value_channels[None, :]
    tl.store(target, result.to(output.dtype.element_ty), is_query & is_value)
