"""One slow cache that knows every option: which tokens are held, which of them are rounded, and where they stand.

It keeps all that a layer was ever given. Before each forward of the fast cache it says, from lists and definitions,
what attention may see; after it, the model is asked again with exactly that, and has to say the same. What decides by
attention, or shares out among layers, has no rule here: then the positions that the fast cache claims are believed, and
everything else is checked all the same.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import EvictionPolicy, Needs, ScoreContext
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.policies import make_policy
from reference import SLOW_POLICIES, SlowLayer, SlowScore, Vector, _forced_masks, shared_layers
from rounded import slow_round, slow_sizes

#: How far one rounded key or value may be from what came, as a share of its norm.
FARTHEST = {None: 0.0, 8: 0.04, 4: 0.5, 3: 1.0, 2: 2.0}
#: First tokens that stay where nobody says how many; one block with all others.
PUBLISHED_SINKS = {"streaming_llm": 4, "recency": 0}
#: [row][kv head] -> column -> how far forward it is seen
Seen = list[list[dict[int, int]]]
Spans = list[tuple[int, int]]


def wide(states: Tensor) -> Tensor:
    """In float32 or wider: what is rounded is not rounded on the way there."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


def by_row(spans: Any) -> list[Spans]:
    """One entry for all rows, or one for each, or for several that follow each other; none = no spans."""
    return [list(spans)] if spans and isinstance(spans[0], tuple) else list(spans or [])


@dataclass(frozen=True)
class Tied(EvictionPolicy):
    """Few different scores, so that most tokens and many blocks are exactly equal."""

    needs = Needs(token_local=True)

    def score(self, context: ScoreContext) -> Tensor:
        return (context.positions * 7 % 5).float() / 8


def slow_tied(keys: list[Vector], values: list[Vector], positions: list[int], layer: int, head: int) -> list[float]:
    return [position * 7 % 5 / 8 for position in positions]


#: Scores in lists, by the name of the policy in a case.
RULES: dict[str, SlowScore] = {**SLOW_POLICIES, "tied": slow_tied}


@dataclass
class Rounding:
    """Of one row of one layer.

    Attributes:
        means: of keys and values `[heads, 1, dim]` in few digits, what is subtracted before they are rounded: their
            mean over the first tokens before the model turned them; None = nothing. The first tokens are those that
            have come when several come at once, or when there is a block of them.
        met: whether these tokens have come.
        sizes: as `means`, what channels are divided by, from the first tokens less their mean.
        below: tokens before this position have been outside the newest ones, and never come back as they were.
        count: real tokens that have been taken in.
    """

    means: tuple[Tensor | None, Tensor | None] = (None, None)
    sizes: tuple[Tensor | None, Tensor | None] = (None, None)
    met: bool = False
    below: int = 0
    count: int = 0


@dataclass
class LayerRecord:
    """What one paged layer was given, and what may become of it.

    Attributes:
        states: keys and values `[rows, heads, columns, dim]`.
        rounding: per row.
        rule: which tokens are held; None = believe the fast cache.
        rotaries: how the model turns keys, and values, where a mean is subtracted from them.
    """

    states: tuple[Tensor, Tensor]
    rounding: list[Rounding]
    rule: SlowLayer | None
    rotaries: tuple[Any, Any]


@dataclass
class Forward:
    """One forward, as attention saw it.

    Attributes:
        columns: from where to where in the text.
        past: per layer the keys and values before its own, as they were read.
        sees: per layer `[rows, heads, queries, columns]` bool.
        visible: `[rows, columns]` bool, the 2-D mask.
    """

    columns: slice
    past: dict[int, tuple[Tensor, Tensor]]
    sees: dict[int, Tensor]
    visible: Tensor

    def first(self, stop: int) -> Forward:
        """Of the columns before this one."""
        count = stop - self.columns.start
        sees = {layer: seen[:, :, :count, :stop] for layer, seen in self.sees.items()}
        return Forward(slice(self.columns.start, stop), self.past, sees, self.visible[:, :stop])

    def rows(self, index: list[int]) -> Forward:
        """In a batch made of these rows."""
        past = {layer: (keys[index], values[index]) for layer, (keys, values) in self.past.items()}
        sees = {layer: seen[index] for layer, seen in self.sees.items()}
        return Forward(self.columns, past, sees, self.visible[index])


class SlowCache:
    """The twin of one `PagedEvictionCache`; asked around every forward of it.

    Args:
        model: the same weights as the model whose forwards are followed, in plain attention.
        options: what the fast cache was made with.
        autocast: the model's forwards run under it. What comes in is single precision at best then, and a number in few
            bits may be rounded to its other neighbour.
    """

    def __init__(self, model: Any, options: dict[str, Any], autocast: bool = False) -> None:
        self.model, self.options, self.autocast = model, options, autocast
        self.bits = _pair(options.get("bits"))
        self.latent = "deepseek" in model.config.model_type
        self.recording = bool(options.get("record_past"))
        self.spans = by_row(options.get("protect"))
        self.clear()

    def clear(self) -> None:
        """Nothing was seen."""
        self.ids = self.positions = torch.zeros(0, 0, dtype=torch.long)
        self.real = self.visible = self.shown = torch.zeros(0, 0, dtype=torch.bool)
        self.layers: dict[int, LayerRecord] = {}
        self.forwards: list[Forward] = []
        self.pending = 0
        self.most = 0  # columns, before any were taken back
        self._held_at: dict[
            tuple[int, int, int], tuple[int, set[int]]
        ] = {}  # real tokens, and those held, when last seen
        self.taken_back = 0  # columns that were left after the last crop of tokens that had been evicted for
        self._hidden_at: list[int] = []  # by row, real tokens that were left when a mask hid others; none = no row
        self._gone: list[set[int]] = []  # by row, positions that a mask hid; none = no row
        self._moved_spans: list[Spans] = []  # by row, of rows that were chosen; none = as `spans` says
        self._named_at: list[int] = []  # by row, real tokens when the spans were given last; none = none
        self._twin: _Twin | None = None
        self._around: dict[int, Seen] = {}  # per layer, what its queries saw of the past

    @property
    def seen(self) -> int:
        """Columns."""
        return int(self.real.shape[1])

    # ---- what is protected and held, by the rule -------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """Its name."""
        return self.options.get("policy", "keydiff" if self.latent else "paged_eviction")

    @property
    def block(self) -> int:
        """Its size."""
        return int(self.options.get("block_size", 16))

    @property
    def protected(self) -> int:
        """First tokens that stay."""
        return int(self.options.get("sink_tokens", PUBLISHED_SINKS.get(self.policy, self.block)))

    @property
    def recent(self) -> int:
        """Newest tokens that stay."""
        recent = self.options.get("recent_tokens")
        return self.block if recent is None else int(recent)

    def _rule(self, index: int, budget: int) -> SlowLayer | None:
        plain = [self.options.get("allocator", "uniform") == "uniform", self.options.get("disposal", "drop") == "drop"]
        score = RULES.get(self.policy)
        # What compares tokens is shown them rounded.
        reads_rounded = self.bits != (None, None) and self.policy == "keydiff"
        if score is None or reads_rounded or not all(plain):
            return None
        policy = Tied() if self.policy == "tied" else make_policy(self.policy)
        heads = self.options.get("heads") or policy.needs.heads
        shared = heads == "shared"
        rule = SlowLayer(budget, self.block, self.protected, score, shared, index, self.recent, self.spans)
        rule.recording = self.recording
        return rule

    def taken_in(self, index: int, waiting: int) -> list[list[tuple[Tensor, Tensor]]]:
        """Of one layer, `[row][position]` the key and value `[heads, dim]` of each real token but those that wait."""
        keys, values = self.layers[index].states
        columns = [row[: self.seen - waiting].nonzero()[:, 0].tolist() for row in self.real]
        return [[(keys[row, :, at], values[row, :, at]) for at in own] for row, own in enumerate(columns)]

    # ---- a forward -------------------------------------------------------------------------------------------------

    @contextmanager
    def following(self, cache: Any, ids: Tensor, real: Tensor, positions: Tensor) -> Iterator[None]:
        """The fast cache takes in these columns `[rows, n]`."""
        self._new = ids, real, positions
        if not self.seen:
            self.ids, self.real, self.positions = ids[:, :0], real[:, :0], positions[:, :0]
            self.visible = self.shown = self.real
        self._came: dict[int, tuple[Tensor, Tensor]] = {}
        self._around = {}
        self.commit(0)
        self._begin: dict[int, Seen] = {}
        for index, layer in cache.paged_layers:
            layer.__dict__["update"] = self._watch(index, layer, layer.update)
        try:
            yield
        finally:
            for _, layer in cache.paged_layers:
                layer.__dict__.pop("update", None)

    def _watch(self, index: int, layer: Any, update: Callable[..., Any]) -> Callable[..., Any]:
        def watched(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            held = torch.promote_types(keys.dtype, values.dtype)  # one type for both
            self._came[index] = keys.detach().to(held, copy=True), values.detach().to(held, copy=True)
            believed = self._believes(index) and not self.options.get("static")
            if believed:
                layer.commit()
            before = self._claimed(layer, keys) if believed else []
            if self.options.get("static") and keys.shape[2] > 1:
                self._begin[index] = self._claimed(layer, keys)
            result = update(keys, values, *args, **kwargs)
            if believed:
                overwrites = keys.shape[2] == 1 and not layer.state.waiting
                self._around[index] = self._claimed(layer, keys) if overwrites else before
            return result

        return watched

    def _believes(self, index: int) -> bool:
        record = self.layers.get(index)
        return (self._rule(index, 0) if record is None else record.rule) is None

    def _claims(self, cache: Any, rows: int) -> dict[int, Seen]:
        """Of a static cache, whose steps are counted when they are over."""
        claimed = {}
        for index, layer in cache.paged_layers:
            heads = layer.state.heads if layer.held else 0
            claimed[index] = self._claimed(layer, torch.zeros(rows, heads))
        return claimed

    def _claimed(self, layer: Any, keys: Tensor) -> Seen:
        rows, heads = keys.shape[:2]
        if not layer.held:
            return [[{} for _ in range(heads)] for _ in range(rows)]
        return self._by_column(layer.positions.tolist(), layer.shifts.tolist())

    def _by_column(self, positions: Any, shifts: Any) -> Seen:
        real = torch.cat([self.real, self._new[1]], dim=1)
        columns = [row.nonzero()[:, 0].tolist() for row in real]
        return [
            [
                # What a failed forward has left is behind all columns.
                {
                    [*columns[row], sys.maxsize][min(p, len(columns[row]))]: s
                    for p, s in zip(*head, strict=True)
                    if p >= 0
                }
                for head in zip(heads, moved, strict=True)
            ]
            for row, (heads, moved) in enumerate(zip(positions, shifts, strict=True))
        ]

    def compare(self, cache: Any, logits: Tensor, tolerance: float) -> None:
        """The fast cache has taken in the columns, and the model said `logits` `[rows, n, vocabulary]`."""
        ids, real, positions = self._new
        start, count = self.seen, ids.shape[1]
        if self.options.get("static"):
            self._around = self._claims(cache, len(ids)) if count == 1 else self._begin
        forward = Forward(slice(start, start + count), {}, {}, torch.cat([self.visible, real], dim=1))
        for index, layer in cache.paged_layers:
            assert index in self._came, f"layer {index} was not asked"
            forward.past[index], forward.sees[index] = self._one_layer(index, layer, start, count)
        self.ids, self.positions, self.real = (
            torch.cat(pair, dim=1) for pair in ((self.ids, ids), (self.positions, positions), (self.real, real))
        )
        self.visible, self.shown = forward.visible, torch.cat([self.shown, real], dim=1)
        self.most = max(self.most, self.seen)
        expected = self._twin_of(start).say(forward)
        self.forwards.append(forward)
        self.pending = count
        if not self.recording:
            self.commit(0)
        off = (logits - expected).abs().amax(-1)
        assert logits[real].isfinite().all(), "logits are not finite"
        worst = off[real].max().item() if real.any() else 0.0
        assert worst <= tolerance * (1 + expected[real].abs().max().item() if real.any() else 1), (
            f"columns {start}..{start + count - 1}: logits differ by {worst:.2e}"
        )
        self.check(cache, states=count > 1 or self.seen % 3 == 0)

    def _one_layer(self, index: int, layer: Any, start: int, count: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """What the queries of this forward may see of the past, and of themselves; takes their keys and values in."""
        real, (keys, values) = self._new[1], self._came[index]
        rows, heads = keys.shape[:2]
        if index not in self.layers:
            empty = keys[:, :, :0], values[:, :, :0]
            rule = self._rule(index, layer.budget.capacity)
            rotaries = tuple(codec.rotary for codec in layer.store.coder.codecs) or (None, None)
            self.layers[index] = LayerRecord(empty, [Rounding() for _ in range(rows)], rule, rotaries)
        record = self.layers[index]
        after = self._seen_by_rule(record, keys, values, real) if record.rule else self._around[index]
        sees = torch.zeros(rows, heads, count, start + count, dtype=torch.bool)
        moves = self.options.get("positions") == "cache"
        shifts = torch.zeros(rows, heads, start, dtype=torch.long)
        for row in range(rows):
            for head in range(heads):
                past = [column for column in after[row][head] if column < start] if after[row] else []
                sees[row, head, :, past] = True
                if moves:
                    shifts[row, head, past] = torch.tensor(
                        [after[row][head][column] for column in past], dtype=torch.long
                    )
        new = real[:, None, None, :] & torch.ones(count, count).tril().bool()
        sees[..., start:] = new
        past = self._read(index, record, real if count == 1 else None, shifts if moves else None)
        record.states = tuple(torch.cat(pair, dim=2) for pair in zip(record.states, (keys, values), strict=True))
        return past, sees

    def _seen_by_rule(self, record: LayerRecord, keys: Tensor, values: Tensor, real: Tensor) -> Seen:
        rule = record.rule
        assert rule is not None
        heads, overwrites = keys.shape[1], keys.shape[2] == 1 and rule.held == rule.budget and not rule.recording
        before = self._held(rule, len(real), heads)
        rule.feed(keys, values, real.tolist())
        return self._held(rule, len(real), heads) if overwrites else before

    def _held(self, rule: SlowLayer, rows: int, heads: int) -> Seen:
        if not rule.rows:
            return [[{} for _ in range(heads)] for _ in range(rows)]
        groups = [[rule.group(row, head) for head in range(heads)] for row in range(rows)]
        positions = [[[token.position for token in group.tokens] for group in own] for own in groups]
        shifts = [[[group.shifts[token.position] for token in group.tokens] for group in own] for own in groups]
        return self._by_column(positions, shifts)

    def _read(
        self, index: int, record: LayerRecord, single: Tensor | None, shifts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """All columns before this forward as attention reads them; a single token counts among the newest already."""
        position = self.real.long().cumsum(1) - 1
        read = []
        for kind, states in enumerate(record.states):
            rounds = self.bits[kind] is not None
            states = states.clone()
            for row, rounding in enumerate(record.rounding if rounds else ()):
                count = rounding.count + (0 if single is None else int(single[row, 0]))
                newest = max(rounding.below, count - self.block)
                few = (position[row] >= min(self.protected, 4)) & (position[row] < newest)
                offset = self._offset(record, row, kind, position[row])[:, few]
                sizes = rounding.sizes[kind]
                sizes = 1.0 if sizes is None else sizes
                rounded = self._rounded(index, kind, (wide(states[row][:, few]) - offset) / sizes)
                states[row][:, few] = (rounded * sizes + offset).to(states)
            moves = kind == int(self.latent) and shifts is not None
            read.append(turned(self.model, index, states, shifts) if moves and states.shape[2] else states)
        return read[0], read[1]

    def _rounded(self, index: int, kind: int, states: Tensor) -> Tensor:
        """`[heads, n, dim]` as they are kept."""
        return slow_round(states, self.bits[kind], True)

    def _offset(self, record: LayerRecord, row: int, kind: int, position: Tensor) -> Tensor:
        """`[heads, columns, dim]`, what is subtracted of each column of this row."""
        mean, rotary = record.rounding[row].means[kind], record.rotaries[kind]
        if mean is None:
            return torch.zeros_like(record.states[kind][row])
        mean = mean.expand_as(record.states[kind][row])
        return mean if rotary is None else rotary.rotate(mean[None], position.clamp(min=0)[None, None])[0].to(mean)

    def _mean(self, record: LayerRecord, row: int, kind: int, columns: list[int]) -> Tensor | None:
        """Of these columns of this row, see `Rounding.means`."""
        if self.bits[kind] is None or not (kind == 0 or self.latent):
            return None
        states = wide(record.states[kind][row][:, columns])
        if record.rotaries[kind] is not None:
            places = (self.real[row].long().cumsum(0) - 1)[columns]
            states = record.rotaries[kind].unrotate(states[None], places[None, None])[0]
        return states.mean(1, keepdim=True).bfloat16().to(record.states[kind])

    def _sizes(self, record: LayerRecord, row: int, kind: int, columns: list[int]) -> Tensor | None:
        """Of these columns of this row, see `Rounding.sizes`."""
        if record.rounding[row].means[kind] is None:
            return None
        offset = self._offset(record, row, kind, self.real[row].long().cumsum(0) - 1)
        return slow_sizes((wide(record.states[kind][row]) - offset)[:, columns])[:, None]

    # ---- commit and take back --------------------------------------------------------------------------------------

    def commit(self, drop: int) -> None:
        """What waits is taken in, but for the newest columns."""
        count, self.pending = self.pending, 0
        if drop:
            self._cut(self.seen - drop)
        count -= drop
        if count <= 0:
            return
        for record in self.layers.values():
            if record.rule is not None:
                record.rule.commit(0)
            for row, rounding in enumerate(record.rounding):
                came = [at for at in range(self.seen - count, self.seen) if self.real[row, at]]
                rounding.count += len(came)
                if not rounding.met and (len(came) > 1 or rounding.count >= self.block):
                    stay = (self.real[row, : self.seen] & self.visible[row, : self.seen]).nonzero()[:, 0].tolist()
                    rounding.met = True
                    if stay:  # a mask may have hidden all of them
                        rounding.means = self._mean(record, row, 0, stay), self._mean(record, row, 1, stay)
                        rounding.sizes = self._sizes(record, row, 0, stay), self._sizes(record, row, 1, stay)
                rounding.below = max(rounding.below, rounding.count - self.block)

    def can_crop(self, count: int) -> bool:
        """Whether the rule still holds the newest columns, in every layer that has one."""
        try:
            for record in self.layers.values():
                copy.deepcopy(record.rule or SlowLayer(0, 1, 0, SLOW_POLICIES["recency"], True)).crop(count)
        except ValueError:
            return False
        return True

    def crop(self, count: int) -> None:
        """Take back the newest columns."""
        waiting = min(count, self.pending)
        for record in self.layers.values():
            if record.rule is not None:
                record.rule.crop(count)
        self.commit(waiting)
        left = self.seen - (count - waiting)
        if left <= 0:
            self.clear()
        elif count > waiting:
            self._cut(left)
            for record in self.layers.values():
                self._count_again(record)

    def _cut(self, left: int) -> None:
        self.taken_back = left
        self.ids, self.real, self.positions = self.ids[:, :left], self.real[:, :left], self.positions[:, :left]
        self.visible, self.shown = self.visible[:, :left], self.shown[:, :left]
        counts = self.real.sum(1).tolist()
        self._gone = [{at for at in gone if at < count} for gone, count in zip(self._gone, counts, strict=False)]
        for record in self.layers.values():
            record.states = record.states[0][:, :, :left], record.states[1][:, :, :left]
        self.forwards = [
            one if one.columns.stop <= left else one.first(left) for one in self.forwards if one.columns.start < left
        ]
        self._twin = None

    def select(self, index: list[int]) -> None:
        """The batch is made of these rows."""
        self._held_at.clear()
        self._moved_spans = [self.spans_of(row) for row in index]
        self.ids, self.real, self.positions = self.ids[index], self.real[index], self.positions[index]
        self.visible, self.shown = self.visible[index], self.shown[index]
        self._named_at = [self._named_at[row] for row in index] if self._named_at else []
        self._gone = [self._gone[row] for row in index] if self._gone else []
        self._hidden_at = [self._hidden_at[row] for row in index] if self._hidden_at else []
        for record in self.layers.values():
            record.states = record.states[0][index], record.states[1][index]
            record.rounding = [replace(record.rounding[row]) for row in index]
            if record.rule is not None:
                record.rule.reorder(index)
        self.forwards = [one.rows(index) for one in self.forwards]
        self._twin = None

    def hide(self, hidden: Tensor, *, forget: bool = False) -> None:
        """A mask hides these columns, `[rows, columns]` bool, all of them visible so far; or the cache is told to
        `forget` them: masks may go on showing them, and all positions stay."""
        self.commit(0)
        columns = [set(row.nonzero()[:, 0].tolist()) for row in hidden]
        rules = [held_record.rule for held_record in self.layers.values() if held_record.rule is not None]
        lost = [rule.lost(columns) for rule in rules]
        level = [max(most) for most in zip(*lost, strict=True)]
        for rule in rules:
            rule.hide(columns, level, forget)
        self.visible = self.visible & ~hidden
        gone = self._positions_of(hidden)
        if not forget:
            self.shown = self.shown & ~hidden
            end = [int(own[-1]) + 1 if len(own := row.nonzero()[:, 0]) else 0 for row in self.shown]
            counts = torch.arange(self.seen) < torch.tensor(end)[:, None]
            self.real = torch.where(hidden.any(-1, keepdim=True), self.real & counts, self.real)
        self._gone = [
            {at for at in before | own if at < count}
            for before, own, count in zip(
                self._gone or [set()] * len(gone), gone, self.real.sum(1).tolist(), strict=True
            )
        ]
        left = self.real.sum(1).tolist()
        self._hidden_at = [
            count if row.any() else before
            for row, count, before in zip(hidden, left, self._hidden_at or [0] * len(left), strict=True)
        ]
        for at, (count, held) in self._held_at.items():
            self._held_at[at] = min(count, int(self.real[at[1]].sum())), held - gone[at[1]]
        for record in self.layers.values():
            self._count_again(record)

    def _positions_of(self, columns: Tensor) -> list[set[int]]:
        positions = self.real.long().cumsum(1) - 1
        return [set(own[chosen].tolist()) for own, chosen in zip(positions, columns, strict=True)]

    def _count_again(self, record: LayerRecord) -> None:
        for row, rounding in enumerate(record.rounding):
            rounding.count = int(self.real[row].sum())
            rounding.below = min(rounding.below, rounding.count)
            if not rounding.count:
                record.rounding[row] = Rounding()

    def spans_of(self, row: int) -> Spans:
        """Those of this row."""
        if self._moved_spans:
            return self._moved_spans[row]
        return self.spans[row * len(self.spans) // len(self.real)] if self.spans else []

    def protect(self, spans: Spans) -> None:
        """These tokens stay from now on, in all rows, and no others but the first and the newest."""
        self.commit(0)
        self.spans, self._moved_spans, self._named_at = by_row(spans), [], [int(row.sum()) for row in self.real]
        for record in self.layers.values():
            if record.rule is not None:
                record.rule.protect(self.spans)

    def shrink(self, budget: int) -> None:
        """Every layer holds no more than this."""
        self.commit(0)
        for record in self.layers.values():
            rule = record.rule
            if rule is None:
                continue
            rule.budget = budget
            if rule.held > budget:
                for row in rule.rows:
                    for group in row.groups:
                        rule._trim(group, [], len(row.columns), sum(row.columns))
                rule.held = budget

    # ---- the model, asked again ------------------------------------------------------------------------------------

    def _twin_of(self, start: int) -> _Twin:
        if self._twin is None:
            self._twin = _Twin(self)
            for forward in self.forwards:
                self._twin.say(forward)
        assert self._twin.get_seq_length() == start
        return self._twin

    # ---- what the fast cache claims ----------------------------------------------------------------------------------

    def check(self, cache: Any, states: bool = True) -> None:
        """Everything that can be read of the fast cache agrees; `states`: keys, values and scores as well."""
        assert cache.get_seq_length() == self.seen
        least = cache.budget
        everything = least is not None and least >= self.most
        for index, layer in cache.paged_layers:
            record = self.layers.get(index)
            if record is None:
                continue
            waiting = self.pending if self.recording else 0
            taken = self.real[:, : self.seen - waiting]
            own = [int(row.sum()) for row in taken]
            # What newer tokens took the place of does not come back when these are taken back.
            since = [int(row[: self.taken_back].sum()) for row in taken]
            since = [max(pair) for pair in zip(since, self._hidden_at or since, strict=True)]
            positions = layer.positions
            assert layer.held <= layer.budget.capacity, "more is held than the budget"
            for row, heads in enumerate(positions.tolist()):
                for head, slots in enumerate(heads):
                    held = sorted(p for p in slots if p >= 0)
                    self._check_positions(record, row, head, held, (since[row], own[row]), everything)
                    self._check_gone((index, row, head), own[row], set(held))
            if states and layer.held and any(own):
                self._check_states(index, layer, record, taken)
            if states and layer.held and record.rule is not None:
                self._check_blocks(layer, record.rule)
        stats = cache.stats()
        assert stats.seen == self.seen
        rules = [record.rule for record in self.layers.values()]
        if rules and None not in rules and not self._hidden_at:  # what a mask hid at the end has never come
            assert stats.evicted_tokens == sum(map(_evicted, rules)), "tokens are counted wrongly"

    def _check_positions(
        self, record: LayerRecord, row: int, head: int, held: list[int], counts: tuple[int, int], everything: bool
    ) -> None:
        since, count = counts
        gone = {at for at in self._gone[row] if at < count} if self._gone else set()
        assert len(held) == len(set(held)), "a token is held twice"
        assert not held or held[-1] < count, "a token is held that never came"
        assert not gone & set(held), "a token is held that a mask hid"
        if everything:
            assert len(held) == count - len(gone), "a token has gone, and the budget would hold all"
        must = {*range(min(self.protected, count)), *range(max(since, count - self.recent), count)}
        named = self._named_at[row] if self._named_at else 0
        must |= {at for span in self.spans_of(row) for at in range(*span) if named <= at < count}
        must -= gone
        assert must <= set(held), f"protected tokens {sorted(must - set(held))} have gone"
        if record.rule is not None and record.rule.rows:
            expected = sorted(token.position for token in record.rule.group(row, head).tokens)
            assert held == expected, f"row {row}, head {head}: {held} are held, not {expected}"

    def _check_blocks(self, layer: Any, rule: SlowLayer) -> None:
        """The tokens of every block in the order of the text or of overwriting, and the mean score of full blocks."""
        table, scores = layer.block_table(), layer.block_scores().double()
        for row in range(len(rule.rows)):
            for head in range(table.shape[1]):
                logical = [token.position for token in rule.group(row, head).tokens]
                shown = table[row, head].flatten().tolist()
                assert shown == logical + [-1] * (len(shown) - len(logical)), "blocks hold other tokens"
                means = rule.block_scores(row, head)
                means += [math.nan] * (len(scores[row, head]) - len(means))
                torch.testing.assert_close(
                    scores[row, head], torch.tensor(means).double(), rtol=1e-4, atol=1e-5, equal_nan=True
                )

    def _check_gone(self, which: tuple[int, int, int], count: int, held: set[int]) -> None:
        """What has left does not come back, whoever decides what leaves."""
        before, had = self._held_at.get(which, (0, set()))
        back = {position for position in held - had if position < before}
        assert not back, f"tokens {sorted(back)} have come back"
        self._held_at[which] = count, held

    def _check_states(self, index: int, layer: Any, record: LayerRecord, taken: Tensor) -> None:
        positions = layer.positions
        real = positions >= 0
        columns = torch.zeros_like(positions)
        for row in range(len(positions)):
            own = taken[row].nonzero()[:, 0]
            if len(own):
                columns[row] = own[positions[row].clamp(0, len(own) - 1)]
        read = self._read(index, record, None, None)
        for kind, (held_states, expected, came) in enumerate(
            zip((layer.keys, layer.values), read, record.states, strict=True)
        ):
            at = columns[..., None].expand(-1, -1, -1, came.shape[-1])
            held_states, expected, came = held_states[:, :, : layer.held], expected.gather(2, at), came.gather(2, at)
            size = came.norm(dim=-1).clamp(min=1e-300)
            different = ((held_states - expected).norm(dim=-1) / size > 1e-5) & real
            name = ("keys", "values")[kind]
            if self.bits[kind] is None or not self.autocast:
                assert not different.any(), f"layer {index}, {name} at [row, head, slot] {different.nonzero().tolist()}"
            far = ((held_states - came).norm(dim=-1) / size > FARTHEST[self.bits[kind]] + 1e-6) & real
            assert not far.any(), f"layer {index}, {name}: {self.bits[kind]} bits are far from what came"


def _evicted(rule: SlowLayer) -> int:
    """Tokens that came and are not held, in all rows; a row counts once."""
    waiting = [sum(token is not None for token in row.pending) for row in rule.rows]
    return sum(sum(row.columns) - own - len(row.groups[0].tokens) for row, own in zip(rule.rows, waiting, strict=True))


class _Twin(DynamicCache):
    """Gives each forward what it may see."""

    def __init__(self, slow: SlowCache) -> None:
        super().__init__(config=slow.model.config)
        self.slow = slow
        self.forward: Forward | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        own = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        assert self.forward is not None
        past = self.forward.past.get(layer_idx)
        if past is None:
            return own
        return torch.cat([past[0], key_states], dim=2), torch.cat([past[1], value_states], dim=2)

    def say(self, forward: Forward) -> Tensor:
        """Logits of these columns, `[rows, n, vocabulary]`."""
        slow, self.forward = self.slow, forward
        reference = slow.model
        part = forward.columns
        dtype = reference.dtype
        masks = {layer: _additive(reference, sees, part.start, dtype) for layer, sees in forward.sees.items()}
        shared = shared_layers(reference.config)
        masks |= {layer: masks[source] for layer, source in shared.items() if source in masks}
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=slow.autocast)
        with torch.no_grad(), autocast, _forced_masks(reference, masks):
            logits: Tensor = reference(
                input_ids=slow.ids[:, part],
                attention_mask=forward.visible.long(),
                position_ids=slow.positions[:, part],
                **{CACHE_ARGUMENT: self},
                use_cache=True,
            ).logits
        return logits


def _pair(setting: Any) -> tuple[Any, Any]:
    return (setting[0], setting[1]) if isinstance(setting, list | tuple) else (setting, setting)


def _additive(model: Any, sees: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    sees = sees.clone()
    # A query that sees nothing (a pad) sees itself, or its softmax would have nothing to share out.
    nothing = ~sees.any(-1)
    own = torch.arange(sees.shape[2])
    sees[:, :, own, start + own] |= nothing
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)
    return mask.repeat_interleave(model.config.num_attention_heads // mask.shape[1], dim=1)


def turned(model: Any, index: int, states: Tensor, shifts: Tensor) -> Tensor:
    """`[rows, heads, columns, dim]`, each moved forward by its shift, with the model's own rotation."""
    if not getattr(model.config, "no_rope_layers", [1] * (index + 1))[index]:
        return states
    modeling = sys.modules[type(model).__module__]
    embedding = next(one for one in model.modules() if type(one).__name__.endswith("RotaryEmbedding"))
    rows, heads, columns, dim = states.shape
    own = states.reshape(rows * heads, 1, columns, dim)
    places = shifts.reshape(rows * heads, columns)
    kinds = getattr(model.config, "layer_types", None)
    kind = (kinds[index],) if kinds and isinstance(getattr(embedding, "rope_type", None), dict) else ()
    # What stretches positions may also scale keys, which has been done to these.
    angles = [part / getattr(embedding, "attention_scaling", 1.0) for part in embedding(own, places, *kind)]
    if "gemma3n" in model.config.model_type:
        return modeling.apply_rotary_pos_emb(own, *angles).reshape(states.shape)
    return modeling.apply_rotary_pos_emb(own, own, *angles)[1].reshape(states.shape)
