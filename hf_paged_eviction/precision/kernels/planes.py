"""Codes are taken apart into planes: what lies at the same place of every byte."""

import triton
import triton.language as tl

from .numbers import EXACT, ON_DEVICE, dot, multiplied


def _taking_apart(bits: int, above: int) -> str:
    """Instructions that make of four bytes what lies at each of their places, less `above`, in bfloat16: bits behind
    0x4300 are a number from 128 on."""
    places, less = 8 // bits, (0xC300 + above) * 0x10001
    lines = [".reg .b32 a, b, c, one, less;", "mov.b32 one, 0x3f803f80;", f"mov.b32 less, {less:#x};"]
    lines += [f"prmt.b32 {name}, ${2 * places}, 0, {order};" for name, order in (("a", "0x4140"), ("b", "0x4342"))]
    for place in range(places):
        for at, name in enumerate("ab"):
            if place:
                lines.append(f"shr.b32 c, {name}, {place * bits};")
            source, mask = "c" if place else name, (2**bits - 1) * 0x10001
            lines.append(f"lop3.b32 c, {source}, {mask:#x}, 0x43004300, 0xEA;")
            lines.append(f"fma.rn.bf16x2 ${2 * place + at}, c, one, less;")
    return "{ " + " ".join(lines) + " }"


_OF_FOUR, _OF_TWO = tl.constexpr(_taking_apart(4, 8)), tl.constexpr(_taking_apart(2, 2))
_OF_THREE = tl.constexpr(_taking_apart(2, 4))


@triton.constexpr_function
def plane_count(bits):
    """How many numbers lie in a byte, without third bits."""
    return {2: 4, 3: 4, 4: 2}.get(bits, 1)


@triton.jit
def plane_channels(plane: tl.constexpr, width: tl.constexpr, bits: tl.constexpr, dim: tl.constexpr):
    """The channels of a plane, which lie at the same place of their bytes; `dim` = none."""
    parts: tl.constexpr = plane_count(bits)
    below: tl.constexpr = (dim + parts - 1) // parts
    byte = tl.arange(0, width)
    return tl.where((byte < below) & (plane * below + byte < dim), plane * below + byte, dim)


@triton.constexpr_function
def offset(bits):
    """What is to be subtracted from the numbers of `read_planes`: they are integers."""
    return -0.5 if bits in (2, 3, 4) else 0.0


@triton.jit
def _places(byte, bits: tl.constexpr):
    """What lies at the places of bytes, two of 4 bits or four of 2, less half of the number of levels."""
    if ON_DEVICE:
        if bits == 4:
            planes = tl.inline_asm_elementwise(
                _OF_FOUR, "=r,=r,=r,=r,r", [byte], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            planes = tl.inline_asm_elementwise(
                _OF_TWO if bits == 2 else _OF_THREE,
                "=r,=r,=r,=r,=r,=r,=r,=r,r",
                [byte],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
    else:
        byte, less = byte.to(tl.int32), 2 ** (bits - 1)
        if bits == 4:
            planes = ((byte & 15) - less).to(EXACT), ((byte >> 4) - less).to(EXACT)
        else:
            first, second = ((byte & 3) - less).to(EXACT), ((byte >> 2 & 3) - less).to(EXACT)
            planes = first, second, ((byte >> 4 & 3) - less).to(EXACT), ((byte >> 6) - less).to(EXACT)
    return planes


@triton.jit
def _third(at, inside, numbers, plane: tl.constexpr, width: tl.constexpr, dim: tl.constexpr):
    """The numbers of a plane with the highest of their 3 bits."""
    below: tl.constexpr = (dim + 3) // 4
    above: tl.constexpr = (dim + 7) // 8
    channel = plane_channels(plane, width, 3, dim)[None, :]
    bits = tl.load(at + below + channel % above, inside & (channel < dim), other=0).to(tl.int32)
    return numbers + ((bits >> (channel // above) & 1) * 4).to(tl.float32).to(EXACT)


@triton.jit
def read_planes(
    codes, slots, inside, bits: tl.constexpr, stored: tl.constexpr, dim: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    """The planes `[slots, width]` of numbers of these slots, which take `stored` bytes or numbers each: as they are, or
    their levels and `offset`. Where there is nothing, what is there has no meaning, but is finite."""
    inside, at, column = inside[:, None], codes + slots[:, None] * stored, tl.arange(0, width)[None, :]
    below: tl.constexpr = (dim + plane_count(bits) - 1) // plane_count(bits)  # without the third bits
    there = tl.load(at + column, inside & (column < below), other=0)
    if bits == 0:
        planes = (there if ON_DEVICE else there.to(tl.float32),)
    elif bits == 8:
        planes = ((there.to(tl.float32) - 127.5).to(EXACT),)
    else:
        planes = _places(there, bits)
        if bits == 3:
            first, second = _third(at, inside, planes[0], 0, width, dim), _third(at, inside, planes[1], 1, width, dim)
            third, fourth = _third(at, inside, planes[2], 2, width, dim), _third(at, inside, planes[3], 3, width, dim)
            planes = first, second, third, fourth
    return planes


@triton.jit
def read_queries(
    members, is_query, bits: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, passes: tl.constexpr
):  # fmt: skip
    """Of queries: the channels of each plane, `[width, rows]`, and what is to be subtracted from products with it."""
    less = tl.zeros([is_query.shape[1]], tl.float32)
    queries = ()
    for plane in tl.static_range(plane_count(bits)):
        channel = plane_channels(plane, width, bits, dim)[:, None]
        query = tl.load(members + channel, is_query & (channel < dim), other=0).to(tl.float32)
        queries = queries + (query,)  # noqa: RUF005 - Triton adds tuples
        less += tl.sum(multiplied(query, EXACT, passes), 0) * offset(bits)
    return queries, less


@triton.jit
def dot_queries(planes, queries, passes: tl.constexpr):
    """Products `[slots, rows]`."""
    products = tl.zeros([planes[0].shape[0], queries[0].shape[1]], tl.float32)
    for plane in tl.static_range(len(planes)):
        products = dot(planes[plane], queries[plane], products, passes)
    return products


@triton.jit
def add_weighted(sums, factor, planes, weights, passes: tl.constexpr):
    """Sums `[width, rows]` of each plane: `factor` times those before, and the planes with these weights."""
    new = ()
    for plane in tl.static_range(len(planes)):
        summed = dot(tl.trans(planes[plane]), weights, sums[plane] * factor[None, :], passes)
        new = new + (summed,)  # noqa: RUF005
    return new


@triton.jit
def no_sums(rows: tl.constexpr, bits: tl.constexpr, width: tl.constexpr):
    """Zeros for `add_weighted`."""
    sums = ()
    for _ in tl.static_range(plane_count(bits)):
        sums = sums + (tl.zeros([width, rows], tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def store_sums(
    target, sums, less, is_query, bits: tl.constexpr, dim: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    """Store the sums of all planes, less what `offset` counts in them."""
    for plane in tl.static_range(len(sums)):
        channel = plane_channels(plane, width, bits, dim)[:, None]
        tl.store(target + channel, sums[plane] - less[None, :], is_query & (channel < dim))
