"""What a file may say of a paged layer: shapes that belong together, and no number that would point outside.

A digest tells damage; these checks tell a file that was made to look right. They read all integers once.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..allocators.cascade import CascadeSnapshot
from ..allocators.sharing import SharingSnapshot
from ..layer.contents import PagedSnapshot
from ..layer.paged import PagedLayer
from ..masks.padding import PaddingSnapshot
from ..precision.coded import CodedSnapshot, CodedStore
from ..precision.exact import EMPTY
from ..queries.observer import ObserverSnapshot
from ..static.sliding import SlidingSnapshot, StaticSlidingLayer
from ..store.store import HeldSnapshot, StoreSnapshot
from ..table.bounds import bounds_of, spans_in
from ..table.budget import BlockBudget
from ..table.state import Choice, Counters, Phase, Tokens

#: No text is longer, and sums of such numbers are still far from overflowing.
_LONGEST = 2**40


def _need(condition: bool | Tensor, what: str) -> None:
    if not bool(condition):
        raise ValueError(what)


def _shape(name: str, tensor: Tensor, shape: Iterable[int], dtype: torch.dtype) -> None:
    wanted = tuple(shape)
    _need(
        tensor.shape == wanted and tensor.dtype == dtype,
        f"{name} is {tensor.dtype} {list(tensor.shape)} where {dtype} {list(wanted)} belongs",
    )


def _range(name: str, numbers: Tensor, least: int, most: int) -> None:
    """Both included."""
    inside = not numbers.numel() or (int(numbers.min()) >= least and int(numbers.max()) <= most)
    _need(inside, f"{name} has numbers outside {least} .. {most}")


def check_paged(saved: PagedSnapshot, layer: PagedLayer, rows: int, seen: int) -> None:
    """Refuse what does not belong into a paged layer like this, or would point outside of it.

    Raises:
        ValueError: with the part.
    """
    _need(saved.table is not None and saved.store is not None, "it has no tokens, and others have")
    if saved.table is None or saved.store is None:
        return
    state, counters = saved.table.state, saved.table.counters
    _need(state.tokens.positions.ndim == 3, f"positions is {list(state.tokens.positions.shape)}")
    _need(saved.tokens == state.tokens.positions.shape[-1], f"its budget is {saved.tokens}, which its table is not")
    size, capacity = layer.budget.block_size, state.tokens.positions.shape[-1]
    _need(capacity > 0 and capacity % size == 0, f"its budget {capacity} is no multiple of the block size {size}")
    _need(capacity >= layer.budget.smallest, f"its budget {capacity} is below the smallest, {layer.budget.smallest}")
    known = layer.quota.unequal or layer.budget.tokens in (None, capacity)
    _need(known, f"its budget is {capacity}, and the settings make it {layer.budget.tokens}")
    heads = _check_store(saved.store, layer, rows, capacity)
    here, there = (
        (layer.local_heads.processes(heads), layer.local_heads.first_head(heads)),
        (saved.processes, saved.first_head),
    )
    _need(
        here == there,
        f"it was saved by a process with head {there[1]} and the next, one of {there[0]}; this one has head {here[1]} "
        f"and is one of {here[0]}",
    )
    held = saved.store.shape[2]
    sets = 1 if layer.heads == "shared" else heads
    # Where shares differ, slots beyond the row's own are dead and count as held.
    _check_counters(counters, held, seen, capacity, held <= seen or state.phase.limits is not None)
    _check_phase(state.phase, counters, (rows, sets, capacity), layer.budget, layer.quota.unequal)
    if saved.store.lengths is not None:
        limits = state.phase.limits
        same = limits is not None and torch.equal(limits.expand(-1, heads), saved.store.lengths)
        _need(same, "rows and heads hold other numbers of tokens than they may")
    _check_tokens(state.tokens, state.phase, held, seen, (rows, sets, capacity))
    _check_shifts(saved.store, state.tokens, layer, (rows, sets, capacity))
    _check_choice(state.choice, (rows, sets, capacity), size, max(1, layer.needs.decision_interval // size))
    if saved.scores is not None:
        _need(layer.quota.unequal, "it has scores that only shares of rows or heads need")
        _shape("scores", saved.scores, (rows, sets, held), torch.float32)
    _need(
        (layer.listener is None) == (saved.observer is None),
        "it has statistics that its policy does not ask for, or none",
    )
    if saved.observer is not None:
        _check_observer(saved.observer, layer, (rows, heads, capacity), seen)
        _check_queries(saved.observer.kept, saved.store, layer.local_heads.latent)
    asks = layer.is_compileable and layer.needs.queries
    _need(saved.ring is not None or not asks, "it has no query, and compiled steps of its policy ask for one")
    if saved.ring is not None:
        _need(layer.is_compileable and layer.needs.queries, "it has a query that nobody asks for")
        _need(saved.ring.example.ndim == 4 and saved.ring.example.shape[2] == 1, "its query is none")
        _check_queries([saved.ring.example], saved.store, layer.local_heads.latent)
    _need(
        (saved.marks is None) == (layer.marks is None),
        "it has marks of tokens that its policy does not ask for, or none",
    )
    if saved.marks is not None:
        _shape("marks", saved.marks, (rows, heads, held), torch.float32)
    _need(saved.outlet is None or layer.outlet.plans or layer.outlet.takes, "it has tokens that its disposal drops")
    layer.outlet.check_saved(saved.outlet, saved.table, saved.store)
    _need(saved.all_real is None or layer.is_compileable, "it has compiled steps, and the cache is not static")


def _check_store(store: HeldSnapshot, layer: PagedLayer, rows: int, capacity: int) -> int:
    if store.lengths is not None:
        _check_lengths(store, store.lengths, layer, rows, capacity)
    if isinstance(layer.store, CodedStore):
        return _check_coded(store, layer, rows, capacity)
    _need(isinstance(store, StoreSnapshot), "its keys and values are in few bits, and here they are not")
    if not isinstance(store, StoreSnapshot):
        return 0
    keys, values = store.keys, store.values
    dims = 4 if store.lengths is None else 2
    fits = keys.ndim == values.ndim == dims and keys.shape[:-1] == values.shape[:-1]
    fits = fits and (keys.shape[0] == rows if store.lengths is None else len(keys) == int(store.lengths.sum()))
    _need(fits, f"keys {list(keys.shape)} and values {list(values.shape)} are not those of {rows} rows")
    _need(keys.dtype == values.dtype and keys.dtype.is_floating_point, f"keys are {keys.dtype}, values {values.dtype}")
    heads, held = store.shape[1], store.shape[2]
    _need(heads > 0 and held <= store.slots <= capacity, f"{held} tokens, {store.slots} slots, a budget of {capacity}")
    layer.quota.check(heads, layer.local_heads)
    return heads


def _check_lengths(store: HeldSnapshot, lengths: Tensor, layer: PagedLayer, rows: int, capacity: int) -> None:
    _need(not layer.store.columns.pads, "its heads hold different numbers of tokens, and here they do not")
    _need(lengths.ndim == 2 and lengths.shape[0] == rows and lengths.dtype == torch.int64, "its lengths are none")
    _need(lengths.shape[1] > 0 and store.slots == capacity, f"{store.slots} slots, a budget of {capacity}")
    _range("lengths", lengths, 1, capacity)


def _check_coded(saved: HeldSnapshot, layer: PagedLayer, rows: int, capacity: int) -> int:
    store = layer.store
    _need(isinstance(saved, CodedSnapshot), "its keys and values are as they came, and here they are in few bits")
    if not isinstance(saved, CodedSnapshot) or not isinstance(store, CodedStore):
        return 0
    ndim = 4 if saved.lengths is None else 2
    _need(saved.key_codes.ndim == ndim and saved.keys.ndim == saved.values.ndim == 4, "its codes are none")
    _need(saved.keys.shape[0] == rows and saved.dtype.is_floating_point, f"its keys are not those of {rows} rows")
    _need(saved.values.dtype == saved.dtype, f"keys are {saved.dtype}, values {saved.values.dtype}")
    for (shape, dtype), found in zip(store.expected(saved), [*saved.codes, *saved.exact], strict=True):
        _shape("codes", found, shape, dtype)
    heads, held = saved.shape[1], saved.shape[2]
    _need(heads > 0 and held <= saved.slots <= capacity, f"{held} tokens, {saved.slots} slots, a budget of {capacity}")
    _range("places", saved.places, EMPTY, held - 1)
    for name in ("count", "coded", "since"):
        _range(name, getattr(saved, name), 0, _LONGEST)
    _need((saved.coded <= saved.count).all(), "more tokens are encoded than came")
    _need(0 <= saved.uncoded < layer.budget.block_size, f"{saved.uncoded} tokens wait for their codes")
    _need(saved.means.isfinite().all(), "the mean of its keys is no number")
    _need((saved.sizes.isfinite() & (saved.sizes > 0)).all(), "the sizes of its channels are none")
    layer.quota.check(heads, layer.local_heads)
    return heads


def _check_counters(counters: Counters, held: int, seen: int, capacity: int, were_seen: bool) -> None:
    _need(counters.held == held and held <= capacity, f"{counters.held} tokens are counted, and {held} are there")
    _need(were_seen, f"{held} tokens are held, and {seen} were seen")
    _need(counters.seen == seen and 0 < seen <= _LONGEST, f"{counters.seen} tokens were seen, elsewhere {seen}")
    _need(counters.positions_until == seen, "positions are not written down")
    _need(counters.overwriting == (held == capacity), "it is full and goes on growing, or the reverse")
    _need(-1 <= counters.chosen_at <= seen, f"victims were chosen at {counters.chosen_at}")


def _check_phase(
    phase: Phase, counters: Counters, shape: tuple[int, int, int], budget: BlockBudget, unequal: bool
) -> None:
    (rows, sets, capacity), size = shape, budget.block_size
    _shape("pads", phase.pads, (rows,), torch.int64)
    _range("pads", phase.pads, 0, counters.seen)
    _need(phase.bounds.ndim == 2, "bounds are none of spans")
    _shape("bounds", phase.bounds, (rows, phase.bounds.shape[1]), torch.int64)
    _need((phase.bounds.diff(dim=-1) >= 0).all() and not phase.bounds.shape[1] % 2, "bounds are none of spans")
    wanted = bounds_of(budget.spans, budget.protected, rows, phase.bounds.device)
    _need(spans_in(phase.bounds) == spans_in(wanted), "bounds are none of the spans that its settings protect")
    _shape("full_at", phase.full_at, (rows, sets), torch.int64)
    _range("full_at", phase.full_at, 0, _LONGEST)
    values = counters.full_at_values
    _need(set(phase.full_at.flatten().tolist()) <= values, "full_at has values that are not counted")
    # More than there are now, where rows have been dropped.
    _need(all(0 <= value <= _LONGEST for value in values), "full_at is counted")
    _need(counters.residues == frozenset(value % size for value in values), "residues are not those of full_at")
    _need((phase.limits is None) or unequal, "it has shares of rows or heads, and the allocator makes none")
    if phase.limits is not None:
        _shape("limits", phase.limits, (rows, sets), torch.int64)
        _range("limits", phase.limits, size, capacity)
    if phase.order is not None:
        _shape("order", phase.order, shape, torch.int64)
        _need((phase.order.sort(-1).values == torch.arange(capacity)).all(), "order is no order of the slots")


def _check_tokens(tokens: Tokens, phase: Phase, held: int, seen: int, shape: tuple[int, int, int]) -> None:
    _shape("positions", tokens.positions, shape, torch.int64)
    _shape("scores", tokens.scores, shape, torch.float32)
    _range("positions", tokens.positions, -1, _LONGEST)
    inside = tokens.positions[..., :held].sort(-1).values
    _need((inside < (seen - phase.pads)[:, None, None]).all(), "positions lie in the future")
    again = (inside[..., 1:] == inside[..., :-1]) & (inside[..., 1:] >= 0)
    _need(not again.any(), "a position is held twice")


def _check_shifts(store: HeldSnapshot, tokens: Tokens, layer: PagedLayer, shape: tuple[int, int, int]) -> None:
    turning = layer.store.turning
    _need((turning is None) == (tokens.shifts is None), "its tokens stand in the text, or in the cache, and here not")
    if tokens.shifts is not None:
        _shape("shifts", tokens.shifts, shape, torch.int64)
        _range("shifts", tokens.shifts, 0, _LONGEST)
    if not isinstance(store, StoreSnapshot):
        return
    _need(turning is not None or store.turned is None, "it has turned keys, and the settings turn none")
    if turning is not None and store.turned is not None:
        _shape("turned", store.turned, store.keys.shape, store.keys.dtype)


def _check_choice(choice: Choice, shape: tuple[int, int, int], size: int, together: int) -> None:
    rows, sets, capacity = shape
    blocks = capacity // size
    for name in ("block", "left", "taken"):
        _shape(name, getattr(choice, name), (rows, sets), torch.int64)
    _range("block", choice.block, 0, blocks - 1)
    _shape("slots", choice.slots, (rows, sets, size), torch.int64)
    _range("slots", choice.slots, 0, capacity - 1)
    ahead = choice.ahead.shape[-1] if choice.ahead.ndim else 0
    fits = ahead in {1, together, min(together, blocks)}
    _need(fits, f"{ahead} victims are chosen together, and its policy chooses {together}")
    _shape("ahead", choice.ahead, (rows, sets, ahead), torch.int64)
    _range("ahead", choice.ahead, 0, blocks - 1)
    _range("left", choice.left, 0, ahead)
    _range("taken", choice.taken, 0, ahead - 1)
    _shape("evicted_blocks", choice.evicted_blocks, (rows,), torch.int64)
    _range("evicted_blocks", choice.evicted_blocks, 0, _LONGEST)


def _check_observer(saved: ObserverSnapshot, layer: PagedLayer, shape: tuple[int, int, int], seen: int) -> None:
    rows, needs, size = shape[0], layer.needs, layer.budget.block_size
    _need(set(saved.tokens) == set(needs.token_statistics), f"it has the statistics {', '.join(saved.tokens)}")
    _need(set(saved.rows) <= set(needs.row_statistics), f"it has the statistics {', '.join(saved.rows)}")
    for name, values in saved.tokens.items():
        _shape(name, values, shape, torch.float32)
    for name, values in saved.rows.items():
        of_rows = values.ndim > 0 and values.shape[0] == rows and not values.is_complex()
        of_rows = of_rows and values.dtype != torch.bool
        _need(of_rows, f"{name} is {values.dtype} {list(values.shape)} for {rows} rows")
    for name in ("until", "since", "passing"):
        numbers = getattr(saved.count, name)
        _shape(name, numbers, (rows,), torch.int64)
        _range(name, numbers, 0, _LONGEST if name == "passing" else seen)
    _need(saved.longest in (size, 2 * size), f"{saved.longest} queries are kept at most")
    _need(len(saved.kept) == len(saved.kept_real) <= max(saved.longest, seen), "its queries are not counted")
    _need(not saved.kept or saved.logits is not None, "its queries have no scale")
    for query, real in zip(saved.kept, saved.kept_real, strict=True):
        _need(query.ndim == 4 and query.shape == saved.kept[0].shape, "its queries differ in shape")
        _need(query.shape[0] == rows and query.shape[2] == 1, f"a query is {list(query.shape)} for {rows} rows")
        if real is not None:
            _shape("kept_real", real, (rows, 1), torch.bool)


def _check_queries(queries: Sequence[Tensor], store: HeldSnapshot, latent: bool) -> None:
    """Queries that wait are as wide as keys, and of their type or, from under autocast, of a narrower one."""
    for query in queries:
        narrower = query.dtype.is_floating_point and torch.promote_types(query.dtype, store.dtype) == store.dtype
        _need(narrower, f"a query is {query.dtype}, and keys are {store.dtype}")
        if isinstance(store, StoreSnapshot | CodedSnapshot) and not latent:
            wide = store.keys.shape[-1]
            _need(query.shape[-1] == wide, f"a query is {query.shape[-1]} wide, and keys are {wide}")


def check_sliding(saved: SlidingSnapshot, layer: StaticSlidingLayer, rows: int, seen: int) -> None:
    """As `check_paged`, of a static sliding-window layer."""
    keys, values = saved.keys, saved.values
    fits = keys.ndim == 4 and values.ndim == 4 and keys.shape[:3] == values.shape[:3]
    _need(fits and (keys.shape[0], keys.shape[2]) == (rows, layer.window), f"keys are {list(keys.shape)}")
    floating = keys.dtype.is_floating_point and values.dtype.is_floating_point  # under autocast not of one type
    _need(floating, f"keys are {keys.dtype}, values {values.dtype}")
    _need(saved.seen == seen, f"{saved.seen} tokens were seen, elsewhere {seen}")


def check_padding(saved: PaddingSnapshot, rows: int, seen: int) -> None:
    """Refuse masks of other rows."""
    for name in ("given", "mask", "came", "counted"):
        mask = getattr(saved, name)
        if mask is not None:
            fits = mask.ndim == 2 and mask.dtype == torch.bool and mask.shape[0] and rows % mask.shape[0] == 0
            _need(bool(fits), f"the {name} of the padding is {mask.dtype} {list(mask.shape)} for {rows} rows")
    _need(0 <= saved.all_real_from <= _LONGEST, "the padding has no end")


def check_sharing(saved: SharingSnapshot, layers: int, rows: int, size: int) -> None:
    """Refuse shares of other layers or rows."""
    _need(all(0 <= place < layers for place in saved.shares), "the shares are those of other layers")
    for share in saved.shares.values():
        _need(share.ndim == 2 and share.shape[0] == rows and share.dtype == torch.int64, "the shares are of other rows")
        _range("the shares", share, size, _LONGEST)
    if not isinstance(saved, CascadeSnapshot):
        return
    _need(all(0 <= place < layers for place in saved.preferences), "the preferences are those of other layers")
    for preference in saved.preferences.values():
        fits = preference.ndim == 2 and len(preference) == rows and preference.dtype.is_floating_point
        _need(fits, "the preferences are of other rows")
    if saved.real is not None:
        _shape("real", saved.real, (rows,), torch.int64)
        _range("real", saved.real, 0, _LONGEST)
    if saved.settled is not None:
        _shape("settled", saved.settled, (rows,), torch.bool)
