"""What a message looks like to the model, so that the tokens before it never change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..data.prompting.chat_template import has_template
from ..errors import UserError

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


class Turns:
    """The conversation so far. A turn that was asked for counts once it is begun.

    Only what is new is ever fed: with a chat template, what stands behind the last answer. Templates that write the
    past anew (leave out the thinking of earlier answers, print the time) would break a cache that was filled before,
    so what was fed stays as it was, and the turn says that it is `rewritten`.

    Args:
        template: messages in the tokenizer's chat template, if it has one; else one below the other.
        follows: a text stands before it that is read already: nothing marks a beginning.
    """

    def __init__(self, tokenizer: Any, system: str | None, template: bool = True, follows: bool = False) -> None:
        self._tokenizer, self._system, self._follows = tokenizer, system, follows
        self._template = template and has_template(tokenizer)
        self._text = ""
        self.messages: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)

    def next(self, message: str) -> Turn:
        """The turn that this message would be.

        Raises:
            UserError: the template fails, or shows no earlier answers.
        """
        messages = (*self.messages, {"role": "user", "content": message})
        if self._text:
            return self._later(message, messages)
        if self._template:
            text = self._render(messages)
        else:
            text = message if self._system is None else f"{self._system}\n{message}"
        if self._follows:
            new = text.removeprefix(self._tokenizer.bos_token or "") if self._template else text
            return Turn(encode_after(self._tokenizer, f"\n{new}"), text, messages)
        return Turn(encode(self._tokenizer, text, special=not self._template), text, messages)

    def _later(self, message: str, messages: tuple[Message, ...]) -> Turn:
        if not self._template:
            return Turn(encode_after(self._tokenizer, f"\n{message}"), f"{self._text}\n{message}", messages)
        marked = self._render((*self.messages[:-1], {"role": "assistant", "content": _ANSWER}, messages[-1]))
        _, found, new = marked.rpartition(_ANSWER)
        if not found:
            raise UserError(f"the chat template of this tokenizer leaves out earlier answers; {_WAY_OUT}")
        text = self._text + new
        # White space around an answer is stripped by many templates, and harmless.
        rewritten = "".join(self._render(messages).split()) != "".join(text.split())
        return Turn(encode_after(self._tokenizer, new), text, messages, rewritten)

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
        return common_length(first, second)

    def _render(self, messages: tuple[Message, ...]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program, it may fail in any way
            raise UserError(f"the chat template of this tokenizer fails: {error}; {_WAY_OUT}") from error
        return text


def common_length(first: list[int], second: list[int]) -> int:
    """Tokens in which two lists agree before they part."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Tokens of a text that begins a conversation; a rendered one brings its special tokens along."""
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def encode_after(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that stands behind another: without the space that some tokenizers write before the first."""
    line, both = encode(tokenizer, "\n"), encode(tokenizer, "\n" + text)
    return both[len(line) :] if both[: len(line)] == line else encode(tokenizer, text)
