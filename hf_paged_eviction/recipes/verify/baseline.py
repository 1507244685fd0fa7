"""What the model does without this cache: how it rounds, and what chunks and pads change."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .model_state import NotCovered, use_attention
from .reference import Reference
from .report import CallNames
from .rounding import nudged
from .running import Feeder
from .text import Calls, Text, calls_of, row_alone, text_of, whole, without

#: At least this counts as rounding, by precision; a deep model rounds more, which `Baseline.noise` shows.
_LEAST = {torch.float64: 1e-6, torch.float32: 1e-4}
#: Half precision: units in the last place. All: multiples of the noise, of which only a sample was seen.
_UNITS, _NOISES = 4, 4
#: A difference of the model from itself above this, or above 0.25 in half precision, is none of rounding.
_NO_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-2}


def distance(found: Tensor, expected: Tensor, real: Tensor) -> float:
    """Largest difference of a logit, in standard deviations of the expected logits.

    Args:
        found, expected: `[rows, columns, ids]`.
        real: `[rows, at least so many columns]`, nonzero = real token; the others are left out.

    Raises:
        NotCovered: the expected logits are no numbers, or all the same.
    """
    known = real[:, : expected.shape[1]].bool()
    found, expected = found[known], expected[known]
    if expected.isnan().any():
        raise NotCovered("the model itself gives nan")
    plain = expected.abs() < 1e9  # some models mark ids that they never say by the smallest number there is
    scale = expected[plain].std()
    if not scale > 0:
        raise NotCovered("all logits of the model are the same")
    difference = (found - expected)[plain].abs().max() / scale
    return float(difference.nan_to_num(nan=float("inf")))


@dataclass(frozen=True)
class OwnCalls:
    """What `DynamicCache` makes of some calls.

    Attributes:
        text: a left-padded batch.
        logits: its own.
        chunks: how far they are from those of one forward, beyond rounding; or 0.0.
        pads: how far a row is from itself alone, beyond rounding; or 0.0.
    """

    text: Text
    logits: Tensor
    chunks: float
    pads: float


class Baseline:
    """The model with `DynamicCache`, under its own attention implementation.

    Attributes:
        noise: how far rounding alone was seen to move a logit: between two attention implementations, between a row
            alone and in a batch, and, of what is small enough, between one forward and several.
        tolerance: what counts as rounding; in half precision at least what `nudged` embeddings change.
        reference: runs with masks of their own.

    Args:
        layers: those that this cache pages.

    Raises:
        NotCovered: the model does not run with `DynamicCache`, or a row depends on its batch.
    """

    def __init__(self, feeder: Feeder, text: Text, budget: int, attention: str, layers: list[int]) -> None:
        self.text, self._feeder, self._budget, self._attention = text, feeder, budget, attention
        self._calls: dict[CallNames, OwnCalls | NotCovered] = {}
        self._least = least = _LEAST.get(feeder.dtype, _UNITS * torch.finfo(feeder.dtype).eps)
        self._no_rounding = _NO_ROUNDING.get(feeder.dtype, 0.25)
        self._whole = self.run(text, whole(text.length))
        first = self.run(text.alone(0), whole(text.length))
        self.noise = distance(self._whole[:1], first, text.mask[:1])
        if self.noise > self._no_rounding:
            raise NotCovered(
                f"with DynamicCache, too, a row without pads depends on the rows beside it: by {self.noise:.1e}"
            )
        if feeder.rounds_coarsely:
            with nudged(feeder.model):
                least = max(least, distance(self.run(text, whole(text.length)), self._whole, text.mask))
        self.tolerance = max(least, _NOISES * self.noise)
        self.reference = Reference(feeder.model, layers)
        self.no_reference: str | None = None
        try:
            self._try_reference(layers)
        except NotCovered as problem:
            self.no_reference = str(problem)
        self.tolerance = max(least, _NOISES * self.noise)

    def run(self, text: Text, calls: Calls) -> Tensor:
        """Logits with `DynamicCache`.

        Raises:
            NotCovered: with the error of the model.
        """
        use_attention(self._feeder.model, self._attention)
        try:
            return self._feeder.feed(text, self._feeder.dynamic()[0], calls)
        except (NotCovered, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise NotCovered(f"the model fails with DynamicCache: {type(error).__name__}: {error}") from error

    def masked(self, text: Text, calls: Calls, visible: dict[int, Tensor]) -> Tensor:
        """Logits with `DynamicCache`, of which each layer and head sees what `visible` says.

        Raises:
            NotCovered: masks cannot be handed to this model.
        """
        if self.no_reference is not None:
            raise NotCovered(self.no_reference)
        cache, own = self._feeder.dynamic()
        use_attention(self._feeder.model, self._attention)
        try:
            return self.reference.run(visible, own, lambda: self._feeder.feed(text, cache, calls))
        except (NotCovered, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise NotCovered(f"the full cache to compare with takes no such mask: {error}") from error

    def of(self, name: CallNames) -> OwnCalls:
        """The same for some calls.

        Raises:
            NotCovered: the model cannot be called like this.
        """
        if name not in self._calls:
            try:
                self._calls[name] = self._measure(name)
            except NotCovered as problem:
                self._calls[name] = problem
        found = self._calls[name]
        if isinstance(found, NotCovered):
            raise found
        return found

    def _measure(self, name: CallNames) -> OwnCalls:
        text = self.text if self._feeder.encodes else text_of(name, self.text, self._budget)
        calls = calls_of(name, text.length, self._budget)
        at_once = self._whole if text is self.text else self.run(text, whole(text.length))
        logits, row = self.run(text, calls), row_alone(calls, text)
        chunks = distance(logits, at_once[:, : logits.shape[1]], text.mask)
        pads = 0.0
        if not self._feeder.encodes:
            alone = self.run(text.alone(row), without(calls, text.pads[row]))
            pads = distance(logits[row : row + 1, text.pads[row] :], alone, torch.ones_like(alone[..., 0]))
        # Recurrent layers round differently in chunks than in one forward, more so than attention does.
        self.noise = max([self.noise, *(each for each in (chunks, pads) if each <= self._least)])
        self.tolerance = max(self.tolerance, _NOISES * self.noise)
        return OwnCalls(text, logits, self._beyond_rounding(chunks), self._beyond_rounding(pads))

    def _beyond_rounding(self, difference: float) -> float:
        return difference if difference > self.tolerance else 0.0

    def _try_reference(self, layers: list[int]) -> None:
        """Whether a mask that hides nothing changes nothing, and one that hides much does."""
        length, device = self.text.length, self.text.ids.device
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        seen = causal & self.text.mask.bool()[:, None, None, :]
        try:
            noise = self._try_masks(seen, layers)
        except NotCovered:
            self.reference.use_hooks()
            noise = self._try_masks(seen, layers)
        if noise > max(self._no_rounding, self.tolerance):
            raise NotCovered(
                f"the attention implementation {self._attention!r} of this model and its eager function differ by "
                f"{noise:.1e} standard deviations without any cache of this package"
            )
        self.noise = max(self.noise, noise)
        if layers and self._try_masks(seen & ~causal.tril(-3), layers) <= max(self.tolerance, _NOISES * self.noise):
            raise NotCovered("hiding most of the text from all layers hardly changes the logits of this model")

    def _try_masks(self, seen: Tensor, layers: list[int]) -> float:
        visible = {layer: seen.expand(len(self.text.ids), -1, -1, -1) for layer in layers}
        masked = self.masked(self.text, whole(self.text.length), visible)
        return distance(masked, self._whole, self.text.mask)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the model itself makes of calls and pads."""
        notes = []
        if self.tolerance > self._no_rounding:
            notes.append(
                f"Rounding alone may move the logits of this model by {self.tolerance:.1e} standard deviations, so "
                "little can be told from them. Verify the model in float32, too."
            )
        for name, found in self._calls.items():
            if isinstance(found, OwnCalls) and found.chunks:
                notes.append(
                    f"With DynamicCache, too, this model answers differently when the text comes in {name!r} calls: by "
                    f"{found.chunks:.1e}. This cache is compared with the same calls."
                )
            if isinstance(found, OwnCalls) and found.pads:
                notes.append(
                    f"With DynamicCache, too, a row of this model depends on its pads ({name!r} calls): by "
                    f"{found.pads:.1e}. This cache is compared in a batch without pads."
                )
        return tuple(notes)
