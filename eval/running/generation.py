"""Greedy answers, under the stop rules of the tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList

from hf_paged_eviction.internals import CACHE_ARGUMENT, forget_last_text

from ..metrics.thinking import CLOSE, OPEN
from .prefill import Inputs

#: What switches each setting of sampling off.
_NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "min_p": None,
    "top_h": None,
}


def without_sampling(own: Any) -> dict[str, Any]:
    """Settings that switch off sampling as the checkpoint configures it.

    Greedy decoding ignores it anyway, but transformers would warn of each setting.
    """
    return {name: value for name, value in _NEUTRAL.items() if getattr(own, name, None) not in (None, value)}


#: Whether an answer of these tokens is right as it stands.
Judge = Callable[[Sequence[int]], bool]


def is_settled(tokens: Sequence[int], judge: Judge) -> bool:
    """Whether the token before the last made an answer right, and the last one left it so: no longer number."""
    return judge(tokens[:-1]) and judge(tokens)


class Generator:
    """`generate` in two steps, so that many caches can continue from one reading of the prompt.

    Args:
        stop_at_newline: a new line ends an answer, and at least one token is generated.

    Attributes:
        ends: ids that end an answer.
    """

    def __init__(self, model: Any, tokenizer: Any, stop_at_newline: bool = False) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.stop_at_newline = stop_at_newline
        self.ends = end_tokens(model, tokenizer, stop_at_newline)
        special = [mark for mark in (OPEN, CLOSE) if mark in tokenizer.all_special_tokens]
        self._marks = {tokenizer.convert_tokens_to_ids(mark): mark for mark in special}

    def first(self, inputs: Inputs, cache: DynamicCache, chunk: int | None = None) -> Tensor:
        """Read what the cache has not seen of the prompts; the first token of each answer, `[rows]` int64."""
        settings: dict[str, Any] = {"min_new_tokens": 1} if self.stop_at_newline else {}
        if chunk is not None:
            settings["prefill_chunk_size"] = chunk
        return self._generate(inputs.ids, inputs.mask, cache, max_new_tokens=1, **settings)[:, -1]

    def rest(
        self,
        inputs: Inputs,
        first: Tensor,
        cache: DynamicCache,
        limits: Sequence[int],
        judges: Sequence[Judge] = (),
    ) -> Tensor:
        """All tokens of the answers, `[rows, tokens]`; see `until_end` for where a row's own answer stops.

        Args:
            first: `[rows]`, not yet fed to the cache.
            limits: most tokens per row.
            judges: one per row, where an answer ends as soon as it is right.
        """
        tokens = first[:, None].to(inputs.ids.device)
        most = torch.tensor(limits, device=tokens.device)
        ended = torch.isin(tokens[:, 0], torch.tensor(sorted(self.ends), dtype=torch.int64, device=tokens.device))
        if bool((ended | (most <= 1)).all()):
            return tokens
        ids, mask = inputs.extended(tokens)
        width = inputs.ids.shape[1]
        last = (width + most).masked_fill(ended, 0)

        def stops(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            """`[rows]` bool, which rows are done: at a width of their own, or with the token that settles an answer."""
            done = last <= input_ids.shape[1]
            if judges:
                pairs = zip(input_ids[:, width:].tolist(), judges, strict=True)
                done |= torch.tensor([is_settled(answer, judge) for answer, judge in pairs], device=done.device)
            return done

        rules = StoppingCriteriaList([stops])
        output = self._generate(ids, mask, cache, max_new_tokens=max(limits) - 1, stopping_criteria=rules)
        return output[:, width:]

    @torch.inference_mode()
    def _generate(self, ids: Tensor, mask: Tensor, cache: DynamicCache, **settings: Any) -> Tensor:
        forget_last_text(self.model)  # which may have been of other rows
        output: Tensor = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            **{CACHE_ARGUMENT: cache},
            do_sample=False,
            **plain_settings(self.ends, ids[:, -1].tolist()),
            **without_sampling(self.model.generation_config),
            **settings,
        )
        return output

    def text(self, tokens: Sequence[int]) -> str:
        """An answer as text."""
        parts = groupby(tokens, key=self._marks.get)  # marks of thinking stay, also where they are special tokens
        return "".join(mark or self.tokenizer.decode(list(run), skip_special_tokens=True) for mark, run in parts)


def plain_settings(ends: Set[int], last: Sequence[int]) -> dict[str, Any]:
    """Settings of `generate` for one answer per row, as tokens, that stops at `ends`.

    Args:
        last: id of each row.
    """
    return {
        "num_beams": 1,
        "use_cache": True,
        # A checkpoint may ask for another length, for other ends, for another cache, or for more than the tokens.
        "max_length": None,
        "stop_strings": None,
        "cache_implementation": None,
        "return_dict_in_generate": False,
        "eos_token_id": sorted(ends) or None,
        # For the columns after a row's end. No prompt ends in it, or `generate` would warn of right padding.
        "pad_token_id": next(token for token in range(len(last) + 1) if token not in last),
    }


def end_tokens(model: Any, tokenizer: Any, stop_at_newline: bool = False) -> frozenset[int]:
    """Ids that end an answer: the checkpoint's list, the tokenizer's own, and a new line where the task says so."""
    listed = model.generation_config.eos_token_id
    ends = {listed} if isinstance(listed, int) else set(listed or [])
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    if stop_at_newline:
        ends.add(tokenizer.encode("\n", add_special_tokens=False)[-1])
    return frozenset(ends)


def until_end(tokens: Sequence[int], limit: int, ends: Set[int], judge: Judge | None = None) -> list[int]:
    """The answer of one row: at most `limit` tokens, up to and with the first that ends it.

    Args:
        judge: the answer also ends with the token that makes it right, if the next one leaves it right.
    """
    own = list(tokens[:limit])
    own = own[: next((index + 1 for index, token in enumerate(own) if token in ends), len(own))]
    if judge is None:
        return own
    right = (count for count in range(1, len(own)) if is_settled(own[: count + 1], judge))
    return own[: next(right, len(own))]
