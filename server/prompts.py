"""Texts and messages become tokens, off the loop that answers everybody."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_paged_eviction import spans_of_roles

from .calls import OPEN
from .names import TokenNames
from .refusals import Refused

_TAIL = 4
Message = Mapping[str, Any]
#: Arguments of `apply_chat_template` that are no variables of a template, and its variables that stand in a request.
_OURS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


@dataclass(frozen=True)
class Limits:
    """Bounds on what one request may ask for, in tokens.

    Attributes:
        prompt: of a prompt.
        answer: of an answer.
        window: of both together; None: no bound.
    """

    prompt: int
    answer: int
    window: int | None


@dataclass(frozen=True)
class Prompt:
    """What one answer goes on from.

    Attributes:
        tokens: of it.
        protected: spans of them that are never evicted; None: none was asked for.
        tail: tokens that its answer is decoded behind, so that it begins as it does in the text; none before a message.
        text: as it was sent; None: it was sent as tokens.
    """

    tokens: list[int]
    protected: Sequence[tuple[int, int]] | None = None
    tail: Sequence[int] = ()
    text: str | None = None


class Prompts:
    """What requests ask, in tokens, within bounds.

    Args:
        tokenizer: of the model.
        vocabulary: tokens that the model knows.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, limits: Limits) -> None:
        self._tokenizer, self._vocabulary, self.limits = tokenizer, vocabulary, limits
        self.names = TokenNames(tokenizer)
        # One thread and a tokenizer of its own: tokenizers lock themselves while they change their settings.
        self._encoder = deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @property
    def tags_calls(self) -> bool:
        """Whether the chat template tells the model to write calls of tools between tags."""
        return OPEN in str(self._tokenizer.chat_template)

    async def of_chat(
        self,
        messages: Sequence[Message],
        roles: Sequence[str],
        tools: Sequence[Any],
        template: Mapping[str, Any],
    ) -> Prompt:
        """A conversation, up to where the model answers.

        Args:
            roles: of the messages that are never evicted, see `spans_of_roles`.
            tools: that the model is told of.
            template: what else its chat template is told.

        Raises:
            Refused: the model is not for conversations, its template does not take these, or they are too long.
        """
        if len(messages) > self.limits.prompt:  # each is a token at least
            raise self._too_long(len(messages), "messages")
        if not getattr(self._tokenizer, "chat_template", None):
            raise Refused("This model has no chat template: use /v1/completions.", code="no_chat_template")
        unknown = next((name for name in template if name in _OURS or not self._template_names(name)), None)
        if unknown is not None:
            raise _not_shown(f"chat_template_kwargs.{unknown}", "this name")
        more = {**template, "tools": list(tools) or None}
        prompt: Prompt = await self._off_the_loop(partial(self._chat, roles, more), messages)
        return prompt

    async def of_text(
        self, prompt: str | list[int], goes_on: bool, protected: Sequence[tuple[int, int]] | None
    ) -> Prompt:
        """A prompt.

        Args:
            goes_on: it is no beginning, and gets no token that marks one.
            protected: spans of its tokens that are never evicted.

        Raises:
            Refused: it is empty, or not made of tokens of the model.
        """
        if isinstance(prompt, list):
            self.check_tokens(prompt, "prompt")
            return Prompt(prompt, protected, prompt[-_TAIL:])
        tokens = await self._off_the_loop(partial(self._text, not goes_on), prompt)
        return Prompt(tokens, protected, tokens[-_TAIL:], prompt)

    def most_new(self, tokens: Sequence[int], max_tokens: int | None, before: int) -> int:
        """New tokens of an answer to this prompt.

        Args:
            max_tokens: for at most so many; fewer are given where there is no room for them.
            before: tokens of a context that comes before it.

        Raises:
            Refused: the prompt is too long, or empty.
        """
        limits, count = self.limits, len(tokens)
        if not tokens:
            raise Refused("The prompt is empty: a request needs at least one token.", code="empty_prompt")
        if count > limits.prompt:
            raise self._too_long(count, "tokens")
        room = limits.answer if limits.window is None else min(limits.answer, limits.window - before - count)
        if room < (max_tokens != 0):
            raise _out_of_room(
                f"This model's maximum context length is {limits.window} tokens. The prompt has {before + count}, and "
                "the answer needs at least one more."
            )
        return room if max_tokens is None else min(max_tokens, room)

    def check_tokens(self, tokens: Iterable[int], param: str) -> None:
        """Refuse ids that are not in the vocabulary."""
        wrong = next((token for token in tokens if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            last = self._vocabulary - 1
            raise Refused.of(param, f"{wrong} is not a token id of this model: ids are 0 to {last}.")

    def stop(self, seconds: float) -> bool:
        """Read nothing more; False if what is being read has not been by then."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for thread in self._thread._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._thread._threads)

    async def _off_the_loop(self, work: Any, argument: Any) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, argument)
        except Refused:
            raise
        except (UnicodeError, TypeError) as error:
            raise Refused("The text is not valid Unicode.") from error
        except Exception as error:
            raise Refused(f"The tokenizer of this model cannot encode this text: {error}") from error

    def _chat(self, roles: Sequence[str], more: dict[str, Any], messages: Sequence[Message]) -> Prompt:
        text = self._rendered(messages, more)
        if more["tools"] and self._rendered(messages, more | {"tools": None}) == text:
            raise _not_shown("tools", "tools")
        for name, what in (("name", "names of speakers"), ("tool_calls", "tool calls")):
            without = [{key: value for key, value in message.items() if key != name} for message in messages]
            if without != messages and self._rendered(without, more) == text:
                raise _not_shown("messages", what)
        spoken = [message for message in messages if message["role"] != "tool"]
        if len(spoken) < len(messages) and self._rendered(spoken, more) == text:
            raise _not_shown("messages", "results of tool calls")
        tokens = self._text(False, text)
        if len(tokens) > self.limits.prompt:  # before anything is looked for in it
            raise self._too_long(len(tokens), "tokens")
        return Prompt(tokens, self._spans(messages, roles, more) if roles else None)

    def _rendered(self, messages: Sequence[Message], more: dict[str, Any]) -> str:
        """What the template makes of messages. It is a program, and these its input: it may fail in any way."""
        try:
            settings = more | {"add_generation_prompt": True, "tokenize": False}
            return str(self._encoder.apply_chat_template(list(messages), **settings))
        except Exception as error:
            reason = f"the chat template of this model fails on them: {error or type(error).__name__}"
            raise Refused.of("messages", reason) from error

    def _template_names(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", str(self._tokenizer.chat_template)) is not None

    def _spans(self, messages: Sequence[Message], roles: Sequence[str], more: dict[str, Any]) -> list[tuple[int, int]]:
        try:
            return spans_of_roles(self._encoder, messages, roles, **more)
        except ValueError as error:
            raise Refused.of("protect", error) from error

    def _text(self, special: bool, prompt: str) -> list[int]:
        return list(self._encoder(prompt, add_special_tokens=special)["input_ids"])

    def _too_long(self, count: int, what: str) -> Refused:
        return _out_of_room(f"The prompt has {count} {what}; this server accepts at most {self.limits.prompt} tokens.")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens of an answer."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def _not_shown(param: str, what: str) -> Refused:
    reason = f"the chat template of this model ignores {what}. Leave it out."
    return Refused.of(param, reason, "unsupported_value")


def _out_of_room(message: str) -> Refused:
    return Refused(message, param="messages", code="context_length_exceeded")
