"""Greedy answers, under the stop rules of the tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList

from hf_paged_eviction.internals import (
    ANSWERS_AS_TOKENS,
    CACHE_ARGUMENT,
    CHANGES_PROMPT,
    forget_last_text,
    generate_settings,
)

from ..errors import UserError
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
#: Ways to choose tokens other than greedily, none of which is followed, and how `generate` would end an answer.
_GREEDY = {
    "do_sample": False,
    "num_beams": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "num_beam_groups": None,
    "diversity_penalty": None,
    "constraints": None,
    "force_words_ids": None,
    # A checkpoint may ask for other ends.
    "stop_strings": None,
    "max_time": None,
}
_IN_TWO_CALLS = "it depends on where a call of generate begins, and eval makes an answer in two calls"
#: What cannot be followed.
_CANNOT = CHANGES_PROMPT | dict.fromkeys(
    (
        *("begin_suppress_tokens", "forced_eos_token_id", "exponential_decay_length_penalty"),
        *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "guidance_scale"),
    ),
    _IN_TWO_CALLS,
)
_CANNOT["min_length"] = "it counts the pads of a row"


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

    Raises:
        UserError: the generation configuration of the model asks for something that eval cannot follow.
    """

    def __init__(self, model: Any, tokenizer: Any, stop_at_newline: bool = False) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.stop_at_newline = stop_at_newline
        self.ends = end_tokens(model, tokenizer, stop_at_newline)
        sets = ANSWERS_AS_TOKENS | _GREEDY | without_sampling(model.generation_config)
        try:
            self._settings = generate_settings(model, {}, "eval", sets=sets, cannot=_CANNOT)
        except ValueError as error:
            raise UserError(str(error)) from error
        self._least = max(model.generation_config.min_new_tokens or 0, int(stop_at_newline))
        special = [mark for mark in (OPEN, CLOSE) if mark in tokenizer.all_special_tokens]
        self._marks = {tokenizer.convert_tokens_to_ids(mark): mark for mark in special}

    def first(self, inputs: Inputs, cache: DynamicCache, chunk: int | None = None) -> Tensor:
        """Read what the cache has not seen of the prompts; the first token of each answer, `[rows]` int64."""
        settings = {"max_new_tokens": 1, "min_new_tokens": self._least, "prefill_chunk_size": chunk}
        return self._generate(inputs.ids, inputs.mask, cache, settings)[:, -1]

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

        settings = {"max_new_tokens": max(limits) - 1, "min_new_tokens": max(self._least - 1, 0)}
        rules = StoppingCriteriaList([stops])
        return self._generate(ids, mask, cache, {**settings, "stopping_criteria": rules})[:, width:]

    @torch.inference_mode()
    def _generate(self, ids: Tensor, mask: Tensor, cache: DynamicCache, settings: dict[str, Any]) -> Tensor:
        forget_last_text(self.model)  # which may have been of other rows
        tokens = {"eos_token_id": sorted(self.ends) or None, "pad_token_id": pad_token(ids[:, -1].tolist())}
        inputs = {"input_ids": ids, "attention_mask": mask, CACHE_ARGUMENT: cache}
        output: Tensor = self.model.generate(**inputs, **(self._settings | tokens | settings))
        return output

    def text(self, tokens: Sequence[int]) -> str:
        """An answer as text."""
        parts = groupby(tokens, key=self._marks.get)  # marks of thinking stay, also where they are special tokens
        return "".join(mark or self.tokenizer.decode(list(run), skip_special_tokens=True) for mark, run in parts)


def pad_token(last: Sequence[int]) -> int:
    """What `generate` writes after a row's end: no prompt may end in it, or `generate` would warn of right padding.

    Args:
        last: id of each row.
    """
    return next(token for token in range(len(last) + 1) if token not in last)


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
