"""A score that was fitted to the model: `paged-eviction prepare` makes the file."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from ...learned.calibration import Calibration, is_here, load_calibration
from ..base import EvictionPolicy, ScoreContext
from ..needs import Needs
from ..registry import register_policy


@register_policy("calibrated")
@dataclass(frozen=True)
class Calibrated(EvictionPolicy):
    r"""Estimates the attention that later tokens will pay, from key, value and position alone. Fitted to the model.

    .. math::

        s_t = c \bigl( w \cdot f(k_t, v_t, p_t) + b \bigr), \quad c \text{ rising; }
        w, b, c \text{ per layer and KV head}

    `f` are cheap features of the token: the log norms of key and value, their distances from the mean, the direction of
    the key, and whether the token is one of the first. `w` and `b` are a linear fit to the attention that the model
    pays in some text, and `c` is an increasing curve. Models differ in which keys matter: in one those with a large
    norm, in another those with a small norm. The cost is little more than that of a norm. The direction of the key is
    the feature of Q-Filters (arXiv 2503.02812). Keys are read before rotary embedding if the file was made that way;
    what was learned from short texts then holds at every position.

    Args:
        file: file that `paged-eviction prepare` wrote, a registered name of such a file, or `organisation/name` on the
            Hugging Face Hub.

    Raises:
        ValueError: there is no such calibration. `check_model` and `score` raise it if the calibration belongs to
            another model.
    """

    file: str

    of_file: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _ = self.calibration  # read now, so that a missing file is an error here

    @cached_property
    def calibration(self) -> Calibration:
        """The calibration in the file."""
        return load_calibration(self.file)

    @property
    def needs(self) -> Needs:
        return Needs(
            heads="separate",
            token_local=True,
            absolute_noise=True,
            common_unit=True,
            supports_mla=False,
            rotary=self.calibration.unrotated,
        )

    @staticmethod
    def is_here(file: str) -> bool:
        """See `Named.is_here`."""
        return is_here(file)

    @property
    def file_digests(self) -> dict[str, str]:
        return {self.file: self.calibration.digest}

    def check_model(self, config: Any) -> None:
        self.calibration.check_model(config)

    def score(self, context: ScoreContext) -> Tensor:
        keys = context.unrotated_keys if self.calibration.unrotated else context.keys
        return self.calibration.score(keys, context.values, context.positions, context.layer_idx, context.first_head)
