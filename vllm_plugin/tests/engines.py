"""A server of a tiny model, and a record of what its scheduler did."""

import gc
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.sampling_params import RequestOutputKind

from alone import Rounding, answer
from hf_paged_eviction_vllm.settings import _servers
from hf_paged_eviction_vllm.snapshots import snapshots_of
from hf_paged_eviction_vllm.spec import EvictionManager


@dataclass
class Record:
    """What the scheduler did.

    Attributes:
        chunks: of each request, tokens of each step since it was last admitted.
        begun: of each request, the chunks in which the snapshot was read that it then began with.
        hits: of each request that was admitted in this step with a snapshot, its chunks.
        kept: of each snapshot, by the hash of its text, the chunks in which it was read.
        most: of each request, most blocks of a group at a time.
        read: of each request, tokens that it read when it was last admitted.
        over: requests that owned more blocks than they may.
        preempted: number of preemptions.
        managers: those of layers that evict.
    """

    chunks: dict[str, list[int]] = field(default_factory=dict)
    begun: dict[str, list[int]] = field(default_factory=dict)
    hits: dict[str, list[int]] = field(default_factory=dict)
    kept: dict[bytes, list[int]] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    over: list[str] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=dict)
    preempted: int = 0
    managers: list[EvictionManager] = field(default_factory=list)

    def cuts(self, request: str, stop: int | None = None) -> list[int]:
        """The chunks in which the first `stop` tokens of a request were read, by itself or by others."""
        cuts = []
        for count in [*self.begun[request], *self.chunks[request]]:
            cuts.append(count if stop is None else min(count, stop - sum(cuts)))
        return [count for count in cuts if count]

    def name(self, start: str) -> str:
        """The request whose id is this one, a hyphen, and what vLLM adds."""
        return next(request for request in self.chunks if request.startswith(f"{start}-"))


@dataclass
class Server:
    """A server.

    Attributes:
        llm: vLLM.
        model: the same model in transformers.
        options: those of its requests.
        record: what its scheduler did.
        rounding: of keys and values.
        sessions: of each session, the tokens that were generated.
    """

    llm: Any
    model: Any
    options: dict[str, Any]
    record: Record
    rounding: Rounding | None = None
    sessions: dict[str, list[int]] = field(default_factory=dict)

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        new: int,
        extra: dict[str, Any] | None = None,
        salt: str | None = None,
        anew: bool = False,
        **more: Any,
    ) -> None:
        """A request arrives.

        Args:
            extra: its own options.
            salt: keeps its text apart.
            anew: whether it reads all of its text.
            more: arguments of vLLM's `add_request`, and `n`, the number of answers.
        """
        parameters = _greedy(new, extra, more.pop("n", 1))
        if anew:
            parameters.skip_reading_prefix_cache = True
        text = {"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {})
        self.llm.llm_engine.add_request(name, text, parameters, **more)

    def tell(self, session: str, tokens: Sequence[int], new: int, last: bool = False, **more: Any) -> None:
        """A session begins or gets its next part; `sessions` has its answers.

        Args:
            last: whether it ends instead; then `tokens` do not matter.
            more: arguments of vLLM's `process_inputs`.
        """
        engine = self.llm.llm_engine
        more |= {"supported_tasks": engine.get_supported_tasks(), "resumable": not last}
        text = {"prompt_token_ids": list(tokens)}
        part = engine.input_processor.process_inputs(f"{session}-0", text, _greedy(new, None, 1), **more)
        part.external_req_id = part.request_id  # the engine has answers for it, which nobody waits for
        self.sessions.setdefault(session, [])
        engine.engine_core.add_request(part)

    def step(self) -> dict[str, list[int]]:
        """One step; the answers that are complete. Of requests with several these are named `0_name`, `1_name` etc."""
        answers = {}
        for output in self.llm.llm_engine.step():
            if output.finished:
                several = len(output.outputs) > 1
                for number, one in enumerate(output.outputs):
                    answers[f"{number}_{output.request_id}" if several else output.request_id] = list(one.token_ids)
        return answers

    def cancel(self, name: str) -> None:
        """A request or session is given up, if it is still there."""
        self.llm.llm_engine.abort_request([name])
        self.llm.llm_engine.engine_core.abort_requests([f"{name}-0"])

    def preempt(self) -> bool:
        """The request that came last loses its blocks, as when none are left; False if there is none."""
        scheduler = self.scheduler
        if not scheduler.running:
            return False
        request = scheduler.running.pop()
        scheduler._preempt_request(request, time.monotonic())
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        return True

    def finish(self) -> dict[str, list[int]]:
        """All steps until no request is left."""
        answers: dict[str, list[int]] = {}
        while self.llm.llm_engine.has_unfinished_requests():
            answers |= self.step()
        return answers

    def check(self, name: str, prompt: Sequence[int], given: list[int], options: dict[str, Any] | None = None) -> None:
        """An answer is that of `PagedEvictionCache` alone."""
        request = self.record.name(name)
        chunks, done = self.record.chunks[request], self.record.read[request]
        count = next(at for at in range(1, len(chunks) + 1) if sum(chunks[:at]) == done)
        known = done - len(prompt)  # of the answer, read as part of the prompt after a preemption
        text = [*prompt, *given[:known]]
        own, new = self.options | (options or {}), len(given) - known
        wanted = answer(self.model, own, text, chunks[:count], new, self.rounding)
        assert given[known:] == wanted, f"{name}: {len(prompt)} tokens in {chunks[:count]}"

    def check_blocks(self) -> None:
        """No request owned more blocks than it may, and all are free."""
        assert not self.record.over, self.record.over
        for manager in self.record.managers:
            assert not manager.req_to_blocks and not manager.claims
            assert manager.block_pool.get_num_free_blocks() == manager.block_pool.num_gpu_blocks - 1


@contextmanager
def served(folder: Path, model: Any, options: dict[str, Any], **engine: Any) -> Any:
    """Serve a model; its scheduler is watched."""
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "block_size": 32} | engine
    settings = {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8} | settings
    model.set_attn_implementation("paged_eviction")
    llm = LLM(str(folder), skip_tokenizer_init=True, additional_config={"paged_eviction": options}, **settings)
    own = {name: value for name, value in options.items() if name not in ("reserve", "snapshots")}
    server = Server(llm, model, own, Record())
    _watch(server)
    try:
        yield server
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm, server
        _servers.clear()  # something may hold the configuration for a while
        cleanup_dist_env_and_memory()  # the next model may need groups that this one did not
        gc.collect()


def _greedy(new: int, extra: dict[str, Any] | None, count: int) -> SamplingParams:
    return SamplingParams(
        n=count,
        max_tokens=new,
        temperature=0,
        detokenize=False,
        ignore_eos=True,
        extra_args=extra,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _watch(server: Server) -> None:
    scheduler, record = server.scheduler, server.record
    record.managers = [
        one for one in scheduler.kv_cache_manager.coordinator.single_type_managers if isinstance(one, EvictionManager)
    ]
    for manager in record.managers:
        _watch_snapshots(manager, record)
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        admitted = [new.req_id for new in output.scheduled_new_reqs]
        for name in [*admitted, *output.scheduled_cached_reqs.resumed_req_ids]:
            before = scheduler.requests[name].num_computed_tokens - output.num_scheduled_tokens[name]
            hit, known = record.hits.pop(name, []), record.chunks.get(name)
            if before and known and hit in ([], record.cuts(name)):  # a session, or one that only changed its blocks
                continue
            record.begun[name], record.chunks[name] = hit, []
            record.read[name] = scheduler.requests[name].num_tokens
        record.preempted += len(output.preempted_req_ids or ())
        for name, count in output.num_scheduled_tokens.items():
            record.chunks[name].append(count)
            for manager in record.managers:
                blocks = sum(not block.is_null for block in manager.req_to_blocks[name])
                # One token comes into a block that is not kept; a chunk may begin and end within blocks.
                chunk = -(-count // manager.block_size) if count > 1 else 0
                most = manager.claim(name).kept + 1 + chunk
                record.most[name] = max(record.most.get(name, 0), blocks)
                if blocks > most:
                    record.over.append(f"{name}: {blocks} blocks, {most} are allowed")
        return output

    def updated(*args: Any) -> Any:
        outputs = update(*args)
        for of_client in outputs.values():
            for one in of_client.outputs:
                server.sessions.get(one.request_id.rsplit("-", 1)[0], []).extend(one.new_token_ids)
        return outputs

    scheduler.schedule, scheduler.update_from_output = watched, updated


def _watch_snapshots(manager: EvictionManager, record: Record) -> None:
    known, add, keep = snapshots_of(manager.block_pool), manager.add_local_computed_blocks, manager._keep_snapshot

    def added(request: str, blocks: Any, begun: int, *args: Any, **kwargs: Any) -> None:
        if begun:
            (text,) = [text for text, one in known.items() if one.blocks[0] is blocks[0] and one.is_whole]
            record.hits[request] = record.kept[text]
        add(request, blocks, begun, *args, **kwargs)

    def kept(claim: Any) -> None:
        before = dict(known)
        keep(claim)
        for text, one in known.items():
            if before.get(text) is not one:
                record.kept[text] = record.cuts(one.origin, one.seen)

    manager.add_local_computed_blocks, manager._keep_snapshot = added, kept


def drawn(rng: Any, count: int, vocabulary: int = 500) -> list[int]:
    """A text of random tokens."""
    return [rng.randrange(3, vocabulary) for _ in range(count)]
