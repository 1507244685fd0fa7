"""The pads of a batch.

A layer gets keys and values only, so the cache learns the 2-D attention mask from the model's own mask construction
(`masks.channel`) or from the user. The host reads the mask once per forward of several tokens; a decode step reads no
tensor on an accelerator.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tensors.parts import persistent

#: What is known of a column of a row, uint8. Each state includes those below it; 0 = it came as a pad.
#: It was a real token when it came; it has a position; no mask has hidden it; the cache was not told to forget it.
_CAME, _COUNTS, _SHOWN, _VISIBLE = 1, 2, 3, 4


@dataclass(frozen=True)
class Hidden:
    """The state of a batch after tokens of the past were hidden by a mask, or forgotten.

    Attributes:
        positions: `[rows, seen]` bool, these tokens, indexed by their former position.
        columns: `[rows, seen]` uint8, the new state of `Padding`.
    """

    positions: Tensor
    columns: Tensor

    @property
    def pads(self) -> Tensor:
        """`[rows]` int64, number of columns without a position: pads, and hidden tokens at the end of a row."""
        return (self.columns < _COUNTS).sum(-1)


class Padding:
    """The known part of the 2-D attention mask of a batch.

    Attributes:
        given: `[rows, columns]` bool, the mask of the user; None = none.
        observed: whether the model has shown a mask, or shown that there is none.
        all_real_from: columns from here on are known to have no pads; fewer columns may have some after rows or columns
            have gone.
        irregular: whether pads may be elsewhere than before the tokens of their row.
        forgets: whether the cache may have been told to forget tokens, which masks may still show.
        agrees: whether the model has shown the same mask that the user gave.

    Args:
        attention_mask: `[rows, length]`, nonzero = real token. It takes precedence over the model's mask for the
            columns that it covers. The batch may be a multiple of `rows` (beams, several returned sequences).

    Raises:
        TypeError, ValueError: the mask is not a tensor, or not 2-D.
    """

    STATE = "given", "_columns", "_fewer", "observed", "all_real_from", "irregular", "forgets", "agrees"

    given: Tensor | None
    observed: bool
    all_real_from: int
    irregular: bool
    forgets: bool
    agrees: bool
    _columns: Tensor | None  # [rows, columns] uint8, the states above; later columns are visible

    def __init__(self, attention_mask: Tensor | None = None) -> None:
        self._warned = False
        self._fewer = False  # whether rows or columns have gone since `all_real_from` was worked out
        self.reset()
        if attention_mask is None:
            return
        if not isinstance(attention_mask, Tensor):
            raise TypeError(f"attention_mask must be a tensor [rows, length], got {type(attention_mask).__name__}.")
        if attention_mask.ndim != 2:
            raise ValueError(f"attention_mask must be [rows, length], got shape {tuple(attention_mask.shape)}.")
        self.given = attention_mask.bool()
        self._learn(self.given)

    # ---- the mask of a forward ------------------------------------------------------------------------------------

    def unchanged(self, mask: Tensor, seen: int, batch: int) -> Tensor | None:
        """The mask of a single token, `[batch, seen + 1]` bool, if it is known to bring no news: the past is the same,
        and the token is real. A step checks nothing else."""
        if seen < max(self.all_real_from, 1) or mask.shape[1] <= seen or not self._may_read(mask, seen, single=True):
            return None
        joined = compared = self._merge(mask, seen + 1, batch, seen)
        known = self.columns(0, self.all_real_from, batch, mask.device)
        if known is not None:
            same = joined[:, : self.all_real_from] == known
            if self.forgets:
                same |= self._forgotten(self.all_real_from, batch, mask.device)
            compared = torch.cat([same, joined[:, self.all_real_from :]], dim=1)
        # The minimum of bytes is ten times as fast as `all` of bools.
        return joined if bool(compared.view(torch.uint8).min()) else None

    def newly_hidden(self, mask: Tensor | None, seen: int, batch: int, single: bool = False) -> Hidden | None:
        """Find the visible columns of the past that the mask of a forward hides.

        Args:
            mask: `[batch, seen or more]`, nonzero = visible; None if the model masks no column.
            single: the forward has one token, so a mask on an accelerator is not read.

        Returns:
            The state after hiding them, for `hide`; None if there are none. Hidden tokens at the end of a row lose
            their positions, as if they had been pads from the start.

        Raises:
            ValueError: the mask shows a token that was hidden.
        """
        readable = self.any_pads if mask is None else mask.shape[1] >= seen and self._may_read(mask, seen, single)
        if not seen or not readable:
            return None
        if mask is None and self.given is None:
            if self._columns is not None and bool((self._columns < _SHOWN).any()):
                raise _shown_again(None)
            return None
        mask = self._merge(mask, seen, batch, seen)
        columns = self._states(seen, batch, mask.device)
        visible, forgotten = columns == _VISIBLE, columns == _SHOWN
        mask = mask & ~forgotten
        if torch.equal(mask, visible):
            return None
        shown, hidden = mask & ~visible, visible & ~mask
        if bool(shown.any()):
            raise _shown_again(shown)
        position = torch.where(hidden, (columns >= _COUNTS).cumsum(-1) - 1, seen)
        positions = hidden.new_zeros(batch, seen + 1).scatter_(1, position, hidden)[:, :seen]
        ends = _behind(mask | forgotten) & hidden.any(-1, keepdim=True)
        columns = columns.clamp_max(torch.where(ends, _CAME, torch.where(hidden, _COUNTS, _VISIBLE)).to(torch.uint8))
        return Hidden(positions, columns)

    def without(self, positions: Tensor) -> Hidden:
        """The state after forgetting tokens of the past, for `hide`. They keep their positions; masks may show them.

        Args:
            positions: `[batch, seen]` bool, these tokens, indexed by their position.
        """
        columns = self._states(positions.shape[1], len(positions), positions.device)
        visible = columns == _VISIBLE
        gone = visible & positions.gather(1, ((columns >= _COUNTS).cumsum(-1) - 1).clamp_min(0))
        return Hidden(positions, columns.masked_fill(gone, _SHOWN))

    def _states(self, seen: int, batch: int, device: torch.device) -> Tensor:
        """`[batch, seen]` uint8, the state of each column."""
        columns = torch.full((batch, seen), _VISIBLE, dtype=torch.uint8, device=device)
        if self._columns is not None and self.all_real_from:
            known = self._expand(self._columns, batch)[:, :seen]
            columns[:, : known.shape[1]] = known.to(device)
        return columns

    def _forgotten(self, seen: int, batch: int, device: torch.device) -> Tensor:
        """`[batch, seen]` bool, the tokens that the cache was told to forget."""
        return self._states(seen, batch, device) == _SHOWN

    def mask_without_forgotten(
        self, seen: int, count: int, mask: Tensor | None, batch: int, config: Any
    ) -> tuple[Tensor, bool]:
        """The 2-D mask for layers that do not evict, and so still hold what was forgotten; see `channel.Tell`."""
        device = mask.device if mask is not None else self._columns.device  # type: ignore[union-attr]
        shown = torch.ones(batch, seen + count, dtype=torch.bool, device=device) if mask is None else mask.bool()
        shown = shown.clone()
        shown[:, :seen] &= ~self._forgotten(seen, batch, device)
        return shown, False

    def _may_read(self, mask: Tensor, seen: int, single: bool) -> bool:
        """Reading the mask of every step would synchronise an accelerator. It is read up to the first column without a
        pad: a padded prompt may come in single tokens."""
        return not single or mask.device.type == "cpu" or seen <= self.all_real_from

    def hide(self, hidden: Hidden) -> None:
        """Set this state."""
        self._set(persistent(hidden.columns))
        self.forgets = bool((hidden.columns == _SHOWN).any())
        self.irregular = True  # whatever the mask is, slots are no longer in the order of columns

    def observe(self, mask: Tensor | None, seen: int, length: int, batch: int) -> Tensor | None:
        """Take in the mask of a forward with the columns `seen .. length`; for earlier columns see `newly_hidden`.

        Args:
            mask: `[batch, >= length]` bool; None if the model masks no column.

        Returns:
            The resulting mask, `[batch, length]` bool; None = nothing is masked.

        Raises:
            ValueError: the mask lacks tokens that were seen before.
        """
        self.observed = True
        if mask is not None and seen and mask.shape[1] < length:
            if mask.shape[1] == length - seen:
                raise ValueError(
                    f"The whole text of {mask.shape[1]} tokens came, of which the cache has seen {seen}. `generate` "
                    "does so with use_cache=False: leave that out, or the cache. For another text, call "
                    "cache.reset() first."
                )
            raise ValueError(
                f"attention_mask covers {mask.shape[1]} tokens, but {seen} were seen before and {length - seen} are "
                "new. It always covers everything seen, whatever the cache still holds: pass a mask of "
                f"{length} columns, or none where there are no pads."
            )
        if mask is None and self.given is None:
            if not seen:
                self._columns, self.all_real_from = None, 0
            return None
        if self.given is not None and mask is not None and not seen:
            self.agrees = torch.equal(self._expand(self.given, batch)[:, :length].to(mask.device), mask.bool())
        mask = self._merge(mask, length, batch, seen)
        # Of a step on an accelerator the new column counts as real.
        several = length - seen > 1 or seen <= self.all_real_from
        if several or (self._may_read(mask, seen, single=True) and not mask[:, -1].all()):
            self._learn(mask, seen)
        return mask

    def _merge(self, mask: Tensor | None, length: int, batch: int, seen: int) -> Tensor:
        """Join the model's mask with the user's. A token that is real in the user's mask may be hidden later, if the
        model had told of it too."""
        if mask is not None:
            mask = mask[:, :length].bool()
            if mask.shape[1] < length:  # transformers hides the columns that a mask does not reach
                mask = torch.nn.functional.pad(mask, (0, length - mask.shape[1]))
            if self.given is None:
                return mask
        user_mask = self._expand(self.given, batch)[:, :length]  # type: ignore[arg-type]  # one of the two is there
        if mask is None:
            mask = user_mask.new_ones(batch, length)
        user_mask = user_mask.to(mask.device)
        count = user_mask.shape[1]
        if self.agrees:
            user_mask = torch.cat([user_mask[:, :seen] & mask[:, : min(seen, count)], user_mask[:, seen:]], dim=1)
        return torch.cat([user_mask, mask[:, count:]], dim=1)

    @staticmethod
    def _expand(mask: Tensor, batch: int) -> Tensor:
        rows = mask.shape[0]
        if rows == 0 or batch % rows:
            raise ValueError(
                f"attention_mask= has {rows} rows, which does not divide the batch of {batch}. Pass the mask of "
                "this batch, or none: it is learned from the model's own."
            )
        return mask if rows == batch else mask.repeat_interleave(batch // rows, dim=0)

    def _learn(self, mask: Tensor, seen: int = 0) -> None:
        """Take the columns from `seen` on from a mask, which says the same of those before."""
        columns = mask.to(torch.uint8) * _VISIBLE
        if self._columns is not None and seen and self.all_real_from:
            before = self._expand(self._columns, len(mask))[:, :seen].to(mask.device)
            columns = torch.cat([before, columns[:, before.shape[1] :]], dim=1)
        self._set(columns)

    def _set(self, columns: Tensor) -> None:
        self._columns, self._fewer, hidden = columns, False, columns < _VISIBLE
        padded = hidden.any(dim=0).nonzero()
        self.all_real_from = int(padded[-1]) + 1 if len(padded) else 0
        self.irregular = self.irregular or bool((hidden[:, 1:] > hidden[:, :-1]).any())

    # ---- what is known --------------------------------------------------------------------------------------------

    @property
    def any_pads(self) -> bool:
        """Whether there is a pad, as of the last forward of several tokens.

        Reads a tensor if rows or columns have gone since then: what was hidden of a row leaves with it.
        """
        self._look_again()
        return self.all_real_from > 0

    def _look_again(self) -> None:
        if self._fewer and self.all_real_from and self._columns is not None:
            self._set(self._columns)

    def columns(self, start: int, stop: int, batch: int, device: torch.device, least: int = _VISIBLE) -> Tensor | None:
        """Which of the tokens `start .. stop` are real: `[batch, stop - start]` bool, or None if all are."""
        if start >= self.all_real_from or self._columns is None:
            return None
        mask = self._expand(self._columns, batch)[:, start:stop].to(device) >= least
        beyond = stop - start - mask.shape[1]
        return torch.nn.functional.pad(mask, (0, beyond), value=True) if beyond else mask

    def shown(self, start: int, stop: int, batch: int, device: torch.device) -> Tensor | None:
        """Like `columns`: the columns that a mask may show."""
        return self.columns(start, stop, batch, device, _SHOWN)

    def counted(self, start: int, stop: int, batch: int, device: torch.device) -> Tensor | None:
        """Like `columns`: the columns that have a position."""
        return self.columns(start, stop, batch, device, _COUNTS)

    @property
    def tokens_hidden(self) -> int:
        """Number of tokens of all rows that were hidden and have lost their positions. Reads a tensor."""
        return 0 if self._columns is None else int((self._columns == _CAME).sum())

    def warn_if_unknown(self) -> None:
        """Warn once if the batch has several rows and no mask."""
        if self.observed or self.given is not None or self._warned:
            return
        self._warned = True
        warnings.warn(
            "A batch of several rows arrived and nothing told the cache which tokens are pads, so all count as real. "
            "This model builds its mask by itself: pass attention_mask= to PagedEvictionCache.",
            stacklevel=2,
        )

    # ---- rows and life --------------------------------------------------------------------------------------------

    def map_rows(self, change: Callable[[Tensor], Tensor], batch: int) -> None:
        """Apply an indexing of the rows; there are `batch` rows so far."""
        self._change(lambda mask: change(self._expand(mask, batch)))

    def crop(self, length: int) -> None:
        """Forget all columns from `length` on."""
        if length == 0:
            self.reset()
            return
        self._change(lambda mask: mask[:, :length])
        self.all_real_from = min(self.all_real_from, length)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.given, self._columns = (None if mask is None else change(mask) for mask in (self.given, self._columns))
        self._fewer = True

    def reset(self) -> None:
        """Forget the mask, also that of the user: the next prompt has its own."""
        self.given = self._columns = None
        self.all_real_from = 0
        self.observed = self.irregular = self.forgets = self.agrees = False


def mask_of_slots(mask: Tensor | None, used: Tensor, overwrites: bool, offset: int, columns: int) -> Tensor:
    """The mask of a forward where pads lie in other slots than their columns say, `[batch, columns]` bool.

    Args:
        mask: `[batch, columns]` bool, of the columns seen and new; None = all are visible.
        used: `[batch, held]` bool, the slots of real tokens.
        overwrites: the forward has a single token, which will take a slot: the highest of the pads, which lie in the
            lowest slots.
        offset: the column of the first slot.
    """
    if overwrites:
        pads = (~used).sum(-1, keepdim=True)
        used = torch.arange(used.shape[1], device=used.device) >= pads - 1
    mask = used.new_ones(len(used), columns) if mask is None else mask.clone()
    mask[:, offset : offset + used.shape[1]] = used.to(mask.device)
    return mask


def _behind(mask: Tensor) -> Tensor:
    """`[rows, columns]` bool, the columns behind the last one of their row that the mask shows."""
    places = torch.arange(mask.shape[1], device=mask.device)
    return places > torch.where(mask, places, -1).amax(-1, keepdim=True)


def _shown_again(shown: Tensor | None) -> ValueError:
    where = "without a mask"
    if shown is not None:
        row, column = shown.nonzero()[0].tolist()
        where = f"with a mask that shows {int(shown.sum())} of them, the first in row {row}, column {column}"
    return ValueError(
        "attention_mask hid tokens of the past as pads, or later, so the cache does not hold them; now a forward comes "
        f"{where}. What is hidden once stays hidden: pass a mask with 0 for it, as long as this text goes on, or call "
        "cache.reset() and read the text anew."
    )
