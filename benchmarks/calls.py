"""How much code a token passes: calls, files, operators, microseconds of a layer. `python benchmarks/calls.py --help`

A tiny Llama runs. Calls of functions in hf_paged_eviction are counted, properties included, and operators of torch
beside those that `DynamicCache` needs for as many tokens.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_paged_eviction
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

PACKAGE = Path(hf_paged_eviction.__file__).parent
BUDGET, PROMPT = 128, 200


@dataclass(frozen=True)
class Call:
    """One call of a function of the package.

    Attributes:
        depth: calls of the package that it is inside of.
        file: below the package.
        name: with its class.
    """

    depth: int
    file: str
    name: str


def traced(run: Callable[[], object]) -> list[Call]:
    """The calls of the package's functions that `run` makes, in order."""
    calls: list[Call] = []
    depth = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal depth
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(f"{PACKAGE}/"):
            return
        if event == "call":
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified names
            file = str(Path(code.co_filename).relative_to(PACKAGE))
            calls.append(Call(depth, file, name))
        depth += 1 if event == "call" else -1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


class Operators(TorchDispatchMode):
    """Counts operators of torch while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Text:
    """A tiny model that reads with a cache, here and there with its calls traced. Without a budget: `DynamicCache`."""

    def __init__(
        self,
        attention: str = "sdpa",
        policy: str = "paged_eviction",
        layers: int = 1,
        budget: int | None = BUDGET,
        **options: Any,
    ) -> None:
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(config).eval()
        self.model.set_attn_implementation(attention)
        self.cache: Any = DynamicCache()
        self._prompt = max(PROMPT, (budget or 0) + PROMPT - BUDGET)
        if budget is not None:
            self.cache = PagedEvictionCache(self.model.config, budget=budget, policy=policy, **options)

    @torch.no_grad()
    def read(self, count: int) -> list[Call]:
        """The calls of a forward of so many tokens."""
        ids = torch.randint(0, 64, (1, count))
        return traced(lambda: self.model(ids, **{CACHE_ARGUMENT: self.cache}))

    @torch.no_grad()
    def operators(self, tokens: int) -> list[int]:
        """Operators of each of so many tokens, behind a prompt."""
        self.read(self._prompt)
        counts = []
        for _ in range(tokens):
            with Operators() as operators:
                self.model(torch.randint(0, 64, (1, 1)), **{CACHE_ARGUMENT: self.cache})
            counts.append(operators.count)
        return counts


#: Caches whose operators are counted.
OPERATORS: dict[str, dict[str, Any]] = {
    "keydiff": {"policy": "keydiff"},
    "snapkv": {"policy": "snapkv"},
    "static": {"policy": "keydiff", "static": True},
    "4 bits": {"policy": "keydiff", "bits": 4},
    "4 bits, read as they lie": {"policy": "keydiff", "bits": 4, "budget": 384},
    "shares of heads": {"policy": "keydiff", "allocator": [2.0, 0.5]},
}


def operators() -> dict[str, tuple[float, float]]:
    """Operators per layer that a token needs beyond those of `DynamicCache`: the fewest, and on average over blocks."""

    def per_layer(**options: Any) -> list[float]:
        counts = []
        for layers in (1, 3):
            layer_options = dict(options)
            if isinstance(layer_options.get("allocator"), list):
                layer_options["allocator"] = Heads.of([layer_options["allocator"]] * layers)
            counts.append(Text("paged_eviction", layers=layers, **layer_options).operators(32))
        return [(more - less) / 2 for less, more in zip(*counts, strict=True)]

    (base,) = set(per_layer(budget=None, policy=""))
    counts_by_name = {name: per_layer(**options) for name, options in OPERATORS.items()}
    return {name: (min(counts) - base, sum(counts) / len(counts) - base) for name, counts in counts_by_name.items()}


def runs() -> dict[str, list[Call]]:
    """The calls of each case by its name."""
    text, static = Text(), Text(static=True)
    snapkv = Text("paged_eviction", "snapkv", allocator="ada_kv")
    texts = {"overflowing prompt": text.read(PROMPT), "victim due": text.read(1), "token overwritten": text.read(1)}
    for _ in range(2):
        static.read(PROMPT if not static.cache.get_seq_length() else 1)
    texts["token, static"] = static.read(1)
    texts["prompt, snapkv@ada_kv"] = snapkv.read(PROMPT)
    return texts


def tree(calls: list[Call]) -> str:
    """One line per call, its callers before it."""
    first = calls[0].depth if calls else 0
    return "\n".join(f"{'  ' * (call.depth - first) + call.name:56s} {call.file}" for call in calls)


# ---- time ------------------------------------------------------------------------------------------------------------


def update_us(rounds: int, layers: int = 16, steps: int = 16) -> tuple[float, float]:
    """CPU time of one layer's `update` for a token, in microseconds, and of the two writes to tensors alone.

    Of many layers over whole blocks, so their common choice of victims counts; medians of rounds that take turns.
    """
    cache = PagedEvictionCache(Text(layers=layers).model.config, budget=BUDGET, policy="paged_eviction")
    prompt, token = torch.randn(1, 2, PROMPT, 16), torch.randn(1, 2, 1, 16)
    storage, slot = torch.zeros(1, 2, BUDGET, 16), torch.zeros(1, 1, 1, dtype=torch.int64)

    def update(states: torch.Tensor = token) -> None:
        for index in range(layers):
            cache.update(states, states, index)

    def write() -> None:
        for _ in range(layers):
            index = slot[..., None].expand(1, 2, -1, 16)
            storage.scatter_(2, index, token)
            storage.scatter_(2, index, token)

    times: dict[str, list[float]] = {"update": [], "write": []}
    with torch.no_grad():
        update(prompt)
        for _ in range(rounds):
            for name, run in (("update", update), ("write", write)):
                start = time.process_time()
                for _ in range(steps):
                    run()
                times[name].append((time.process_time() - start) / steps / layers * 1e6)
    return median(times["update"]), median(times["write"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", metavar="NAME", help="print the calls of this case, callers before callees")
    parser.add_argument("--rounds", type=int, default=30, help="of timing")
    options = parser.parse_args()
    measured = runs()
    if options.tree is not None:
        print(tree(measured[options.tree]))
        return
    for name, calls in measured.items():
        print(f"{name:24s} {len(calls):4d} calls {len({call.file for call in calls}):3d} files")
    for name, (least, mean) in operators().items():
        print(f"{name:24s} {least:4.0f} operators per layer and token beside DynamicCache's, {mean:.1f} on average")
    torch.set_num_threads(1)
    update, write = update_us(options.rounds)
    print(f"update of one layer and token: {update:.1f} us, {write:.1f} of them the writes to tensors")


if __name__ == "__main__":
    main()
