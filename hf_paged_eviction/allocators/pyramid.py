"""PyramidKV, arXiv 2406.02069."""

from dataclasses import dataclass
from typing import ClassVar

from ..policies.checks import check_between, check_count
from .base import FixedAllocator
from .registry import register_allocator


@register_allocator("pyramid")
@dataclass(frozen=True)
class Pyramid(FixedAllocator):
    r"""Gives each layer less than the one before it, by a linear rule.

    .. math::

        b_\ell = w + m - \ell \frac{m - l}{L - 1}, \quad l = \frac{\text{budget} - w}{\beta},
        \quad m = 2 (\text{budget} - w) - l

    `w` is `window`, which every layer gets. The last layer gets `w + (budget - w) / beta`, and the first is as far
    above the mean as the last is below it. As in arXiv 2406.02069, a layer gets no more than the tokens that a row has,
    and the other layers get what it leaves. So nothing is evicted while a row fits into the total. Each forward of
    several tokens divides anew, for each row.

    Args:
        beta: steepness; 1 = equal shares.
        window: number of tokens that every layer gets; 8 in the authors' runs.

    Raises:
        ValueError: a parameter is out of range.
    """

    paper: ClassVar[str | None] = "2406.02069"

    beta: float = 20.0
    window: int = 8

    def __post_init__(self) -> None:
        check_between("beta", self.beta, 1)  # 1 = equal shares
        check_count("window", self.window)

    def weights(self, layers: int, budget: int) -> list[float]:
        window = min(self.window, budget)
        least = (budget - window) / self.beta
        most = 2 * (budget - window) - least
        step = (most - least) / max(layers - 1, 1)
        return [window + most - index * step for index in range(layers)] if layers > 1 else [1.0]
