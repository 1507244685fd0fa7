"""Attention of single queries on codes, without decoding keys and values.

A number is `step * (index - middle)` with one step per token, so both factors leave the sums: `query . key = step *
(query . indices - middle * sum(query))`, and the same for values. The mixing of channels is applied to the query, and
undone once in the output. On CUDA, steps use Triton kernels, and on a CPU a function in C (`fused`). Where these cannot
read the codes, compiled code uses broadcast products and sums instead of matrix products, so that the compiler fuses
them with unpacking and reads only the codes. In other cases the indices are unpacked first.

In eager mode the number of operators determines the time of a token, so there are few: matrices of all rows and heads
are batched, and hidden slots are masked in the products.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.weights import Logits
from ..store.columns import Columns, States
from ..store.exact import EMPTY, Exact
from .codec import Codec, planes_of, unpack


@dataclass
class InCodes:
    """The codes of all slots of a layer, and attention to them. Tokens in `exact` are read from there, not from their
    slots. If columns have lengths, entries beyond them mean nothing.

    Attributes:
        codecs: codecs of keys and of values.
        columns: columns of codes, see `FewBits`.
        exact: tokens that are not rounded.
        held: number of slots in use, the first ones; None = all.
        visible: `[batch, 1 or kv_heads, slots]` bool, the slots that hold a token; None = all, or the model's mask says
            it.
    """

    codecs: tuple[Codec, Codec]
    columns: Columns
    exact: Exact
    held: int | None = None
    visible: Tensor | None = None

    @property
    def dim(self) -> int:
        """Head size of the values."""
        return self.exact.values.shape[-1]

    @property
    def slots(self) -> int:
        """Number of slots that attention reads; for heads of different length, the slots of a padded copy."""
        columns = self.columns
        return columns.shape[2] if self.held is None or columns.layout.lengths is not None else self.held

    def read(self, query: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
        """Attention of one query per row, `[batch, 1, query_heads, dim]`, in float32 or wider, by torch operators.

        Args:
            query: `[batch, query_heads, 1, dim]`; `G` query heads share a KV head.
            mask: bool or additive, broadcastable to `[batch, query_heads, 1, slots or more]`; None = all are visible.
        """
        exact, columns = self.exact, self.columns.first(self.slots)
        (rows, heads, _, dim), (sets, places) = query.shape, exact.slots.shape[1:]
        queries = (
            query.reshape(rows * sets, -1, dim).to(torch.promote_types(query.dtype, torch.float32)) * logits.scaling
        )
        products = self._products(queries, columns)
        beside = torch.bmm(queries, exact.keys.flatten(0, 1).to(queries.dtype).mT)
        products = torch.cat([products, beside], dim=-1).view(rows, sets, -1, products.shape[-1] + places)
        if logits.softcap is not None:
            products = (products / logits.softcap).tanh() * logits.softcap
        weights = _softmax(self._hide(products, mask), logits.sinks).flatten(0, 1)
        rounded, beside = weights.split([products.shape[-1] - places, places], dim=-1)
        output = self._sums(rounded, columns)
        output = output.baddbmm_(beside, exact.values.flatten(0, 1).to(queries.dtype))
        return output.reshape(rows, 1, heads, self.dim)

    def _products(self, queries: Tensor, columns: States) -> Tensor:
        """Of queries `[B * H, G, dim]` with the decoded keys, `[B * H, G, slots]`."""
        codec, (row_statistics, _), packed = self.codecs[0], self.exact.row_statistics(), columns["key_codes"]
        if codec.bits is None:
            return torch.bmm(queries, packed.to(queries.dtype).flatten(0, 1).mT)
        mixed = queries * row_statistics.sizes.flatten(0, 1) if codec.centred else queries
        mixed = mixed @ codec.turn(queries.shape[-1], queries.dtype, queries.device) if codec.turned else mixed
        products = _index_products(mixed, packed, columns["key_levels"], codec)
        if not codec.centred:
            return products
        mean = row_statistics.mean.flatten(0, 1).to(queries.dtype)
        if codec.rotary is None:
            return products.add_(queries @ mean.mT)
        return codec.rotary.add_products(products, queries, mean, columns["positions"][..., 0])

    def _sums(self, weights: Tensor, columns: States) -> Tensor:
        """Of the decoded values, from which no mean was subtracted, by weights `[B * H, G, slots]`."""
        codec, packed = self.codecs[1], columns["value_codes"]
        if codec.bits is None:
            return torch.bmm(weights, packed.to(weights.dtype).flatten(0, 1))
        sums = _index_sums(weights, packed, columns["value_levels"], codec, self.dim)
        return sums @ codec.turn(self.dim, sums.dtype, sums.device).mT if codec.turned else sums

    def _hide(self, products: Tensor, mask: Tensor | None) -> Tensor:
        """Logits `[B, H, G, slots + W]` without what the mask hides, and without what is no token: the slot of a token
        that is not rounded, and a place that is empty."""
        slots, held = products.shape[-1] - self.exact.slots.shape[-1], self.exact.slots
        hidden = torch.finfo(products.dtype).min
        if mask is not None:
            products = products + self._bias(mask, products)
        own = torch.arange(slots, products.shape[-1], device=held.device)
        nobody = torch.where(held == EMPTY, own, held)[:, :, None].expand(-1, -1, products.shape[2], -1)
        products = products.scatter_(-1, nobody, hidden)
        if (bounds := self.columns.layout.bounds) is not None:
            beyond = torch.arange(slots, device=held.device) >= bounds[1][:, :, None, None]
            products[..., :slots].masked_fill_(beyond, hidden)
        return products

    def _bias(self, mask: Tensor, products: Tensor) -> Tensor:
        """`[B, H, G, slots + W]`: the mask, of tokens that are not rounded at the slots where they are held."""
        (rows, sets, group, _), places = products.shape, self.exact.slots
        slots = products.shape[-1] - places.shape[-1]
        mask = mask[:, :, 0, :slots].expand(rows, sets * group, slots).unflatten(1, (sets, group))
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=products.dtype).masked_fill_(~mask, torch.finfo(products.dtype).min)
        mask = mask.to(products.dtype)
        at = places.clamp_min(0)[:, :, None].expand(-1, -1, group, -1)
        return torch.cat([mask, mask.gather(-1, at)], dim=-1)


def _softmax(products: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of logits `[B, H, G, n]`; `sinks` `[H * G]` take part and belong to no token."""
    if sinks is None:
        return products.softmax(-1)
    rows, sets, group, _ = products.shape
    beside = sinks.to(products.dtype).view(1, sets, group, 1).expand(rows, -1, -1, 1)
    return torch.cat([products, beside], dim=-1).softmax(-1)[..., :-1]


def fuses() -> bool:
    """Whether to write products as sums of broadcast products. A compiler fuses them with unpacking; in eager mode each
    operation would store all products."""
    return torch.compiler.is_compiling()


def _index_products(vectors: Tensor, packed: Tensor, levels: Tensor, codec: Codec) -> Tensor:
    """Of vectors `[B * H, G, dim]` with the distances of all tokens from the middle: `[B * H, G, n]`."""
    bits, (sets, _, dim) = codec.bits or 0, vectors.shape
    total, levels = vectors.sum(-1, keepdim=True), levels.flatten(0, 1).mT
    if not fuses():
        indices = unpack(packed, bits, dim, vectors.dtype).view(sets, -1, dim)
        return torch.baddbmm(total, vectors, indices.mT, beta=-codec.middle).mul_(levels)
    sums = -codec.middle * total
    for factor, planes in planes_of(packed.flatten(0, 1)[:, None], bits, dim):
        width = planes[0].shape[-1]
        padded = torch.nn.functional.pad(vectors * factor, (0, width * len(planes) - dim))
        pairs = zip(planes, padded.split(width, dim=-1), strict=True)
        parts = [index.to(vectors.dtype) * weight[..., None, :] for index, weight in pairs]
        sums = sums + sum(parts[1:], parts[0]).sum(-1)
    return sums * levels


def _index_sums(weights: Tensor, packed: Tensor, levels: Tensor, codec: Codec, dim: int) -> Tensor:
    """Of the distances of all tokens from the middle, by weights `[B * H, G, n]`: `[B * H, G, dim]`."""
    bits, steps = codec.bits or 0, weights * levels.flatten(0, 1).mT
    total = steps.sum(-1, keepdim=True)
    if not fuses():
        indices = unpack(packed, bits, dim, steps.dtype).view(len(steps), -1, dim)
        return torch.baddbmm(total, steps, indices, beta=-codec.middle)
    sums = -codec.middle * total
    for factor, planes in planes_of(packed.flatten(0, 1)[:, None], bits, dim):
        parts = [(index.to(steps.dtype) * steps[..., None]).sum(-2) for index in planes]
        sums = sums + torch.cat(parts, dim=-1)[..., :dim] * factor
    return sums
