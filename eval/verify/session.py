"""The state of `verify`."""

import itertools
import traceback
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import PAGED_EVICTION

from .baseline import Baseline, distance
from .held import BrokenPromise, HeldRecord
from .report import Check, Outcome, Verification
from .subject import NotCovered, Subject
from .text import BLOCK_SIZE, Calls, Text, row_alone, text_length, text_of, without

#: The effect of evictions must stand out from what counts as rounding so much, or a comparison shows nothing.
_STANDS_OUT = 5
_PACKAGE = Path(__file__).parents[2]


class Session:
    """Runs the checks on one model, inside of `untouched`.

    Args:
        budget: the small budget, which evicts.
        seed: seed of the text.
    """

    def __init__(self, subject: Subject, budget: int, seed: int) -> None:
        self._subject, self._budget = subject, budget
        self._text = text_of("chunks", Text.draw(subject.model, text_length(budget), seed), budget)
        self._tried = set[tuple[str, str, str, str, int]]()

    def answer(self, check: Check) -> Check:
        """Run a check; returns it with its outcome.

        Raises:
            RuntimeError: the cache refuses the options of the check for a plain model, too.
        """
        self._try_on_a_plain_model(check)
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
        everything, mask = own.logits, own.text.mask
        logits, record = self._follow(check, own.text, own.calls)
        if check.question == "exact for what it holds":
            effect = distance(logits, everything, mask)
            return distance(logits, self._baseline.masked(own.text, own.calls, record.visible), mask), effect
        return distance(logits, everything, mask), None

    def _alone(self, check: Check) -> tuple[float, None]:
        """How far a row is from itself alone."""
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
        cache = PagedEvictionCache(
            self._subject.model.config, budget=self._text.length, block_size=BLOCK_SIZE, policy="random"
        )
        return [index for index, _ in cache.paged_layers]

    @cached_property
    def _baseline(self) -> Baseline:
        return Baseline(self._subject, self._text, self._budget, self._layers)

    def _follow(self, check: Check, text: Text, calls: Calls) -> tuple[Tensor, HeldRecord]:
        """Logits of a new cache, and what it held."""
        cache, limits = self._new_cache(check), list(map(torch.tensor, self._limits(check)))
        record = HeldRecord(cache, text, check.budget, limits)
        return self._subject.feed(text, cache, calls, record.after), record

    def _new_cache(self, check: Check) -> PagedEvictionCache:
        """A cache for the model, which is ready for it."""
        options = _options(check, self._limits(check))
        self._subject.use(check.attention)
        return PagedEvictionCache(self._subject.model.config, **options)

    def _limits(self, check: Check) -> list[list[int]]:
        """Tokens of each paged layer, one number, or of each of its KV heads, if unequal: a block more and a block less
        in turn."""
        if check.mode != "unequal budgets":
            return [[check.budget] for _ in self._layers]
        widths = self._kv_heads if check.heads == "separate" else [1 for _ in self._layers]
        number, steps = sum(widths), itertools.cycle((-BLOCK_SIZE, BLOCK_SIZE))
        units = [check.budget + step for step in itertools.islice(steps, number - number % 2)]
        rest = iter([*units, *[check.budget] * (number % 2)])
        return [list(itertools.islice(rest, width)) for width in widths]

    @cached_property
    def _kv_heads(self) -> list[int]:
        """Of the paged layers."""
        own = self._subject.dynamic()
        self._subject.use(self._subject.attention)
        self._subject.feed(self._text.alone(0), own, ((0, self._text.length),))
        return [own.layers[index].keys.shape[1] for index in self._layers]

    def _try_on_a_plain_model(self, check: Check) -> None:
        """Whether the cache takes these options at all: what it refuses for a plain model says nothing about a model.

        Raises:
            RuntimeError: it does not.
        """
        ours = PAGED_EVICTION if check.attention == PAGED_EVICTION else "sdpa"
        tried = (ours, check.mode, check.heads, check.policy, check.budget)
        if tried in self._tried:
            return
        config = LlamaConfig(
            num_hidden_layers=2, num_key_value_heads=2, num_attention_heads=2, attn_implementation=ours
        )
        uneven = [check.budget - BLOCK_SIZE, check.budget + BLOCK_SIZE]
        table = [uneven, uneven] if check.heads == "separate" else [[tokens] for tokens in uneven]
        try:
            PagedEvictionCache(config, **_options(check, table))
        except Exception as error:
            raise RuntimeError(
                f"A check of verify is at fault, because a plain model fails it, too: {error}"
            ) from error
        self._tried.add(tried)


def _options(check: Check, limits: list[list[int]]) -> dict[str, Any]:
    """The options of the cache of a check."""
    options = {"budget": check.budget, "block_size": BLOCK_SIZE, "policy": check.policy, "heads": check.heads}
    if check.mode == "static":
        options["static"] = True
    if check.mode == "unequal budgets" and limits:
        options["allocator"] = f"heads:{limits}"  # the table of `Heads.of`
    return options


def _meant(error: Exception) -> bool:
    """Whether a line of this package raised the error, rather than something that it called."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised = (last.line or "").startswith("raise ") and Path(last.filename).is_relative_to(_PACKAGE)
    return raised and isinstance(error, (ValueError, TypeError, RuntimeError))
