"""A fitted score and what the newest queries look at, added."""

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
    r"""The attention that a token can be expected to get, and `weight` times what it gets now.

    .. math:: s_t = c_t + \lambda \frac{1}{n_t} \sum_{q \in \text{window}} a_{q,t}

    `c` is the score of `calibrated`, which knows a model's habits and no text; the sum is the mean attention that the
    last `window` queries pay to the token (of a group of query heads the mean too), as in SnapKV (2404.14469) without
    its pooling and its pins. Both are shares of attention, so that they can be added, and compared over layers and
    heads. A text goes on with what it is about: in running text the sum loses half of what the calibrated score does.
    The more the window counts, the more is lost of what nobody has asked for yet; with a weight of 4 that is little.

    Args:
        file: as of `calibrated`.
        weight: of the window.
        window: queries observed.

    Raises:
        ValueError: there is no such calibration, or a number is out of range. By `check_model` and `score`: it belongs
            to another model.
    """

    file: str
    weight: float = 4.0
    window: int = 32

    of_file: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("weight", self.weight)
        check_count("window", self.window, at_least=1)
        _ = self.expected  # read at once, so that a file that is not there is an error here

    @cached_property
    def expected(self) -> Calibrated:
        """Tells what can be expected of a token."""
        return Calibrated(self.file)

    @property
    def needs(self) -> Needs:
        own, window = self.expected.needs, super().needs
        seen = {name: getattr(window, name) for name in ("token_statistics", "row_statistics", "window")}
        return replace(own, token_local=False, **seen)

    @staticmethod
    def is_here(file: str) -> bool:
        """See `Named.is_here`."""
        return Calibrated.is_here(file)

    @property
    def file_digests(self) -> dict[str, str]:
        return self.expected.file_digests

    def check_model(self, config: Any) -> None:
        self.expected.check_model(config)

    def attention(self, context: ScoreContext) -> Tensor:
        return self.expected.score(context) + self.weight * self.mean(context)
