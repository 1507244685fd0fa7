"""One conversation in one cache: every token is read once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList

from hf_paged_eviction.table.spans import Spans

from ..caches.making import policy_of
from ..errors import UserError
from ..options.chat import ChatOptions
from ..running.efficiency import kv_bytes
from ..running.generation import end_tokens, plain_settings, without_sampling
from ..running.prefill import feed, input_device
from .answering import Interrupt, Listener
from .figures import Footprint
from .settings import make_cache, open_cache
from .turns import Turn, Turns, common_length

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
        seconds: after the first token.
        full: answer of a full cache, where that was asked for.
    """

    text: str
    tokens: list[int]
    read: int
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
        policy: what it keeps tokens by, with an allocator that is not the uniform one.

    Args:
        options: as `chat_settings` gives them.

    Raises:
        UserError: policy, budget, protected prefix or model do not go together.
    """

    def __init__(self, model: Any, tokenizer: Any, options: ChatOptions) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self._device, self._ends = input_device(model), end_tokens(model, tokenizer)
        self.begin()

    def begin(self) -> None:
        """Start anew, with a new cache."""
        options = self.options
        self.turns = Turns(self.tokenizer, options.system, options.chat_template, follows=options.context is not None)
        self._system_tokens = self.turns.prefix() if "system" in options.protected_roles else 0
        self.ids: list[int] = []
        if options.context is None:
            self.cache = make_cache(self.model, options, self._protected())
        else:
            self.cache = open_cache(self.model, options, options.context)
        self.policy = policy_of(self.cache)
        self.context: int = self.cache.get_seq_length()
        self.ids = [0] * self.context
        self._answers = 0

    def _protected(self, turn: Turn | None = None) -> Spans:
        """Spans of the roles that are never evicted, when this turn comes."""
        roles, come = self.options.protected_roles, len(self.ids)
        spans = [(0, self._system_tokens)] if "system" in roles else []
        if "last_user" in roles and turn is not None:
            spans.append((come, come + len(turn.ids)))
        return tuple(spans)

    @property
    def seen(self) -> int:
        """Tokens that the cache has seen."""
        count: int = self.cache.get_seq_length()
        return count

    @property
    def budget(self) -> int:
        """Tokens per layer that the cache may hold, on average."""
        return Footprint.of(self.cache).budget

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.cache.paged_layers[0][1].budget.block_size)

    def prepare(self, message: str) -> Turn:
        """The turn that this message would be; the conversation is not changed.

        Raises:
            UserError: it is empty, or the chat template cannot take it.
        """
        if not message.strip():
            raise UserError("the message is empty: write one, or /help")
        return self.turns.next(message)

    def answer(self, turn: Turn, listener: Listener, interrupt: Interrupt) -> Answer:
        """Read a turn and answer it.

        Raises:
            UserError: memory or the model's table of positions has come to its end. The conversation has begun anew
                then.
        """
        with self._or_anew():
            return self._answer(turn, listener, interrupt)

    def _answer(self, turn: Turn, listener: Listener, interrupt: Interrupt) -> Answer:
        if "last_user" in self.options.protected_roles:
            try:
                self.cache.protect(self._protected(turn))
            except ValueError as error:
                raise UserError(f"--protect last_user: {error}") from error
        self.turns.begin(turn)
        self.ids += turn.ids
        prompt, before = len(self.ids), self.seen
        self.cache.note_ids(torch.tensor([self.ids]))
        tokens, seconds = self._say(self.ids, self.cache, listener, interrupt), listener.seconds
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
            seconds=seconds,
            ending="unread" if not tokens else "end" if ended else "stopped" if interrupt.wanted else "length",
            footprint=Footprint.of(self.cache),
            full=self._full_answer(prompt, tokens) if self.options.full and not interrupt.wanted else None,
        )
        self._answers += 1
        return answer

    def _full_answer(self, prompt: int, tokens: list[int]) -> FullAnswer:
        """A new full cache reads the whole conversation: some layers of some models cannot take an answer back."""
        cache = DynamicCache(config=self.model.config)
        full = self._say(self.ids[:prompt], cache, Listener(self.tokenizer), Interrupt())
        text: str = self.tokenizer.decode(full, skip_special_tokens=True)
        return FullAnswer(text, full, common_length(tokens, full), kv_bytes(cache))

    @torch.inference_mode()
    def _say(self, ids: list[int], cache: DynamicCache, listener: Listener, interrupt: Interrupt) -> list[int]:
        """Feed what the cache has not seen and generate behind it; nothing if Ctrl-C came before the last chunk.

        Returns:
            The answer, with the token that ended it; the last one has not been fed to the cache.
        """
        row, options = torch.tensor([ids], dtype=torch.int64, device=self._device), self.options
        mask, chunk, start = torch.ones_like(row), options.prefill_chunk_size, cache.get_seq_length()
        while len(ids) - cache.get_seq_length() > chunk and not interrupt.wanted:
            stop = cache.get_seq_length() + chunk
            feed(self.model, row[:, stop - chunk : stop], mask[:, :stop], cache)
            listener.reading(stop - start, len(ids) - start)
        if interrupt.wanted:
            return []
        choice: dict[str, Any] = without_sampling(self.model.generation_config)
        if options.temperature > 0:
            torch.manual_seed(options.seed * 1_000_003 + self._answers)
            choice = {"temperature": options.temperature, "top_p": options.top_p}
        output: Tensor = self.model.generate(
            input_ids=row,
            attention_mask=mask,
            past_key_values=cache,
            do_sample=options.temperature > 0,
            max_new_tokens=options.max_new_tokens or 1,
            streamer=listener,
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
        if budget > self.budget:
            raise UserError(f"/budget {budget}: the budget is {self.budget} and evicted tokens cannot come back")
        try:
            self.cache.shrink(budget)
        except (TypeError, ValueError) as error:
            raise UserError(f"/budget {budget}: {error}") from error

    @contextmanager
    def _or_anew(self) -> Iterator[None]:
        try:
            yield
        except (torch.OutOfMemoryError, IndexError) as error:
            # Some layers have seen tokens that others have not.
            length = len(self.ids)
            self.begin()
            if isinstance(error, IndexError):
                what = f"this model has no positions for {length:,} tokens, however few of them the cache holds"
                raise UserError(f"{what}: the conversation begins anew ({error})") from error
            reason = str(error).splitlines()[0]
            raise UserError(
                f"out of memory, the conversation begins anew: {reason}; a smaller --prefill-chunk-size takes less "
                "to read, a smaller --budget less to hold"
            ) from error
