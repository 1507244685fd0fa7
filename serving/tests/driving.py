"""Continuous batching step by step, without its thread: a schedule says what happens before which step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.integration.models import why_not_ours
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_serving import moved, paged_batching

#: Why the tests of this room are skipped; empty = they are not.
UNSERVED = "; ".join(moved())
#: Cuts of the tests, in tokens.
CHUNK = 16
#: What is called before which step.
Schedule = Mapping[int, Sequence[Any]]


@cache
def model_of(family: str = "llama") -> PreTrainedModel:
    """In float64, so that no last bit decides between two tokens."""
    return models.build(family).double()


def texts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens."""
    return [prompt.tolist() for prompt in models.prompts(list(lengths), seed=seed)]


def greedy(new: int, **changes: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, **changes)


def pool(pages: int, page_size: int = 16, tokens: int = CHUNK + 8, **changes: Any) -> Any:
    """A configuration of continuous batching with so many pages and tokens per step."""
    from transformers import ContinuousBatchingConfig

    sizes = {"page_size": page_size, "num_blocks": pages, "max_batch_tokens": tokens, "allow_block_sharing": False}
    return ContinuousBatchingConfig(**(sizes | changes))


_ANSWERS: dict[Any, list[int]] = {}


def alone(model: PreTrainedModel, prompt: Sequence[int], new: int, **options: Any) -> list[int]:
    """What the request gives by itself, with `PagedEvictionCache` and the same cuts; the same request runs once."""
    key = model, model.config._attn_implementation, tuple(prompt), new, repr(sorted(options.items()))
    if key not in _ANSWERS:
        _ANSWERS[key] = held_alone(model, prompt, new, **options)[0]
    return _ANSWERS[key]


def held_alone(
    model: PreTrainedModel, prompt: Sequence[int], new: int, **options: Any
) -> tuple[list[int], PagedEvictionCache]:
    """As `alone`, and the cache afterwards."""
    chunk = options.pop("prefill_chunk_size", CHUNK)
    before = model.config._attn_implementation
    if why_not_ours(model.config) is None:
        model.set_attn_implementation(PAGED_EVICTION)
    try:
        cache_ = PagedEvictionCache(model.config, **options)
        return answer(model, cache_, prompt, new, chunk), cache_
    finally:
        model.set_attn_implementation(before)


def feed(model: PreTrainedModel, cache_: PagedEvictionCache, tokens: Sequence[int], chunk: int = CHUNK) -> torch.Tensor:
    """The cache takes these tokens in, so many at a time; logits of the last ones."""
    for start in range(0, len(tokens), chunk):
        ids = torch.tensor([list(tokens[start : start + chunk])])
        with torch.no_grad():
            logits: torch.Tensor = model(ids, **{CACHE_ARGUMENT: cache_}).logits
    return logits


def answer(
    model: PreTrainedModel, cache_: PagedEvictionCache, prompt: Sequence[int], new: int, chunk: int = CHUNK
) -> list[int]:
    """The most likely tokens, one after the other."""
    logits, tokens = feed(model, cache_, prompt, chunk), []
    for at in range(new):
        tokens.append(int(logits[0, -1].argmax()))
        if at < new - 1:
            logits = feed(model, cache_, tokens[-1:])
    return tokens


@dataclass
class Batching:
    """A manager whose loop is turned by hand.

    Attributes:
        answers: finished requests: their tokens, or the error.
        most_pages: most pages that each request ever owned.
        most_live: most requests that owned pages at once.
    """

    manager: Any
    processor: Any
    answers: dict[str, list[int] | str] = field(default_factory=dict)
    most_pages: dict[str, int] = field(default_factory=dict)
    most_live: int = 0

    @property
    def bounded(self) -> Any:
        return self.processor.scheduler.bounded

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        pool_ = self.processor.cache.pool
        return int(pool_.num_free_sectors * self.bounded.blocks_per_sector + pool_.count_free_blocks(0))

    def last_held(self, name: str, schedule: Schedule | None = None) -> list[list[list[int]]]:
        """Turn until a request has ended. Positions of the tokens that it then held, by layer, set and slot."""
        request = None
        for _ in self._turns(schedule):
            request = self.bounded.requests.get(name, request)
            if name in self.answers:
                break
        request_table = self.bounded.request_table
        held = request.layout.held(request.seen)
        positions = request_table.positions[request_table.pages.first(request.number, held)]
        sets = [own.tolist() for own in positions.split([*held])]
        return [sets[at : at + request_table.sets] for at in range(0, len(sets), request_table.sets)]

    def add(self, name: str, prompt: Sequence[int], new: int, **options: Any) -> None:
        self.manager.add_request(list(prompt), request_id=name, max_new_tokens=new, eos_token_id=-1, **options)

    def step(self) -> bool:
        """One forward, if there is anything to do."""
        has_input = not (self.manager.input_queue.empty() and self.manager.cancel_queue.empty())
        if not has_input and not self.processor.has_pending_requests():
            return False
        self.manager._generation_loop_body(self.processor, bootstrapping=False)
        for name, blocks in self.bounded.block_table.items():
            self.most_pages[name] = max(self.most_pages.get(name, 0), len(blocks))
        self.most_live = max(self.most_live, len(self.bounded.block_table))
        self._collect()
        return True

    def _collect(self) -> None:
        queue = self.manager.output_router.output_queue
        while not queue.empty():
            output = queue.get()
            if output.is_finished():
                self.answers[output.request_id] = output.error or output.generated_tokens

    def run(self, schedule: Schedule | None = None) -> None:
        """Turn until all is done."""
        for _ in self._turns(schedule):
            pass

    def _turns(self, schedule: Schedule | None) -> Iterator[None]:
        """Each step until all is done; before step `n` call what `schedule[n]` holds."""
        steps = dict(schedule or {})
        at = 0
        while True:
            for act in steps.pop(at, ()):
                act(self)
            busy = self.step()
            at += 1
            if not busy and not steps:
                return
            yield


@contextmanager
def batching(model: PreTrainedModel, config: Any, **options: Any) -> Any:
    """A manager inside `paged_batching`, turned by hand."""
    options.setdefault("prefill_chunk_size", CHUNK)
    with paged_batching(model, **options):
        manager = model.init_continuous_batching(greedy(20), config)
        manager.current_batch = 0
        manager._wake_up_loop.wait = lambda timeout=None: None  # there is no other thread to wait for
        processor = manager.batch_processor = manager._create_batch_processor()
        # What was never written must never be read.
        processor.cache.cache_tensor.view(model.dtype).fill_(float("nan"))
        yield Batching(manager, manager.batch_processor)
