"""The state of `verify`."""

import traceback
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction import PagedEvictionCache

from .baseline import Baseline, distance
from .held import BrokenPromise, HeldRecord
from .report import Check, Outcome, Verification
from .subject import NotCovered, Subject
from .text import BLOCK_SIZE, Calls, Text, row_alone, text_length, text_of, without

#: The effect of evictions must stand out from what counts as rounding so much, or a comparison shows nothing.
_STANDS_OUT = 5
_PACKAGE = Path(__file__).parents[2]
_MODES: dict[str, dict[str, Any]] = {"static": {"static": True}, "recall": {"disposal": "recall(blocks=all)"}}


class Session:
    """Runs the checks on one model, inside of `untouched`.

    Args:
        budget: the small budget, which evicts.
        seed: seed of the text.
    """

    def __init__(self, subject: Subject, budget: int, seed: int) -> None:
        self._subject, self._budget = subject, budget
        text = Text.draw(subject.model, text_length(budget), seed)
        self._text = text if subject.encodes else text_of("chunks", text, budget)

    def answer(self, check: Check) -> Check:
        """Run a check; returns it with its outcome."""
        try:
            if not self._layers and check.budget < self._text.length:
                raise NotCovered("no layer of this model evicts")
            self._new_cache(check)  # a refusal comes before everything else
            error, effect = self._alone(check) if check.question == "row as alone" else self._together(check)
        except torch.OutOfMemoryError:
            raise
        except NotCovered as problem:
            return replace(check, outcome="not covered", reason=str(problem))
        except Exception as problem:
            if isinstance(problem, BrokenPromise):
                return replace(check, outcome="wrong", reason=str(problem))
            if _meant(problem):
                return replace(check, outcome="refused", reason=str(problem))
            return replace(check, outcome="wrong", reason=f"it fails: {type(problem).__name__}: {problem}")
        tolerance, reason = self._baseline.tolerance, ""
        outcome: Outcome = "wrong" if error > tolerance else "exact"
        if error == float("inf"):
            reason = "it gives logits that are no numbers"
        elif outcome == "exact" and effect is not None and effect < _STANDS_OUT * tolerance:
            outcome = "not covered"
            reason = "evictions change the logits of this model too little to tell a right cache from a wrong one"
        return replace(check, outcome=outcome, error=error, effect=effect, reason=reason)

    def report(self, checks: tuple[Check, ...]) -> Verification:
        """The report with all checks and notes."""
        subject, baseline = self._subject, self.__dict__.get("_baseline")
        return Verification(
            model=type(subject.model).__name__,
            dtype=str(subject.dtype).removeprefix("torch."),
            device=str(self._text.ids.device),
            tolerance=baseline.tolerance if baseline else 0.0,
            noise=baseline.noise if baseline else 0.0,
            checks=checks,
            notes=tuple(baseline.notes) if baseline else (),
        )

    # ---- the questions --------------------------------------------------------------------------------------------

    def _together(self, check: Check) -> tuple[float, float | None]:
        """The error of a batch, padded where the model can stand it, and the effect of evictions."""
        own = self._baseline.of(check.calls)
        everything, mask, effect = own.logits, own.text.mask, None
        logits, record = self._follow(check, own.text, own.calls)
        if check.question == "exact for what it holds":
            effect = distance(logits, everything, mask)
            return distance(logits, self._baseline.masked(own.text, own.calls, record.visible), mask), effect
        if check.mode == "recall":
            dropped, _ = self._follow(replace(check, mode="dynamic"), own.text, own.calls)
            effect = distance(dropped, everything, mask)
        return distance(logits, everything, mask), effect

    def _alone(self, check: Check) -> tuple[float, None]:
        """How far a row is from itself alone."""
        if self._subject.encodes:
            raise NotCovered("the decoder of an encoder-decoder model begins without pads")
        own = self._baseline.of(check.calls)
        if own.pads:
            raise NotCovered(f"with DynamicCache, too, a row of this model depends on its pads: by {own.pads:.1e}")
        row = row_alone(own.calls, own.text)
        text, pads = own.text.alone(row), own.text.pads[row]
        logits, _ = self._follow(check, own.text, own.calls)
        alone, _ = self._follow(check, text, without(own.calls, pads))
        return distance(logits[row : row + 1, pads:], alone, text.mask), None

    # ---- runs -----------------------------------------------------------------------------------------------------

    @cached_property
    def _layers(self) -> list[int]:
        """Those that are paged. Raises what the constructor of the simplest cache raises."""
        cache = self._subject.paged(budget=self._text.length, block_size=BLOCK_SIZE, policy="random")[1]
        return [index for index, _ in cache.paged_layers]

    @cached_property
    def _baseline(self) -> Baseline:
        return Baseline(self._subject, self._text, self._budget, self._layers)

    def _follow(self, check: Check, text: Text, calls: Calls) -> tuple[Tensor, HeldRecord]:
        """Logits of a new cache, and what it held."""
        cache, paged = self._new_cache(check)
        record = HeldRecord(paged, text, self._budgets(check)[: len(self._layers)])
        return self._subject.feed(text, cache, calls, record.after), record

    def _new_cache(self, check: Check) -> tuple[Any, PagedEvictionCache]:
        """A cache for the whole model, and the part of it that is looked at; the model is ready for it."""
        self._subject.use(check.attention)
        budgets = self._budgets(check)
        return self._subject.paged(
            budget=budgets if check.mode == "unequal budgets" else budgets[0],
            block_size=BLOCK_SIZE,
            policy=check.policy,
            heads=check.heads,
            **_MODES.get(check.mode, {}),
        )

    def _budgets(self, check: Check) -> list[int]:
        """Of the paged layers; at least one, for models that have none."""
        step = BLOCK_SIZE if check.mode == "unequal budgets" else 0
        return [check.budget + step * (index % 2 or -1) for index in range(max(len(self._layers), 1))]


def _meant(error: Exception) -> bool:
    """Whether a line of this package raised the error, rather than something that it called."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised = (last.line or "").startswith("raise ") and Path(last.filename).is_relative_to(_PACKAGE)
    return raised and isinstance(error, (ValueError, TypeError, RuntimeError))
