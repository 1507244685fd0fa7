"""A fitted score and what the newest queries look at, added."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from ..attention.window_attention import WindowAttention
from ..base import ScoreContext
from ..checks import check_count, check_positive
from ..needs import Needs
from ..registry import register_policy
from .calibrated import Calibrated


@register_policy("observed")
@dataclass(frozen=True)
class Observed(WindowAttention):
    r"""Adds the calibrated score and the attention of the newest queries.

    .. math:: s_t = c_t + \lambda \frac{1}{n_t} \sum_{q \in \text{window}} a_{q,t}

    `c` is the score of `calibrated`, which knows the model but not the text. The sum is the mean attention that the
    last `window` queries pay the token (averaged over the query heads that share a KV head), as in SnapKV (arXiv
    2404.14469) without its pooling and without pinned tokens. `lambda` is `weight`. Both terms are shares of attention,
    so they can be added, and compared across layers and heads. The second term helps where the text goes on about the
    same subject. A larger weight loses more of the tokens that no query has attended to yet.

    Args:
        weight: weight of the window's attention.
        window: number of observed queries.
        profile: as in `calibrated`.

    Raises:
        ValueError: there is no such profile, or a number is out of range. `check_model` and `score` raise it if there
            is none, or if it belongs to another model.
    """

    weight: float = 4.0
    window: int = 32
    profile: str | None = None

    reads_profile: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("weight", self.weight)
        check_count("window", self.window, at_least=1)
        _ = self.expected  # read now, so that a missing file is an error here

    @cached_property
    def expected(self) -> Calibrated:
        """The policy that scores a token by the calibration alone."""
        return Calibrated(self.profile)

    @property
    def needs(self) -> Needs:
        own, window = self.expected.needs, super().needs
        seen = {name: getattr(window, name) for name in ("token_statistics", "row_statistics", "window")}
        return replace(own, token_local=False, **seen)

    @property
    def profile_digests(self) -> Mapping[str, str]:
        return self.expected.profile_digests

    def check_model(self, config: Any) -> None:
        self.expected.check_model(config)

    def attention(self, context: ScoreContext) -> Tensor:
        return self.expected.score(context) + self.weight * self.mean(context)
