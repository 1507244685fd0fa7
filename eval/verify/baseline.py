"""The model without this cache: its rounding errors, and its dependence on pads."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .masked import LayerMasks, hooked, registered
from .report import CallNames
from .subject import NotCovered, Subject, nudged
from .text import Calls, Text, calls_of, row_alone, text_of, whole, without

#: At least this counts as rounding, by precision; a deep model rounds more, which `Baseline.noise` shows.
_LEAST = {torch.float64: 1e-6, torch.float32: 1e-4}
#: Half precision: units in the last place. All: multiples of the noise, of which only a sample was seen.
_UNITS, _NOISES = 4, 6
#: A difference of the model from itself above this, or above 0.25 in half precision, is none of rounding.
_NO_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-2}


def distance(logits: Tensor, expected: Tensor, real: Tensor) -> float:
    """Largest difference of a logit, in standard deviations of the expected logits.

    Args:
        logits, expected: `[rows, columns, ids]`.
        real: `[rows, at least so many columns]`, nonzero = real token; the others are left out.

    Raises:
        NotCovered: the expected logits are nan, or all equal.
    """
    rows = real[:, : expected.shape[1]].bool()
    logits, expected = logits[rows], expected[rows]
    if expected.isnan().any():
        raise NotCovered("the model itself gives nan")
    plain = expected.abs() < 1e9  # some models give ids that they never generate the smallest number
    scale = expected[plain].std()
    if not scale > 0:
        raise NotCovered("all logits of the model are the same")
    return float(((logits - expected)[plain].abs().max() / scale).nan_to_num(nan=float("inf")))


class OwnCalls(NamedTuple):
    """The result of some calls of a text with `DynamicCache`, left-padded unless `pads`: the difference between a
    padded row and the row alone, beyond rounding."""

    text: Text
    calls: Calls
    logits: Tensor
    pads: float


class Baseline:
    """The model with `DynamicCache`, under its own attention implementation.

    Attributes:
        noise: largest change of a logit by rounding alone: between two attention implementations, and between a row
            alone and in a batch.
        tolerance: largest change that counts as rounding; in half precision at least the change by `nudged` embeddings.

    Args:
        layers: the layers that this cache pages.

    Raises:
        NotCovered: the model does not run with `DynamicCache`, or a row depends on its batch.
    """

    def __init__(self, subject: Subject, text: Text, budget: int, layers: list[int]) -> None:
        self._text, self._subject, self._budget = text, subject, budget
        self._least = _LEAST.get(subject.dtype, _UNITS * torch.finfo(subject.dtype).eps)
        self._no_rounding = _NO_ROUNDING.get(subject.dtype, 0.25)
        self._measured: dict[CallNames, OwnCalls] = {}
        self._whole = self.run(text, whole(text.length))
        self.noise = distance(self._whole[:1], self.run(text.alone(0), whole(text.length)), text.mask[:1])
        if self.noise > self._no_rounding:
            raise NotCovered(
                f"with DynamicCache, too, a row without pads depends on the rows beside it: by {self.noise:.1e}"
            )
        self._nudged = 0.0
        if subject.coarse:
            with nudged(subject.model):
                self._nudged = distance(self.run(text, whole(text.length)), self._whole, text.mask)
        self._masking, self._no_masks = registered, ""
        try:
            self._try_reference(layers)
        except NotCovered as problem:
            self._no_masks = str(problem)

    @property
    def tolerance(self) -> float:
        return max(self._least, self._nudged, _NOISES * self.noise)

    @property
    def notes(self) -> list[str]:
        """Notes about the model."""
        notes = []
        if self.tolerance > self._no_rounding:
            notes.append(
                f"Rounding alone may move the logits of this model by {self.tolerance:.1e} standard deviations, so "
                "little can be told from them. Verify the model in float32, too."
            )
        if pads := max((own.pads for own in self._measured.values()), default=0.0):
            notes.append(
                f"With DynamicCache, too, a row of this model depends on its pads: by {pads:.1e}. This cache is "
                "compared in a batch without pads."
            )
        return notes

    def run(self, text: Text, calls: Calls) -> Tensor:
        """Logits with `DynamicCache`.

        Raises:
            NotCovered: the model raises an error, which is the message.
        """
        self._subject.use(self._subject.attention)
        return self._told("the model fails with DynamicCache", text, calls, self._subject.dynamic())

    def masked(self, text: Text, calls: Calls, visible: dict[int, Tensor]) -> Tensor:
        """Logits with `DynamicCache`, where each layer and head sees only the `visible` tokens.

        Raises:
            NotCovered: masks cannot be handed to this model.
        """
        if self._no_masks:
            raise NotCovered(self._no_masks)
        self._subject.use(self._subject.attention)
        cache = self._subject.dynamic()
        with self._masking(self._subject, LayerMasks(visible, cache)):
            return self._told("the full cache to compare with takes no such mask", text, calls, cache)

    def _told(self, failure: str, text: Text, calls: Calls, cache: Any) -> Tensor:
        try:
            return self._subject.feed(text, cache, calls)
        except (NotCovered, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise NotCovered(f"{failure}: {type(error).__name__}: {error}") from error

    def of(self, name: CallNames) -> OwnCalls:
        """The result of some calls, measured once.

        Raises:
            NotCovered: the model cannot be called like this.
        """
        if name not in self._measured:
            text = text_of(name, self._text, self._budget)
            calls = calls_of(name, text.length, self._budget)
            self._measured[name] = self._without_pads_that_matter(text, calls, self.run(text, calls))
        return self._measured[name]

    def _without_pads_that_matter(self, text: Text, calls: Calls, logits: Tensor) -> OwnCalls:
        row = row_alone(calls, text)
        alone = self.run(text.alone(row), without(calls, text.pads[row]))
        pads = distance(logits[row : row + 1, text.pads[row] :], alone, torch.ones_like(alone[..., 0]))
        if pads <= self._least:
            self.noise = max(self.noise, pads)
        if pads <= self.tolerance:
            return OwnCalls(text, calls, logits, 0.0)
        text = text.padded()
        return OwnCalls(text, calls, self.run(text, calls), pads)

    def _try_reference(self, layers: list[int]) -> None:
        """Whether a mask that hides nothing changes nothing, and one that hides much does."""
        length, mask = self._text.length, self._text.mask.bool()[:, None, None, :]
        causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()

        def noise_of(seen: Tensor) -> float:
            visible = dict.fromkeys(layers, seen)
            return distance(self.masked(self._text, whole(length), visible), self._whole, self._text.mask)

        try:
            noise = noise_of(causal & mask)
        except NotCovered:
            self._masking = hooked
            noise = noise_of(causal & mask)
        if noise > max(self._no_rounding, self.tolerance):
            raise NotCovered(
                f"the attention implementation {self._subject.attention!r} of this model and its eager function differ "
                f"by {noise:.1e} standard deviations without any cache of this package"
            )
        self.noise = max(self.noise, noise)
        if layers and noise_of(causal & mask & ~causal.tril(-3)) <= self.tolerance:
            raise NotCovered("hiding most of the text from all layers hardly changes the logits of this model")
