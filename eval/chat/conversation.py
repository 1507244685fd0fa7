"""One conversation in one cache: every token is read once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList, TextStreamer

from hf_paged_eviction import PagedEvictionCache, make_policy
from hf_paged_eviction.naming.sizes import parse_bytes
from hf_paged_eviction.options.checked import first_tokens
from hf_paged_eviction.queries.attention import PAGED_EVICTION

from ..caches import make_paged_cache
from ..contexts import context_policy, open_context
from ..errors import UserError
from ..options.chat import ChatOptions
from ..policy_names import needs_queries, split_name
from ..running.efficiency import kv_bytes
from ..running.generation import end_tokens, plain_settings, without_sampling
from ..running.prefill import feed, input_device
from ..sizes import tokens_of_memory
from .figures import Footprint
from .interrupt import Interrupt
from .positions import room, table_of_positions
from .turns import Turn, Turns, common_length

#: How an answer came to its end: by a token that ends it, at the limit, by Ctrl-C, by Ctrl-C before it began.
Ending = Literal["end", "length", "stopped", "unread"]
#: Tokens of an answer whose speed means something.
_FEWEST = 8


class Listener:
    """Who wants to know how far an answer is; this one does not."""

    def reading(self, done: int, total: int) -> None:
        """So many of the new tokens were read."""

    def token(self, count: int, seconds: float) -> None:
        """So many tokens of the answer are there; `seconds` since the first one."""

    def text(self, piece: str) -> None:
        """The answer goes on like this."""


@dataclass(frozen=True)
class FullAnswer:
    """What a full cache answers to the same tokens.

    Attributes:
        same: tokens in which the two answers agree before they part.
    """

    text: str
    tokens: list[int]
    same: int
    kv_bytes: int


@dataclass(frozen=True)
class Answer:
    """What the model said.

    Attributes:
        tokens: of the answer, with the one that ended it.
        read: new tokens before the answer.
        read_seconds, seconds: until the first token, and after it.
        full: answer of a full cache, where that was asked for.
    """

    text: str
    tokens: list[int]
    read: int
    read_seconds: float
    seconds: float
    ending: Ending
    footprint: Footprint
    full: FullAnswer | None = None

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.ending in ("stopped", "unread")

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first; None where there are too few to tell."""
        return (len(self.tokens) - 1) / self.seconds if len(self.tokens) >= _FEWEST and self.seconds > 0 else None


class Conversation:
    """Feeds a cache what is new.

    Attributes:
        ids: all tokens of the conversation; the cache has seen the first `seen`, the others are fed with the next
            message.
        context: tokens of a saved context at its start; their ids are not known, 0 stands for each.
        cache: of `options`, possibly shrunk since.
        answers: of all turns.

    Args:
        options: as `chat_settings` gives them.
    """

    def __init__(self, model: Any, tokenizer: Any, options: ChatOptions) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._positions = table_of_positions(model)
        self._device, self._ends = input_device(model), end_tokens(model, tokenizer)
        self.begin(options)

    def begin(self, options: ChatOptions) -> None:
        """Start anew, with a new cache.

        Raises:
            UserError: policy, budget, protected prefix or model do not go together. Then nothing has changed.
        """
        turns = Turns(self.tokenizer, options.system, options.chat_template, follows=options.context is not None)
        if options.context is None:
            cache, options = _make_cache(self.model, options, turns)
        else:
            cache, options = _open_cache(self.model, options, options.context)
        self.cache, self.options, self.turns = cache, options, turns
        self.context: int = cache.get_seq_length()
        self.ids: list[int] = [0] * self.context
        self.answers: list[Answer] = []

    @property
    def seen(self) -> int:
        """Tokens that the cache has seen."""
        count: int = self.cache.get_seq_length()
        return count

    @property
    def budget(self) -> int:
        """Tokens per layer that the cache may hold, on average."""
        return Footprint.of(self.cache).budget

    def prepare(self, message: str, before: Sequence[str] = ()) -> Turn:
        """The turn that this message, behind other texts, would be; the conversation is not changed.

        Raises:
            UserError: it is empty, or has no place.
        """
        if not message.strip():
            raise UserError("the message is empty: write one, or /help")
        turn = self.turns.next("\n".join([*before, message]))
        room(self._positions, len(self.ids) + len(turn.ids))
        return turn

    def answer(self, turn: Turn, listener: Listener, interrupt: Interrupt) -> Answer:
        """Read a turn and answer it.

        Raises:
            UserError: out of memory. The conversation has begun anew then.
        """
        with self._out_of_memory():
            return self._answer(turn, listener, interrupt)

    def _answer(self, turn: Turn, listener: Listener, interrupt: Interrupt) -> Answer:
        self.turns.begin(turn)
        self.ids += turn.ids
        prompt, before, started = len(self.ids), self.seen, perf_counter()
        self.cache.note_ids(torch.tensor([self.ids]))
        stream = _Stream(self.tokenizer, listener)
        tokens = self._say(self.ids, self.cache, stream, interrupt)
        finished = perf_counter()
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        ended = bool(tokens) and tokens[-1] in self._ends
        # The token that ends an answer was not fed, and the next turn brings its own.
        self.ids += tokens[:-1] if ended else tokens
        self.cache.note_ids(torch.tensor([self.ids]))
        self.turns.answered(text)
        answer = Answer(
            text=text,
            tokens=tokens,
            read=min(prompt, self.seen) - before,
            read_seconds=(stream.first or finished) - started,
            seconds=finished - (stream.first or finished),
            ending="unread" if not tokens else "end" if ended else "stopped" if interrupt.wanted else "length",
            footprint=Footprint.of(self.cache),
            full=self._full_answer(prompt, tokens) if self.options.full and not interrupt.wanted else None,
        )
        self.answers.append(answer)
        return answer

    def _full_answer(self, prompt: int, tokens: list[int]) -> FullAnswer:
        """A new full cache reads the whole conversation: some layers of some models cannot take an answer back."""
        cache = DynamicCache(config=self.model.config)
        full = self._say(self.ids[:prompt], cache, _Stream(self.tokenizer, Listener()), Interrupt())
        text: str = self.tokenizer.decode(full, skip_special_tokens=True)
        return FullAnswer(text, full, common_length(tokens, full), kv_bytes(cache))

    @torch.inference_mode()
    def _say(self, ids: list[int], cache: DynamicCache, stream: _Stream, interrupt: Interrupt) -> list[int]:
        """Feed what the cache has not seen and generate behind it; nothing if Ctrl-C came before the last chunk.

        Returns:
            The answer, with the token that ended it; the last one has not been fed to the cache.
        """
        row, options = torch.tensor([ids], dtype=torch.int64, device=self._device), self.options
        mask, chunk, start = torch.ones_like(row), options.prefill_chunk_size, cache.get_seq_length()
        while len(ids) - cache.get_seq_length() > chunk and not interrupt.wanted:
            stop = cache.get_seq_length() + chunk
            feed(self.model, row[:, stop - chunk : stop], mask[:, :stop], cache)
            stream.listener.reading(stop - start, len(ids) - start)
        if interrupt.wanted:
            return []
        most, left = options.max_new_tokens or 1, room(self._positions, len(ids))
        choice: dict[str, Any] = without_sampling(self.model.generation_config)
        if options.temperature > 0:
            torch.manual_seed(options.seed * 1_000_003 + len(self.answers))
            choice = {"temperature": options.temperature, "top_p": options.top_p}
        output: Tensor = self.model.generate(
            input_ids=row,
            attention_mask=mask,
            past_key_values=cache,
            do_sample=options.temperature > 0,
            max_new_tokens=most if left is None else min(most, left),
            streamer=stream,
            stopping_criteria=StoppingCriteriaList([interrupt]),
            **plain_settings(self._ends, ids[-1:]),
            **choice,
        )
        answer: list[int] = output[0, len(ids) :].tolist()
        return answer

    @torch.inference_mode()
    def shrink(self, budget: int) -> None:
        """Hold fewer tokens from now on.

        Raises:
            UserError: no legal budget, or a larger one.
        """
        smaller, held = self.options.but(budget=str(budget)), self.budget
        if not self.seen:
            self.begin(smaller)
            return
        if budget > held:
            raise UserError(
                f"/budget {budget}: the budget is {held} and evicted tokens cannot come back"
                + ("" if self.options.context else f"; /reset {budget} begins a new conversation with it")
            )
        try:
            self.cache.shrink(budget)
        except (TypeError, ValueError) as error:
            raise UserError(f"/budget {budget}: {error}") from error
        self.options = smaller

    @contextmanager
    def _out_of_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            # Some layers have seen tokens that others have not.
            self.begin(self.options)
            reason = str(error).splitlines()[0]
            raise UserError(
                f"out of memory, the conversation begins anew: {reason}; a smaller --prefill-chunk-size takes less "
                "to read, a smaller --budget less to hold"
            ) from error


class _Stream(TextStreamer):  # type: ignore[misc]
    """Passes on whole words as soon as they are there, and notes when the first token came."""

    def __init__(self, tokenizer: Any, listener: Listener) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.listener, self._count = listener, 0
        self.first: float | None = None

    def put(self, value: Tensor) -> None:
        prompt = self.next_tokens_are_prompt
        super().put(value)
        if not prompt:
            now = perf_counter()
            self.first = self.first or now
            self._count += 1
            self.listener.token(self._count, now - self.first)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.listener.text(text)


def _make_cache(model: Any, options: ChatOptions, turns: Turns) -> tuple[PagedEvictionCache, ChatOptions]:
    """An empty cache, and the options with its budget in tokens."""
    policy = options.policy
    if needs_queries(policy, options.disposal) and model.config._attn_implementation != PAGED_EVICTION:
        model.set_attn_implementation(PAGED_EVICTION)
    told = options
    if options.protect_system:
        sinks = first_tokens(options.sink_tokens, make_policy(split_name(policy)[0]), options.block_size)
        told = options.but(sink_tokens=max(turns.prefix(), sinks))
    budget = options.size
    if isinstance(budget, str):
        budget = tokens_of_memory(model, told, policy, parse_bytes(budget), f"--budget {budget}")
    cache = make_paged_cache(model.config, told, policy, f"with a budget of {options.budget}", budget=budget)
    if not cache.paged_layers:
        raise UserError("no layer of this model keeps all that it has read, so there is nothing to evict")
    return cache, options


def _open_cache(model: Any, options: ChatOptions, path: Path) -> tuple[PagedEvictionCache, ChatOptions]:
    """The cache of a saved context, and the options that it was made with.

    Raises:
        UserError: it cannot be used here.
    """
    typed = options.attn_implementation
    cache, policy = open_context(path, model), context_policy(path)
    if typed is not None and model.config._attn_implementation != typed:
        raise UserError(
            f"--attn-implementation {typed} does not go with --context {path}: {policy} needs "
            f"{model.config._attn_implementation}; leave it out"
        )
    try:
        row = cache.follow_up(torch.zeros(1, 1, dtype=torch.int64, device=input_device(model)))
    except ValueError as error:
        raise UserError(f"--context {path}: a conversation goes on from one text; {error}") from error
    if not row["attention_mask"].all():
        raise UserError(f"--context {path}: its text was read with pads; read it anew without them")
    sizes = cache.paged_layers[0][1].budget
    return cache, options.but(policy=policy, budget=str(Footprint.of(cache).budget), block_size=sizes.block_size)
