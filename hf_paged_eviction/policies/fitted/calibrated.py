"""A score that was fitted to the model: `paged-eviction prepare` makes the file."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from ...learned.calibration import Calibration, load_calibration
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
        profile: file that `paged-eviction prepare` wrote. As text the policy is `calibrated`, and the cache is given
            `profile=`.

    Raises:
        ValueError: there is no such profile. `check_model` and `score` raise it if there is none, or if it belongs to
            another model.
    """

    profile: str | None = None

    reads_profile: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.profile is not None:
            _ = self.calibration  # read now, so that a missing file is an error here

    @cached_property
    def calibration(self) -> Calibration:
        """The scores in the profile."""
        if self.profile is None:
            raise ValueError(f"The policy {self.name!r} reads a profile, and has none: give profile=FILE.")
        return load_calibration(self.profile)

    @property
    def needs(self) -> Needs:
        return Needs(
            heads="separate",
            token_local=True,
            absolute_noise=True,
            supports_mla=False,
            rotary=self.profile is None or self.calibration.unrotated,
        )

    @property
    def profile_digests(self) -> Mapping[str, str]:
        return {} if self.profile is None else {self.profile: self.calibration.digest}

    def check_model(self, config: Any) -> None:
        self.calibration.check_model(config)

    def score(self, context: ScoreContext) -> Tensor:
        keys = context.unrotated_keys if self.calibration.unrotated else context.keys
        return self.calibration.score(keys, context.values, context.positions, context.layer_idx, context.first_head)
