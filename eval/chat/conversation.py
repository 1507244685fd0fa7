"""One conversation in one cache: every token is read once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import PAGED_EVICTION

from ..budgets import parse_memory
from ..caches import make_paged_cache
from ..contexts import context_policy, open_context
from ..errors import UserError
from ..policy_names import needs_queries
from ..running.efficiency import kv_bytes
from ..running.prefill import input_device
from ..sizes import tokens_of_memory
from .figures import Footprint
from .interrupt import Interrupt
from .positions import Positions
from .settings import ChatSettings
from .turns import Turn, Turns, make_turns
from .voice import Listener, Voice

#: How an answer came to its end: by a token that ends it, at the limit, by Ctrl-C, by Ctrl-C before it began.
Ending = Literal["end", "length", "stopped", "unread"]
#: Tokens of an answer whose speed means something.
_FEWEST = 8


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
        cache: of `settings`, possibly shrunk since.
        answers: of all turns.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: ChatSettings) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.positions = Positions.of(model)
        self._voice = Voice(model, tokenizer, settings.sampling, settings.chunk)
        self.begin(settings)

    def begin(self, settings: ChatSettings) -> None:
        """Start anew, with a new cache.

        Raises:
            UserError: policy, budget, protected prefix or model do not go together. Then nothing has changed.
        """
        turns = make_turns(self.tokenizer, settings.system, settings.template, follows=settings.context is not None)
        if settings.context is None:
            cache, settings = _make_cache(self.model, settings, turns)
        else:
            cache, settings = _open_cache(self.model, settings, settings.context)
        self.cache, self.settings, self.turns = cache, settings, turns
        self.context: int = cache.get_seq_length()
        self.ids: list[int] = [0] * self.context
        self.answers: list[Answer] = []

    @property
    def seen(self) -> int:
        """Tokens that the cache has seen."""
        count: int = self.cache.get_seq_length()
        return count

    def prepare(self, message: str) -> Turn:
        """The turn that this message would be; the conversation is not changed.

        Raises:
            UserError: it is empty, or has no place.
        """
        if not message.strip():
            raise UserError("the message is empty: write one, or /help")
        turn = self.turns.next(message)
        self.positions.room(len(self.ids) + len(turn.ids))
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
        prompt, unread, started = len(self.ids), len(self.ids) - self.seen, perf_counter()
        clock = _Clock(listener)
        tokens: list[int] = []
        if self._voice.read(self.ids, self.cache, clock, interrupt):
            room = self.positions.room(prompt)
            tokens = self._voice.answer(self.ids, self.cache, len(self.answers), clock, interrupt, room)
        finished = perf_counter()
        text = self._voice.text(tokens)
        ended = bool(tokens) and tokens[-1] in self._voice.ends
        # The token that ends an answer was not fed, and the next turn brings its own.
        self.ids += tokens[:-1] if ended else tokens
        self.turns.answered(text)
        answer = Answer(
            text=text,
            tokens=tokens,
            read=min(unread, self.seen - prompt + unread),
            read_seconds=(clock.first or finished) - started,
            seconds=finished - (clock.first or finished),
            ending="unread" if not tokens else "end" if ended else "stopped" if interrupt.wanted else "length",
            footprint=Footprint.of(self.cache),
            full=self._full_answer(prompt, tokens) if self.settings.compare and not interrupt.wanted else None,
        )
        self.answers.append(answer)
        return answer

    def _full_answer(self, prompt: int, tokens: list[int]) -> FullAnswer:
        """A new full cache reads the whole conversation: some layers of some models cannot take an answer back."""
        cache, ids = DynamicCache(config=self.model.config), self.ids[:prompt]
        nobody, never = Listener(), Interrupt()
        self._voice.read(ids, cache, nobody, never)
        full = self._voice.answer(ids, cache, len(self.answers), nobody, never, self.positions.room(prompt))
        pairs = enumerate(zip(tokens, full, strict=False))
        same = next((place for place, (one, other) in pairs if one != other), min(len(tokens), len(full)))
        return FullAnswer(self._voice.text(full), full, same, kv_bytes(cache))

    @torch.inference_mode()
    def shrink(self, budget: int) -> None:
        """Hold fewer tokens from now on.

        Raises:
            UserError: no legal budget, or a larger one.
        """
        if not self.seen:
            self.begin(self.settings.with_budget(budget))
            return
        if budget > self.settings.budget:
            raise UserError(
                f"/budget {budget}: the budget is {self.settings.budget} and evicted tokens cannot come back"
                + ("" if self.settings.context else f"; /reset {budget} begins a new conversation with it")
            )
        try:
            self.cache.shrink(budget)
        except (TypeError, ValueError) as error:
            raise UserError(f"/budget {budget}: {error}") from error
        self.settings = self.settings.with_budget(budget)

    @contextmanager
    def _out_of_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            # Some layers have seen tokens that others have not.
            self.begin(self.settings)
            reason = str(error).splitlines()[0]
            raise UserError(
                f"out of memory, the conversation begins anew: {reason}; a smaller --prefill-chunk-size takes less "
                "to read, a smaller --budget less to hold"
            ) from error


def _make_cache(model: Any, settings: ChatSettings, turns: Turns) -> tuple[PagedEvictionCache, ChatSettings]:
    """An empty cache, and the settings with its budget in tokens."""
    curious = needs_queries(settings.policy, settings.loading.disposal)
    if curious and model.config._attn_implementation != PAGED_EVICTION:
        model.set_attn_implementation(PAGED_EVICTION)
    options = settings.loading
    if settings.protect_system:
        options = options.but(protected_prefix=max(turns.prefix(), options.protected_prefix))
    if settings.memory is not None:
        (size,) = parse_memory(settings.memory)
        budget = tokens_of_memory(model, options, settings.policy, size.memory or 0, f"--memory {settings.memory}")
        settings = settings.but(budget=budget)
    label = f"with a budget of {settings.budget}"
    cache = make_paged_cache(model.config, options, settings.policy, label, budget=settings.budget)
    if not cache.paged_layers:
        raise UserError("no layer of this model keeps all that it has read, so there is nothing to evict")
    return cache, settings


def _open_cache(model: Any, settings: ChatSettings, path: Path) -> tuple[PagedEvictionCache, ChatSettings]:
    """The cache of a saved context, and the settings that it was made with.

    Raises:
        UserError: it cannot be used here.
    """
    typed = settings.loading.attn_implementation
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
    sizes, budget = cache.paged_layers[0][1].budget, Footprint.of(cache).budget
    loading = settings.loading.but(policies=(policy,), budgets=(str(budget),), block_size=sizes.block_size)
    return cache, settings.but(loading=loading, budget=budget)


class _Clock(Listener):
    """Passes everything on, and notes when the first token came."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.first: float | None = None
        self.reading, self.text = listener.reading, listener.text  # type: ignore[method-assign]

    def token(self, count: int, seconds: float) -> None:
        if self.first is None:
            self.first = perf_counter()
        self._listener.token(count, seconds)
