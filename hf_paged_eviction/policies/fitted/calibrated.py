"""A score that was fitted to the model: `paged-eviction prepare` makes the file."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from ...learned.calibration import Calibration, load_calibration
from ...learned.calibration.files import is_here
from ..base import EvictionPolicy, ScoreContext
from ..needs import Needs
from ..registry import register_policy


@register_policy("calibrated")
@dataclass(frozen=True)
class Calibrated(EvictionPolicy):
    r"""The attention that later tokens can be expected to pay, from key, value and position alone.

    .. math::

        s_t = c \bigl( w \cdot f(k_t, v_t, p_t) + b \bigr), \quad c \text{ rising; }
        w, b, c \text{ per layer and KV head}

    Which keys matter is a habit of a model: in one those of a large norm, in another those of a small one. So this
    score is fitted, per layer and KV head, to what the model at hand attends to in some text: a line through cheap
    features, then a rising curve. It costs little more than a norm. The direction of a key is one feature (Q-Filters,
    2503.02812), the others are norms and distances that are policies of their own elsewhere. Keys are looked at before
    rotary embedding, where the file was made so: then what was learned in short texts holds for every position.

    Args:
        file: what `paged-eviction prepare` wrote, a name given to such a file, or `organisation/name` on the Hugging
            Face Hub.

    Raises:
        ValueError: there is no such calibration. By `check_model` and `score`: it belongs to another model.
    """

    file: str

    of_file: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _ = self.calibration  # read at once, so that a file that is not there is an error here

    @cached_property
    def calibration(self) -> Calibration:
        """What the file says."""
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
