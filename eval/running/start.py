"""From prompts to caches that have read them, with one reading for all of them where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import REPEAT, PagedLayer, Queries, probe_context

from ..data.prompting.chat_template import end_of_turn
from ..data.prompting.prompts import Prompt
from ..models.device import input_device
from ..options.settings import TaskSettings
from .agreement import recorded_logits
from .efficiency import Stopwatch
from .generation import Generator
from .prefill import Ids, Inputs, after_forwards, can_share, read, replay
from .recording import RecordingCache


@dataclass(frozen=True)
class First:
    """The first token of each answer, not yet fed to a cache.

    Attributes:
        tokens: `[rows]` int64.
        logits: `[rows, vocabulary]` they come from, on the CPU; None where nobody asks.
    """

    tokens: Tensor
    logits: Tensor | None

    def of(self, rows: Tensor) -> First:
        """Those of some rows `[n]` int64."""
        tokens = self.tokens[rows.to(self.tokens.device)]
        return First(tokens, None if self.logits is None else self.logits[rows])


@dataclass(frozen=True)
class Source:
    """Contexts (or whole prompts) that were read once, with the full cache.

    Attributes:
        cache: all their keys and values.
        inputs: what was read.
        first: None where questions have yet to be fed.
        seconds: what reading took.
        queries: by layer, without keys; empty where nobody asked for them.
    """

    cache: DynamicCache
    inputs: Inputs
    first: First | None
    seconds: float
    queries: Mapping[int, Queries]

    def fills(self, cache: DynamicCache) -> bool:
        """Whether an empty cache can be brought to the state in which reading by itself would leave it."""
        paged = [(index, layer) for index, layer in enumerate(cache.layers) if isinstance(layer, PagedLayer)]
        return can_share(cache) and all(layer.recorder is None or index in self.queries for index, layer in paged)

    def rows(self, inputs: Inputs) -> Tensor:
        """`[contexts]` int64, where the contexts of some of its prompts are."""
        places: dict[Ids, list[int]] = {}
        for index, context in enumerate(self.inputs.contexts):
            places.setdefault(context, []).append(index)
        return torch.tensor([places[context][0] for context in inputs.contexts])

    def serves_as(self, inputs: Inputs) -> bool:
        """Whether its cache is just what these inputs need, row by row, and can forget what is fed to it then."""
        slides = any(type(layer) is DynamicSlidingWindowLayer for layer in self.cache.layers)
        return inputs.spread is None and inputs.contexts == self.inputs.contexts and not slides

    def rewind(self) -> None:
        """Forget what was fed after the contexts."""
        surplus = self.cache.get_seq_length() - self.inputs.context_ids.shape[1]
        if surplus:
            self.cache.crop(-surplus)


@dataclass(frozen=True)
class Start:
    """A cache that has seen the whole prompts, and was compressed on the way.

    Attributes:
        first: the first token of each answer.
        prefill_seconds: until that token, compression included; a shared reading counts in full.
    """

    cache: DynamicCache
    first: First
    prefill_seconds: float


@dataclass(frozen=True)
class Probed:
    """Contexts that were read once and probed. Each budget shrinks a copy of the cache.

    Attributes:
        cache: holds all tokens, with the attention of the probe.
        seconds: of reading and asking.
    """

    cache: PagedEvictionCache
    seconds: float


class Reader:
    """Reads prompts under the settings of a run.

    Args:
        tell: told, after every chunk of a prompt that is read in chunks, how many of how many columns were read.
    """

    def __init__(
        self, model: Any, settings: TaskSettings, generator: Generator, tell: Callable[[int, int], None] | None = None
    ) -> None:
        self.model, self.settings, self.generator, self.tell = model, settings, generator, tell
        self.device = input_device(model)

    def inputs(self, prompts: Sequence[Prompt]) -> Inputs:
        """Pad prompts together, see `Inputs.of`."""
        return Inputs.of(prompts, self.device)

    def source(self, prompts: Sequence[Prompt], *, queries: bool = False) -> Source:
        """Read what all caches have to read.

        Args:
            queries: keep the queries, too, for caches that need them.
        """
        inputs, config = self.inputs(prompts), self.model.config
        cache = RecordingCache(config) if queries else DynamicCache(config=config)
        watch = Stopwatch(self.device)
        first = None
        if self.settings.question_aware:
            first = self._first(inputs, cache)
        else:
            read(self.model, inputs.context_ids, inputs.context_mask, cache)
        recorded = cache.stop() if isinstance(cache, RecordingCache) else {}
        # The keys are in the cache, which may grow and would leave these behind.
        recorded = {index: replace(one_layer, key=one_layer.key.new_empty(0)) for index, one_layer in recorded.items()}
        return Source(cache, inputs, first, watch.lap(), recorded)

    def probed(self, inputs: Inputs) -> int:
        """Columns that a probe compresses: all that is to be compressed, but a token is left to answer from."""
        return inputs.context_ids.shape[1] - self.settings.question_aware

    def start(self, inputs: Inputs, cache: DynamicCache, source: Source | None) -> Start:
        """Bring a cache to the end of the prompts: an empty one, or that of a source that serves as it is."""
        watch = Stopwatch(self.device)
        with self._chunks_told(inputs.ids.shape[1], cache.get_seq_length()):
            first = self._fill(inputs, cache, source)
            seconds = watch.lap()
        shared = 0.0 if source is None else source.seconds
        return Start(cache, first, shared + seconds)

    def probe(self, inputs: Inputs, cache: PagedEvictionCache, budget: int) -> Probed:
        """Read the contexts into an empty cache that has room for them, and ask the model to repeat them.

        Args:
            budget: to which the cache will be shrunk.
        """
        watch, columns = Stopwatch(self.device), self.probed(inputs)
        ids, mask = inputs.context_ids[:, :columns], inputs.context_mask[:, :columns]
        tokenizer = self.generator.tokenizer
        # As in KVzip, an instruct model is asked in the user's turn, and repeats in its own.
        text = REPEAT + (end_of_turn(tokenizer) if inputs.chat and not self.settings.question_aware else "")
        probe = tokenizer.encode(text, add_special_tokens=False)
        chunk = self.settings.prefill_chunk_size or 2048
        with self._chunks_told(inputs.ids.shape[1]):
            probe_context(self.model, cache, budget, ids, mask, probe_ids=probe, chunk_size=chunk)
        return Probed(cache, watch.lap())

    def shrunk(self, inputs: Inputs, probed: Probed, budget: int, *, again: bool) -> Start:
        """The start of a probed cache at this budget. The time of the probe counts in full.

        Args:
            again: other budgets follow, so that a copy is shrunk.
        """
        cache = deepcopy(probed.cache) if again else probed.cache
        watch = Stopwatch(self.device)
        cache.shrink(budget)
        seconds = watch.lap()
        start = self.start(inputs, cache, None)
        return replace(start, prefill_seconds=probed.seconds + seconds + start.prefill_seconds)

    def _chunks_told(self, columns: int, before: int = 0) -> AbstractContextManager[None]:
        """Tell of every forward within this block, where prompts are read in chunks."""
        tell, read_so_far = self.tell, before
        if tell is None or self.settings.prefill_chunk_size is None:
            return nullcontext()

        def note(ids: Tensor | None, output: Any) -> None:
            nonlocal read_so_far
            if ids is not None:
                read_so_far += ids.shape[1]
                tell(min(read_so_far, columns), columns)

        return after_forwards(self.model, note)

    def _fill(self, inputs: Inputs, cache: DynamicCache, source: Source | None) -> First:
        if source is None:
            if not self.settings.question_aware and not cache.get_seq_length():
                chunk = self.settings.prefill_chunk_size
                read(self.model, inputs.context_ids, inputs.context_mask, cache, chunk)
        elif cache is not source.cache:
            replay(source.cache, cache, source.rows(inputs), inputs.context_ids.shape[1], source.queries)
        if inputs.spread is not None:
            cache.batch_select_indices(inputs.spread)
        if source is None or source.first is None:
            return self._first(inputs, cache)
        return source.first.of(source.rows(inputs))

    def _first(self, inputs: Inputs, cache: DynamicCache) -> First:
        chunk = self.settings.prefill_chunk_size if self.settings.question_aware else None
        with recorded_logits(self.model, self.settings.agreement) as logits:
            tokens = self.generator.first(inputs, cache, chunk)
        return First(tokens, logits[-1] if logits else None)
