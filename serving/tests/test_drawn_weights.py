"""Requests and changes of weights in drawn order: each forward computes as its weights would, whatever is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch

import driving
import models
from driving import CHUNK, Batching, batching, feed, pool, texts
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.queries.attention import PAGED_EVICTION

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

KINDS: tuple[dict[str, Any], ...] = (
    {"policy": "keydiff"},
    {"policy": "h2o"},
    {"policy": "value_norm", "allocator": Heads.of([[0.3, 1.7], [1.4, 0.6]])},
)
NEW = 4
ROUNDS = 9
#: Together they meet what each part of `Weights.key` is there for.
SEEDS = range(20, 26)
Change = Callable[[Any, Random], None]


class Alone:
    """`PagedEvictionCache` with one request, read as far as the manager has read it, by the weights of each moment."""

    def __init__(self, model: Any, prompt: list[int], options: dict[str, Any]) -> None:
        self._model, self._prompt = model, prompt
        self._cache, self._seen = PagedEvictionCache(model.config, **options), 0
        self.answer: list[int] = []

    def read(self, seen: int) -> None:
        """Read on, up to this number of tokens."""
        while self._seen < seen:
            text = self._prompt + self.answer
            end = min(self._seen - self._seen % CHUNK + CHUNK, len(self._prompt))
            piece = text[self._seen : max(end, self._seen + 1)]
            logits = feed(self._model, self._cache, piece)
            self._seen += len(piece)
            if self._seen >= len(self._prompt):
                self.answer.append(int(logits[0, -1].argmax()))
        assert self._seen == seen, "the manager cut the prompt elsewhere"


class Lockstep:
    """A manager, and each of its requests alone beside it."""

    def __init__(self, model: Any, turned: Batching, options: dict[str, Any]) -> None:
        self._model, self._turned, self._options = model, turned, options
        self._live: dict[str, Alone] = {}
        self.answers: dict[str, list[int]] = {}

    def ask(self, prompt: list[int]) -> None:
        name = str(len(self._live) + len(self.answers))
        with attention(self._model, PAGED_EVICTION):
            self._live[name] = Alone(self._model, prompt, self._options)
        self._turned.add(name, prompt, NEW)

    def turn(self, steps: int) -> None:
        """So many forwards, or fewer if there is nothing to do."""
        for _ in range(steps):
            if not self._turned.step():
                return
            with attention(self._model, PAGED_EVICTION):
                self._follow()

    def _follow(self) -> None:
        for name, request in list(self._live.items()):
            if name in self._turned.answers:
                request.read(len(request._prompt) + NEW - 1)
                self.answers[name] = self._live.pop(name).answer
            elif name in self._turned.bounded.requests:
                request.read(self._turned.bounded.requests[name].seen)


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    yield
    model.set_attn_implementation(before)


def in_place(model: Any, draw: Random) -> None:
    weight = draw.choice(list(model.parameters()))
    with torch.no_grad():
        weight.add_(torch.randn_like(weight), alpha=0.3)


def optimizer(model: Any, draw: Random) -> None:
    kind = draw.choice([torch.optim.SGD, torch.optim.AdamW])
    steps = kind(model.parameters(), lr=0.05, foreach=draw.random() < 0.5)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    steps.step()
    steps.zero_grad()


def loaded(model: Any, draw: Random) -> None:
    other = models.build("llama", seed=draw.randrange(9)).double()
    model.load_state_dict(other.state_dict(), strict=False, assign=draw.random() < 0.5)


def replaced(model: Any, draw: Random) -> None:
    layer = draw.choice([module for module in model.modules() if type(module) is torch.nn.Linear])
    layer.weight = torch.nn.Parameter(layer.weight.detach().flip(0))


def rounded(model: Any, draw: Random) -> None:
    """By a module's own conversions, which replace the memory of its parameters."""
    layer = draw.choice([module for module in model.modules() if type(module) is torch.nn.Linear])
    layer.to(torch.float8_e4m3fn).double()


class Back:
    """Earlier weights come back; which of them, is drawn."""

    def __init__(self) -> None:
        self._earlier: list[dict[str, torch.Tensor]] = []

    def note(self, model: Any) -> None:
        self._earlier.append({name: value.clone() for name, value in model.state_dict().items()})

    def __call__(self, model: Any, draw: Random) -> None:
        model.load_state_dict(draw.choice(self._earlier), strict=False)


def schedule(model: Any, wrapped: Any, changes: list[Change], draw: Random) -> None:
    """Requests with common beginnings, and before some of them, or while they are read, a change of the weights."""
    options = {"budget": 32, "block_size": 4} | draw.choice(KINDS)
    first, other = texts([37, 37], seed=draw.randrange(99))
    prompts = [
        beginning + texts([draw.randint(1, 30)], seed=draw.randrange(99))[0]
        for beginning in (first, first, first[:16] + other[:21], other)
    ]
    back = Back()
    changes = draw.sample([*changes, back], 3)  # few, so that they meet again
    with batching(wrapped, pool(9, allow_block_sharing=True), **options) as turned:
        both = Lockstep(model, turned, options)
        for _ in range(ROUNDS):
            back.note(model)
            for _ in range(draw.randint(1, 3)):
                both.ask(draw.choice(prompts))
                both.turn(draw.choice([0, 1, 3, 99]))
            draw.choice(changes)(wrapped, draw)
        both.turn(999)
        assert both.answers == turned.answers
        assert turned.bounded.prefixes.hits > 0
        assert turned.free == 9


@pytest.mark.parametrize("seed", SEEDS)
def test_changes_of_weights(seed: int) -> None:
    model = models.build("llama").double()
    schedule(model, model, [in_place, optimizer, loaded, replaced, rounded], Random(seed))


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "merged_adapters")]


def switched(model: Any, draw: Random) -> None:
    model.set_adapter(draw.choice(sorted(model.peft_config)))


def disabled(model: Any, draw: Random) -> None:
    model.base_model.disable_adapter_layers()


def enabled(model: Any, draw: Random) -> None:
    model.base_model.enable_adapter_layers()


def one_layer(model: Any, draw: Random) -> None:
    """The adapters of one layer are turned on or off."""
    layer = draw.choice(layers_of(model))
    layer.enable_adapters(layer.disable_adapters)


def scaled(model: Any, draw: Random) -> None:
    layer = draw.choice(layers_of(model))
    for name in layer.scaling:
        layer.scaling[name] = draw.choice([0.5, 1.0, 2.0])


def added(model: Any, draw: Random) -> None:
    name = f"added {draw.random()}".replace(".", "")  # PEFT finds its modules by paths with dots
    model.add_adapter(name, next(iter(model.peft_config.values())))
    model.double().set_adapter(name)


def deleted(model: Any, draw: Random) -> None:
    name, *others = draw.sample(sorted(model.peft_config), len(model.peft_config))
    if others:
        model.set_adapter(others[0])
        model.delete_adapter(name)


def merged(model: Any, draw: Random) -> None:
    """Or no longer, if they were."""
    if any(layer.merged for layer in layers_of(model)):
        model.unmerge_adapter()
    else:
        model.merge_adapter()


@pytest.mark.filterwarnings("ignore:Adapter cannot be set when the model is merged")
@pytest.mark.parametrize("seed", SEEDS)
def test_changes_of_adapters(seed: int) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, draw = models.build("llama").double(), Random(seed)
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, settings, adapter_name="one")
    added(wrapped, draw)
    changes = [switched, disabled, enabled, one_layer, one_layer, scaled, added, deleted, merged, in_place]
    schedule(model, wrapped, changes, draw)
