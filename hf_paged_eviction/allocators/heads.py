"""Shares of KV heads that were learned once for a model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from ..integration.models import is_latent_attention, paged_layers
from ..learned.calibration import Calibration, load_calibration
from ..learned.calibration.files import is_here
from ..learned.shares import HeadShares
from ..policies.checks import check_positive
from .base import FixedAllocator
from .registry import register_allocator


@register_allocator("heads")
@dataclass(frozen=True)
class Heads(FixedAllocator):
    r"""Each KV head of each layer has its own share of the budget, the same for every text.

    .. math:: b_{\ell,h} = \text{budget} \cdot L H \, \frac{w_{\ell,h}^\gamma}{\sum_{m,g} w_{m,g}^\gamma}

    Few heads of a model look far back, and most look at the first and the newest tokens. Which ones do is a habit of
    the model (RazorAttention, 2407.15891; HeadKV, 2410.19258; DuoAttention, 2410.10819), so that a table that was
    learned once serves every policy. No head gets more than its row has tokens: what it has no use for goes to the
    others, and nothing leaves before the budget of all heads together is used up. The table depends on the share of the
    text that is kept. Sizes are decided when several tokens come that do not all fit, or when single tokens have
    filled the budget: then as for a text of four times its length. Else they stay as they are while single tokens come.

    Args:
        file: a profile, see `prepare`; or the table itself as JSON, `[[2.0, 0.5], [1.0, 0.5]]`, a row for each layer
            that evicts and a number for each KV head. `Heads.of(table)` writes that.
        power: of the shares; larger than 1 = steeper, for policies whose own choice of tokens is worth less.

    Raises:
        ValueError: there is no such profile, it has no shares, or the table cannot be read. By `check_model`: it
            belongs to another model.
    """

    file: str
    power: float = 1.0

    of_file: ClassVar[bool] = True
    per_head: ClassVar[bool] = True
    foreseen: ClassVar[int | None] = 4

    def __post_init__(self) -> None:
        check_positive("power", self.power)
        _ = self.table  # read at once, so that a file that is not there is an error here

    @classmethod
    def of(cls, table: Sequence[Sequence[float]] | Tensor) -> "Heads":
        """Shares that are given: a row for each layer that evicts, a number for each KV head.

        Raises:
            TypeError, ValueError: it is no such table.
        """
        rows = [[float(f"{float(share):.6g}") for share in row] for row in table]
        return cls(json.dumps(rows))

    @cached_property
    def _profile(self) -> Calibration | None:
        return None if self.file.lstrip().startswith("[") else load_calibration(self.file)

    @cached_property
    def table(self) -> HeadShares:
        """What the file, or the text, says."""
        if self._profile is not None:
            if self._profile.shares is None:
                raise ValueError(
                    f"The profile {self.file!r} has no shares of heads: make it anew with `paged-eviction prepare`."
                )
            return self._profile.shares
        try:
            return HeadShares.of(json.loads(self.file))
        except (TypeError, ValueError) as error:
            raise ValueError(f"heads: {self.file[:60]!r} is no table of shares: {error}.") from error

    @staticmethod
    def is_here(file: str) -> bool:
        """See `Named.is_here`."""
        return file.lstrip().startswith("[") or is_here(file)

    @property
    def file_digests(self) -> dict[str, str]:
        """See `Named.file_digests`."""
        return {} if self._profile is None else {self.file: self._profile.digest}

    def check_model(self, config: Any) -> None:
        """See `BudgetAllocator.check_model`."""
        if is_latent_attention(config):
            raise ValueError(
                "allocator='heads' shares out among KV heads, and this model caches latents (MLA), which all heads "
                "read: use allocator='uniform' or 'pyramid'."
            )
        if self._profile is not None:
            self._profile.check_model(config)
        paged = paged_layers(config)
        if len(paged) != len(self.table.layers):
            raise ValueError(
                f"allocator='heads' has shares for {len(self.table.layers)} layers, and {len(paged)} layers of this "
                "model evict. Give a row for each of these."
            )

    def weights(self, layers: int, budget: int) -> list[float]:
        """The mean over the heads of each layer, for a quarter of the tokens."""
        return [float(each.mean()) for each in self._at(Tensor([0.25]))]

    def shares(self, layers: int, budget: int, tokens: Tensor) -> list[Tensor]:
        """See `FixedAllocator.shares`."""
        return self._at((budget / tokens.clamp_min(1)).clamp_max(1.0))

    def _at(self, kept: Tensor) -> list[Tensor]:
        return [shares**self.power for shares in self.table.at(kept)]
