"""Answers as OpenAI spells them, whole and in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hf_paged_eviction.serving.sampling import Chosen, Sampler

from .calls import Call, CallStream
from .names import Offsets
from .prompts import Prompt, Prompts
from .text import TextStream


@dataclass(frozen=True)
class Piece:
    """What an answer has grown by.

    Attributes:
        text: of the new tokens, as far as it is certain.
        chosen: tokens with their log probabilities, if they were asked for.
        offsets: where each of them begins, in characters of the whole text.
        end: why the answer is complete, "stop", "tool_calls" or "length"; None: it goes on.
        calls: of tools.
    """

    text: str
    chosen: list[Chosen]
    offsets: list[int]
    end: str | None
    calls: Sequence[Call] = ()


class Answer:
    """One answer while it grows.

    Args:
        prompts: knows the text of tokens.
        prompt: that it answers.
        stops: texts that end it.
        ends: tokens that end it.
        sampler: that chooses its tokens.

    Attributes:
        sampler: as given.
        tokens: so far, one that ends it included.
    """

    def __init__(
        self, prompts: Prompts, prompt: Prompt, stops: Sequence[str], ends: frozenset[int], sampler: Sampler
    ) -> None:
        self._prompts, self._prompt, self._ends, self.sampler = prompts, prompt, ends, sampler
        self._text = TextStream(prompts.decode, stops, prompt.tail)
        self._waiting: list[Chosen] = []
        self._offsets = Offsets(prompts.names)
        self.tokens = 0

    def hear(self, output: Any) -> Piece:
        """Take what transformers says of it."""
        new = output.generated_tokens[self.tokens :]
        if self.sampler.settings.logprobs is not None:
            told = self.sampler.chosen[self.tokens : self.tokens + len(new)]
            self._waiting += [chosen for chosen in told if self._tells(chosen.token)]
        self.tokens += len(new)
        ending = bool(new) and new[-1] in self._ends
        text, over = self._text.add(new[:-1] if ending else new), output.is_finished()
        if over:
            text += self._text.end()
        if self._text.stopped:
            return self._piece(text, self._told(text), "stop")
        ended = "stop" if ending else "length"
        chosen, self._waiting = (self._waiting, []) if text or over else ([], self._waiting)
        return self._piece(text, chosen, ended if over else None)

    def _tells(self, token: int) -> bool:
        return token not in self._ends

    def _piece(self, text: str, chosen: list[Chosen], end: str | None) -> Piece:
        return Piece(text, chosen, self._offsets.of([each.token for each in chosen]), end)

    def _told(self, text: str) -> list[Chosen]:
        """Of the tokens that were not told yet, those that the text before a stop has room for."""
        room, told = len(text.encode("utf-8", "replace")), []
        for chosen in self._waiting:
            if room <= 0:
                break
            told.append(chosen)
            room -= len(self._prompts.names.bytes_of(chosen.token))
        return told


class Echo(Answer):
    """An answer behind its prompt.

    A token that ends it is told of, too: clients that score texts ask for one token and leave the last one out.
    """

    _begun = False

    def hear(self, output: Any) -> Piece:
        """As `Answer.hear`; the prompt comes with the first piece."""
        if self._begun:
            return self._heard(output)
        self._begun = True
        text, chosen = self._prompt.text, []
        if text is None:
            text = self._prompts.decode(self._prompt.tokens)
        if self.sampler.settings.logprobs is not None:
            chosen = [Chosen(self._prompt.tokens[0], None, ()), *self.sampler.read]
        offsets = self._offsets.of_text([each.token for each in chosen], text)
        piece = self._heard(output)
        return Piece(text + piece.text, chosen + piece.chosen, offsets + piece.offsets, piece.end)

    def _heard(self, output: Any) -> Piece:
        return super().hear(output)

    def _tells(self, token: int) -> bool:
        return True


class Calling(Answer):
    """An answer whose calls of tools are taken out of its text."""

    def hear(self, output: Any) -> Piece:
        """As `Answer.hear`."""
        piece = super().hear(output)
        text, calls = self._calls.add(piece.text)
        if piece.end is not None:
            rest, last = self._calls.end()
            text, calls = text + rest, calls + last
        end = "tool_calls" if self._calls.count and piece.end == "stop" else piece.end
        return replace(piece, text=text, calls=calls, end=end)

    @cached_property
    def _calls(self) -> CallStream:
        return CallStream()


class PromptAlone(Echo):
    """A prompt without an answer: the token that was asked for to have it read is left out."""

    def _heard(self, output: Any) -> Piece:
        return Piece("", [], [], "length")


@dataclass
class Form:
    """What all answers to one request have in common.

    Args:
        model: its name.
        prompts: knows the text of tokens.
        told: whether log probabilities are.
    """

    model: str
    prompts: Prompts
    told: bool
    made: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        """The response, of the pieces of each answer."""
        choices = [self._choice(index, _joined(each)) for index, each in enumerate(pieces)]
        return {**self._head(""), "choices": choices, "usage": usage}

    def begin(self, index: int) -> dict[str, Any] | None:
        """What is sent before the first piece of an answer."""
        return None

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """A piece of one answer."""
        return {**self._head(".chunk"), "choices": [self._delta(index, piece)]}

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """What is sent after the last piece, if it was asked for."""
        return {**self._head(".chunk"), "choices": [], "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        raise NotImplementedError

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError


class ChatForm(Form):
    """Of `/v1/chat/completions`."""

    def begin(self, index: int) -> dict[str, Any]:
        delta = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return {**self._head(".chunk"), "choices": [delta]}

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{self.number}"
        return {"id": name, "object": f"chat.completion{kind}", "created": self.made, "model": self.model}

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message |= {"content": piece.text or None, "tool_calls": [call.plain for call in piece.calls]}
        return {"index": index, "message": message, "logprobs": self._logprobs(piece), "finish_reason": piece.end}

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            delta["tool_calls"] = [{"index": call.number, **call.plain} for call in piece.calls]
        return {"index": index, "delta": delta, "logprobs": self._logprobs(piece), "finish_reason": piece.end}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self.told:
            return None
        return {"content": [self._told(each) for each in piece.chosen], "refusal": None}

    def _told(self, chosen: Chosen) -> dict[str, Any]:
        top = [self._named(token, logprob) for token, logprob in chosen.top]
        return {**self._named(chosen.token, chosen.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        names = self.prompts.names
        return {"token": names.name(token), "logprob": _finite(logprob), "bytes": list(names.bytes_of(token))}


class CompletionForm(Form):
    """Of `/v1/completions`."""

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"cmpl-{self.number}"
        return {"id": name, "object": "text_completion", "created": self.made, "model": self.model}

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece) if self.told else None,
            "finish_reason": piece.end,
        }

    _delta = _choice

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {
            "tokens": [self.prompts.names.name(each.token) for each in piece.chosen],
            "token_logprobs": [_finite(each.logprob) for each in piece.chosen],
            "top_logprobs": [None if each.logprob is None else self._top(each) for each in piece.chosen],
            "text_offset": piece.offsets,
        }

    def _top(self, chosen: Chosen) -> dict[str, float | None]:
        """By name; of tokens with one name, the less likely ones by their numbers."""
        found: dict[str, float | None] = {}
        for token, logprob in chosen.top:
            name = self.prompts.names.name(token)
            found[f"token_id:{token}" if name in found else name] = _finite(logprob)
        return found


def _joined(pieces: Sequence[Piece]) -> Piece:
    text = "".join(piece.text for piece in pieces)
    chosen = [each for piece in pieces for each in piece.chosen]
    offsets, calls = ([each for piece in pieces for each in getattr(piece, name)] for name in ("offsets", "calls"))
    return Piece(text, chosen, offsets, pieces[-1].end, calls)


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity, and nothing that is no number."""
    return None if logprob is None else max(-9999.0, logprob)


def usage(prompt: int, answers: int) -> dict[str, Any]:
    """Tokens that were read and written."""
    return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}
