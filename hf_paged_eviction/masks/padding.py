"""Which columns of the batch are pads.

A layer is handed keys and values and nothing else, so the cache learns the 2-D attention mask from the model's own
mask construction (`masks.channel`) or from the user. What layers have to know on the host is worked out once per
forward of several tokens; a decode step reads no tensor on an accelerator.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parts import Snapshot, map_tensors, persistent


@dataclass(frozen=True)
class PaddingSnapshot(Snapshot):
    """What is known of a batch's pads.

    Attributes:
        given, mask: `[rows, length]` bool, nonzero = real token: what the user gave, and what is in force.
        all_real_from: columns from here on are known to have no pads.
        observed, irregular: see `Padding`.
    """

    given: Tensor | None
    mask: Tensor | None
    all_real_from: int
    observed: bool
    irregular: bool


class Padding:
    """The 2-D attention mask of a batch, as far as it is known.

    Args:
        attention_mask: `[rows, length]`, nonzero = real token. Wins over what the model tells for the columns it
            covers; `rows` may divide the batch (beams, several returned sequences).
        expected: whether a batch that says nothing of pads deserves a warning.

    Raises:
        TypeError, ValueError: the mask is not a tensor, or not 2-D.
    """

    def __init__(self, attention_mask: Tensor | None = None, expected: bool = True) -> None:
        self.expected = expected
        self._given = self._check(attention_mask)
        self._mask: Tensor | None = None
        self._all_real_from = 0
        self._warned = False
        self.observed = False
        self.irregular = False
        if self._given is not None:
            self._learn(self._given)

    @staticmethod
    def _check(mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        if not isinstance(mask, Tensor):
            raise TypeError(f"attention_mask must be a tensor [rows, length], got {type(mask).__name__}.")
        if mask.ndim != 2:
            raise ValueError(f"attention_mask must be [rows, length], got shape {tuple(mask.shape)}.")
        return mask.bool()

    def observe(self, mask: Tensor | None, seen: int, length: int, batch: int) -> Tensor | None:
        """Take in the mask of a forward whose columns are `seen .. length`.

        Args:
            mask: `[batch, >= length]` bool, or None where the model masks no column.

        Returns:
            The mask in force, `[batch, length]` bool, or None: nothing is masked.

        Raises:
            ValueError: the mask leaves out tokens that were seen before.
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
        if mask is not None or self._given is not None:
            mask = self._merge(mask, length, batch)
        if mask is None:
            self._mask = None
        elif length - seen > 1 or seen < self._all_real_from or seen == 0:
            self._learn(mask)
        elif mask.device.type == "cpu" and not mask[:, -1].all():
            # Reading the mask of every step would synchronise an accelerator; there the new column counts as real.
            self._learn(mask)
        else:
            self._mask = mask
        return mask

    def _merge(self, mask: Tensor | None, length: int, batch: int) -> Tensor | None:
        if mask is not None:
            mask = mask[:, :length].bool()
            if mask.shape[1] < length:  # transformers hides the columns that a mask does not reach
                mask = torch.nn.functional.pad(mask, (0, length - mask.shape[1]))
        if self._given is None:
            return mask
        given = self._expand(self._given, batch)[:, :length]
        if mask is None:
            mask = given.new_ones(batch, length)
        return torch.cat([given.to(mask.device), mask[:, given.shape[1] :]], dim=1)

    @staticmethod
    def _expand(mask: Tensor, batch: int) -> Tensor:
        rows = mask.shape[0]
        if rows == 0 or batch % rows:
            raise ValueError(
                f"attention_mask= has {rows} rows, which does not divide the batch of {batch}. Pass the mask of "
                "this batch, or none: it is learned from the model's own."
            )
        return mask.repeat_interleave(batch // rows, dim=0)

    def _learn(self, mask: Tensor) -> None:
        self._mask = mask
        padded = (~mask).any(dim=0).nonzero()
        self._all_real_from = int(padded[-1]) + 1 if len(padded) else 0
        self.irregular = self.irregular or bool((mask[:, 1:] < mask[:, :-1]).any())

    @property
    def given(self) -> bool:
        """Whether the mask came from the user."""
        return self._given is not None

    @property
    def any_pads(self) -> bool:
        """Whether a pad is known of, as of the last forward of several tokens."""
        return self._all_real_from > 0

    def may_be_pads(self, start: int) -> bool:
        """Whether any of the tokens from `start` on is known not to be real."""
        return self._mask is not None and start < self._all_real_from

    def columns(self, start: int, stop: int, batch: int, device: torch.device) -> Tensor | None:
        """Which of the tokens `start .. stop` are real: `[batch, stop - start]` bool, or None if all are."""
        if start >= self._all_real_from or self._mask is None:
            return None
        mask = self._expand(self._mask, batch)[:, start:stop].to(device)
        beyond = stop - start - mask.shape[1]
        return torch.nn.functional.pad(mask, (0, beyond), value=True) if beyond else mask

    def warn_if_unknown(self) -> None:
        """Several rows and no word about pads: say so, once."""
        if not self.expected or self.observed or self.given or self._warned:
            return
        self._warned = True
        warnings.warn(
            "A batch of several rows arrived and nothing told the cache which tokens are pads, so all count as real. "
            "This model builds its mask by itself: pass attention_mask= to PagedEvictionCache.",
            stacklevel=2,
        )

    def map_rows(self, change: Callable[[Tensor], Tensor], batch: int) -> None:
        """Apply an indexing of the batch's rows, `batch` of them so far, to all that is known."""
        if self._given is not None:
            self._given = change(self._expand(self._given, batch))
        if self._mask is not None:
            self._mask = change(self._expand(self._mask, batch))

    def crop(self, length: int) -> None:
        """Forget all columns from `length` on: those that come in their place are others."""
        if length == 0:
            self.reset()
            return
        self._given = None if self._given is None else self._given[:, :length]
        self._mask = None if self._mask is None else self._mask[:, :length]
        self._all_real_from = min(self._all_real_from, length)

    def reset(self) -> None:
        """Forget the mask, the one given by the user included: the next prompt has its own."""
        self._given = self._mask = None
        self._all_real_from = 0
        self.observed = self.irregular = False

    def snapshot(self) -> PaddingSnapshot:
        """All that is known."""
        return PaddingSnapshot(self._given, self._mask, self._all_real_from, self.observed, self.irregular)

    def restore(self, saved: PaddingSnapshot, device: torch.device) -> None:
        """Know what was known of another batch."""
        saved = map_tensors(lambda tensor: persistent(tensor.to(device)), saved)
        self._given, self._mask, self._all_real_from = saved.given, saved.mask, saved.all_real_from
        self.observed, self.irregular = saved.observed, saved.irregular
