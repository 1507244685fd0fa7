"""Tokenise texts and messages, outside of the HTTP loop."""

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
    """The limits of one request, in tokens.

    Attributes:
        prompt: longest prompt.
        answer: longest answer.
        window: longest prompt and answer together; None = no limit.
    """

    prompt: int
    answer: int
    window: int | None


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt.

    Attributes:
        tokens: tokens of the prompt.
        protected: spans of tokens that are never evicted; None = none requested.
        tail: last tokens of the prompt, which are decoded together with the answer, so that the answer begins as in the
            text; empty for chats.
        text: text of the request; None if the prompt was sent as tokens.
    """

    tokens: list[int]
    protected: Sequence[tuple[int, int]] | None = None
    tail: Sequence[int] = ()
    text: str | None = None


class Prompts:
    """Turns the prompts of requests into tokens, within limits.

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: number of tokens of the model.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, limits: Limits) -> None:
        self._tokenizer, self._vocabulary, self.limits = tokenizer, vocabulary, limits
        self.names = TokenNames(tokenizer)
        # One thread and a tokenizer of its own: tokenizers lock themselves while they change their settings.
        self._encoder = deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @property
    def tags_calls(self) -> bool:
        """Whether the chat template tells the model to write tool calls between tags."""
        return OPEN in str(self._tokenizer.chat_template)

    async def of_chat(
        self,
        messages: Sequence[Message],
        roles: Sequence[str],
        tools: Sequence[Any],
        template: Mapping[str, Any],
    ) -> Prompt:
        """Tokenise a conversation, up to the beginning of the answer.

        Args:
            roles: roles of messages that are never evicted, see `spans_of_roles`.
            tools: tools for the chat template.
            template: other arguments of the chat template.

        Raises:
            Refused: the model has no chat template, the template fails, or the conversation is too long.
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
        """Tokenise a prompt.

        Args:
            goes_on: the prompt continues a context, so it gets no token for the beginning of a text.
            protected: spans of tokens that are never evicted.

        Raises:
            Refused: the prompt is empty, or has ids that are not tokens of the model.
        """
        if isinstance(prompt, list):
            self.check_tokens(prompt, "prompt")
            return Prompt(prompt, protected, prompt[-_TAIL:])
        tokens = await self._off_the_loop(partial(self._text, not goes_on), prompt)
        return Prompt(tokens, protected, tokens[-_TAIL:], prompt)

    def most_new(self, tokens: Sequence[int], max_tokens: int | None, before: int) -> int:
        """Largest number of new tokens of an answer to this prompt.

        Args:
            max_tokens: the client's limit; None = no limit. The result is smaller if there is no room.
            before: number of tokens of a context before the prompt.

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
        """Stop tokenising; False if a running call takes too long."""
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
            # A result of a tool belongs to its call; clients add the name of the tool.
            without = [
                message if message["role"] == "tool" else {key: message[key] for key in message if key != name}
                for message in messages
            ]
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
        """Apply the chat template to messages. A template is a program, so it may raise any error."""
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
        """Decode tokens of an answer."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def _not_shown(param: str, what: str) -> Refused:
    reason = f"the chat template of this model ignores {what}. Leave it out."
    return Refused.of(param, reason, "unsupported_value")


def _out_of_room(message: str) -> Refused:
    return Refused(message, param="messages", code="context_length_exceeded")
