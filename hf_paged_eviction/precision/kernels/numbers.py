"""Constants of the kernels, and float32 in fewer bits."""

import triton
import triton.language as tl

#: Logits of hidden tokens are below this.
HIDDEN = tl.constexpr(-1e30)
LOWEST = tl.constexpr(-3e38)
#: Triton's interpreter has no instructions of a device and no products in bfloat16, which holds levels as they are.
ON_DEVICE = tl.constexpr(not triton.knobs.runtime.interpret)
EXACT = tl.constexpr(tl.bfloat16 if ON_DEVICE.value else tl.float32)
#: Logits are taken to the power of two.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def rounded(numbers, dtype: tl.constexpr):
    """float32 in this dtype."""
    if ON_DEVICE and dtype == tl.bfloat16:
        two: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        rounded = tl.inline_asm_elementwise(two, "=r,f,f", [numbers], tl.bfloat16, True, 2)
    else:
        rounded = numbers.to(dtype)
    return rounded


@triton.jit
def dot(left, right, total, passes: tl.constexpr):
    """`total` and the product of numbers and float32, of which as many parts are taken as there are passes."""
    if left.dtype == tl.float32:
        total = tl.dot(left, right, total, input_precision="tf32x3")
    else:
        part = rounded(right, left.dtype)
        total = tl.dot(left, part, total)
        for _ in tl.static_range(passes - 1):
            right -= part.to(tl.float32)
            part = rounded(right, left.dtype)
            total = tl.dot(left, part, total)
    return total


@triton.jit
def multiplied(right, dtype: tl.constexpr, passes: tl.constexpr):
    """What `dot` takes of it."""
    if dtype == tl.float32:
        sum_of_parts = right
    else:
        sum_of_parts = rounded(right, dtype).to(tl.float32)
        for _ in tl.static_range(passes - 1):
            sum_of_parts += rounded(right - sum_of_parts, dtype).to(tl.float32)
    return sum_of_parts


@triton.jit
def power_of_two(numbers):
    """2 to the power of float32; what is too small for normal numbers is 0."""
    if ON_DEVICE:
        power = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [numbers], tl.float32, True, 1)
    else:
        power = tl.exp2(numbers)
    return power


@triton.jit
def waves(angles):
    """Cosine and sine of angles of any size, without the full turns: 2 pi in two pieces, of which the first has so few
    digits that its product is exact."""
    turns = (angles * 0.15915494309189535 + 12582912.0) - 12582912.0  # what is beyond is rounded away
    rest = angles - turns * 6.28125 - turns * 0.0019353071795864769
    if ON_DEVICE:
        cosine = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [rest], tl.float32, True, 1)
        sine = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [rest], tl.float32, True, 1)
    else:
        cosine, sine = tl.cos(rest), tl.sin(rest)
    return cosine, sine
