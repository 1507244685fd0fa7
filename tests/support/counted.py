"""How much code a token passes: calls, files, operators.

A tiny Llama runs. Calls of functions in hf_paged_eviction are counted, properties included, and operators of torch
beside those that `DynamicCache` needs for as many tokens.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_paged_eviction
from calibrations import drawn_score
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.learned.calibration import Calibration, fingerprint, save_calibration

PACKAGE = Path(hf_paged_eviction.__file__).parent
BUDGET, PROMPT = 128, 200


class Call(NamedTuple):
    """One call of a function of the package: calls that it is inside of, its file, and its name with its class."""

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
    """A tiny model that reads with a cache. Without a budget: `DynamicCache`."""

    def __init__(self, attention: str = "sdpa", layers: int = 1, budget: int | None = BUDGET, **options: Any) -> None:
        sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": layers}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(config).eval()
        self.model.set_attn_implementation(attention)
        self.cache: Any = DynamicCache()
        self._prompt = max(PROMPT, (budget or 0) + PROMPT - BUDGET)
        if budget is not None:
            self.cache = PagedEvictionCache(self.model.config, budget=budget, **{"policy": "paged_eviction", **options})

    @torch.no_grad()
    def read(self, count: int) -> None:
        self.model(torch.randint(0, 64, (1, count)), **{CACHE_ARGUMENT: self.cache})

    def calls(self, count: int) -> list[Call]:
        """The calls of a forward of so many tokens."""
        return traced(lambda: self.read(count))

    def operators(self, tokens: int) -> list[int]:
        """Operators of each of so many tokens, behind a prompt."""
        self.read(self._prompt)
        counts = []
        for _ in range(tokens):
            with Operators() as operators:
                self.read(1)
            counts.append(operators.count)
        return counts


#: Caches whose operators are counted; an allocator is made for so many layers.
OPERATORS: dict[str, dict[str, Any]] = {
    "keydiff": {"policy": "keydiff"},
    "snapkv": {"policy": "snapkv"},
    "static": {"policy": "keydiff", "static": True},
    "4 bits": {"policy": "keydiff", "bits": 4},
    "shares of heads": {"policy": "keydiff", "allocator": lambda layers: Heads.of([[2.0, 0.5]] * layers)},
}


def operators(cases: dict[str, dict[str, Any]] = OPERATORS) -> dict[str, tuple[float, float]]:
    """Operators per layer that a token needs beyond those of `DynamicCache`: the fewest, and on average over blocks."""

    def per_layer(options: dict[str, Any]) -> list[float]:
        one, three = (
            Text("paged_eviction", layers=layers, **{k: v(layers) if callable(v) else v for k, v in options.items()})
            for layers in (1, 3)
        )
        return [(more - less) / 2 for less, more in zip(one.operators(16), three.operators(16), strict=True)]

    (base,) = set(per_layer({"budget": None}))
    counts_by_name = {name: per_layer(options) for name, options in cases.items()}
    return {name: (min(counts) - base, sum(counts) / len(counts) - base) for name, counts in counts_by_name.items()}


def thirty_layers(folder: Path) -> Iterator[tuple[str, dict[str, list[Call]]]]:
    """Of 30 layers, as SmolLM2 has: the calls of a prompt that overflows, of the first token and the third behind it,
    when some heads have room left, of a token inside a block, of the most expensive one around the end of a block, and
    of a token before the cache is full; by case. A profile is written into `folder`."""
    draw = torch.Generator().manual_seed(3)
    table = 0.25 + 1.5 * torch.rand(30, 2, generator=draw)
    heads: dict[str, Any] = {"allocator": Heads.of(table.tolist()), "heads": "separate"}
    scores = {index: drawn_score(2, 16, draw) for index in range(30)}
    config = Text(layers=30, budget=None).model.config
    save_calibration(Calibration(scores, fingerprint(config)), profile := str(folder / "profile.safetensors"))
    cases: dict[str, dict[str, Any]] = {
        "equal": {"policy": "keydiff"},
        "heads": {"policy": "keydiff", **heads},
        "heads in 4 bits": {"policy": "keydiff", **heads, "bits": 4},
        "heads in 4 bits, snapkv": {"policy": "snapkv", **heads, "bits": 4},
        "heads in 4 bits, observed": {"policy": "observed", "profile": profile, **heads, "bits": 4},
        "static": {"policy": "keydiff", "static": True},
    }
    for name, options in cases.items():
        text = Text("paged_eviction", layers=30, **options)
        events = {"overflow": text.calls(PROMPT), "first token": text.calls(1)}
        text.read(1)
        events["third token"] = text.calls(1)
        for _ in range(14):
            text.read(1)
        steps = [text.calls(1) for _ in range(32)]
        events |= {"token": min(steps, key=len), "end of a block": max(steps, key=len)}
        growing = Text("paged_eviction", layers=30, **options)
        growing.read(20)
        growing.read(1)
        yield name, {**events, "growing": growing.calls(1)}


def runs() -> dict[str, list[Call]]:
    """The calls of each case by its name."""
    text, static = Text(), Text(static=True)
    snapkv = Text("paged_eviction", policy="snapkv", allocator="ada_kv")
    static.read(PROMPT)
    static.read(1)
    return {
        "overflowing prompt": text.calls(PROMPT),
        "victim due": text.calls(1),
        "token overwritten": text.calls(1),
        "token, static": static.calls(1),
        "prompt, snapkv@ada_kv": snapkv.calls(PROMPT),
    }


def tree(calls: list[Call]) -> str:
    """One line per call, its callers before it."""
    first = calls[0].depth if calls else 0
    return "\n".join(f"{'  ' * (call.depth - first) + call.name:56s} {call.file}" for call in calls)
