"""Triton kernels for attention of single queries on codes. `fused` launches them.

The first kernel reads the slots of one row and KV head in parallel parts. The second kernel joins the parts with the
tokens in `Exact` and the sinks, weighted by their sums of exponentials. Everything is computed in float32; matrix
products take as many passes of fewer bits as are as exact as float32, or for queries of 16 bits as 16 bits.
"""

import triton
import triton.language as tl

#: Logits of hidden tokens are below this.
_HIDDEN = tl.constexpr(-1e30)
_LOWEST = tl.constexpr(-3e38)
#: Triton's interpreter has no instructions of a device and no products in bfloat16, which holds distances from the
#: middle as they are.
_ON_DEVICE = tl.constexpr(not triton.knobs.runtime.interpret)
_EXACT = tl.constexpr(tl.bfloat16 if _ON_DEVICE.value else tl.float32)


def _taking_apart(bits: int) -> str:
    """Instructions that make of four bytes what lies at each of their places, in bfloat16: bits behind 0x4300 are a
    number from 128 on."""
    places = 8 // bits
    lines = [".reg .b32 a, b, c, one, less;", "mov.b32 one, 0x3f803f80;", "mov.b32 less, 0xc300c300;"]
    lines += [f"prmt.b32 {name}, ${2 * places}, 0, {order};" for name, order in (("a", "0x4140"), ("b", "0x4342"))]
    for place in range(places):
        for at, name in enumerate("ab"):
            lines += [
                f"shr.b32 c, {name}, {place * bits};",
                f"lop3.b32 c, c, {2**bits - 1:#06x}{2**bits - 1:04x}, 0x43004300, 0xEA;",
                f"fma.rn.bf16x2 ${2 * place + at}, c, one, less;",
            ]
    return "{ " + " ".join(lines) + " }"


_OF_FOUR, _OF_TWO = tl.constexpr(_taking_apart(4)), tl.constexpr(_taking_apart(2))


@triton.jit
def _channels(columns, bits: tl.constexpr, dim: tl.constexpr):
    """The channels of columns of `_numbers`, which has those that share a byte side by side; `dim` = none."""
    if bits == 0 or bits == 8:
        channels = columns
    elif bits == 4:
        half: tl.constexpr = (dim + 1) // 2
        channels = tl.where(columns // 2 < half, columns % 2 * half + columns // 2, dim)
    else:
        quarter: tl.constexpr = (dim + 3) // 4
        channels = (columns % 2 * 2 + columns // 2 % 2) * quarter + columns // 4
        channels = tl.where(columns // 4 < quarter, channels, dim)
    return channels


@triton.jit
def _places(byte, step: tl.constexpr):
    """What lies at the places of bytes, two of 4 bits or four of 2."""
    if _ON_DEVICE:
        if step == 4:
            first, second = tl.inline_asm_elementwise(
                _OF_FOUR, "=r,=r,=r,=r,r", [byte], (tl.bfloat16, tl.bfloat16), True, 4
            )
            third, fourth = first, second
        else:
            first, second, third, fourth = tl.inline_asm_elementwise(
                _OF_TWO,
                "=r,=r,=r,=r,=r,=r,=r,=r,r",
                [byte],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                True,
                4,
            )
    else:
        byte = byte.to(tl.int32)
        first, second = (byte & (2**step - 1)).to(_EXACT), (byte >> step & (2**step - 1)).to(_EXACT)
        third, fourth = (byte >> 2 * step & (2**step - 1)).to(_EXACT), (byte >> 3 * step).to(_EXACT)
    return first, second, third, fourth


@triton.jit
def _third(codes, inside, byte, place: tl.constexpr, below: tl.constexpr, dim: tl.constexpr):
    """The highest of 3 bits, for the channels that lie at this place of their bytes: 4 or 0."""
    above: tl.constexpr = (dim + 7) // 8
    channel = place * below + byte
    bits = tl.load(codes + below + channel % above, inside & (channel < dim), other=0).to(tl.int32)
    return ((bits >> (channel // above) & 1) * 4).to(tl.float32).to(_EXACT)


@triton.jit
def _numbers(codes, slots, inside, bits: tl.constexpr, stored: tl.constexpr, dim: tl.constexpr, width: tl.constexpr):
    """Numbers `[slots, width]` of these slots, which take `stored` bytes or numbers each, with the channels as in
    `_channels`: as they are, in float32, or their distances from the middle in levels. Where there is nothing, what is
    there has no meaning, but is finite."""
    if bits == 0:
        channel = tl.arange(0, width)[None, :]
        numbers = tl.load(codes + slots[:, None] * stored + channel, inside[:, None] & (channel < dim), other=0)
        numbers = numbers.to(tl.float32)
    else:
        step: tl.constexpr = 2 if bits == 3 else bits
        parts: tl.constexpr = 8 // step
        below: tl.constexpr = (dim + parts - 1) // parts  # bytes without the third bits
        channel, inside = tl.arange(0, width // parts)[None, :], inside[:, None]
        at = codes + slots[:, None] * stored
        byte = tl.load(at + channel, inside & (channel < below), other=0)
        middle = tl.full([1, 1], (2**bits - 1) / 2, _EXACT)
        if bits == 8:
            numbers = (byte.to(tl.float32) - (2**bits - 1) / 2).to(_EXACT)
        else:
            first, second, third, fourth = _places(byte, step)
            if bits == 3:
                first += _third(at, inside, channel, 0, below, dim)
                second += _third(at, inside, channel, 1, below, dim)
                third += _third(at, inside, channel, 2, below, dim)
                fourth += _third(at, inside, channel, 3, below, dim)
            numbers = tl.join(first - middle, second - middle)
            if parts == 4:
                numbers = tl.join(numbers, tl.join(third - middle, fourth - middle))
            numbers = tl.reshape(numbers, [slots.shape[0], width])
    return numbers


@triton.jit
def _dot(left, right, total, precise: tl.constexpr):
    """`total` and the product of float32 `left` with what `_numbers` gives. Of 16-bit numbers, the left ones are taken
    apart into so many that nothing that counts is lost."""
    if right.dtype == tl.float32:
        total = tl.dot(left, right, total, input_precision="tf32x3")
    else:
        high = left.to(right.dtype)
        rest = left - high.to(tl.float32)
        middle = rest.to(right.dtype)
        total = tl.dot(middle, right, tl.dot(high, right, total))
        if precise:
            total = tl.dot((rest - middle.to(tl.float32)).to(right.dtype), right, total)
    return total


@triton.jit
def _waves(angles):
    """Cosine and sine of angles of any size, without the full turns: 2 pi in two pieces, of which the first has so few
    digits that its product is exact."""
    turns = (angles * 0.15915494309189535 + 12582912.0) - 12582912.0  # what is beyond is rounded away
    rest = angles - turns * 6.28125 - turns * 0.0019353071795864769
    if _ON_DEVICE:
        cosine = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [rest], tl.float32, True, 1)
        sine = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [rest], tl.float32, True, 1)
    else:
        cosine, sine = tl.cos(rest), tl.sin(rest)
    return cosine, sine


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
    positions, starts, lengths, places, mask, mask_row, mask_head, mask_slot, sums,
    scaling, softcap, slots, set_slots, part_slots,
    heads: tl.constexpr, group: tl.constexpr, shared: tl.constexpr, place_count: tl.constexpr,
    key_bits: tl.constexpr, value_bits: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    pairs: tl.constexpr, pair_step: tl.constexpr, pair_offset: tl.constexpr, still: tl.constexpr,
    rows: tl.constexpr, key_width: tl.constexpr, value_width: tl.constexpr, pair_width: tl.constexpr,
    slot_step: tl.constexpr, place_step: tl.constexpr, mixed_step: tl.constexpr,
    key_stored: tl.constexpr, value_stored: tl.constexpr, precise: tl.constexpr,
):  # fmt: skip
    """Of a row and KV head (program 0) and a part of its slots (program 1): the sums of values, still mixed,
    `sums` `[row and head, part, group, value_dim]`, and behind them `[row and head, part, 2, group]` the largest logits
    and the sums of exponentials.

    Args:
        means, sizes: `[row and head, key_dim + value_dim]`, see `Exact`.
        frequencies, signs, scalings: of the channels of a head, see `Rotary`; channel `i * pair_step` turns with the
            one `pair_offset` after it, and those from `still` on do not turn. None = no channel turns.
        slots: to be read, of the `set_slots` that each row and KV head has.
        starts, lengths: `[row and head]`, where slots lie one after the other; None = side by side.
        shared: whether all KV heads of a row have the same positions.
        rows, *_width: of tiles, powers of two.
        key_stored, value_stored: bytes of a token, or numbers.
        precise: whether products are to be as exact as float32, or as 16 bits.
    """
    own, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    member = tl.arange(0, rows)
    key_channels = _channels(tl.arange(0, key_width), key_bits, key_dim)
    value_channels = _channels(tl.arange(0, value_width), value_bits, value_dim)
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
        is_still = (key_channels >= still) & (key_channels < key_dim)
        mean = tl.load(means + alike + key_channels, is_still, other=0).to(tl.float32)
        unturned = tl.sum(mean[None, :] * queries, 1)[:, None]
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

    key_codes, key_levels = key_codes + first * key_stored, key_levels + first
    value_codes, value_levels = value_codes + first * value_stored, value_levels + first
    positions += row * set_slots if shared else first
    if mask is not None:
        mask += row * mask_row
    most, total = tl.full([rows], _LOWEST, tl.float32), tl.zeros([rows], tl.float32)
    summed = tl.zeros([rows, value_width], tl.float32)
    nothing = tl.zeros([rows, slot_step], tl.float32)
    wave: tl.constexpr = "tf32x3" if precise else "tf32"
    for start in range(part * part_slots, tl.minimum((part + 1) * part_slots, length), slot_step):
        slot = start + tl.arange(0, slot_step)
        inside = slot < length
        live = inside
        for place in tl.static_range(0, place_count, place_step):
            places_here = place + tl.arange(0, place_step)
            held = tl.load(places + own * place_count + places_here, places_here < place_count, other=-1)
            if tl.max(((held >= start) & (held < start + slot_step)).to(tl.int32), 0) > 0:
                live &= tl.max((held[None, :] == slot[:, None]).to(tl.int32), 1) == 0
        bias = _bias(mask, query_heads * mask_head, slot, mask_slot, live)
        live &= tl.max(bias, 0) > _HIDDEN
        is_key = inside if key_bits > 0 else live
        numbers = _numbers(key_codes, slot, is_key, key_bits, key_stored, key_dim, key_width)
        products = _dot(queries, tl.trans(numbers), nothing, precise)
        if key_bits > 0:
            level = tl.where(live, tl.load(key_levels + slot, inside, other=0).to(tl.float32), 0.0)
            products = products * level[None, :] + unturned
            if frequencies is not None:
                position = tl.load(positions + slot, inside, other=0).to(tl.float32)
                cosine, sine = _waves(frequency[:, None] * position[None, :])
                products = tl.dot(even, cosine, products, input_precision=wave)
                products = tl.dot(odd, sine, products, input_precision=wave)
        most, total, weights, factor = _add(most, total, products, bias, scaling, softcap)
        if value_bits > 0:
            level = tl.where(live, tl.load(value_levels + slot, inside, other=0).to(tl.float32), 0.0)
            weights *= level[None, :]
        is_value = inside if value_bits > 0 else live
        numbers = _numbers(value_codes, slot, is_value, value_bits, value_stored, value_dim, value_width)
        summed = _dot(weights, numbers, summed * factor[:, None], precise)

    ends = sums + tl.num_programs(0).to(tl.int64) * parts * group * value_dim
    end = ends + (own * parts + part) * 2 * group + member
    tl.store(end, most, member < group)
    tl.store(end + group, total, member < group)
    target = sums + ((own * parts + part) * group + member)[:, None] * value_dim + value_channels[None, :]
    tl.store(target, summed, is_query & (value_channels < value_dim)[None, :])


@triton.jit
def _ends(ends, piece, member, pieces, group: tl.constexpr):
    """The largest logits and the sums of exponentials of these pieces, and `[members, pieces]`, whose they are."""
    end, is_piece = ends + piece // group * 2 * group + piece % group, piece < pieces
    most = tl.load(end, is_piece, other=_LOWEST)
    total = tl.load(end + group, is_piece, other=0)
    return most, total, is_piece[None, :] & (piece[None, :] % group == member[:, None])


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
    most, total = tl.full([rows], _LOWEST, tl.float32), tl.zeros([rows], tl.float32)
    result = tl.zeros([rows, value_width], tl.float32)
    for start in range(0, place_count, place_step):
        place = start + tl.arange(0, place_step)
        slot = tl.load(places + own * place_count + place, place < place_count, other=-1)
        live = slot >= 0
        of_mask = mask if mask is None else mask + own // heads * mask_row
        bias = _bias(of_mask, query_heads * mask_head, slot, mask_slot, live)
        lies = own * place_count + place
        numbers = _numbers(keys, lies, live, 0, key_dim, key_dim, key_width)
        products = tl.dot(queries, tl.trans(numbers), input_precision="tf32x3")
        most, total, weights, factor = _add(most, total, products, bias, scaling, softcap)
        numbers = _numbers(values, lies, live, 0, value_dim, value_dim, value_width)
        result = tl.dot(weights, numbers, result * factor[:, None], input_precision="tf32x3")

    before, pieces = most, parts * group  # a piece is a part for a query head
    ends = sums + tl.num_programs(0).to(tl.int64) * pieces * value_dim + own * parts * 2 * group
    sums += own * pieces * value_dim
    for start in range(0, pieces, piece_step):
        most_there, total_there, mine = _ends(ends, start + tl.arange(0, piece_step), member, pieces, group)
        new = tl.maximum(most, tl.max(tl.where(mine, most_there[None, :], _LOWEST), 1))
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
