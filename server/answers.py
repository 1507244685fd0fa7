"""Answers in OpenAI's format, whole and streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .calls import Call, CallStream
from .names import Offsets
from .prompts import Prompt, Prompts
from .sampling import Chosen, Sampler
from .text import TextStream


@dataclass(frozen=True)
class Piece:
    """A new part of an answer.

    Attributes:
        text: text of the new tokens, as far as later tokens cannot change it.
        chosen: tokens with their log probabilities, if requested.
        offsets: index in the whole text, in characters, at which each of them begins.
        end: why the answer is complete, "stop", "tool_calls" or "length"; None = it is not complete.
        calls: tool calls.
    """

    text: str
    chosen: list[Chosen]
    offsets: list[int]
    end: str | None
    calls: Sequence[Call] = ()

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Piece:
        """Join consecutive pieces."""
        names = ("chosen", "offsets", "calls")
        chosen, offsets, calls = ([entry for piece in pieces for entry in getattr(piece, name)] for name in names)
        return cls("".join(piece.text for piece in pieces), chosen, offsets, pieces[-1].end, calls)


class Answer:
    """One answer that grows.

    Args:
        prompts: decodes tokens.
        prompt: prompt of the answer.
        stops: texts that end the answer.
        ends: tokens that end the answer.
        sampler: chooses the tokens of the answer.
        echo: the first piece contains the prompt, and log probabilities include the token that ends the answer.
            (Clients that score texts ask for one token and ignore the last one.)
        alone: leave out the only token, which was requested so that the prompt is read.
        calls: take tool calls out of the text.

    Attributes:
        sampler: see above.
        tokens: number of tokens so far, with the one that ends the answer.
    """

    def __init__(
        self,
        prompts: Prompts,
        prompt: Prompt,
        stops: Sequence[str],
        ends: frozenset[int],
        sampler: Sampler,
        *,
        echo: bool = False,
        alone: bool = False,
        calls: bool = False,
    ) -> None:
        self._prompts, self._prompt, self._ends, self.sampler = prompts, prompt, ends, sampler
        self._text = TextStream(prompts.decode, stops, prompt.tail)
        self._calls = CallStream() if calls else None
        self._untold = frozenset[int]() if echo else ends
        self._echo, self._alone = echo, alone
        self._waiting: list[Chosen] = []
        self._offsets = Offsets(prompts.names)
        self.tokens = 0

    def hear(self, output: Any) -> Piece:
        """Take an output of transformers."""
        read = [self._read()] if self._echo else []
        self._echo = False
        return Piece.joined([*read, Piece("", [], [], "length") if self._alone else self._written(output)])

    def _read(self) -> Piece:
        text, chosen = self._prompt.text, []
        if text is None:
            text = self._prompts.decode(self._prompt.tokens)
        if self.sampler.settings.logprobs is not None:
            chosen = [Chosen(self._prompt.tokens[0], None, ()), *self.sampler.read]
        return Piece(text, chosen, self._offsets.of_text([choice.token for choice in chosen], text), None)

    def _written(self, output: Any) -> Piece:
        new = output.generated_tokens[self.tokens :]
        if self.sampler.settings.logprobs is not None:
            new_chosen = self.sampler.chosen[self.tokens : self.tokens + len(new)]
            self._waiting += [chosen for chosen in new_chosen if chosen.token not in self._untold]
        self.tokens += len(new)
        ending = bool(new) and new[-1] in self._ends
        text, over = self._text.add(new[:-1] if ending else new), output.is_finished()
        if over:
            text += self._text.end()
        if self._text.stopped:
            return self._piece(text, self._chosen_for(text), "stop")
        ended = "stop" if ending else "length"
        chosen, self._waiting = (self._waiting, []) if text or over else ([], self._waiting)
        return self._piece(text, chosen, ended if over else None)

    def _piece(self, text: str, chosen: list[Chosen], end: str | None) -> Piece:
        calls: list[Call] = []
        if self._calls is not None:
            text, calls = self._calls.add(text)
            if end is not None:
                rest, last = self._calls.end()
                text, calls = text + rest, calls + last
            if end == "stop" and self._calls.count:
                end = "tool_calls"
        return Piece(text, chosen, self._offsets.of([choice.token for choice in chosen]), end, calls)

    def _chosen_for(self, text: str) -> list[Chosen]:
        """The waiting tokens that belong to the text before a stop text."""
        room, fitting = len(text.encode("utf-8", "replace")), []
        for chosen in self._waiting:
            if room <= 0:
                break
            fitting.append(chosen)
            room -= len(self._prompts.names.bytes_of(chosen.token))
        return fitting


@dataclass
class Form:
    """The format of all answers to one request.

    Args:
        model: name of the model.
        prompts: decodes tokens.
        gives_logprobs: whether answers have log probabilities.

    Attributes:
        warning: what the client should know of its request, in complete answers and in last pieces; None = nothing.

    Class attributes:
        prefix: prefix of the id of a response.
        kinds: `object` of a response, whole and streamed.
    """

    model: str
    prompts: Prompts
    gives_logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)
    warning: str | None = field(default=None, init=False)
    prefix: ClassVar[str]
    kinds: ClassVar[tuple[str, str]]

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole response, from the pieces of each answer."""
        choices = [
            self._choice(index, Piece.joined(answer_pieces), "message") for index, answer_pieces in enumerate(pieces)
        ]
        return self._response(self.kinds[0], choices, usage=usage, **self._warned(True))

    def begin(self, index: int) -> dict[str, Any] | None:
        """The event before the first piece of an answer."""
        return None

    def part(self, index: int, piece: Piece, **more: Any) -> dict[str, Any]:
        """The event for a piece of one answer."""
        last = piece.end is not None
        return self._response(self.kinds[1], [self._choice(index, piece, "delta")], **more, **self._warned(last))

    def _warned(self, last: bool) -> dict[str, Any]:
        return {"warning": self.warning} if last and self.warning is not None else {}

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The event after the last piece, if the client wants the usage."""
        return self._response(self.kinds[1], [], usage=usage)

    def _response(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        head = {"id": f"{self.prefix}-{self.number}", "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}

    def _choice(self, index: int, piece: Piece, name: str) -> dict[str, Any]:
        logprobs = self._logprobs(piece) if self.gives_logprobs else None
        return {"index": index, **self._content(piece, name), "logprobs": logprobs, "finish_reason": piece.end}

    def _content(self, piece: Piece, name: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError


class ChatForm(Form):
    """The format of `/v1/chat/completions`."""

    prefix, kinds = "chatcmpl", ("chat.completion", "chat.completion.chunk")

    def begin(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._response(self.kinds[1], [choice])

    def _content(self, piece: Piece, name: str) -> dict[str, Any]:
        calls = [call.plain for call in piece.calls]
        if name == "message":
            message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
            return {name: message | ({"content": piece.text or None, "tool_calls": calls} if calls else {})}
        message = {"content": piece.text} if piece.text else {}
        if calls:
            message["tool_calls"] = [{"index": call.number, **call.plain} for call in piece.calls]
        return {name: message}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {"content": [self._with_alternatives(chosen) for chosen in piece.chosen], "refusal": None}

    def _with_alternatives(self, chosen: Chosen) -> dict[str, Any]:
        top = [self._named(token, logprob) for token, logprob in chosen.top]
        return {**self._named(chosen.token, chosen.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        names = self.prompts.names
        return {"token": names.name(token), "logprob": _finite(logprob), "bytes": list(names.bytes_of(token))}


class CompletionForm(Form):
    """The format of `/v1/completions`."""

    prefix, kinds = "cmpl", ("text_completion", "text_completion")

    def _content(self, piece: Piece, name: str) -> dict[str, Any]:
        return {"text": piece.text}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {
            "tokens": [self.prompts.names.name(chosen.token) for chosen in piece.chosen],
            "token_logprobs": [_finite(chosen.logprob) for chosen in piece.chosen],
            "top_logprobs": [None if chosen.logprob is None else self._top(chosen) for chosen in piece.chosen],
            "text_offset": piece.offsets,
        }

    def _top(self, chosen: Chosen) -> dict[str, float | None]:
        """Log probabilities by the name of the token. Of tokens with the same name, less likely ones get their ids as
        names."""
        logprobs: dict[str, float | None] = {}
        for token, logprob in chosen.top:
            name = self.prompts.names.name(token)
            logprobs[f"token_id:{token}" if name in logprobs else name] = _finite(logprob)
        return logprobs


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity, and nothing that is no number."""
    return None if logprob is None else max(-9999.0, logprob)


def usage(prompt: int, answers: int) -> dict[str, Any]:
    """The numbers of tokens of prompts and answers, in OpenAI's format."""
    return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}
