"""What a message looks like to the model, so that the tokens before it never change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..prompting.chat_template import has_template

#: Stands for an answer to find out what a template writes after it. No text has it in it.
_ANSWER = "qzx3answer7xzq"
_WAY_OUT = "--no-chat-template joins the messages by new lines instead"

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """A message on its way to the model.

    Attributes:
        ids: tokens to feed after everything that was fed before.
        text: the whole conversation up to the place of the answer.
        rewritten: the template would now write something else for what was fed before.
    """

    ids: list[int]
    text: str
    messages: tuple[Message, ...]
    rewritten: bool = False


class Turns(ABC):
    """The conversation so far. A turn that was asked for counts once it is begun.

    Args:
        follows: a text stands before it that is read already: nothing marks a beginning.
    """

    def __init__(self, tokenizer: Any, system: str | None, follows: bool = False) -> None:
        self._tokenizer, self._system, self._follows = tokenizer, system, follows
        self._text = ""
        self.messages: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)

    @abstractmethod
    def next(self, message: str) -> Turn:
        """The turn that this message would be."""

    def begin(self, turn: Turn) -> None:
        """Make this turn a part of the conversation."""
        self._text, self.messages = turn.text, turn.messages

    def answered(self, text: str) -> None:
        """What the model said in the turn that was begun, without the token that ended it."""
        self._text += text
        self.messages = (*self.messages, {"role": "assistant", "content": text})

    def prefix(self) -> int:
        """Tokens at the start that are the same whatever the first message is: the system message."""
        first, second = (self.next(message).ids for message in ("A", "zebra"))
        pairs = zip(first, second, strict=False)
        return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def make_turns(tokenizer: Any, system: str | None, template: bool, *, follows: bool = False) -> Turns:
    """By the tokenizer's chat template if it has one and that is wanted, else as plain text."""
    if template and has_template(tokenizer):
        return TemplateTurns(tokenizer, system, follows)
    return PlainTurns(tokenizer, system, follows)


class PlainTurns(Turns):
    """Messages and answers one below the other, as a model without a chat template reads them."""

    def next(self, message: str) -> Turn:
        """The message on a line of its own."""
        messages = (*self.messages, {"role": "user", "content": message})
        if self._text:
            return Turn(encode_after(self._tokenizer, f"\n{message}"), f"{self._text}\n{message}", messages)
        text = message if self._system is None else f"{self._system}\n{message}"
        if self._follows:
            return Turn(encode_after(self._tokenizer, f"\n{text}"), text, messages)
        return Turn(encode(self._tokenizer, text, special=True), text, messages)


class TemplateTurns(Turns):
    """Messages as the chat template of the tokenizer writes them.

    Only the new part of each rendering is fed: what stands after the last answer. Templates that write the past anew
    (leave out the thinking of earlier answers, print the time) would break a cache that was filled before, so what was
    fed stays as it was, and the turn says that it is `rewritten`.
    """

    def next(self, message: str) -> Turn:
        """The part of the rendering behind what was fed.

        Raises:
            UserError: the template fails, or shows no earlier answers.
        """
        messages = (*self.messages, {"role": "user", "content": message})
        whole = self._render(messages)
        if not self._text:
            return Turn(self._beginning(whole), whole, messages)
        marked = self._render((*self.messages[:-1], {"role": "assistant", "content": _ANSWER}, messages[-1]))
        _, found, new = marked.rpartition(_ANSWER)
        if not found:
            raise UserError(f"the chat template of this tokenizer leaves out earlier answers; {_WAY_OUT}")
        text = self._text + new
        # White space around an answer is stripped by many templates, and harmless.
        rewritten = "".join(whole.split()) != "".join(text.split())
        return Turn(encode_after(self._tokenizer, new), text, messages, rewritten)

    def _beginning(self, whole: str) -> list[int]:
        if not self._follows:
            return encode(self._tokenizer, whole)
        return encode_after(self._tokenizer, "\n" + whole.removeprefix(self._tokenizer.bos_token or ""))

    def _render(self, messages: tuple[Message, ...]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program, it may fail in any way
            raise UserError(f"the chat template of this tokenizer fails: {error}; {_WAY_OUT}") from error
        return text


def encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Tokens of a text that begins a conversation; a rendered one brings its special tokens along."""
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def encode_after(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that stands behind another: without the space that some tokenizers write before the first."""
    line, both = encode(tokenizer, "\n"), encode(tokenizer, "\n" + text)
    return both[len(line) :] if both[: len(line)] == line else encode(tokenizer, text)
