"""A case: a model, options of the cache, a batch and a sequence of calls; and a game of it against the slow cache."""

from __future__ import annotations

import copy
import pickle
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache as memoize
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

import models
from calibrations import drawn_score
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.integration.models import paged_layers
from hf_paged_eviction.learned.calibration import Calibration, fingerprint, save_calibration
from hf_paged_eviction.precision import few_bits
from slow_cache import SlowCache, Tied, by_row

Call = tuple[Any, ...]
#: Words of which a refusal has at least one: it tells the way out.
WAYS_OUT = "use give call choose smallest make pass upgrade nearest fewer allowed".split()
WAYS_OUT += ["must be", "needs budget"]
#: Of the size of the logits. A wrong token, place or rounding moves them by far more. Angles are worked out in single
#: precision, and plain attention (eager) is played in it.
TOLERANCE, OF_ANGLES = 1e-6, 1e-4
#: The same under autocast, whose numbers have eight bits: it moves logits by up to 0.02 of their size, and by up to
#: 0.06 where a number in two or three bits is rounded to its other neighbour.
OF_AUTOCAST, OF_FEW_BITS_IN_AUTOCAST = 0.05, 0.15


@dataclass(frozen=True)
class Case:
    """What is played.

    Attributes:
        options: of `PagedEvictionCache`.
        calls: see `Game`.
        family: see `MODELS`.
        attention: implementation that the model is set to.
        rows: of the batch.
        seed: of the text and the pads.
        pass_mask: the pads are told to the constructor, besides the model.
        autocast: the caller has it on, and the model is in single precision, since autocast leaves a double one alone.
            It must not reach what the cache works out.
    """

    options: dict[str, Any] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    family: str = "llama"
    attention: str = "sdpa"
    rows: int = 1
    seed: int = 0
    pass_mask: bool = False
    autocast: bool = False


class RefusedError(Exception):
    """The constructor refused the options, with the reason and the way out."""


def _refusal(error: Exception) -> Exception:
    message = str(error)
    if len(message) < 40 or not any(way in message.lower() for way in WAYS_OUT):
        return AssertionError(f"refused without the way out: {message}")
    return RefusedError(message)


#: Family of `support.models` and what is changed of it, by name.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "small_states": ("llama", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gemma3": ("gemma3", {}),
    "gemma3n": ("gemma3n", {}),
    # Experts exist in single precision only; without them all models are played in double.
    "deepseek_v3": ("deepseek_v3", {"first_k_dense_replace": 2}),
    "lfm2": ("lfm2", {}),
    "falcon_h1": ("falcon_h1", {}),
    "cohere": ("cohere", {}),
    "glm": ("glm", {}),
    "smollm3": ("smollm3", {}),
    "yarn": ("llama", models.rope("yarn", factor=8.0, original_max_position_embeddings=64)),
    # With experts, so that their attention has to be eager.
    "gpt_oss": ("gpt_oss", {}),
    "qwen3_next": ("qwen3_next", {}),
}
#: Pads come on the left of the first forward only.
RECURRENT = ("lfm2", "falcon_h1", "qwen3_next")


OURS = "paged_eviction"
#: Policies of a file, which is drawn.
FITTED = ("calibrated", "observed")


@memoize
def model_of(family: str, attention: str, single: bool = False) -> Any:
    """In double precision noise hardly ever decides which token goes, or how it is rounded. Plain attention (eager)
    knows none: there pads give nan.
    """
    name, changes = MODELS[family]
    model = models.build(name, attention, **changes)
    if attention != "eager" and not single:
        model = model.double()
    if family == "small_states":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight *= 1e-6
                layer.self_attn.v_proj.weight *= 1e-6
    return model


def shape_of(family: str, attention: str) -> tuple[Any, int, int]:
    """The text model's config, its KV heads, and their width."""
    config = model_of(family, attention).config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config, config.num_key_value_heads, dim


@memoize
def calibration_of(family: str, attention: str) -> str:
    """A file of scores that have nothing to do with the model, of keys before rotary embedding: one for each layer."""
    config, heads, dim = shape_of(family, attention)
    draw = torch.Generator().manual_seed(2)
    layers = {index: drawn_score(heads, dim, draw) for index in paged_layers(config)}
    path = Path(tempfile.mkdtemp()) / "drawn.safetensors"
    save_calibration(Calibration(layers, fingerprint(config), {}, True), path)
    return str(path)


@memoize
def shares_of(family: str, attention: str) -> Heads:
    """Shares of heads that differ by up to a factor of 50."""
    config, heads, _ = shape_of(family, attention)
    draw = torch.Generator().manual_seed(3)
    return Heads.of(50 ** torch.rand(len(paged_layers(config)), heads, generator=draw))


class Game:
    """One case being played. Every method is a call of a case, by its name."""

    def __init__(self, case: Case) -> None:
        self.case, self.rows = case, case.rows
        self.without_masks = False
        self.model = model_of(case.family, case.attention, case.autocast)
        self.draw = torch.Generator().manual_seed(case.seed)
        self.static = bool(case.options.get("static"))
        self.recurrent = case.family in RECURRENT
        self.plain = model_of(case.family, "eager" if case.attention == "eager" else "sdpa", case.autocast)
        self.slow = SlowCache(self.plain, case.options, case.autocast)
        self.cache: Any = None
        try:
            self.cache = self._made()
        except (ValueError, TypeError) as error:
            raise _refusal(error) from error
        angles = case.options.get("positions") == "cache" or self.model.dtype != torch.float64
        self.tolerance = OF_ANGLES if angles else TOLERANCE
        if case.autocast:
            self.tolerance = OF_FEW_BITS_IN_AUTOCAST if {2, 3} & {*self.slow.bits} else OF_AUTOCAST
        self.forwards = 0

    def _made(self, **changes: Tensor) -> PagedEvictionCache:
        options = {"policy": self.slow.policy, **self.case.options, **changes}
        if options["policy"] == "tied":
            options["policy"] = Tied()
        if options.get("policy") in FITTED:
            options["profile"] = calibration_of(self.case.family, self.case.attention)
        if options.get("allocator") == "heads":
            options["allocator"] = shares_of(self.case.family, self.case.attention)
        return models.paged(self.model.config, **options)

    def play(self) -> Game:
        """All calls."""
        for name, *arguments in self.case.calls:
            getattr(self, name)(*arguments)
        return self

    # ---- forwards --------------------------------------------------------------------------------------------------

    def _columns(self, count: int, pads: str) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, which of them are real, and positions, `[rows, count]` each."""
        rows, slow = self.rows, self.slow
        ids = torch.randint(2, models.VOCABULARY, (rows, count), generator=self.draw)
        real = torch.ones(rows, count, dtype=torch.bool)
        fits = not (self.recurrent and slow.seen) and not (self.static and count == 1)
        if pads == "left" and fits:
            real = torch.arange(count) >= torch.randint(count, (rows, 1), generator=self.draw)
        elif pads == "any" and fits and not self.recurrent:
            real = torch.randint(4, (rows, count), generator=self.draw) > 0
        before = slow.shown.sum(1, keepdim=True) if slow.seen else torch.zeros(rows, 1, dtype=torch.long)
        return ids.masked_fill(~real, models.PAD), real, (before + real.long().cumsum(1) - 1).clamp(min=0)

    def _say(self, cache: Any, ids: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        mask = torch.cat([self._past(), real], dim=1) if self.slow.seen else real
        given = None if self.without_masks and self.slow.seen and mask.all() else mask.long()
        with torch.no_grad(), self._autocast():
            logits: Tensor = self.model(
                input_ids=ids, attention_mask=given, position_ids=positions, **{CACHE_ARGUMENT: cache}, use_cache=True
            ).logits
        return logits

    def _past(self) -> Tensor:
        """A mask of the past, `[rows, seen]` bool, that shows one or another of the forgotten tokens."""
        forgotten = self.slow.shown & ~self.slow.visible
        if not forgotten.any():
            return self.slow.visible
        return self.slow.visible | (forgotten & (torch.rand(forgotten.shape, generator=self.draw) < 0.7))

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast)

    def _feed(self, columns: tuple[Tensor, Tensor, Tensor]) -> None:
        with self.slow.following(self.cache, *columns):
            try:
                logits = self._say(self.cache, *columns)
            except ValueError as error:
                if re.match(r"budget='[\d.]+[kMG]?B'|budget='\d+%' of", str(error)):  # known only now
                    raise _refusal(error) from error
                raise
        self.slow.compare(self.cache, logits, self.tolerance)
        self.forwards += 1

    def feed(self, count: int, pads: str = "none") -> None:
        """A forward of `count` columns; `pads`: none, left or any."""
        if makes := self.case.pass_mask and not self.slow.seen:
            self.slow.spans = by_row(self.case.options.get("protect"))  # others were given to the cache before
            self._match_spans()
        columns = self._columns(count, pads)
        if makes:
            self.cache = self._made(attention_mask=columns[1].long())
        self._feed(columns)

    def steps(self, count: int, pads: str = "none") -> None:
        """Single tokens."""
        for _ in range(count):
            self.feed(1, pads)

    def unmasked(self) -> None:
        """From now on, forwards after the first come without a mask where all tokens of all rows are visible."""
        self.without_masks = True

    def hide(self, kind: str, count: int, beforehand: bool = False) -> None:
        """A mask that hides tokens of the past comes with `count` columns, or before them (`beforehand`): the last
        ones of a row (`end`), one or another (`any`), or all of a row (`row`)."""
        if not self.slow.seen:
            return
        chosen = torch.rand(self.slow.visible.shape, generator=self.draw) < 0.3
        if kind != "any":
            share = torch.rand(self.rows, 1, generator=self.draw) if kind == "end" else torch.zeros(self.rows, 1)
            chosen = torch.arange(self.slow.seen) >= share * self.slow.seen
            chosen = chosen & (torch.rand(self.rows, 1, generator=self.draw) < 0.6)
        hidden = chosen & self.slow.visible
        if not hidden.any():
            return
        before = copy.deepcopy(self.cache)
        self.slow.commit(0)
        columns = self._hiding(hidden, count)
        mask = torch.cat([self._past() & ~hidden, columns[1]], dim=1).long()
        with self._autocast():
            before.follow_up(columns[0], mask)
        if beforehand:
            self.cache = before
        self.slow.hide(hidden)
        self._feed(columns)

    def _hiding(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Columns that come with a mask that hides these."""
        before, self.slow.shown = self.slow.shown, self.slow.shown & ~hidden
        columns = self._columns(count, "none")
        self.slow.shown = before
        return columns

    def forget(self, spans: list[tuple[int, int]], own: bool = False) -> None:
        """The cache is told to forget tokens; `own`: of the last row alone."""
        if not self.slow.seen:
            return
        places, hidden = self.slow.real.cumsum(1) - 1, torch.zeros_like(self.slow.real)
        lengths = self.slow.real.sum(1).tolist()
        asked = [[(min(start, n), min(end, n)) for start, end in spans] for n in lengths]
        asked = [row if not own or at == self.rows - 1 else [] for at, row in enumerate(asked)]
        for row, row_spans in enumerate(asked):
            for start, end in row_spans:
                hidden[row] |= self.slow.real[row] & (places[row] >= start) & (places[row] < end)
        held = self._positions()
        if hidden.any():
            self.slow.commit(0)
        try:
            with self._autocast():
                self.cache.forget(asked)
        except ValueError as error:
            _refusal(error)
            assert self.recurrent or "disposal" in self.case.options, str(error)
            assert self._positions() == held or self.slow.recording
            return
        if hidden.any():
            self.slow.hide(hidden & self.slow.visible, forget=True)
        self.slow.check(self.cache)

    def alone(self) -> None:
        """The model without any cache, with texts as long as what layers hold: nothing of the run may reach it."""
        held = {layer.held for _, layer in self.cache.paged_layers if layer.held}
        ids = torch.randint(2, models.VOCABULARY, (self.rows, 7), generator=self.draw)
        ids = ids.repeat(1, 1 + max(held, default=0) // 7)
        for stop in sorted({1, 7} | held):
            with torch.no_grad():
                expected = self.plain(ids[:, :stop], use_cache=False).logits
                off = (self.model(ids[:, :stop], use_cache=False).logits - expected).abs().max().item()
            assert off <= self.tolerance * (1 + expected.abs().max().item()), (
                f"without a cache logits differ by {off:.2e}"
            )

    def fail(self, count: int, where: str, then: int = 0) -> None:
        """A forward runs out of memory, before the last layer or between `update` and attention; then the model is
        used without a cache. The next forward, the same or one of `then` columns, is refused, or as if nothing had
        been. If refused, all begins anew."""
        columns = self._columns(count, "none")
        self.slow.commit(0)
        with _failing(self.model, where):
            try:
                self._say(self.cache, *columns)
            except torch.OutOfMemoryError:
                pass
            else:
                raise AssertionError("the forward did not fail")
        self.alone()
        columns = self._columns(then, "none") if then else columns
        try:
            with self.slow.following(self.cache, *columns):
                logits = self._say(self.cache, *columns)
        except (RuntimeError, ValueError) as error:
            # Where all layers with a state of their own have the tokens, no more is wrong than the next mask.
            expected = "reset()" in str(error) or str(error).startswith("attention_mask covers")
            assert expected, f"after a failed forward: {error}"
            self.reset()
        else:
            self.slow.compare(self.cache, logits, self.tolerance)

    # ---- rows and rollback -----------------------------------------------------------------------------------------

    def crop(self, count: int) -> None:
        """Take back `count` columns, or nothing at all."""
        count = min(count, self.slow.seen)
        if not count:
            return
        if self.recurrent and self.slow.seen - count == 1 and not self.slow.visible[:, 0].all():
            return  # the slow cache would read a pad alone, which transformers does not hide from a linear state
        before, allowed = self._positions(), self.slow.can_crop(count)
        try:
            with self._autocast():
                self.cache.crop(-count)
        except (ValueError, RuntimeError) as error:
            ruled = all(state.rule is not None for state in self.slow.layers.values())
            others = self.static or self.recurrent or self.case.family in SLIDING
            assert not (allowed and ruled) or others, f"crop({-count}) refused: {error}"
            assert self._positions() == before, "crop refused, and changed something"
            return
        assert allowed, "tokens were taken back that are needed to go on"
        self.slow.crop(count)
        self.slow.check(self.cache)
        if not self.slow.seen:
            self._match_spans()

    def _positions(self) -> list[Any]:
        return [layer.positions.tolist() for _, layer in self.cache.paged_layers]

    def order(self, kind: str) -> None:
        """Rows are put into another order (`reorder`), chosen (`select`) or repeated (`repeat`)."""
        if not self.slow.seen:
            return
        index = torch.arange(self.rows)
        if kind == "repeat" and self.rows <= 2:
            index = index.repeat_interleave(2)
            self.cache.batch_repeat_interleave(2)
        elif kind == "select":
            index = torch.randint(self.rows, (max(1, self.rows - 1),), generator=self.draw)
            self.cache.batch_select_indices(index)
        else:
            index = torch.randint(self.rows, (self.rows,), generator=self.draw)
            self.cache.reorder_cache(index)
        self.slow.select(index.tolist())
        self.rows = len(index)
        self.slow.check(self.cache)

    def shrink(self, blocks: int) -> None:
        """Give up so many blocks, as far as there are."""
        budget = self.cache.budget
        if self.static or budget is None:
            return
        sizes = self.cache._options.sizes
        smaller = max(budget - blocks * self.slow.block, sizes.smallest)
        if smaller >= budget:
            return
        with self._autocast():
            self.cache.shrink(smaller)
        self.slow.shrink(smaller)
        self.slow.check(self.cache)

    def protect(self, spans: list[tuple[int, int]]) -> None:
        """Other tokens stay from now on, unless the budget is too small for them."""
        try:
            with self._autocast():
                self.cache.protect(spans)
        except ValueError as error:
            _refusal(error)
            return
        self.slow.protect(spans)
        self.slow.check(self.cache)

    def gradient(self, count: int) -> None:
        """Begin anew, with two forwards whose gradients are asked for together: right, or refused."""
        self.reset()
        budget = self.cache.budget or 2 * count
        ids = torch.randint(2, models.VOCABULARY, (self.rows, 2 * count), generator=self.draw)
        weights = torch.randn(self.rows, 2 * count, models.VOCABULARY, generator=self.draw, dtype=self.model.dtype)
        if 2 * count > budget or self.case.family not in PLAIN:
            return
        gradients = []
        for model, cache in ((self.plain, DynamicCache(config=self.plain.config)), (self.model, self.cache)):
            embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
            try:
                with torch.enable_grad(), self._autocast():
                    parts = [
                        model(inputs_embeds=part, **{CACHE_ARGUMENT: cache}, use_cache=True).logits
                        for part in embeds.split(count, dim=1)
                    ]
                    (torch.cat(parts, dim=1) * weights).sum().backward()
            except (RuntimeError, ValueError, NotImplementedError) as error:
                assert len(str(error)) > 40, f"gradients are refused without a reason: {error}"
                break
            gradients.append(embeds.grad)
        self.reset()
        if len(gradients) == 2:
            off = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
            most = OF_AUTOCAST if self.case.autocast else 1e-3
            assert off < most, f"gradients over two forwards are wrong by {off:.2f} of their size"

    # ---- life ------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """And go on with what was loaded."""
        if not self.slow.seen:
            return
        if self.slow.recording:
            with self._autocast():
                self.cache.crop(0)
            self.slow.commit(0)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "context.safetensors"
            self.cache.save(path, self.slow.ids)
            own = Tied() if self.slow.policy == "tied" else None
            self.cache = PagedEvictionCache.load(path, self.model.config, input_ids=self.slow.ids, policy=own)
        self.slow.check(self.cache)

    def copy(self) -> None:
        """And go on with the copy."""
        self.cache = copy.deepcopy(self.cache)

    def pickle(self) -> None:
        """And go on with what came back."""
        self.cache = pickle.loads(pickle.dumps(self.cache))

    def reset(self) -> None:
        """Forget everything; the next batch may be another."""
        self._begin_anew(self.cache.reset)

    def release(self) -> None:
        """Forget everything, and give the storage up."""
        self._begin_anew(self.cache.release)

    def _begin_anew(self, forget: Callable[[], None]) -> None:
        forget()
        self.slow.clear()
        self.rows = 1 + (self.rows + self.case.seed) % 3
        self._match_spans()
        assert self.cache.get_seq_length() == 0

    def _match_spans(self) -> None:
        """The next batch begins anew, and protected spans that differ by row are for so many rows."""
        if self.rows % max(len(self.slow.spans), 1):
            self.rows = len(self.slow.spans)


#: A layer that forgets by itself cannot be asked to take back.
SLIDING = ("gemma3", "gemma3n")
#: Nothing but attention over all that is held.
PLAIN = ("llama", "gpt_neox", "yarn")


@contextmanager
def _failing(model: Any, where: str) -> Iterator[None]:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("as if")

    layers, interface = model.base_model.layers, AttentionInterface._global_mapping
    # Latents are expanded between `update` and attention; elsewhere attention itself fails.
    between = getattr(getattr(layers[0], "self_attn", None), "kv_b_proj", None) if where == "between" else None
    if where == "between" and between is None and model.config._attn_implementation == OURS:
        ours, interface[OURS] = interface[OURS], out_of_memory
        try:
            yield
        finally:
            interface[OURS] = ours
        return
    hook = (layers[-1] if between is None else between).register_forward_pre_hook(out_of_memory)
    try:
        yield
    finally:
        hook.remove()


def play(case: Case) -> Game:
    """Play it. With an odd seed, attention reads codes where they lie, however few there are.

    Raises:
        RefusedError: the options do not go together. Anything else: something is wrong.
    """
    few = 0 if case.seed % 2 else few_bits.FEW
    with warnings.catch_warnings(), patch.object(few_bits, "FEW", few):
        warnings.simplefilter("ignore")
        return Game(case).play()
