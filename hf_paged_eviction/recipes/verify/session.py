"""One model in the course of `verify`."""

import traceback
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...cache import PagedEvictionCache
from ...policies import EvictionPolicy
from .baseline import Baseline, distance
from .held import BrokenPromise, HeldRecord
from .report import Check, Verdict, Verification
from .subject import NotCovered, Subject
from .text import BLOCK_SIZE, Calls, Text, calls_of, row_alone, text_length, text_of, whole, without

#: The effect of evictions must stand out from what counts as rounding so much, or a comparison shows nothing.
_STANDS_OUT = 5
_PACKAGE = Path(__file__).parents[2]

#: Error, effect, and what else there is to know.
Answer = tuple[float, float | None, str]


class Session:
    """One model in the course of `verify`, inside of `untouched`.

    Args:
        budget: the one that has to evict.
        seed: of the text.
        policy: that checks name by its label, and that may not be registered.
    """

    def __init__(self, subject: Subject, budget: int, seed: int, policy: EvictionPolicy) -> None:
        self._subject, self._budget, self._seed, self._policy = subject, budget, seed, policy
        self._text = self._draw(seed)
        self._runs: dict[tuple[Check, int], tuple[Tensor, HeldRecord]] = {}  # a record keeps its text

    def _draw(self, seed: int) -> Text:
        text = Text.draw(self._subject.model, text_length(self._budget), seed)
        return text if self._subject.encodes else text_of("chunks", text, self._budget)

    def answer(self, check: Check) -> Check:
        """The check with its outcome."""
        ask = {"exact for what it holds": self._exact, "row as alone": self._alone}.get(check.question, self._same)
        try:
            if not self._layers and check.budget < self._text.length:
                raise NotCovered("no layer of this model evicts")
            self._new_cache(check)  # a refusal comes before everything else
            error, effect, reason = ask(check)
        except (NotCovered, BrokenPromise) as problem:
            return replace(
                check, outcome="wrong" if isinstance(problem, BrokenPromise) else "not covered", reason=str(problem)
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            if _meant(problem):
                return replace(check, outcome="refused", reason=str(problem))
            return replace(check, outcome="wrong", reason=f"it fails: {type(problem).__name__}: {problem}")
        if error == float("inf"):
            return replace(check, outcome="wrong", effect=effect, reason="it gives logits that are no numbers")
        check = replace(check, outcome="exact", error=error, effect=effect, reason=reason)
        if error > self._baseline.tolerance:
            return replace(check, outcome="wrong")
        if effect is not None and effect < _STANDS_OUT * self._baseline.tolerance:
            weak = "evictions change the logits of this model too little to tell a right cache from a wrong one"
            return replace(check, outcome="not covered", reason=weak)
        return check

    def report(self, checks: tuple[Check, ...], verdicts: tuple[Verdict, ...]) -> Verification:
        """All answers, with what was seen of the model."""
        subject, baseline = self._subject, self.__dict__.get("_baseline")
        notes = [] if baseline is None else list(baseline.notes)
        if baseline is not None and baseline.tolerance > baseline.no_rounding:
            notes.insert(
                0,
                f"Rounding alone may move the logits of this model by {baseline.tolerance:.1e} standard deviations, so "
                "little can be told from them. Verify the model in float32, too.",
            )
        return Verification(
            model=type(subject.model).__name__,
            dtype=str(subject.dtype).removeprefix("torch."),
            device=str(self._text.ids.device),
            tolerance=baseline.tolerance if baseline else 0.0,
            noise=baseline.noise if baseline else 0.0,
            checks=checks,
            notes=tuple(notes),
            verdicts=verdicts,
        )

    # ---- the questions --------------------------------------------------------------------------------------------

    def _same(self, check: Check) -> Answer:
        text, expected = self._expected(check)
        effect = None
        if check.budget < text.length:  # what was evicted comes back
            effect = distance(self._run(replace(check, disposal="drop"), text)[0], expected, text.mask)
        cache, paged = self._new_cache(check)
        logits = self._subject.feed(text, cache, self._calls(check))
        if effect is not None and not paged.stats().evicted_tokens:
            raise NotCovered("nothing was evicted")
        return distance(logits, expected, text.mask), effect, ""

    def _exact(self, check: Check) -> Answer:
        text, everything = self._expected(check)
        logits, record = self._run(check, text)
        # One forward is quicker; what the model makes of chunks must not count as an error of the cache.
        same = self._baseline.of(check.calls).chunks or self._subject.coarse
        calls = self._calls(check) if same else whole(logits.shape[1])
        expected = self._baseline.masked(text, calls, record.visible)
        return distance(logits, expected, text.mask), distance(logits, everything, text.mask), ""

    def _alone(self, check: Check) -> Answer:
        if self._subject.encodes:
            raise NotCovered("the decoder of an encoder-decoder model begins without pads")
        own, reason = self._baseline.of(check.calls), ""
        if own.pads:
            raise NotCovered(f"with DynamicCache, too, a row of this model depends on its pads: by {own.pads:.1e}")
        if self._subject.coarse and check.policy != "random":
            check, reason = replace(check, policy="random"), "with 'random': scores of equal rows round differently"
        error, same = self._alone_once(check, own.text)
        if error > self._baseline.tolerance and not same:
            # Two scores may be as close as rounding errors, once.
            error, _ = self._alone_once(check, text_of(check.calls, self._draw(self._seed + 1), self._budget))
            reason = "other tokens were held, on two texts" if error > self._baseline.tolerance else ""
        return error, None, reason

    def _alone_once(self, check: Check, text: Text) -> tuple[float, bool]:
        """How far a row is from itself alone, and whether the same tokens were held at the end."""
        logits, record = self._run(check, text)
        calls = self._calls(check)
        row = row_alone(calls, text)
        own = text.alone(row)
        alone, its_record = self._follow(check, own, without(calls, text.pads[row]))
        error = distance(logits[row : row + 1, text.pads[row] :], alone, own.mask)
        return error, record.same_tokens(its_record, row)

    # ---- runs -----------------------------------------------------------------------------------------------------

    @cached_property
    def _layers(self) -> list[int]:
        """Those that are paged. Raises what the constructor of the simplest cache raises."""
        cache = self._subject.paged(budget=self._text.length, block_size=BLOCK_SIZE, policy="random")[1]
        return [index for index, _ in cache.paged_layers]

    @cached_property
    def _baseline(self) -> Baseline:
        return Baseline(self._subject, self._text, self._budget, self._layers)

    def _calls(self, check: Check) -> Calls:
        return calls_of(check.calls, self._text.length, self._budget)

    def _expected(self, check: Check) -> tuple[Text, Tensor]:
        """The text to compare on, padded where the model can stand it, and what `DynamicCache` says."""
        own = self._baseline.of(check.calls)
        if not own.pads:
            return own.text, own.logits
        text = own.text.padded()
        return text, self._baseline.run(text, self._calls(check))

    def _run(self, check: Check, text: Text) -> tuple[Tensor, HeldRecord]:
        """With the small budget: two questions may look at the same run."""
        key = (replace(check, question="row as alone"), id(text))
        if key not in self._runs:
            self._runs[key] = self._follow(check, text, self._calls(check))
        return self._runs[key]

    def _follow(self, check: Check, text: Text, calls: Calls) -> tuple[Tensor, HeldRecord]:
        """Logits of a new cache, and what it held."""
        cache, paged = self._new_cache(check)
        record = HeldRecord(paged, text, self._budgets(check))
        return self._subject.feed(text, cache, calls, record.after), record

    def _new_cache(self, check: Check) -> tuple[Any, PagedEvictionCache]:
        """A cache for the whole model, and the part of it that is looked at; the model is ready for it."""
        self._subject.use(check.attention)
        budgets = self._budgets(check)
        return self._subject.paged(
            budget=budgets if check.mode == "unequal budgets" else budgets[0],
            block_size=BLOCK_SIZE,
            policy=self._policy if check.policy == self._policy.label else check.policy,
            heads=check.heads,
            **({} if check.disposal == "drop" else {"disposal": check.disposal}),
            **({"static": True} if check.mode == "static" else {}),
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
