"""Some prompts of a batch, as many as fit into memory, under every policy and budget that they miss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache, make_disposal

from ..data.prompting.prompts import Batch, Prompt
from ..grouping import grouped
from ..metrics.thinking import without_thinking
from ..models.device import input_device
from ..options.settings import TaskSettings
from ..progress import Reading, tell
from ..store.checks import RowKey, row_key
from ..store.results import Row
from .agreement import FullAnswer, identical_share, mean_kl
from .decoding import Decoding, decode, follow
from .efficiency import PeakMemory
from .generation import Generator, Judge
from .prefill import Inputs, can_share
from .recording import Memory, shows_queries
from .rows import finished_row
from .start import First, Probed, Reader, Source, Start
from .variants import Variant, make_cache, shared_length, variants


@dataclass(frozen=True)
class Group:
    """Prompts that run together under one variant.

    Attributes:
        tokens: held by each row of the cache, None = all.
        rows: their indices in the batch.
    """

    variant: Variant
    tokens: int | None
    rows: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        return self.tokens is None


class Part:
    """One attempt at some rows of a batch.

    Args:
        rows: indices of the prompts, which have the same stop rule.
        done: rows that exist already; it may grow while results are taken.
        share: whether one reading of the prompts may serve all caches.

    Attributes:
        shared: whether it does.
        running: the rows that are being worked on.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: TaskSettings,
        batch: Batch,
        rows: Sequence[int],
        done: Set[RowKey],
        share: bool,
    ) -> None:
        self.model, self.settings, self.batch, self.rows, self.done = model, settings, batch, rows, done
        self.device = input_device(model)
        missing = [row for row in rows if any(self._misses(variant, row) for variant in variants(settings))]
        self.groups = [group for variant in variants(settings) for group in self._groups(variant, missing)]
        self.prompts = [batch.prompts[row] for row in missing]
        self.generator = Generator(model, tokenizer, any(prompt.sample.stop_at_newline for prompt in self.prompts))
        self.reader = Reader(model, settings, self.generator, self._tell)
        # One cache alone is better off reading the prompts by itself.
        several = len({group.variant for group in self.groups}) > 1
        plain = can_share(DynamicCache(config=model.config))
        self.shared = share and several and settings.prefill_chunk_size is None and plain
        self.running = [key for group in self.groups for key in self._keys(group)]
        self.memory: tuple[str, Memory] | None = None
        self.probed: tuple[tuple[str, tuple[int, ...]], Probed] | None = None
        self.full_answers: dict[int, FullAnswer] = {}

    def _tell(self, done: int, total: int) -> None:
        tell(Reading(tuple(self.running), done, total, self.batch.task))

    def _misses(self, variant: Variant, row: int) -> bool:
        return variant.key(self.batch, self.batch.prompts[row]) not in self.done

    def _groups(self, variant: Variant, rows: Sequence[int]) -> list[Group]:
        """What a variant has to answer; prompts whose budgets differ stay apart."""
        # Agreement needs the full cache's answer again, even if its row is there.
        again = self.settings.agreement and variant.budget.is_full
        groups = grouped(
            (row for row in rows if again or self._misses(variant, row)),
            lambda row: variant.budget_tokens(self.model, self.settings, self.batch, self.batch.prompts[row]),
        )
        return [Group(variant, tokens, tuple(members)) for tokens, members in groups.items()]

    def results(self) -> Iterator[list[Row]]:
        """Rows of one group after the other."""
        if not self.groups:
            return
        source = self.reader.source(self.prompts, queries=self._keeps_queries()) if self.shared else None
        for group in self.groups:
            if not (self.settings.agreement and group.is_full):
                self.running = self._keys(group)
            rows = [row for row in self._answer(group, source) if row_key(row) not in self.done]
            if rows:
                yield rows

    def _keeps_queries(self) -> bool:
        attends = make_disposal(self.settings.disposal).needs_queries
        needed = any(group.variant.needs_queries or (attends and not group.is_full) for group in self.groups)
        return needed and shows_queries(self.model)

    def _keys(self, group: Group) -> list[RowKey]:
        prompts = [self.batch.prompts[row] for row in group.rows]
        return [key for prompt in prompts if (key := group.variant.key(self.batch, prompt)) not in self.done]

    def _answer(self, group: Group, source: Source | None) -> list[Row]:
        memory = PeakMemory(self.device)
        prompts = [self.batch.prompts[row] for row in group.rows]
        inputs = self.reader.inputs(prompts)
        if group.variant.by_probe and group.tokens is not None and self.reader.probed(inputs) > group.tokens:
            source, start = None, self._by_probe(group, inputs, group.tokens)
        else:
            cache = self._cache(group, inputs, source)
            if source is not None and not source.fills(cache):
                source = None
            start = self.reader.start(inputs, cache, source)
            del cache
        decoding, agreement = self._decode(group, inputs, start)
        # Beside a source, the peak says nothing of this cache.
        peak = {"peak_bytes": None if self.shared else memory.bytes(), "shared_prefill": source is not None}
        if source is not None and start.cache is source.cache:
            source.rewind()
        del start
        rows = []
        for index, (prompt, tokens) in enumerate(zip(prompts, decoding.answers, strict=True)):
            measured = {"budget_tokens": group.tokens, "efficiency": decoding.costs[index] | peak}
            measured |= {"agreement": agreement[index]}
            text, ends = self.generator.text(tokens), self.generator.ends
            rows.append(finished_row(self.settings, self.batch, group.variant, prompt, text, tokens, ends, measured))
        return rows

    def _decode(self, group: Group, inputs: Inputs, start: Start) -> tuple[Decoding, Sequence[dict[str, float] | None]]:
        """The answers, and how they agree with those of the full cache."""
        settings = self.settings
        if settings.teacher_forced and not group.is_full:
            return follow(self.generator, inputs, start, [self.full_answers[row] for row in group.rows])
        # Decoding uses it up.
        compressed = deepcopy(start.cache) if settings.agreement and not group.is_full else None
        limits = [self.batch.prompts[row].sample.max_new_tokens for row in group.rows]
        record = settings.agreement and group.is_full
        judges = self._judges(group)
        decoding = decode(self.generator, inputs, start, limits, record=record, tell=self._tell, judges=judges)
        return decoding, self._agreement(group, inputs, decoding, compressed, start.first)

    def _judges(self, group: Group) -> Sequence[Judge]:
        """What says of each row that its answer is right, where that ends it."""
        if not self.settings.stop_when_right:
            return ()
        return [partial(self._is_right, self.batch.prompts[row]) for row in group.rows]

    def _is_right(self, prompt: Prompt, tokens: Sequence[int]) -> bool:
        answer, _ = without_thinking(self.generator.text(tokens), prompt.thinking)
        return prompt.sample.score(answer) == 1

    def _by_probe(self, group: Group, inputs: Inputs, budget: int) -> Start:
        """A cache that a probe compresses; where readings are shared, all budgets of a policy have one probe."""
        wanted = group.variant.policy, group.rows
        probe, self.probed = self.probed, None
        if probe is None or probe[0] != wanted:
            del probe  # holds a whole context
            size = self.settings.block
            room = -(-self.reader.probed(inputs) // size) * size
            cache = self._made(group, room, inputs)
            probe = wanted, self.reader.probe(inputs, cache, budget)
        if self.shared:
            self.probed = probe
        return self.reader.shrunk(inputs, probe[1], budget, again=self.shared)

    def _spans(self, inputs: Inputs) -> Any:
        return inputs.protected if self.settings.protected_roles else None

    def _cache(self, group: Group, inputs: Inputs, source: Source | None) -> DynamicCache:
        # The full cache needs no copy where it can go on in the source and be cut back afterwards.
        if group.is_full and source is not None and source.serves_as(inputs):
            return source.cache
        cache = self._made(group, group.tokens, inputs)
        if isinstance(cache, PagedEvictionCache) and source is not None and source.queries:
            self._remember(group.variant, source, cache)
        return cache

    def _made(self, group: Group, tokens: int | None, inputs: Inputs) -> DynamicCache:
        # Prompts of a group hold the same number of tokens, so the length of any of them will do.
        length = shared_length(self.batch, self.batch.prompts[group.rows[0]])
        spans = self._spans(inputs)
        return make_cache(self.model, self.settings, group.variant, tokens, length, inputs.context_mask, spans)

    def _remember(self, variant: Variant, source: Source, cache: PagedEvictionCache) -> None:
        """Work out only once what a policy makes of the source's queries."""
        if not variant.needs_queries:
            return
        # All budgets of a policy come one after the other.
        if self.memory is None or self.memory[0] != variant.scorer:
            self.memory = variant.scorer, Memory(source.queries.values())
        self.memory[1].attach(cache)

    def _agreement(
        self,
        group: Group,
        inputs: Inputs,
        decoding: Decoding,
        cache: DynamicCache | None,
        first: First,
    ) -> Sequence[dict[str, float] | None]:
        """Of each row, with what the full cache said before."""
        if first.logits is None:
            return [None] * len(group.rows)
        if cache is None:
            self.full_answers |= {row: decoding.full_answer(index) for index, row in enumerate(group.rows)}
            return [{"identical": 1.0, "kl": 0.0}] * len(group.rows)
        answers = [self.full_answers[row] for row in group.rows]
        divergences = mean_kl(self.model, inputs, cache, first.logits, answers)
        return [
            {"identical": identical_share(tokens, answer), "kl": divergence}
            for tokens, answer, divergence in zip(decoding.answers, answers, divergences, strict=True)
        ]
