"""Drawn tokens of some rows and heads in codes, and what attention to them is, for tests of the kernels."""

from random import Random
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction.attention.parts import Read, join
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction.integration.rotary import Rotary
from hf_paged_eviction.precision.codec import Codec
from hf_paged_eviction.precision.in_codes import InCodes
from hf_paged_eviction.store.columns import Columns
from hf_paged_eviction.store.exact import EMPTY, Exact
from hf_paged_eviction.store.segments import Segments

NAN = float("nan")


def rotary(dim: int, kind: str) -> Rotary | None:
    """`halves` and `turns`, of all channels or of a part of them."""
    if kind == "none":
        return None
    width = dim // 2 if kind == "part" else dim
    pairs = width // 2
    scaling = torch.full((pairs,), 1.25 if kind == "turns" else 1.0)
    return Rotary(1e4 ** (-torch.arange(pairs) / pairs), scaling, neighbours=kind == "turns")


class Case:
    """Some tokens in codes, others exact; nothing else holds a number.

    Args:
        seed: of what is drawn.
        device: where all of it lies.
        chosen: attributes that are not drawn.
    """

    def __init__(self, seed: int, device: str, **chosen: Any) -> None:
        draw, self.device = Random(seed), device
        self.draw = draw
        torch.manual_seed(seed)
        self.rows, self.heads, self.group = draw.choice([(1, 2, 1), (2, 2, 3), (2, 1, 8), (1, 2, 4)])
        self.key_dim = draw.choice([16, 32, 64, 80, 128])
        self.dim = self.key_dim if draw.random() < 0.7 else draw.choice([24, 64])
        self.bits = [(4, 4), (2, 2), (8, 8), (3, 3), (4, None), (None, 2), (8, 4), (2, 3)][seed % 8]
        self.kind = draw.choice(["halves", "halves", "turns", "part", "none"])
        self.dtype = [torch.float32, torch.bfloat16, torch.float16][seed // 2 % 3]
        self.ragged = draw.random() < 0.5
        self.spare = 0 if self.ragged else draw.choice([0, 0, 31])  # slots that are not in use yet
        self.shared = not self.ragged and draw.random() < 0.5
        for name, value in chosen.items():
            setattr(self, name, value)
        drawn = [draw.choice([0, 1, 31, 64, 65, 130]) if self.ragged else 97 for _ in range(self.sets)]
        self.lengths = chosen.get("lengths", drawn)
        if not any(self.lengths):
            self.lengths[0] = 40
        turning = rotary(self.key_dim, self.kind)
        self.codecs = Codec(self.bits[0], True, centred=True, rotary=turning), Codec(self.bits[1], True)
        self.make()

    @property
    def sets(self) -> int:
        return self.rows * self.heads

    def __str__(self) -> str:
        shown = "rows heads group key_dim dim bits kind dtype ragged spare shared lengths".split()
        return ", ".join(f"{name}={getattr(self, name)}" for name in shown)

    def make(self) -> None:
        slots, draw, (rows, heads) = max(self.lengths), self.draw, (self.rows, self.heads)
        keys, values = (
            (torch.randn(rows, heads, slots, dim) + 3 * torch.randn(rows, heads, 1, dim)).to(self.dtype)
            for dim in (self.key_dim, self.dim)
        )
        positions = torch.stack([torch.randperm(3000)[:slots] for _ in range(self.sets)]).view(rows, heads, slots)
        positions = positions[:, :1].expand_as(positions) if self.shared else positions
        places = draw.choice([5, 20, 40])
        held = torch.full((rows, heads, places), EMPTY)
        exact_keys, exact_values = (
            torch.full((rows, heads, places, states.shape[-1]), NAN) for states in (keys, values)
        )
        sizes = keys.shape[-1] + values.shape[-1]
        means, scales = torch.zeros(rows, heads, 1, sizes), torch.ones(rows, heads, 1, sizes)
        number = torch.zeros(rows, dtype=torch.int64)
        tensors = exact_keys.to(self.dtype), exact_values.to(self.dtype), held, number, number, means.to(self.dtype)
        self.exact = exact = Exact(places, *tensors, scales.to(self.dtype), number)
        learnt = (
            self.codecs[0].row_statistics(keys, positions[:, 0], None) if self.bits[0] else exact.row_statistics()[0]
        )
        exact.means[..., : self.key_dim], exact.sizes[..., : self.key_dim] = learnt.mean, learnt.sizes
        columns: dict[str, Tensor] = {}
        self.decoded = []
        for name, codec, states, of_row in zip(
            ("key", "value"), self.codecs, (keys, values), exact.row_statistics(), strict=True
        ):
            codes = codec.encode(states, of_row, positions[..., None])
            decoded = codec.decode(codes, states.shape[-1], torch.float32, of_row, positions[..., None])
            columns[f"{name}_codes"], columns[f"{name}_levels"] = codes.packed.clone(), codes.levels.clone()
            self.decoded.append(decoded.float())
        sets = 1 if self.shared else heads
        dims = 0 if self.codecs[0].rotary is None else 1
        columns["positions"] = positions[:, :sets, :, None][..., :dims].int().clone()
        self.mask_slots(columns, held, keys, values)
        self.columns = self.laid(columns)

    def mask_slots(self, columns: dict[str, Tensor], held: Tensor, keys: Tensor, values: Tensor) -> None:
        """Some tokens are exact, some pads, and what is no token in codes holds no number."""
        draw, slots = self.draw, max(self.lengths)
        self.visible = torch.rand(self.rows, 1, 1, slots) < (0.6 if draw.random() < 0.7 else 2)
        for at, length in enumerate(self.lengths):
            row, head = divmod(at, self.heads)
            chosen = draw.sample(range(length), min(held.shape[-1] // 2, length))
            for place, slot in zip(draw.sample(range(held.shape[-1]), len(chosen)), chosen, strict=True):
                held[row, head, place] = slot
                for exact, states, decoded in zip(
                    (self.exact.keys, self.exact.values), (keys, values), self.decoded, strict=True
                ):
                    exact[row, head, place] = states[row, head, slot]
                    decoded[row, head, slot] = states[row, head, slot].float()
            dead = [*chosen, *range(length, slots)]
            hidden = (~self.visible[row, 0, 0]).nonzero().flatten().tolist()
            for name in ("key", "value"):
                for part in ("codes", "levels"):
                    column = columns[f"{name}_{part}"]
                    if column.dtype.is_floating_point:
                        column[row, head, dead + hidden] = NAN
            if not self.shared:
                columns["positions"][row, head, dead] = 2**31 - 1

    def laid(self, columns: dict[str, Tensor]) -> Columns:
        stored, lengths = Columns(ragged=self.ragged), torch.tensor(self.lengths)
        if self.ragged:
            inside = torch.arange(max(self.lengths)) < lengths[:, None]
            columns = {name: column.flatten(0, 1)[inside] for name, column in columns.items()}
            sets = lengths.view(self.rows, self.heads)
            layout = Segments(sets, torch.device(self.device), max(self.lengths))
        else:
            columns, layout = {name: self.longer(column) for name, column in columns.items()}, None
        stored.use({name: column.to(self.device) for name, column in columns.items()}, layout)
        return stored

    def longer(self, column: Tensor) -> Tensor:
        """With the spare slots, which hold no number."""
        nothing = NAN if column.dtype.is_floating_point else torch.iinfo(column.dtype).max
        return torch.nn.functional.pad(column, (0, 0, 0, self.spare), value=nothing)

    def mask(self) -> Tensor | None:
        """Bool or additive; None where all are visible."""
        if self.visible.all():
            return None
        kind = self.draw.choice(["bool", "inf", "min", "heads"])
        if kind == "bool":
            return self.visible
        least = float("-inf") if kind == "inf" else torch.finfo(torch.float32).min
        mask = torch.where(self.visible, 0.0, least)
        if kind != "heads":
            return mask
        return mask + torch.randn(self.rows, self.heads * self.group, 1, mask.shape[-1])

    def expected(self, query: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
        """One row and head after the other, in float32, of the tokens that there are."""
        reads = []
        mask = torch.zeros(1, 1, 1, max(self.lengths)) if mask is None else mask
        mask = torch.where(mask, 0.0, float("-inf")) if mask.dtype == torch.bool else mask
        mask = mask.expand(self.rows, self.heads * self.group, 1, -1)
        for at, length in enumerate(self.lengths):
            row, head = divmod(at, self.heads)
            head_query = query[row, head * self.group : (head + 1) * self.group, 0].float()
            keys, values = (states[row, head, :length] for states in self.decoded)
            products = head_query @ keys.T * logits.scaling
            if logits.softcap is not None:
                products = (products / logits.softcap).tanh() * logits.softcap
            products = products + mask[row, head * self.group : (head + 1) * self.group, 0, :length]
            seen = products.amax(-1, keepdim=True) > -1e30 if products.shape[-1] else torch.zeros(self.group, 1).bool()
            lse = torch.where(seen[:, 0], products.logsumexp(-1), float("-inf"))
            weights = torch.where(seen, products.softmax(-1), 0.0)
            reads.append(Read(weights @ values, lse))
        output = torch.stack([one.output for one in reads]).view(self.rows, -1, 1, self.dim)
        lse = torch.stack([one.lse for one in reads]).view(self.rows, -1, 1)
        return join([Read(output, lse)], logits)

    def held(self) -> InCodes:
        """As attention reads it."""
        exact = self.exact.change(lambda states: states.to(self.device))
        return InCodes(self.codecs, self.columns, exact, max(self.lengths))
