"""One model in the course of `verify`."""

import dis
from collections.abc import Callable, Sequence
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
from .model_state import NotCovered, attention_name, use_attention
from .plan import Setting
from .report import Check, Question, Verification
from .running import Feeder
from .text import Text, calls_of, draw_text, row_alone, text_length, text_of, whole, without

BLOCK_SIZE = 4
#: The effect of evictions must stand out from what counts as rounding so much, or a comparison shows nothing.
_STANDS_OUT = 5
_PACKAGE = Path(__file__).parents[2]

#: Error, effect, and what else there is to know.
Answer = tuple[float, float | None, str]


class Session:
    """One model in the course of `verify`, inside of `untouched`.

    Attributes:
        own_attention: its attention implementation.

    Args:
        budget: the one that has to evict.
        seed: of the text.
        policies: those that settings name by their labels, and that may not be registered.
    """

    def __init__(self, model: Any, budget: int, seed: int, policies: Sequence[EvictionPolicy]) -> None:
        self._policies = {scorer.label: scorer for scorer in policies}
        self._feeder, self._budget, self._seed = Feeder(model), budget, seed
        self.own_attention = attention_name(model)
        text = draw_text(model, text_length(budget, BLOCK_SIZE), seed)
        self._text = text.unpadded() if self._feeder.encodes else text
        self._runs: dict[tuple[Setting, int], tuple[Tensor, HeldRecord]] = {}  # a record keeps its text

    def check(self, question: Question, setting: Setting) -> Check:
        """Ask one question."""
        ask: dict[Question, Callable[[Setting], Answer]] = {
            "same as DynamicCache": self._same,
            "exact for what it holds": self._exact,
            "row as alone": self._alone,
            "same with what comes back": self._returned,
        }
        found = Check(
            question=question,
            attention=setting.attention,
            calls=setting.calls,
            heads=setting.heads,
            mode=setting.mode,
            policy=setting.policy,
            disposal=setting.disposal,
            budgets=setting.budgets,
            outcome="exact",
        )
        try:
            error, effect, reason = ask[question](setting)
        except NotCovered as problem:
            return replace(found, outcome="not covered", reason=str(problem))
        except BrokenPromise as broken:
            return replace(found, outcome="wrong", reason=str(broken))
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            if _meant(problem):
                return replace(found, outcome="refused", reason=str(problem))
            return replace(found, outcome="wrong", reason=f"it fails: {type(problem).__name__}: {problem}")
        if error == float("inf"):
            return replace(found, outcome="wrong", effect=effect, reason="it gives logits that are no numbers")
        found = replace(found, error=error, effect=effect, reason=reason)
        if error > self._baseline.tolerance:
            return replace(found, outcome="wrong")
        if effect is not None and effect < _STANDS_OUT * self._baseline.tolerance:
            weak = "evictions change the logits of this model too little to tell a right cache from a wrong one"
            return replace(found, outcome="not covered", reason=weak)
        return found

    def report(self, checks: tuple[Check, ...]) -> Verification:
        """All answers, with what was seen of the model."""
        known = self.__dict__.get("_baseline")
        model = self._feeder.model
        return Verification(
            model=type(model).__name__,
            dtype=str(self._feeder.dtype).removeprefix("torch."),
            device=str(self._text.ids.device),
            tolerance=known.tolerance if known else 0.0,
            noise=known.noise if known else 0.0,
            checks=checks,
            notes=known.notes if known else (),
        )

    # ---- the questions --------------------------------------------------------------------------------------------

    def _same(self, setting: Setting) -> Answer:
        self._layers  # noqa: B018 (a model that is refused is refused under any attention)
        self._new_cache(setting, roomy=True)
        text, expected = self._expected(setting)
        cache = self._new_cache(setting, roomy=True)[0]  # again: the baseline has changed the attention
        return distance(self._feeder.feed(text, cache, self._calls(setting)), expected, text.mask), None, ""

    def _exact(self, setting: Setting) -> Answer:
        self._check_evicts(setting)
        text, everything = self._expected(setting)
        found, record = self._run(setting, text)
        own, calls = self._baseline.of(setting.calls), self._calls(setting)
        # One forward is quicker; what the model makes of chunks must not count as an error of the cache.
        same = bool(own.chunks) or self._feeder.rounds_coarsely
        expected = self._baseline.masked(text, calls if same else whole(found.shape[1]), record.visible)
        return distance(found, expected, text.mask), distance(found, everything, text.mask), ""

    def _returned(self, setting: Setting) -> Answer:
        self._check_evicts(setting)
        text, expected = self._expected(setting)
        dropped = self._run(replace(setting, disposal="drop"), text)[0]
        cache, paged = self._new_cache(setting)
        found = self._feeder.feed(text, cache, self._calls(setting))
        if not paged.stats().evicted_tokens:
            raise NotCovered("nothing was evicted")
        return distance(found, expected, text.mask), distance(dropped, expected, text.mask), ""

    def _alone(self, setting: Setting) -> Answer:
        self._check_evicts(setting)
        if self._feeder.encodes:
            raise NotCovered("the decoder of an encoder-decoder model begins without pads")
        if pads := self._baseline.of(setting.calls).pads:
            raise NotCovered(f"with DynamicCache, too, a row of this model depends on its pads: by {pads:.1e}")
        reason = ""
        if self._feeder.rounds_coarsely and setting.policy != "random":
            setting, reason = replace(setting, policy="random"), "with 'random': scores of equal rows round differently"
        text = self._baseline.of(setting.calls).text
        error, same = self._alone_once(setting, text)
        if error > self._baseline.tolerance and not same:
            # Two scores may be as close as rounding errors, once.
            reason = "other tokens were held, on two texts"
            other = draw_text(self._feeder.model, text.length, self._seed + 1)
            error, _ = self._alone_once(setting, text_of(setting.calls, other, self._budget))
            reason = reason if error > self._baseline.tolerance else ""
        return error, None, reason

    def _alone_once(self, setting: Setting, text: Text) -> tuple[float, bool]:
        found, record = self._run(setting, text)
        calls = self._calls(setting)
        row = row_alone(calls, text)
        own = text.alone(row)
        cache, alone = self._follow(setting, own)
        logits = self._feeder.feed(own, cache, without(calls, text.pads[row]), alone.after)
        error = distance(found[row : row + 1, text.pads[row] :], logits, own.mask)
        return error, record.same_tokens(alone, row)

    def _check_evicts(self, setting: Setting) -> None:
        if not self._layers:
            raise NotCovered("no layer of this model evicts")
        self._new_cache(setting)  # a refusal comes before everything else

    # ---- runs -----------------------------------------------------------------------------------------------------

    @cached_property
    def _layers(self) -> list[int]:
        """Those that are paged. Raises what the constructor of the simplest cache raises."""
        cache = self._feeder.paged(budget=self._text.length, block_size=BLOCK_SIZE, policy="random")[1]
        return [index for index, _ in cache.paged_layers]

    @cached_property
    def _baseline(self) -> Baseline:
        return Baseline(self._feeder, self._text, self._budget, self.own_attention, self._layers)

    def _calls(self, setting: Setting) -> Any:
        return calls_of(setting.calls, self._text.length, self._budget)

    def _expected(self, setting: Setting) -> tuple[Text, Tensor]:
        """The text to compare on, padded where the model can stand it, and what `DynamicCache` says."""
        own = self._baseline.of(setting.calls)
        if not own.pads:
            return own.text, own.logits
        text = own.text.unpadded()
        return text, self._baseline.run(text, self._calls(setting))

    def _run(self, setting: Setting, text: Text) -> tuple[Tensor, HeldRecord]:
        """With the small budget: two questions may look at the same run."""
        key = (setting, id(text))
        if key not in self._runs:
            cache, record = self._follow(setting, text)
            self._runs[key] = self._feeder.feed(text, cache, self._calls(setting), record.after), record
        return self._runs[key]

    def _new_cache(self, setting: Setting, roomy: bool = False) -> tuple[Any, PagedEvictionCache]:
        """A cache for the whole model, and the part of it that is looked at; the model is ready for it."""
        use_attention(self._feeder.model, setting.attention)
        budgets = self._budgets(setting, roomy)
        return self._feeder.paged(
            budget=budgets if setting.budgets == "per layer" else budgets[0],
            block_size=BLOCK_SIZE,
            policy=self._policies.get(setting.policy, setting.policy),
            heads=setting.heads,
            **({} if setting.disposal == "drop" else {"disposal": setting.disposal}),
            **({"static": True} if setting.mode == "static" else {}),
        )

    def _budgets(self, setting: Setting, roomy: bool) -> list[int]:
        """Of the paged layers; at least one, for models that have none."""
        count = max(len(self._layers), 1)
        if setting.budgets == "per layer":
            return [self._budget + BLOCK_SIZE * (index % 2 or -1) for index in range(count)]
        return [self._text.length if roomy else self._budget] * count

    def _follow(self, setting: Setting, text: Text) -> tuple[Any, HeldRecord]:
        """A new cache of the small budget, and what will follow it."""
        cache, paged = self._new_cache(setting)
        return cache, HeldRecord(paged, text, self._budgets(setting, roomy=False), BLOCK_SIZE)


def _meant(error: Exception) -> bool:
    """Whether a line of this package raised the error, rather than something that it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    raised = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return (
        raised
        and Path(code.co_filename).is_relative_to(_PACKAGE)
        and isinstance(error, (ValueError, TypeError, RuntimeError))
    )
