"""Which budgets and bits fit into how much memory, and what they lose."""

import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import exp, log

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PretrainedConfig

from ..cache import PagedEvictionCache
from ..layer.paged import PagedLayer
from ..learned.calibration import load_calibration
from ..learned.lookup import chosen_use, find_calibration
from ..learned.measured import BYTES, OF_USE, Bits, Measured, Row, Use
from ..naming.sizes import parse_bytes, readable_bytes
from .shapes import Shapes

#: Precisions that are planned, the model's own first.
_BITS: tuple[Bits, ...] = (None, 8, 4, (4, 2), (3, 2))
#: Tokens per block, and the fewest blocks of a budget: protected ones, the newest, and one to evict.
_BLOCK, _FEWEST = 16, 4
#: So close to a share that was measured, relative to it, its number counts as measured there.
_CLOSE = 0.02


@dataclass(frozen=True)
class Loss:
    """Divergence from the full cache.

    Attributes:
        nats: per token, mean over the ways to ask that count for a use.
        source: "measured" at this share; "between" two shares that were measured; or "extrapolated": the nearest share
            that was measured is another, and the number is that one's.
    """

    nats: float
    source: str

    def __str__(self) -> str:
        marks = {"measured": "", "between": " ~", "extrapolated": " ?"}
        return f"{self.nats:.3f}{marks[self.source]}"


@dataclass(frozen=True)
class Choice:
    """One precision, and the largest budget that fits with it.

    Attributes:
        bits: as in `CacheOptions`; None = the model's dtype.
        tokens: tokens per paged layer and row, in whole blocks; 0 = not even the smallest budget fits.
        cache_bytes: bytes of keys and values of all layers and rows at that budget.
        peak_bytes: most bytes at once while the prompt is read in chunks: weights, cache and temporary tensors.
        share: `cache_bytes` as a share of the whole context in 16 bits.
        loss: what the profile measured at this share; None without a profile, or if these bits were not measured.
    """

    bits: Bits
    tokens: int
    cache_bytes: int
    peak_bytes: int
    share: float
    loss: Loss | None


@dataclass(frozen=True)
class Plan:
    """What fits. `print` shows it as a table.

    Attributes:
        context: tokens of the longest text.
        rows: texts at a time.
        memory: bytes in all; None = no limit was given.
        weights: bytes of weights and buffers.
        token_bytes: bytes of the keys and values of one token of a row, in all layers that grow with the text, in 16
            bits.
        window_bytes: bytes of layers with a sliding window, once their windows are full, in the model's dtype.
        full_bytes: bytes of the keys and values of the whole context in 16 bits: what shares of memory refer to.
        passing_bytes: most bytes of temporary tensors while a chunk is read, without what grows with the budget.
        choices: one for each precision.
        profile: the file that losses come from; None = none was found.
    """

    context: int
    rows: int
    memory: int | None
    weights: int
    token_bytes: int
    window_bytes: int
    full_bytes: int
    passing_bytes: int
    choices: tuple[Choice, ...]
    profile: str | None = None

    def __str__(self) -> str:
        limit = "no limit" if self.memory is None else readable_bytes(self.memory)
        lines = [
            f"{self.context:,} tokens, {self.rows} row{'s' * (self.rows > 1)}, memory {limit}",
            f"  weights                     {readable_bytes(self.weights):>10}",
            f"  keys and values of a token  {readable_bytes(self.token_bytes):>10}  in 16 bits, of all layers",
            f"  of the whole context        {readable_bytes(self.full_bytes):>10}  in 16 bits",
            f"  while a chunk is read       {readable_bytes(self.passing_bytes):>10}  for a moment",
        ]
        if self.window_bytes:
            lines.insert(4, f"  sliding windows             {readable_bytes(self.window_bytes):>10}")
        lines += ["", "  bits      tokens held       keys, values  of 16-bit memory  peak        loss, nats"]
        lines += [self._line(choice) for choice in self.choices]
        sources = {choice.loss.source for choice in self.choices if choice.loss is not None}
        if "between" in sources:
            lines.append("  ~ between two shares that prepare measured")
        if "extrapolated" in sources:
            lines.append("  ? not measured at this share: the number is that of the nearest one")
        if sources:
            lines.append(f"  Losses were measured on prompts of about 1,000 tokens: {self.profile}")
        return "\n".join(lines)

    def _line(self, choice: Choice) -> str:
        bits = str(choice.bits).strip("()")
        if not choice.tokens:
            return f"  {bits:<8}  does not fit"
        held = f"{choice.tokens:,}" + (" (all)" if choice.tokens >= self.context else "")
        loss = "" if choice.loss is None else str(choice.loss)
        return (
            f"  {bits:<8}  {held:<16}  {readable_bytes(choice.cache_bytes):<12}  {choice.share:<16.1%}  "
            f"{readable_bytes(choice.peak_bytes):<10}  {loss}"
        )


def plan(
    model: Module | PretrainedConfig,
    context: int | str,
    memory: int | str | None = None,
    *,
    rows: int = 1,
    chunk: int = 256,
    dtype: torch.dtype | None = None,
    profile: str | None = None,
    bits: Sequence[Bits] = _BITS,
) -> Plan:
    """Work out which budgets and bits fit into memory, before anything is loaded or read.

    The model is built on the meta device, and reads a chunk there, so a configuration is enough. Bytes of weights, keys
    and values are exact; the peak is that of all tensors that operators make, which the tests hold to 2 %, for policies
    that read keys and values. What an operator takes inside, and a memory allocator beyond the tensors, depends on the
    machine.

    >>> print(plan(AutoConfig.from_pretrained("Qwen/Qwen3-8B"), context="128k", memory="24GiB"))  # doctest: +SKIP

    Args:
        model: a model, or its configuration.
        context: tokens of the longest text; "128k" = 131,072.
        memory: bytes for weights, keys and values and all temporary tensors together ("8GiB"); None = no limit.
        rows: texts at a time.
        chunk: tokens that are read at once, `prefill_chunk_size`.
        dtype: dtype of weights, keys and values; None = that of the model or configuration, else bfloat16.
        profile: a file that `prepare` wrote; None = that of the model's weights, if they are registered
            and there is one. Losses come from it.
        bits: precisions to plan, as in `CacheOptions`.

    Raises:
        TypeError: an argument has another type.
        ValueError: a number is out of range, there is no such profile, or transformers cannot build or run the model on
            the meta device.
    """
    tokens = _tokens(context)
    for name, count in (("rows", rows), ("chunk", chunk)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}.")
    limit = None if memory is None else parse_bytes(memory)
    shapes = Shapes(model, dtype)
    path = find_calibration(shapes.config) if profile is None else profile
    measured = None if path is None else load_calibration(str(path)).measured
    passing = cache(partial(shapes.passing, chunk=min(chunk, tokens), rows=rows))
    per_token = sum(map(shapes.token_bytes, shapes.paged))
    windows = (min(window, tokens) * shapes.token_bytes(index) for index, window in shapes.windows.items())
    planned = Plan(
        context=tokens,
        rows=rows,
        memory=limit,
        weights=shapes.weights,
        token_bytes=per_token,
        window_bytes=rows * sum(windows) * shapes.dtype.itemsize // 2,
        full_bytes=rows * per_token * tokens,
        passing_bytes=passing(0, copies=False, waits=False),
        choices=(),
        profile=None if path is None else str(path),
    )
    loss = partial(loss_at, measured, use=chosen_use(shapes.config))
    return replace(planned, choices=tuple(_choice(planned, shapes, passing, one, loss) for one in bits))


def _tokens(context: int | str) -> int:
    """The number of tokens: 1024, "1024", "128k", "1M"; k = 1,024."""
    match = re.fullmatch(r"\s*(\d{1,12})\s*([km]?)\s*", str(context).lower(), re.ASCII)
    if isinstance(context, bool) or not isinstance(context, int | str) or match is None or not int(match[1]):
        raise ValueError(f"context={context!r} is not a number of tokens: write 8192, '128k' or '1M' (k = 1,024).")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2]]


def _choice(
    plan: Plan, shapes: Shapes, passing: Callable[..., int], bits: Bits, loss: Callable[[Bits, float], Loss | None]
) -> Choice:
    """The largest budget with these bits; `passing`: see `Shapes.passing`; `loss`: at a share, see `loss_at`."""
    layers = _layers(shapes, plan.rows, bits)
    per_token = sum(layer.store.token_bytes(*states) for layer, states in layers)
    fixed = sum(layer.store.fixed_bytes(*states) for layer, states in layers)
    copies = any(layer.store.rounds or layer.store.columns.ragged for layer, _ in layers)
    behind = partial(passing, copies=copies, waits=any(layer.recorder is not None for layer, _ in layers))
    most = -(-plan.context // _BLOCK)

    def peak(blocks: int, temporary: int) -> int:
        return plan.weights + plan.window_bytes + blocks * _BLOCK * per_token + fixed + temporary

    def at_most(blocks: int) -> int:
        """The peak, or a little more: temporary tensors grow faster the longer the text, so no more than on a line."""
        return peak(blocks, behind(0) + (behind(most * _BLOCK) - behind(0)) * blocks // most)

    blocks = most if plan.memory is None else bisect_right(range(most + 1), plan.memory, key=at_most) - 1
    if blocks < min(_FEWEST, most):
        return Choice(bits, 0, 0, 0, 0.0, None)
    cache_bytes = blocks * _BLOCK * per_token + fixed
    share = cache_bytes / max(plan.full_bytes, 1)
    # What is not rounded counts as 16 bits when caches are compared, whatever the dtype.
    lost = loss(bits, blocks / most if bits is None else share)
    return Choice(bits, blocks * _BLOCK, cache_bytes, peak(blocks, behind(blocks * _BLOCK)), share, lost)


def _layers(shapes: Shapes, rows: int, bits: Bits) -> list[tuple[PagedLayer, list[Tensor]]]:
    """The paged layers of the cache that would be made, with one token of keys and values as each would get it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a plan is no cache: what to know of its options stands elsewhere
        example = PagedEvictionCache(shapes.config, budget=_FEWEST * _BLOCK, block_size=_BLOCK, bits=bits)
    tokens = {
        index: [one.to(shapes.dtype).expand(rows, -1, -1, -1) for one in states]
        for index, states in shapes.states.items()
    }
    return [(layer, tokens[index]) for index, layer in example.paged_layers if index in tokens]


def loss_at(measured: Measured | None, bits: Bits, share: float, use: Use = "both") -> Loss | None:
    """The loss of the best cache with these bits at a share of the 16-bit bytes of keys and values; None if no cache
    with these bits was measured."""
    if measured is None:
        return None
    if bits is None and share >= 1:
        return Loss(0.0, "measured")  # everything is held as it is
    scores = measured.scores(BYTES, use)
    labels = {row.label for row in measured.rows if row.unit == BYTES and row.bits == bits} & set(scores)
    if not labels:
        return None
    best = min(labels, key=lambda label: scores[label])
    points = sorted((row.share, _mean(row, use)) for row in measured.rows if (row.unit, row.label) == (BYTES, best))
    nearest = min(points, key=lambda point: abs(log(point[0] / share)))
    if abs(nearest[0] / share - 1) <= _CLOSE:
        return Loss(nearest[1], "measured")
    below, above = [point for point in points if point[0] < share], [point for point in points if point[0] > share]
    if not below or not above:
        return Loss(nearest[1], "extrapolated")
    (low, more), (high, less) = below[-1], above[0]
    part, floor = log(share / low) / log(high / low), 1e-6  # a loss may be zero, or less by noise
    return Loss(exp((1 - part) * log(max(more, floor)) + part * log(max(less, floor))), "between")


def _mean(row: Row, use: Use) -> float:
    means = [row.mean(aspect) for aspect in OF_USE[use] if aspect in row.divergences]
    return sum(means) / len(means)
