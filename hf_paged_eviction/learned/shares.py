"""The shares of the budget of each KV head of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Shares of heads are numbers up to this, and from its reciprocal on.
_MOST = 1e6


@dataclass(frozen=True)
class HeadShares:
    """A table of shares by layer and KV head, for one or several shares of the tokens that stay.

    Attributes:
        kept: rising shares of a text's tokens that stay, one for each row of a layer's table.
        layers: by index in the model, `[len(kept), kv_heads]` positive numbers, proportional to the budget of a head.

    Raises:
        ValueError: the numbers do not fit together.
    """

    kept: tuple[float, ...]
    layers: Mapping[int, Tensor]

    def __post_init__(self) -> None:
        rising = self.kept and list(self.kept) == sorted(set(self.kept))
        if not rising or not 1 / _MOST <= self.kept[0] <= self.kept[-1] <= 1:
            raise ValueError(
                f"shares of the tokens must rise from {1 / _MOST:g} or more to at most 1, got {list(self.kept)}"
            )
        if not self.layers:
            raise ValueError("a table of shares needs a layer")
        for index, table in self.layers.items():
            if table.ndim != 2 or len(table) != len(self.kept) or not table.shape[1] or not table.is_floating_point():
                raise ValueError(
                    f"the shares of layer {index} are {table.dtype} {list(table.shape)}, expected floating-point "
                    f"numbers of the shape [{len(self.kept)}, kv_heads]"
                )
            if not ((table >= 1 / _MOST) & (table <= _MOST)).all():
                raise ValueError(f"the shares of layer {index} must be numbers from {1 / _MOST:g} to {_MOST:g}")

    @classmethod
    def of(cls, table: Sequence[Sequence[float]] | Tensor) -> "HeadShares":
        """Make a table that is the same for all shares of the tokens: a row for each layer that evicts, a number per KV
        head.

        Raises:
            TypeError, ValueError: `table` has another form.
        """
        rows = [torch.as_tensor(row, dtype=torch.float64, device="cpu") for row in table]
        if any(row.ndim != 1 for row in rows):
            raise ValueError("a table of shares has a row for each layer and a number for each KV head")
        return cls((1.0,), dict(enumerate(row[None] for row in rows)))

    def at(self, kept_share: Tensor) -> list[Tensor]:
        """The shares for each row of the batch, `[rows, kv_heads]` float64 for each layer.

        Args:
            kept_share: `[rows]` shares of the tokens that stay, each in (0, 1]. Logarithms are interpolated between the
                rows of the table.
        """
        log_shares = torch.tensor(self.kept, dtype=torch.float64, device="cpu").log()
        log_kept = kept_share.double().cpu().log().clamp(log_shares[0], log_shares[-1])
        above = torch.searchsorted(log_shares, log_kept).clamp(max(len(log_shares) > 1, 0), len(log_shares) - 1)
        below = (above - 1).clamp_min(0)
        way = ((log_kept - log_shares[below]) / (log_shares[above] - log_shares[below])).nan_to_num(0.0)[:, None]
        logs = (table.double().log() for table in self.layers.values())
        return [torch.lerp(table[below], table[above], way).exp() for table in logs]
