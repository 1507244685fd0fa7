"""Samples as token ids, in batches, and where the compressed part of a prompt ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import UserError
from ...metrics.thinking import opens_thinking
from ...options.settings import TaskSettings
from ..sample import Sample
from .chat_template import has_template, protected_spans, render, takes_turns, wrap
from .truncation import cut_middle

ChatTemplate = Literal["auto", "always", "never"]

#: Tokens by which a shortened prompt may grow when its text is tokenised again.
_SLACK = 16
#: A tokenizer that does not know the model's context says a far greater number.
_LONGEST_CONTEXT = 10**9


@dataclass(frozen=True)
class Prompt:
    """What the model reads of one sample.

    Attributes:
        sample: the question.
        context: ids that are read and compressed first: the whole prompt when the question is known by then.
        question: ids that are fed after compression; empty when there are none.
        truncated: the prompt lost its middle.
        chat: it was wrapped in the chat template.
        protected: spans of tokens that are never evicted, see `protect`.
        thinking: the chat template has opened the model's thinking, see `metrics.thinking`.
    """

    sample: Sample
    context: tuple[int, ...]
    question: tuple[int, ...]
    truncated: bool
    chat: bool
    protected: tuple[tuple[int, int], ...] = ()
    thinking: bool = False

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.context) + len(self.question)


@dataclass(frozen=True)
class Batch:
    """Prompts of one task that run together.

    Attributes:
        task: name of the task.
        length: tokens asked for per prompt, to which shares of budgets refer; None: each prompt's own length.
        prompts: at least one.
    """

    task: str
    length: int | None
    prompts: tuple[Prompt, ...]


def encode(
    sample: Sample,
    tokenizer: Any,
    *,
    question_aware: bool,
    max_length: int | None,
    chat_template: ChatTemplate,
    protect: Sequence[str] = (),
) -> Prompt:
    """The token ids of a sample: first cut to `max_length`, then wrapped in the chat template, then tokenised.

    Args:
        sample: its prompt is `context + question`.
        tokenizer: a Hugging Face tokenizer.
        question_aware: the whole text is tokenised at once. Otherwise the context and the question are tokenised each
            on its own, so that equal contexts have equal ids. Both have at least one token: a sample without a
            question gets the end of the chat template as its question or, without a template, the last token of the
            context.
        max_length: tokens kept of a longer prompt, not counting the chat template; None keeps all.
        chat_template: "auto" wraps the samples whose task says so, if the tokenizer has a template. In a wrapped
            prompt the cue is the beginning of the answer.
        protect: roles of messages that are never evicted, see `spans_of_roles`; plain text has none.
    """
    chat = _is_chat(sample, tokenizer, chat_template)
    context, question, truncated = sample.context, sample.question + ("" if chat else sample.cue), False
    if max_length is not None:
        context, question, truncated = cut_middle(
            context, question, tokenizer, max_length, at_once=sample.metric == "multiple_choice"
        )
    spans: tuple[tuple[int, int], ...] = ()
    if chat:
        if protect:
            spans = protected_spans(context, question, tokenizer, sample.cue, protect)
        context, question = wrap(context, question, tokenizer, sample.cue)
    thinking = chat and opens_thinking(context + question)
    if question_aware:
        ids = _ids(tokenizer, context + question, special=not chat)
        if not ids:
            raise UserError(f"{sample.task}, {sample.id}: the prompt is empty")
        return Prompt(sample, ids, (), truncated, chat, spans, thinking)
    first, second = _ids(tokenizer, context, special=not chat), _ids(tokenizer, question, special=False)
    if len(first) + len(second) < 2:
        raise UserError(f"{sample.task}, {sample.id}: a prompt of one token has no context and question")
    if not first or not second:
        both = first + second
        at = 1 if not first else len(both) - 1
        first, second = both[:at], both[at:]
    return Prompt(sample, first, second, truncated, chat, spans, thinking)


def _is_chat(sample: Sample, tokenizer: Any, chat_template: ChatTemplate) -> bool:
    """Whether a sample is wrapped; one with a cue for the model's turn, only where the template marks turns."""
    if sample.cue and chat_template != "never" and has_template(tokenizer):
        return sample.chat and takes_turns(tokenizer)
    return chat_template == "always" or (chat_template == "auto" and sample.chat and has_template(tokenizer))


_SHARED: dict[int, int] = {}


def _ids(tokenizer: Any, text: str, *, special: bool) -> tuple[int, ...]:
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    # One object per id of the vocabulary: a benchmark has many millions of tokens.
    return tuple(_SHARED.setdefault(token, token) for token in ids)


def longest_prompt(settings: TaskSettings, tokenizer: Any, config: Any, sample: Sample) -> int | None:
    """Tokens to keep of a prompt, without the chat template; None keeps all.

    If `settings.max_length` is None, it is the model's context minus the answer, the chat template, and a few tokens
    that the text may gain. None if neither the model nor the tokenizer knows the context.
    """
    if settings.max_length is not None:
        return settings.max_length
    context = longest_context(config, tokenizer)
    if context is None:
        return None
    wrapped = _is_chat(sample, tokenizer, settings.chat_template)
    around = len(_ids(tokenizer, render("x", tokenizer, sample.cue), special=False)) if wrapped else 0
    room = context - sample.max_new_tokens - around - _SLACK
    if room < 2:
        raise UserError(
            f"{sample.task}: a context of {context} tokens has no room for a prompt and an answer of "
            f"{sample.max_new_tokens}; give --max-length to use a longer one"
        )
    return room


def longest_context(config: Any, tokenizer: Any) -> int | None:
    """Tokens that the model was made for; None if neither it nor the tokenizer knows."""
    inner = config.get_text_config(decoder=True) if config is not None else None
    context = getattr(inner, "max_position_embeddings", None) or tokenizer.model_max_length
    return context if isinstance(context, int) and context <= _LONGEST_CONTEXT else None
