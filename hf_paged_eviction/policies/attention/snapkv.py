"""SnapKV, arXiv 2404.14469."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..base import ScoreContext
from ..checks import check_count, check_kernel
from ..needs import Needs
from ..registry import register_policy
from ..text_order import Pooling
from .window_attention import WindowAttention


@register_policy("snapkv")
@dataclass(frozen=True)
class SnapKV(WindowAttention):
    r"""Keeps the tokens to which the last `window` queries attend, together with their neighbours.

    .. math:: s_t = \operatorname{pool}_{u \text{ near } t} \frac{1}{n_u} \sum_{q \in \text{window}} a_{q,u}

    `a` is averaged over the query heads that share a KV head, and `n` counts the queries of the window that could see
    the token. `pool` joins the `kernel` nearest held tokens in the order of the text, so that clusters stay together.
    The tokens of the window are pinned, so the budget should be well above `window`; below it only recent tokens stay.
    arXiv 2404.14469 evicts once, at the end of the prompt. Here the window moves on while decoding, and its older part
    is an estimate.

    Args:
        window: number of observed queries.
        kernel: number of pooled tokens, odd; 1 = no pooling.
        pooling: "avg" or "max".

    Raises:
        ValueError: a parameter is out of range.
    """

    window: int = 32
    kernel: int = 5
    pooling: Pooling = "avg"

    paper: ClassVar[str | None] = "2404.14469"

    def __post_init__(self) -> None:
        check_count("window", self.window, at_least=1)
        check_kernel("kernel", self.kernel)
        if self.pooling not in ("avg", "max"):
            raise ValueError(f'pooling must be "avg" or "max", got {self.pooling!r}.')

    @property
    def needs(self) -> Needs:
        return replace(super().needs, reads=())

    def attention(self, context: ScoreContext) -> Tensor:
        return self.pooled(self.mean(context), context, self.kernel, self.pooling)

    def score(self, context: ScoreContext) -> Tensor:
        return self.with_window(self.attention(context), context)
