"""Shares of KV heads that were learned once for a model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from ..integration.models import is_latent_attention, paged_layers
from ..learned.calibration import Calibration, load_calibration
from ..learned.shares import HeadShares
from ..naming import format_name
from ..policies.checks import check_positive
from .base import FixedAllocator
from .registry import register_allocator


@register_allocator("heads")
@dataclass(frozen=True)
class Heads(FixedAllocator):
    r"""Gives each KV head of each layer a fixed share of the budget, which was learned once for the model.

    .. math:: b_{\ell,h} = \text{budget} \cdot L H \, \frac{w_{\ell,h}^\gamma}{\sum_{m,g} w_{m,g}^\gamma}

    `w` is the table of shares, `gamma` is `power`, `L` the number of layers and `H` of KV heads. Few heads of a model
    look far back; most look at the first and the newest tokens. Which ones do depends on the model more than on the
    text (RazorAttention, arXiv 2407.15891; HeadKV, 2410.19258; DuoAttention, 2410.10819; Tangram, 2606.06302), so one
    table serves every policy. LKV (2605.06676) trains such budgets end to end; here they are read off the attention to
    a few thousand tokens. The table depends on the share of the text that is kept.

    No head gets more than its row has tokens; the rest goes to the other heads, so nothing is evicted before all heads
    together use up the budget. Shares are computed when several tokens overflow the budget, and when single tokens have
    filled it; in the second case for a text of four times the budget.

    Args:
        power: exponent of the shares. Above 1 they differ more, which suits policies with weaker scores.
        profile: file that `paged-eviction prepare` wrote. As text the allocator is `heads`, and the file is `profile=`
            of the cache.
        table: in place of a profile the table as JSON, `[[2.0, 0.5], [1.0, 0.5]]`, with a row for each layer that
            evicts and a number for each KV head, as `Heads.of(table)` makes it. As text: `heads:[[2.0, 0.5], ...]`.

    Raises:
        ValueError: there is no such profile, it has no shares, or the table cannot be read. `check_model` raises it if
            there is neither, or if they belong to another model.
    """

    power: float = 1.0
    profile: str | None = None
    table: str | None = None

    reads_profile: ClassVar[bool] = True
    per_head: ClassVar[bool] = True
    foreseen: ClassVar[int | None] = 4

    def __post_init__(self) -> None:
        check_positive("power", self.power)
        if self.profile is not None and self.table is not None:
            raise ValueError("heads: give a profile or a table of shares, not both.")
        if self.profile is not None or self.table is not None:
            _ = self.head_shares  # read now, so that a missing file is an error here

    @classmethod
    def of(cls, table: Sequence[Sequence[float]] | Tensor) -> "Heads":
        """Make an allocator from a table: a row for each layer that evicts, a number for each KV head. With one number
        in every row it shares out among layers alone, and fits heads="shared" and latents (MLA).

        Raises:
            TypeError, ValueError: `table` is not such a table.
        """
        rows = [[float(f"{float(share):.6g}") for share in row] for row in table]
        return cls(table=json.dumps(rows))

    @cached_property
    def _calibration(self) -> Calibration | None:
        return None if self.profile is None else load_calibration(self.profile)

    @cached_property
    def head_shares(self) -> HeadShares:
        """The shares in the profile or table."""
        if self.table is not None:
            try:
                return HeadShares.of(json.loads(self.table))
            except (TypeError, ValueError) as error:
                raise ValueError(f"heads: {self.table[:60]!r} is no table of shares: {error}.") from error
        if self._calibration is None:
            raise ValueError(
                "The allocator 'heads' reads a profile, and has none: give profile=FILE, or a table, Heads.of(table)."
            )
        if self._calibration.shares is None:
            raise ValueError(
                f"The profile {self.profile!r} has no budgets of heads: make it again with `paged-eviction prepare`."
            )
        return self._calibration.shares

    @property
    def divides_heads(self) -> bool:
        """See `BudgetAllocator.divides_heads`."""
        unknown = self.profile is None and self.table is None
        return unknown or any(shares.shape[1] > 1 for shares in self.head_shares.layers.values())

    @property
    def label(self) -> str:
        """See `Named.label`."""
        if self.table is None:
            return format_name(self)
        return f"{self.name}:{self.table}{format_name(replace(self, table=None)).removeprefix(self.name)}"

    @property
    def profile_digests(self) -> Mapping[str, str]:
        """See `Named.profile_digests`."""
        if self.profile is None or self._calibration is None:
            return {}
        return {self.profile: self._calibration.digest}

    def check_model(self, config: Any) -> None:
        """See `BudgetAllocator.check_model`."""
        if self.divides_heads and is_latent_attention(config):
            raise ValueError(
                "allocator='heads' divides the budget among KV heads, but this model caches latents (MLA), which "
                "all heads read: use allocator='uniform' or 'pyramid', or a table with one number for each layer."
            )
        if self._calibration is not None:
            self._calibration.check_model(config)
        paged = paged_layers(config)
        if len(paged) != len(self.head_shares.layers):
            raise ValueError(
                f"allocator='heads' has shares for {len(self.head_shares.layers)} layers, and {len(paged)} layers of "
                "this model evict. Give a row for each of these."
            )

    def weights(self, layers: int, budget: int) -> list[float]:
        """The mean over the heads of each layer, for a quarter of the tokens."""
        return [float(shares.mean()) for shares in self._at(Tensor([0.25]))]

    def shares(self, layers: int, budget: int, tokens: Tensor) -> list[Tensor]:
        """See `FixedAllocator.shares`."""
        return self._at((budget / tokens.clamp_min(1)).clamp_max(1.0))

    def _at(self, kept_share: Tensor) -> list[Tensor]:
        return [shares**self.power for shares in self.head_shares.at(kept_share)]
