"""Slow, obvious versions of what the package does fast.

`Recorder` notes what every query of a run was allowed to see; `reference_logits` are what a model without any cache
says when exactly that is visible. `SlowLayer` plays the eviction rule with Python lists.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

import models
from closeness import SHARE, bound
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT, CACHE_NAMES

Visible = list[list[set[int]]]  # [row][kv head] -> columns


# ---------------------------------------------------------------------------------------------------------------
# What a run saw
# ---------------------------------------------------------------------------------------------------------------


@dataclass
class Column:
    """One column of the text, in every row of the batch."""

    embeds: Tensor  # [rows, hidden]
    real: list[bool]  # per row
    position: Tensor  # [rows] position id
    visible: dict[int, Visible] = field(default_factory=dict)  # per layer
    keys: dict[int, Tensor] = field(default_factory=dict)  # per layer [rows, heads, dim]
    values: dict[int, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None  # [rows, vocabulary]
    ids: Tensor | None = None  # [rows], where the model was fed ids
    forward: int = 0  # in which it came
    newest: dict[int, list[int]] = field(
        default_factory=dict
    )  # per layer [row]: position from which nothing is rounded

    def rows(self, index: list[int]) -> Column:
        """This column in a batch made of these rows."""
        return Column(
            self.embeds[index],
            [self.real[row] for row in index],
            self.position[index],
            {layer: [rows[row] for row in index] for layer, rows in self.visible.items()},
            {layer: keys[index] for layer, keys in self.keys.items()},
            {layer: values[index] for layer, values in self.values.items()},
            None if self.logits is None else self.logits[index],
            None if self.ids is None else self.ids[index],
            self.forward,
            {layer: [first[row] for row in index] for layer, first in self.newest.items()},
        )


class Recorder:
    """Follows one cache through a run of one model; use as a context manager around the run.

    After every forward it also checks the invariants that hold at every moment: keys and values belong to the
    positions, the bound, the protection.
    """

    def __init__(self, model: torch.nn.Module, cache: Any, *, poison: bool = False) -> None:
        self.model, self.cache, self.poison = model, cache, poison
        self.columns: list[Column] = []
        self.new: list[Column] = []
        self.forwards: list[int] = []  # columns of each
        self.replaced: list[tuple[Any, str]] = []

    def __enter__(self) -> Recorder:
        # The attributes rather than hooks: some versions of generate call `forward` past the hooks.
        self._replace(self.model, "forward", self._forward(self.model.forward))
        self._replace(self.cache, "crop", self._following(self.cache.crop, self._crop))
        self._replace(self.cache, "reorder_cache", self._following(self.cache.reorder_cache, self._reorder))
        for index, layer in self.cache.paged_layers:
            self._replace(layer, "update", self._watch(index, layer, layer.update))
        return self

    def __exit__(self, *exception: object) -> None:
        for owner, name in self.replaced:
            del owner.__dict__[name]

    def _replace(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        owner.__dict__[name] = call
        self.replaced.append((owner, name))

    @property
    def mask(self) -> Tensor:
        """[rows, columns] 1 = real token."""
        return torch.tensor([column.real for column in self.columns]).T.long()

    def _following(self, call: Callable[..., Any], then: Callable[..., None]) -> Callable[..., Any]:
        def both(argument: Any) -> Any:
            result = call(argument)
            then(argument)
            return result

        return both

    def _crop(self, count: int) -> None:
        keep = count if count > 0 else len(self.columns) + count
        del self.columns[keep:]

    def _reorder(self, index: Tensor) -> None:
        self.columns = [column.rows(index.tolist()) for column in self.columns]

    def _forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)  # generate looks at the signature
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if not any(kwargs.get(name) is self.cache for name in CACHE_NAMES):
                return forward(*args, **kwargs)
            self._before(args, kwargs)
            output = forward(*args, **kwargs)
            self._after(output)
            return output

        return recorded

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        embeds, ids = kwargs.get("inputs_embeds"), None
        if embeds is None:
            ids = args[0] if args else kwargs["input_ids"]
            embeds = self.model.get_input_embeddings()(ids)
        rows, count = embeds.shape[:2]
        mask = kwargs.get("attention_mask")
        real = torch.ones(rows, count) if mask is None else mask[:, len(self.columns) :][:, :count]
        assert real.shape == (rows, count), "the mask of a forward covers the past and the new tokens"
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(len(self.columns), len(self.columns) + count)[None]
        positions = positions.expand(rows, -1)
        fed = [None] * count if ids is None else ids.clone().unbind(1)
        self.new = [Column(embeds[:, i], real[:, i].bool().tolist(), positions[:, i], ids=fed[i]) for i in range(count)]
        for column in self.new:
            column.forward = len(self.forwards)
        self.columns += self.new
        self.forwards.append(count)

    def _watch(self, index: int, layer: Any, update: Callable[..., Any]) -> Callable[..., Any]:
        def watched(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            for offset, column in enumerate(self.new):
                column.keys[index], column.values[index] = keys[:, :, offset].clone(), values[:, :, offset].clone()
            layer.commit()  # what waits is taken in first, as `update` would do itself
            before = self._held_columns(layer, keys.shape[:2])
            result = update(keys, values, *args, **kwargs)
            overwrites = keys.shape[2] == 1 and not layer.state.waiting  # one that waits is beside all held
            after = self._held_columns(layer, keys.shape[:2]) if overwrites else None
            first_new = len(self.columns) - len(self.new)
            for offset, column in enumerate(self.new):
                so_far = {first_new + i for i in range(offset + 1)}
                column.visible[index] = [
                    [
                        after[row][head]
                        if after is not None
                        else before[row][head] | {c for c in so_far if self.columns[c].real[row]}
                        for head in range(keys.shape[1])
                    ]
                    for row in range(keys.shape[0])
                ]
            return result

        return watched

    def _column_of(self) -> list[list[int]]:
        """[row][position] -> column."""
        rows = len(self.columns[0].real)
        return [[c for c, column in enumerate(self.columns) if column.real[row]] for row in range(rows)]

    def _held_columns(self, layer: Any, shape: Any) -> Visible:
        if not layer.held:
            return [[set() for _ in range(shape[1])] for _ in range(shape[0])]
        column_of = self._column_of()
        return [
            [{column_of[row][p] for p in head if p >= 0} for head in heads]
            for row, heads in enumerate(layer.positions.tolist())
        ]

    def _after(self, output: Any) -> None:
        logit_count = output.logits.shape[1]
        for offset, column in enumerate(self.new[-logit_count:]):
            column.logits = output.logits[:, offset].clone()
        for index, layer in self.cache.paged_layers:
            self._check_slots(layer, index)

    def _check_slots(self, layer: Any, index: int) -> None:
        check_layer(layer, self.columns, index)
        if self.poison:
            poison_unused(layer)


def pads_in_segments(layer: Any) -> Tensor:
    """Where the pads lie in columns whose rows and heads have different numbers of slots."""
    segments = layer.store.columns.layout
    inside = torch.arange(segments.width) < segments.bounds[1][..., None]
    return segments.places(torch.arange(segments.width))[(layer.positions < 0) & inside]


def poison_unused(layer: Any) -> None:
    """Spoil every slot that must not matter: what is beyond `held`, and the pads.

    The pads get huge numbers instead of NaN: attention may multiply them by a weight of exactly zero.
    """
    if layer.store.columns.layout.lengths is not None and not layer.store.rounds:
        for column in layer.store.tensors:
            column[pads_in_segments(layer)] = 1e4
        return
    keys, values = layer.store.read()
    keys[:, :, layer.held :] = math.nan
    values[:, :, layer.held :] = math.nan
    shown, pads = layer.store.columns.tensors.get("rerotated"), (layer.positions < 0)[..., None]
    for states in (keys, values, *([] if shown is None else [shown])):
        held = states[:, :, : layer.held]
        held.copy_(held.masked_fill(pads, 1e4))


def check_layer(layer: Any, columns: list[Column], index: int, *, as_they_came: bool = True) -> None:
    """The promises that hold after every forward: bounded, protected, and every slot is what it says."""
    sizes, held, keys, values = layer.budget, layer.held, layer.keys, layer.values
    budget = sizes.tokens
    assert held <= budget
    assert keys.shape[2] <= budget
    assert values.shape[2] <= budget
    positions = layer.positions
    assert positions.shape == (*keys.shape[:2], held)
    own = [[at for at, column in enumerate(columns) if column.real[row]] for row in range(positions.shape[0])]
    for heads, real in zip(positions.tolist(), own, strict=True):
        for slots in heads:
            positions_held = [p for p in slots if p >= 0]
            assert len(positions_held) == len(set(positions_held)), "a token is held twice"
            assert max(positions_held, default=-1) < len(real), "a token is held that never came"
            if not layer.record_past:
                must_hold = set(range(min(sizes.protected, len(real))))
                must_hold |= set(range(max(0, len(real) - sizes.recent), len(real)))
                must_hold |= {at for span in common_spans(sizes) for at in range(*span) if at < len(real)}
                assert must_hold <= set(positions_held), "a protected token was evicted"
    if as_they_came and any(own):
        _check_states(layer, columns, index, own)


def common_spans(sizes: Any) -> Any:
    """Those that go for every row."""
    return sizes.spans[0] if len(sizes.spans) == 1 else ()


def _check_states(layer: Any, columns: list[Column], index: int, own: list[list[int]]) -> None:
    """Every slot has the keys and values that the token of its position came with; `own[row]` are the real columns."""
    positions = layer.positions
    stands_at = pad_sequence([torch.tensor(real, dtype=torch.long) for real in own], batch_first=True)
    stands_at = stands_at[:, None].expand(-1, positions.shape[1], -1).gather(2, positions.clamp(min=0))
    for kind in ("keys", "values"):
        held = getattr(layer, kind)[:, :, : layer.held]
        came = torch.stack([getattr(column, kind)[index] for column in columns], dim=2)
        came = came.gather(2, stands_at[..., None].expand(-1, -1, -1, came.shape[3]))
        assert came.dtype == held.dtype
        wrong = (came != held).any(-1) & (positions >= 0)
        assert not wrong.any(), f"[row, head, slot] {wrong.nonzero().tolist()}: {kind} of another token"


# ---------------------------------------------------------------------------------------------------------------
# What a model without a cache says when exactly that is visible
# ---------------------------------------------------------------------------------------------------------------


def reference_logits(model: torch.nn.Module, recorder: Recorder) -> Tensor:
    """[rows, columns, vocabulary]: one forward over the whole text, each layer and head masked as recorded."""
    text, every = _recorded(model, recorder), slice(0, len(recorder.columns))
    return replayed_forward(models.eager(model), recorder, text, _masks(model, text), every)


def replayed_logits(model: torch.nn.Module, recorder: Recorder) -> Tensor:
    """As `reference_logits`, but forward by forward into a DynamicCache.

    For models whose recurrent layers say something else in one forward than in several, whatever the cache.
    """
    reference = models.eager(model)
    text, cache, logits, start = _recorded(model, recorder), DynamicCache(config=model.config), [], 0
    masks = _masks(model, text)
    for count in recorder.forwards:
        logits.append(replayed_forward(reference, recorder, text, masks, slice(start, start + count), cache))
        start += count
    return torch.cat(logits, dim=1)


def replayed_forward(
    model: Any, recorder: Recorder, text: _Recorded, masks: dict[int, Tensor], part: slice, cache: Any = None
) -> Tensor:
    """Logits of these columns, each layer and head masked as `masks` say, `[rows, heads, columns, columns]`."""
    fed = {"inputs_embeds": text.embeds[:, part]} if text.ids is None else {"input_ids": text.ids[:, part]}
    with torch.no_grad(), _forced_masks(model, {at: mask[:, :, part, : part.stop] for at, mask in masks.items()}):
        output = model(
            **fed,
            attention_mask=recorder.mask[:, : part.stop],
            position_ids=text.positions[:, part],
            **{CACHE_ARGUMENT: cache},
            use_cache=cache is not None,
        )
    return output.logits


@dataclass(frozen=True)
class _Recorded:
    embeds: Tensor  # [rows, columns, hidden]
    positions: Tensor  # [rows, columns]
    ids: Tensor | None  # [rows, columns], where the model was fed ids all along
    visible: dict[int, list[Visible]]  # per layer, per column


def _recorded(model: torch.nn.Module, recorder: Recorder) -> _Recorded:
    columns = recorder.columns
    visible = {index: [column.visible[index] for column in columns] for index, _ in recorder.cache.paged_layers}
    visible |= {index: visible[source] for index, source in shared_layers(model.config).items() if source in visible}
    ids = [column.ids for column in columns if column.ids is not None]
    return _Recorded(
        torch.stack([column.embeds for column in columns], dim=1),
        torch.stack([column.position for column in columns], dim=1),
        torch.stack(ids, dim=1) if len(ids) == len(columns) else None,
        visible,
    )


def shared_layers(config: Any) -> dict[int, int]:
    """For each layer that attends to the keys and values of an earlier one, which that is."""
    count = getattr(config, "num_kv_shared_layers", 0) or 0
    first = config.num_hidden_layers - count
    types = config.layer_types if count else []
    return {
        index: max(source for source in range(first) if types[source] == types[index])
        for index in range(first, config.num_hidden_layers)
    }


def _masks(model: torch.nn.Module, text: _Recorded) -> dict[int, Tensor]:
    return {layer: _additive_mask(model, sees, text.embeds.dtype) for layer, sees in text.visible.items()}


def _additive_mask(model: torch.nn.Module, sees: list[Visible], dtype: torch.dtype) -> Tensor:
    length, rows, heads = len(sees), len(sees[0]), len(sees[0][0])
    mask = torch.full((rows, heads, length, length), torch.finfo(dtype).min, dtype=dtype)
    seen = [
        (row, head, query, column)
        for query, per_row in enumerate(sees)
        for row, per_head in enumerate(per_row)
        for head, columns in enumerate(per_head)
        # A pad sees itself, or its softmax would have nothing to share out; nobody sees the pad.
        for column in (columns or [query])
    ]
    mask[torch.tensor(seen).unbind(1)] = 0
    return mask.repeat_interleave(model.config.num_attention_heads // heads, dim=1)


@contextmanager
def _forced_masks(model: torch.nn.Module, masks: dict[int, Tensor]) -> Iterator[None]:
    forced = set()

    def force(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        # Modules that serve several layers are told which one (zamba), or how many come before (hrm_text).
        index = bound.arguments.get("layer_idx", module.layer_idx) + bound.arguments.get("cycle_offset", 0)
        if index not in masks:
            return None
        forced.add(index)
        own_mask = bound.arguments["attention_mask"]
        mask = {**own_mask, "causal": masks[index]} if isinstance(own_mask, dict) else masks[index]
        bound.arguments["attention_mask"] = mask
        return bound.args, bound.kwargs

    handles = [
        module.register_forward_pre_hook(force, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "layer_idx")
        and "attention_mask" in _parameters(module)
        and type(module).__name__.endswith("Attention")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    assert forced == set(masks), "every paged layer has an attention module"


def _parameters(module: torch.nn.Module) -> Any:
    return inspect.signature(module.forward).parameters


def assert_exact(model: torch.nn.Module, recorder: Recorder, share: float = SHARE, *, replayed: bool = False) -> None:
    """Every logit of the run equals the reference (promise 2)."""
    assert_said(recorder, replayed_logits(model, recorder) if replayed else reference_logits(model, recorder), share)


def assert_said(recorder: Recorder, expected: Tensor, share: float = SHARE) -> None:
    """Every logit of the run is as expected, `[rows, columns, vocabulary]`; pads say nothing."""
    compared = [
        (at, row, column.logits[row])
        for at, column in enumerate(recorder.columns)
        for row, real in enumerate(column.real)
        if real and column.logits is not None
    ]
    assert compared
    most = bound(torch.stack([expected[row, at] for at, row, _ in compared]), share)
    for at, row, logits in compared:
        difference = (logits - expected[row, at]).abs().max().item()
        assert difference <= most, f"column {at}, row {row}: logits differ by {difference:.2e}, not {most:.2e} or less"


def assert_evicted(recorder: Recorder) -> None:
    """The run was one in which something had to go; otherwise it shows nothing about eviction."""
    assert recorder.cache.stats().evicted_tokens > 0
    assert any(
        len(column.visible[index][row][head]) < sum(c.real[row] for c in recorder.columns[: at + 1])
        for index, _ in recorder.cache.paged_layers
        for at, column in enumerate(recorder.columns)
        for row in range(len(column.real))
        for head in range(len(column.visible[index][row]))
    )


# ---------------------------------------------------------------------------------------------------------------
# The rule, played with lists
# ---------------------------------------------------------------------------------------------------------------

Vector = list[float]


@dataclass(frozen=True)
class Token:
    """A real token of one row."""

    position: int
    keys: tuple[Vector, ...]  # per KV head
    values: tuple[Vector, ...]

    def __deepcopy__(self, memo: Any) -> Token:
        return self  # never changes


#: keys, values, positions of all valid tokens of one head -> their scores
SlowScore = Callable[[list[Vector], list[Vector], list[int], int, int], list[float]]


@dataclass
class Group:
    """The KV heads of a row that decide together: all of them, or one."""

    heads: list[int]
    pads: int = 0
    tokens: list[Token] = field(default_factory=list)  # in logical order
    shifts: dict[int, int] = field(default_factory=dict)  # by position, of those held and some others
    victim: int | None = None  # logical block that is being overwritten
    used: int = 0  # slots of it that are overwritten
    left: list[tuple[int, Token]] = field(default_factory=list)  # which have left, with the columns seen by then
    spans: list[tuple[int, int]] = field(default_factory=list)  # tokens that never leave

    def stays(self, token: Token) -> bool:
        """Whether it lies in a protected span."""
        return any(start <= token.position < end for start, end in self.spans)

    def close_gaps(self, following: int, leaving: Token | None = None) -> None:
        """All that stay stand one after the other, right before the position that follows."""
        staying = sorted((token.position for token in self.tokens if token is not leaving), reverse=True)
        self.shifts = {position: following - 1 - place - position for place, position in enumerate(staying)}


@dataclass
class SlowRow:
    """One row of the batch."""

    groups: list[Group]
    # Of all columns seen, waiting ones included: whether it counts where positions are counted.
    columns: list[bool] = field(default_factory=list)
    hidden: set[int] = field(default_factory=set)  # columns that came as tokens, and that a later mask hid
    forgotten: set[int] = field(default_factory=set)  # of these, what was forgotten and keeps its position
    pending: list[Token | None] = field(default_factory=list)  # None = pad

    def tokens_among(self, count: int) -> int:
        """How many of the newest columns are tokens, and not hidden."""
        first = len(self.columns) - count
        return sum(real and first + at not in self.hidden for at, real in enumerate(self.columns[first:]))

    def hide(self, columns: set[int], forget: bool = False) -> set[int]:
        """A mask hides these, or they are forgotten; returns the positions that they had. Those that a mask hides at
        the end count for none any more."""
        positions = {sum(self.columns[:column]) for column in columns if self.columns[column]}
        self.hidden |= columns
        if forget:
            self.forgotten |= columns
            return positions
        hidden = self.hidden - self.forgotten
        visible = [at for at, real in enumerate(self.columns) if real and at not in hidden]
        end = max(visible, default=-1) + 1
        self.columns[end:] = [False] * (len(self.columns) - end)
        return positions


def rank(scores: list[float], positions: list[int], absolute_noise: bool = False) -> list[tuple[float, int]]:
    """Keys whose order decides: the lowest goes first. Scores of all, protected ones too, set the scale, if there is
    one."""
    levels = _steps_of_scale(scores) if absolute_noise else [_level(score) for score in scores]
    return list(zip(levels, positions, strict=True))


def _level(score: float) -> float:
    """The place of the score among all numbers that have 12 bits after their leading one; nan is below all."""
    if math.isnan(score):
        return -math.inf
    if math.isinf(score) or score == 0:
        return score
    fraction, exponent = math.frexp(abs(score))  # 0.5 <= fraction < 1
    if exponent < -125:  # below the smallest float32 of full precision, places are evenly spaced
        place = math.floor(abs(score) * 2.0**138 + 0.5)
    else:
        place = (exponent + 126) * 4096 + math.floor((2 * fraction - 1) * 4096 + 0.5)
    return math.copysign(place, score)


def _steps_of_scale(scores: list[float]) -> list[float]:
    """In steps of 1/4096 of the power of two at or above the mean size."""
    finite = [abs(score) for score in scores if math.isfinite(score)]
    mean = sum(finite) / len(finite) if finite else 0.0
    fraction, exponent = math.frexp(mean)
    scale = 2.0 ** max(exponent - (fraction == 0.5), -100) if mean else 2.0**-100
    limit = 2**30
    lowest_if_unknown = [-limit if math.isnan(score) else score * 4096 / scale for score in scores]
    return [round(max(-limit, min(limit, scaled))) for scaled in lowest_if_unknown]


class SlowLayer:
    """One layer: rows of groups of lists."""

    def __init__(
        self,
        budget: int,
        block_size: int,
        protected: int,
        score: SlowScore,
        shared: bool,
        layer_idx: int = 0,
        recent: int | None = None,
        spans: list[list[tuple[int, int]]] | None = None,
    ) -> None:
        self.spans = spans or []  # one entry for each row, or for several that follow each other; none = no spans
        self.budget, self.block_size, self.protected = budget, block_size, protected
        self.recent = block_size if recent is None else recent
        self.score, self.shared, self.layer_idx = score, shared, layer_idx
        self.absolute_noise = score in DIFFERENCES
        self.rows: list[SlowRow] = []
        self.held = 0
        self.recording = False

    def feed(self, keys: Tensor, values: Tensor, real: list[list[bool]]) -> None:
        """Columns of a forward: keys and values [rows, heads, columns, dim], real [row][column]."""
        rows, heads, count, _ = keys.shape
        if not self.rows:
            split = [list(range(heads))] if self.shared else [[head] for head in range(heads)]
            self.rows = [SlowRow([Group(list(own)) for own in split]) for _ in range(rows)]
            self._hand_out_spans()
        self.commit(0)
        for index, row in enumerate(self.rows):
            for column in range(count):
                token = None
                if real[index][column]:
                    token = Token(
                        sum(row.columns),
                        tuple(keys[index, head, column].tolist() for head in range(heads)),
                        tuple(values[index, head, column].tolist() for head in range(heads)),
                    )
                row.columns.append(token is not None)
                row.pending.append(token)
        if not self.recording:
            self.commit(0)

    def _hand_out_spans(self) -> None:
        for index, row in enumerate(self.rows):
            for group in row.groups:
                group.spans = self.spans[index * len(self.spans) // len(self.rows)] if self.spans else []

    def protect(self, spans: list[list[tuple[int, int]]]) -> None:
        """Other tokens never leave; blocks are cut anew."""
        self.commit(0)
        self.spans = spans
        self._hand_out_spans()
        for row in self.rows if self.held == self.budget else ():
            for group in row.groups:
                self._trim(group, [], len(row.columns), sum(row.columns))

    def commit(self, drop: int) -> None:
        """Drop the newest waiting columns and store the others."""
        if not self.rows:
            return
        for row in self.rows:
            del row.columns[len(row.columns) - drop :]
            del row.pending[len(row.pending) - drop :]
        count = len(self.rows[0].pending)
        if not count:
            return
        for row in self.rows:
            for group in row.groups:
                if self.held + count <= self.budget:
                    self._append(group, row.pending)
                elif count == 1 and self.held == self.budget:
                    self._overwrite(group, row.pending[0], len(row.columns))
                else:
                    self._trim(group, row.pending, len(row.columns), sum(row.columns))
            row.pending = []
        self.held = min(self.held + count, self.budget)

    @property
    def seen(self) -> int:
        """Columns, pads and waiting ones included."""
        return len(self.rows[0].columns) if self.rows else 0

    def crop(self, count: int) -> None:
        """Take back the newest columns; ValueError if some of them are gone."""
        if not self.rows:
            return
        waiting = min(count, len(self.rows[0].pending))
        self.commit(waiting)
        count -= waiting
        if count >= self.seen:
            self.rows, self.held = [], 0
            return
        for row in self.rows:
            left = sum(row.columns[: len(row.columns) - count])
            reals = row.tokens_among(count)
            for group in row.groups:
                newest = [token for token in group.tokens if token.position >= left]
                if len(newest) < reals or group.pads < count - reals:
                    raise ValueError("evicted")
        if not count:
            return
        for row in self.rows:
            left = sum(row.columns[: len(row.columns) - count])
            reals = row.tokens_among(count)
            del row.columns[len(row.columns) - count :]
            row.hidden = {column for column in row.hidden if column < len(row.columns)}
            row.forgotten &= row.hidden
            for group in row.groups:
                group.pads -= count - reals
                staying = [token for token in group.tokens if token.position < left]
                group.tokens = sorted(staying, key=lambda token: token.position)
                group.victim, group.used = None, 0
        self.held -= count

    def lost(self, hidden: list[set[int]]) -> list[int]:
        """By row, most tokens that a group loses if a mask hides these columns."""
        gone = [copy.deepcopy(row).hide(own) for row, own in zip(self.rows, hidden, strict=True)]
        return [
            max(sum(token.position in positions for token in group.tokens) for group in row.groups)
            for row, positions in zip(self.rows, gone, strict=True)
        ]

    def hide(self, hidden: list[set[int]], level: list[int], forget: bool = False) -> None:
        """A mask hides these columns of each row, or they are forgotten. As many places as `level` says become empty in
        each group of a row, or more; what lacks of them, the lowest of the other tokens give up."""
        self.commit(0)
        for row, own, most in zip(self.rows, hidden, level, strict=True):
            positions = row.hide(own, forget) if own else set()
            for group in row.groups:
                last = max((token.position for token in group.tokens), default=-1) + 1
                staying = [token for token in group.tokens if token.position not in positions]
                lost = len(group.tokens) - len(staying)
                missing = max(most - lost, 0)
                if not lost + missing:
                    continue
                staying.sort(key=lambda token: token.position)
                lowest = self._lowest(group, staying, last, missing, forced=True)
                group.tokens = [token for at, token in enumerate(staying) if at not in lowest]
                group.pads += lost + missing
                group.victim, group.used = None, 0

    def reorder(self, index: list[int]) -> None:
        """Rows by index; rows may repeat."""
        self.rows = [copy.deepcopy(self.rows[row]) for row in index]

    def group(self, row: int, head: int) -> Group:
        """The group that decides for this head."""
        return next(group for group in self.rows[row].groups if head in group.heads)

    def block_scores(self, row: int, head: int) -> list[float]:
        """Mean score of the wholly filled blocks."""
        group = self.group(row, head)
        scores = self._scores(group, group.tokens)
        size = self.block_size
        return [sum(scores[at : at + size]) / size for at in range(0, len(scores) // size * size, size)]

    def _append(self, group: Group, new: list[Token | None]) -> None:
        group.pads += new.count(None)
        group.tokens += [token for token in new if token is not None]
        group.shifts |= {token.position: 0 for token in new if token is not None}

    def _overwrite(self, group: Group, new: Token | None, seen: int) -> None:
        if new is None:  # nothing worth keeping came: the row stays as it is
            return
        if group.pads:
            group.pads -= 1
            self._append(group, [new])
            return
        if group.victim is None or group.used == self.block_size:
            group.victim, group.used = self._next_victim(group, new.position), 0
            group.close_gaps(new.position, group.tokens[group.victim * self.block_size])
        slot = group.victim * self.block_size + group.used
        group.left.append((seen, group.tokens[slot]))
        group.tokens[slot] = new
        group.shifts[new.position] = 0
        group.used += 1

    def _next_victim(self, group: Group, seen: int) -> int:
        size = self.block_size
        blocks = self.budget // size
        newest = blocks - 1 if group.victim is None else group.victim
        scores = self._scores(group, group.tokens)
        means = [sum(scores[at : at + size]) / size for at in range(0, self.budget, size)]
        keys = rank(means, [group.tokens[block * size].position for block in range(blocks)], self.absolute_noise)
        candidates = [
            block
            for block in range(blocks)
            if block != newest
            and all(
                self.protected <= token.position < seen - self.recent and not group.stays(token)
                for token in group.tokens[block * size : (block + 1) * size]
            )
        ]
        return min(candidates, key=keys.__getitem__)

    def _trim(self, group: Group, new: list[Token | None], seen: int, following: int) -> None:
        self._append(group, new)
        tokens = sorted(group.tokens, key=lambda token: token.position)
        excess = group.pads + len(tokens) - self.budget
        from_pads = min(group.pads, excess)
        group.pads -= from_pads
        losers = self._lowest(group, tokens, tokens[-1].position + 1 if tokens else 0, excess - from_pads)
        group.left += [(seen, tokens[at]) for at in sorted(losers)]
        group.tokens = [token for at, token in enumerate(tokens) if at not in losers]
        if losers:
            group.close_gaps(following)
        group.victim, group.used = None, 0

    def _lowest(self, group: Group, tokens: list[Token], last: int, count: int, *, forced: bool = False) -> set[int]:
        """Which of these tokens, of a text of `last` tokens, go first; `forced`: then the newest, then all others."""
        fixed = [token.position < self.protected or group.stays(token) for token in tokens]
        newest = [token.position >= last - self.recent for token in tokens]
        keys = rank(self._scores(group, tokens), [token.position for token in tokens], self.absolute_noise)
        free = [at for at in range(len(tokens)) if not fixed[at] and not newest[at]]
        order = sorted(free, key=keys.__getitem__)
        if forced:
            order += [at for at in range(len(tokens)) if newest[at] and not fixed[at]]
            order += [at for at in range(len(tokens)) if fixed[at]]
        losers = set(order[:count])
        assert len(losers) == count
        return losers

    def _scores(self, group: Group, tokens: list[Token]) -> list[float]:
        if not tokens:
            return []
        per_head = [
            self.score(
                [token.keys[head] for token in tokens],
                [token.values[head] for token in tokens],
                [token.position for token in tokens],
                self.layer_idx,
                head,
            )
            for head in group.heads
        ]
        return [sum(scores) / len(per_head) for scores in zip(*per_head, strict=True)]


# ---------------------------------------------------------------------------------------------------------------
# The policies, as the papers write them
# ---------------------------------------------------------------------------------------------------------------


def norm(vector: Vector) -> float:
    """L2."""
    return math.sqrt(sum(x * x for x in vector))


def slow_paged_eviction(
    keys: list[Vector], values: list[Vector], positions: list[int], layer: int, head: int
) -> list[float]:
    """||V|| / ||K||."""
    return [norm(v) / max(norm(k), 1e-6) for k, v in zip(keys, values, strict=True)]


def slow_key_norm(keys: list[Vector], values: list[Vector], positions: list[int], layer: int, head: int) -> list[float]:
    """-||K||."""
    return [-norm(k) for k in keys]


def slow_value_norm(
    keys: list[Vector], values: list[Vector], positions: list[int], layer: int, head: int
) -> list[float]:
    """||V||."""
    return [norm(v) for v in values]


def slow_keydiff(keys: list[Vector], values: list[Vector], positions: list[int], layer: int, head: int) -> list[float]:
    """-cos(K, mean of the normalised keys)."""
    unit = [[x / norm(k) for x in k] for k in keys]
    mean = [sum(column) / len(unit) for column in zip(*unit, strict=True)]
    length = norm(mean)
    return [-sum(x * y for x, y in zip(k, mean, strict=True)) / length for k in unit]


def slow_streaming_llm(
    keys: list[Vector], values: list[Vector], positions: list[int], layer: int, head: int
) -> list[float]:
    """The first four stay, of the others the newest."""
    return [math.inf if position < 4 else float(position) for position in positions]


def slow_recency(keys: list[Vector], values: list[Vector], positions: list[int], layer: int, head: int) -> list[float]:
    """The newest stay."""
    return [float(position) for position in positions]


def mixed(bits: int) -> int:
    """The hash in plain integers."""
    bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def slow_random(keys: list[Vector], values: list[Vector], positions: list[int], layer: int, head: int) -> list[float]:
    """Seed 0."""
    stream = mixed(mixed(head) + layer)
    return [(mixed((stream + position) & 0xFFFFFFFF) >> 8) / 2**24 for position in positions]


SLOW_POLICIES: dict[str, SlowScore] = {
    "paged_eviction": slow_paged_eviction,
    "key_norm": slow_key_norm,
    "value_norm": slow_value_norm,
    "keydiff": slow_keydiff,
    "streaming_llm": slow_streaming_llm,
    "recency": slow_recency,
    "random": slow_random,
}

#: Scores whose noise does not shrink with them.
DIFFERENCES: tuple[SlowScore, ...] = (slow_keydiff,)
