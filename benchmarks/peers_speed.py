"""Time and memory of a token beside other caches, on a CPU: `python benchmarks/peers_speed.py`.

Rows are JSON lines in `results/peers_speed.jsonl`; those that stand there are not measured again, so the command may be
stopped and repeated. Every row is a ratio to `DynamicCache` in the same process: one token with it before and one after
each token with the candidate, in CPU time, and the median over tokens. Caches are filled with made keys and values, the
same for all, because a prompt of 32k tokens takes a CPU too long to read; a decoded token does not see the difference.
What reading takes is measured apart (`reading`), where that is feasible.

`--candidates quantized` needs optimum-quanto. A candidate that cannot run here has a row that says why. The rows of
kvpress, which needs an older transformers than this package, are of an earlier version of this script.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import transformers
from common import RESULTS, timed_on
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import create_masks_for_generate

from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.integration.feeding import feed
from hf_paged_eviction_eval.bench.decoder import fill, layer_shapes
from hf_paged_eviction_eval.bench.shapes import config_of

ROWS = RESULTS / "peers_speed.jsonl"
#: Name in the rows -> shape and type of numbers. Weights are random: time does not depend on them.
MODELS = {
    "smollm2": ("smollm2-135m", torch.float32),
    "1b-float32": ("llama-3.2-1b", torch.float32),
    "1b-bfloat16": ("llama-3.2-1b", torch.bfloat16),
}
BUDGET, POLICY, CHUNK = 1024, "keydiff", 512
#: A full cache that is larger is not tried.
MOST_BYTES = 5 * 2**30
#: Of this package, by name: options of the cache.
OURS: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"static": True},
    "heads": {"allocator": "heads"},
    "4 bits": {"bits": 4},
}
_PROFILE = "hf_paged_eviction/learned/published/smollm2-135m-instruct.safetensors"
_PREPARED = {"policy": "observed", "allocator": "heads(power=1.5)", "profile": _PROFILE, "sink_tokens": 4}
#: The lines of the README's table: `--models smollm2 --lengths 8192 --rows 1`, and these as `--candidates`.
FRONT: dict[str, dict[str, Any]] = {
    "prepared": _PREPARED,
    "prepared in 8 bits": {**_PREPARED, "bits": 8},
    "unprepared": {"policy": "auto", "allocator": "first_prompt"},  # random weights have no profile
    "published": {"policy": "paged_eviction"},
    "random": {"policy": "random"},
}
#: Ways to read a prompt.
READING = ("whole", "in chunks")


@dataclass(frozen=True)
class Case:
    """What a row is of.

    Attributes:
        kind: "token" or "reading".
        length: of the text so far, pads included.
        rows: of the batch; of several, row `i` begins with `i / (2 * rows)` of the length in pads.
    """

    kind: str
    model: str
    length: int
    rows: int
    candidate: str

    def mask(self) -> Tensor | None:
        """`[rows, length]`, 0 for pads; None = there are none."""
        if self.rows == 1:
            return None
        pads = torch.arange(self.rows)[:, None] * self.length // (2 * self.rows)
        return (torch.arange(self.length) >= pads).long()


class Run:
    """A cache that a model goes on with, token by token."""

    def __init__(self, model: Any, case: Case, cache: Any, seen: int, attention: str = "sdpa") -> None:
        self._model, self._attention, self.cache, self.seen = model, attention, cache, seen
        self.forward, self._mask = model.forward, case.mask()
        self._token, self._rows = torch.full((case.rows, 1), 7), case.rows

    def step(self) -> float:
        """CPU seconds of one token."""
        if self._model.config._attn_implementation != self._attention:
            self._model.set_attn_implementation(self._attention)
        if hasattr(self.cache, "prepare_step"):
            self.cache.prepare_step()
        inputs: dict[str, Any] = {"position_ids": torch.full((self._rows, 1), self.seen)}
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(self._rows, 1)], dim=-1)
            inputs |= {"attention_mask": self._mask, "position_ids": self._mask.sum(-1, keepdim=True) - 1}
        begun = time.process_time()
        if self.forward != self._model.forward and self._mask is not None:  # as generate does before a compiled step
            states = self._model.get_input_embeddings()(self._token)
            inputs["attention_mask"] = create_masks_for_generate(
                self._model.config, states, self._mask, self.cache, position_ids=inputs["position_ids"]
            )
        self.forward(self._token, use_cache=True, **{CACHE_ARGUMENT: self.cache}, **inputs)
        self.seen += 1
        return time.process_time() - begun


def filled(model: Any, case: Case, cache: Any = None) -> Run:
    """`DynamicCache`, which all others are compared with, or another cache of transformers."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    fill(cache, layer_shapes(model), case.rows, case.length, model)
    return Run(model, case, cache, case.length)


def paged(model: Any, **options: Any) -> Any:
    """An empty cache of this package."""
    from hf_paged_eviction import PagedEvictionCache

    return PagedEvictionCache(model.config, budget=BUDGET, **{"policy": POLICY, **options})


def ours(model: Any, case: Case, options: dict[str, Any]) -> Run:
    """The cache of this package; shares of heads are made, and read 2 * BUDGET tokens by the model."""
    from hf_paged_eviction.allocators import Heads

    if options.get("allocator") == "heads":
        heads = torch.linspace(0.25, 1.75, model.config.num_key_value_heads)
        options = options | {"allocator": Heads.of([heads.tolist()] * model.config.num_hidden_layers)}
    model.set_attn_implementation("paged_eviction")
    mask = case.mask()
    cache = paged(model, attention_mask=mask, **options)
    run = Run(model, case, cache, case.length, "paged_eviction")
    if "allocator" in options:  # shares are given when attention has told of the prompt: twice the budget is read
        read(model, cache, min(case.length, 2 * BUDGET), mask)
        run.seen = cache.get_seq_length()
        run._mask = None if mask is None else mask[:, : run.seen]
    else:
        fill(cache, layer_shapes(model), case.rows, case.length, model)
    if options.get("static"):
        run.step()  # attention follows what was filled in
        run.forward = torch.compile(model.forward, fullgraph=True, dynamic=False)
    return run


def read(model: Any, cache: Any, length: int, mask: Tensor | None = None) -> None:
    """Read a prompt in chunks."""
    ids = torch.arange(length).expand(1 if mask is None else len(mask), -1) % 997
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        feed(model, ids[:, start:stop], None if mask is None else mask[:, :stop], cache)


#: With as many tokens as the others keep; in 4 bits of transformers; with layers that wait in the memory of the host.
RUNS: dict[str, Callable[[Any, Case], Run]] = {
    "same tokens": lambda model, case: filled(model, replace(case, length=BUDGET)),
    "quantized": lambda model, case: filled(
        model, case, transformers.QuantizedCache(backend="quanto", config=model.config, nbits=4)
    ),
    "offloaded": lambda model, case: filled(model, case, DynamicCache(config=model.config, offloading=True)),
    **{name: partial(ours, options=options) for name, options in {**OURS, **FRONT}.items()},
}


def tensor_bytes() -> int:
    """Of all storages that are alive; tensors of compilers and the like, which have none, do not count."""
    gc.collect()
    sizes = {}
    for tensor in gc.get_objects():
        if type(tensor) in {Tensor, torch.nn.Parameter} and tensor.device.type == "cpu":
            with suppress(RuntimeError):  # sparse or functional: no storage of its own
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@torch.inference_mode()
def token_row(model: Any, case: Case, tokens: int, warm_up: int = 4) -> dict[str, Any]:
    """Ratios to `DynamicCache` of `tokens` tokens."""
    before = tensor_bytes()
    base = filled(model, case)
    full = tensor_bytes() - before
    run = RUNS[case.candidate](model, case)
    own = tensor_bytes() - before - full
    for side in (base, run):
        for _ in range(warm_up):
            side.step()
    own_seconds, beside = [], [base.step()]
    for _ in range(tokens):
        own_seconds.append(run.step())
        beside.append(base.step())
    ratios = [
        own_time / (less + more) * 2 for own_time, less, more in zip(own_seconds, beside, beside[1:], strict=False)
    ]
    low, _, high = quantiles(ratios, n=4)
    return {
        "tokens": tokens,
        "ms": round(1e3 * median(own_seconds), 2),
        "dynamic_ms": round(1e3 * median(beside), 2),
        "ratio": round(median(ratios), 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "bytes": own,
        "dynamic_bytes": full,
    }


def reading(name: str, length: int, way: str) -> tuple[float, int]:
    """In a process of its own: CPU seconds from a prompt to the logits of its last token, and the peak of memory above
    that of the model."""
    torch.set_num_threads(1)
    model = make_model(name)
    ids = (torch.arange(length) % 997)[None]
    with torch.inference_mode():
        if way == "in chunks":
            model.set_attn_implementation("paged_eviction")
        model(ids[:, :64], logits_to_keep=1)
        # Before the clock runs: importing what they need is no reading.
        cache = paged(model) if way in ("whole", "in chunks") else DynamicCache(config=model.config)
        base, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        if way == "in chunks":
            read(model, cache, length)
        else:
            model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    seconds = time.process_time() - begun
    return seconds, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)


def reading_row(case: Case) -> dict[str, Any]:
    """`DynamicCache` reads before and after the candidate."""
    measured = []
    for way in ("dynamic", case.candidate, "dynamic"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            measured.append(pool.submit(reading, case.model, case.length, way).result())
    (first, full), (own, peak), (last, _) = measured
    return {
        "seconds": round(own, 3),
        "dynamic_seconds": [round(first, 3), round(last, 3)],
        "ratio": round(2 * own / (first + last), 4),
        "peak_bytes": peak,
        "dynamic_peak_bytes": full,
    }


def make_model(name: str) -> Any:
    """Of published shape, with random weights."""
    shape, dtype = MODELS[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype, attn_implementation="sdpa").eval()


def full_bytes(case: Case) -> int:
    """Of `DynamicCache`."""
    shape, dtype = MODELS[case.model]
    config = config_of(shape)
    heads = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return 2 * heads * dtype.itemsize * case.rows * case.length


def cases(options: argparse.Namespace) -> list[Case]:
    """In the order in which they are measured."""
    candidates = options.candidates.split(",")
    sizes = [int(length) for length in options.lengths.split(",")], [int(rows) for rows in options.rows.split(",")]
    tokens = [
        Case("token", model, length, rows, candidate)
        for model, rows, length, candidate in product(options.models.split(","), sizes[1], sizes[0], candidates)
        if candidate in RUNS
    ]
    ways = [way for way in options.reading.split(",") if way]
    return tokens + [
        Case("reading", model, length, 1, way)
        for model, length, way in product(options.models.split(","), sizes[0], ways)
    ]


def key_of(row: dict[str, Any]) -> Case:
    """What this row is of."""
    return Case(*(row[field.name] for field in fields(Case)))


def load_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """Those that are there."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def measure(case: Case, model: Any, tokens: int) -> dict[str, Any]:
    """The row's numbers, or why there are none."""
    if full_bytes(case) > MOST_BYTES:
        return {"refused": f"DynamicCache takes {full_bytes(case) / 2**30:.0f} GiB"}
    try:
        return token_row(model, case, tokens) if case.kind == "token" else reading_row(case)
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return {"refused": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}


def main(arguments: list[str] | None = None) -> None:
    """Measure what is asked for and has no row yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--lengths", default="1024,8192,32768")
    parser.add_argument("--rows", default="1,8", help="of a batch")
    parser.add_argument("--candidates", default=",".join(["same tokens", *OURS]), help=", ".join(RUNS))
    parser.add_argument("--reading", default="", help=f"some of {', '.join(READING)}: slow")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=ROWS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    done, model, of = {key_of(row) for row in load_rows(options.output)}, None, None
    environment = timed_on()
    for case in cases(options):
        if case in done:
            continue
        if case.kind == "token" and of != case.model:
            model, of = None, case.model
            gc.collect()
            model = make_model(case.model)
        row = {**vars(case), **measure(case, model, options.tokens), "environment": environment}
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print({name: value for name, value in row.items() if name != "environment"}, flush=True)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
