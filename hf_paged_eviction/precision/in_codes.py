"""Attention of single queries to codes where they lie: no key and no value is decoded.

A number is `step * (index - middle)` with one step per token, so both can be taken out of the sums:
`query . key = step * (query . indices - middle * sum(query))`, and the same for values. Their fixed mixing of channels
is put on the query, and undone once in the output. In compiled code all is written as broadcast products and sums, not
as products of matrices: so a compiler fuses unpacking with them, and what is read are the codes alone. Elsewhere the
indices are unpacked, and that is all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.parts import Read
from ..attention.weights import Logits
from .codec import Codec, Codes
from .exact import Exact


@dataclass(frozen=True)
class InCodes:
    """All slots of a layer as attention may read them. Tokens in `exact` are read there, not from their slots. Where
    codes have lengths, what lies beyond them is nobody's.

    Attributes:
        codecs, codes: of keys and of values.
        positions: `[batch, sets, slots, 0 or 1]` of the tokens, see `CodedStore`.
        exact: see there.
        dim: of the values.
        empty: so many slots at the beginning of each row and head hold no token.
    """

    codecs: tuple[Codec, Codec]
    codes: tuple[Codes, Codes]
    positions: Tensor
    exact: Exact
    dim: int
    empty: int = 0

    def read(self, query: Tensor, mask: Tensor | None, logits: Logits) -> Read:
        """Attention of one query per row.

        Args:
            query: `[batch, query_heads, 1, dim]`; `G` query heads share a KV head.
            mask: bool or additive, broadcastable to `[batch, query_heads, 1, slots or more]`; None = all are visible.
        """
        exact, (alike, _) = self.exact, self.exact.alike()
        heads, places = exact.slots.shape[1:]
        asked = query[:, :, 0].unflatten(1, (heads, -1))  # [B, H, G, D]
        asked = asked.to(torch.promote_types(query.dtype, torch.float32)) * logits.scaling
        products = self.codecs[0].products(asked, self.codes[0], alike, self.positions)
        products = torch.cat([products, asked @ exact.keys.to(asked.dtype).mT], dim=-1)  # [B, H, G, slots + W]
        if logits.softcap is not None:
            products = (products / logits.softcap).tanh() * logits.softcap
        products = products + self._bias(mask, asked)
        lse = products.logsumexp(-1)
        weights = (products - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
        rounded, beside = weights.split([weights.shape[-1] - places, places], dim=-1)
        output = self.codecs[1].weighted(rounded, self.codes[1], self.dim) + beside @ exact.values.to(asked.dtype)
        return Read(output.flatten(1, 2)[:, :, None], lse.flatten(1, 2)[:, :, None])

    def _bias(self, mask: Tensor | None, asked: Tensor) -> Tensor:
        """`[B, H, 1 or G, slots + W]`: hides what the mask hides, and of two places of a token one."""
        rows, heads, group, _ = asked.shape
        slots, hidden = self.codes[0].levels.shape[2], float("-inf")
        shown = self.exact.once()  # [B, H, W]
        # One slot more than there are, for places that have no token.
        taken = asked.new_zeros(rows, heads, slots + 1)
        taken = taken.scatter(-1, torch.where(shown, self.exact.slots, slots), hidden)[..., :slots]
        if self.empty:
            taken[..., : self.empty] = hidden
        if self.codes[0].lengths is not None:
            lengths = torch.tensor(self.codes[0].lengths, device=taken.device).view(rows, heads, 1)
            taken = taken.masked_fill(torch.arange(slots, device=taken.device) >= lengths, hidden)
        places = torch.where(shown, 0.0, hidden).to(asked.dtype)
        if mask is None:
            return torch.cat([taken, places], dim=-1)[:, :, None]
        mask = mask[:, :, 0, :slots].expand(rows, heads * group, slots).unflatten(1, (heads, group))
        mask = torch.where(mask, 0.0, hidden).to(asked.dtype) if mask.dtype == torch.bool else mask.to(asked.dtype)
        at = self.exact.slots.clamp_min(0)[:, :, None].expand(-1, -1, group, -1)
        return torch.cat([taken[:, :, None] + mask, places[:, :, None] + mask.gather(-1, at)], dim=-1)
