"""The rotary embedding of a layer, and its inverse."""

from math import pi
from typing import Any

import torch
from torch import Tensor

from ..tensors.graphs import static


class Rotary:
    r"""The rotary embedding of one layer: each pair of channels rotates by position times frequency.

    .. math:: x'_a = s (x_a \cos pf - x_b \sin pf), \quad x'_b = s (x_b \cos pf + x_a \sin pf)

    The first `width` channels of a head take part; the others do not change. Angles are computed in float32, as models
    do; results are float32 (float64 for float64). Position 0 is the row's first real token, as in the cache. If a model
    counts from another number (left pads without `position_ids`), all unrotated states of a row differ by the same
    angle, which changes no product between them. No tensor is read on the host.

    Args:
        frequencies: `[pairs]` float32, radians per position; 0 = the pair does not rotate.
        scaling: `[pairs]` float32, factor on rotated states (yarn's attention factor), mostly 1.
        neighbours: a pair are channels 2i and 2i + 1, otherwise i and i + pairs.
    """

    def __init__(self, frequencies: Tensor, scaling: Tensor, neighbours: bool = False) -> None:
        pairs = len(frequencies)
        self.width = width = 2 * pairs
        self._neighbours = neighbours
        halves, turns = (slice(pairs), slice(pairs, width)), (slice(0, width, 2), slice(1, width, 2))
        self._pairs = turns if neighbours else halves
        self._given = frequencies.float(), scaling.float()
        self._scales = not bool((scaling == 1).all())
        self._tables: dict[torch.device, tuple[Tensor, ...]] = {}

    def __deepcopy__(self, memo: Any) -> "Rotary":
        return self  # it is immutable

    def __repr__(self) -> str:
        return f"Rotary(width={self.width})"

    def rotate(self, states: Tensor, positions: Tensor) -> Tensor:
        """Rotate states to their positions, as the model does.

        Args:
            states: `[..., head_dim]`.
            positions: int64, broadcastable to `[...]`.

        Returns:
            `[..., head_dim]`.

        Raises:
            ValueError: a head has fewer than `width` channels.
        """
        return self._turn(states, *self._waves(_one_for_all_heads(positions), states), 1)

    def unrotate(self, states: Tensor, positions: Tensor) -> Tensor:
        """Undo `rotate` for states that the model rotated to these positions; same arguments."""
        cos, sin = self._waves(_one_for_all_heads(positions), states)
        return self._turn(states, cos, -sin, -1)

    def rotate_by(self, states: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
        """Move rotated states by so many positions; negative = towards the start. Same shapes as `rotate`.

        Angles are computed in float64 if the device has it, so that a move by millions of positions is as exact as one
        by one. The result is written to `out` `[..., head_dim]`, of any dtype, if it is given, in few passes over
        memory.
        """
        wide = torch.float32 if states.device.type == "mps" else torch.float64
        offsets = _one_for_all_heads(offsets).to(states.device)
        angles = (offsets[..., None].to(wide) * self._on(states.device)[0]).remainder_(2 * pi)
        angles = angles.to(torch.promote_types(states.dtype, torch.float32))
        cos, sin, (one, other) = angles.cos(), angles.sin(), self._pairs
        out = torch.empty_like(states, dtype=cos.dtype) if out is None else out
        for new, own, partner, sign in ((one, one, other, -1), (other, other, one, 1)):
            if out.dtype == states.dtype == cos.dtype:
                torch.mul(states[..., own], cos, out=out[..., new]).addcmul_(states[..., partner], sin, value=sign)
            else:
                turned = states[..., own] * cos
                out[..., new] = turned.addcmul_(states[..., partner].to(cos.dtype), sin, value=sign)
        out[..., self.width :] = states[..., self.width :]
        return out

    def add_products(self, products: Tensor, query: Tensor, state: Tensor, positions: Tensor) -> Tensor:
        """Add to `products` the products of queries with `state` rotated to these positions, without rotating the
        state.

        Args:
            products: `[batch * heads, group, n]`, written to.
            query: `[batch * heads, group, head_dim]`, after rotary embedding.
            state: `[batch * heads, 1, head_dim]`, before rotary embedding.
            positions: `[batch, 1 or heads, n]`.
        """
        frequencies, scaling = self._on(query.device)[:2]
        one, other = self._pairs
        query_one, query_other, own, partner = query[..., one], query[..., other], state[..., one], state[..., other]
        # What the cosine and the sine of each pair count in a product of the two.
        even = torch.addcmul(query_one * own, query_other, partner)
        odd = torch.addcmul(query_other * own, query_one, partner, value=-1)
        if self._scales:
            even, odd = even * scaling, odd * scaling
        places = positions.flatten(0, 1)
        angles = places[..., None] * frequencies  # as in `rotate`
        sums = products.view(len(places), -1, products.shape[-1])  # heads may share positions
        for share, wave in ((even, angles.cos()), (odd, angles.sin())):
            sums.baddbmm_(share.view(len(places), -1, share.shape[-1]), wave.to(query.dtype).mT)
        if self.width < query.shape[-1]:
            products.add_((query[..., self.width :] * state[..., self.width :]).sum(-1, keepdim=True))
        return products

    def prepare(self, device: torch.device) -> None:
        """Move the tensors to this device before a graph is compiled, which need not copy them."""
        for table in self._on(device):
            static(table)

    def of_channels(self, device: torch.device) -> tuple[list[Tensor], list[int]]:
        """Frequencies, signs (of what a channel gets from its partner) and scaling per channel, and the layout of the
        pairs: their number, the step from one to the next, the distance between the channels of a pair, and the first
        channel that does not rotate."""
        step, distance = (2, 1) if self._neighbours else (1, self.width // 2)
        return list(self._on(device)[2:]), [self.width // 2, step, distance, self.width]

    def rotate_mean(self, states: Tensor, positions: Tensor) -> Tensor:
        """The mean of `rotate` over several positions.

        To rotate a covariance, call it for the rows and then, transposed, for the columns.

        Args:
            states: `[..., head_dim]`.
            positions: `[..., n]` int64, broadcastable to the states in all but the last dimension.
        """
        cos, sin = self._waves(positions, states)
        return self._turn(states, cos.mean(-2), sin.mean(-2), 1)

    def _waves(self, positions: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each pair."""
        if states.shape[-1] < self.width:
            raise ValueError(f"This rotation needs {self.width} channels, but the heads have only {states.shape[-1]}.")
        angles = positions.to(states.device)[..., None].float() * self._on(states.device)[0]
        return angles.cos(), angles.sin()

    def _turn(self, states: Tensor, cos: Tensor, sin: Tensor, power: int) -> Tensor:
        """Turned states, times `power` of the scaling."""
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        if self._scales:
            factor = self._on(states.device)[1] ** power
            cos, sin = cos * factor, sin * factor
        one, other = (states[..., channels] for channels in self._pairs)
        cos, sin = cos.to(states.dtype), sin.to(states.dtype)
        both = torch.addcmul(one * cos, other, sin, value=-1), torch.addcmul(other * cos, one, sin)
        turned = torch.stack(both, dim=-1).flatten(-2) if self._neighbours else torch.cat(both, dim=-1)
        still = states[..., self.width :]
        if not still.shape[-1]:
            return turned
        return torch.cat([turned, still.expand(*turned.shape[:-1], -1)], dim=-1)  # one state at many positions

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Frequencies and scaling of the pairs; frequencies, signs and scaling of the channels."""
        if device not in self._tables:
            frequencies, scaling = (table.to(device) for table in self._given)
            both = frequencies, -torch.ones_like(frequencies), scaling
            others = frequencies, torch.ones_like(frequencies), scaling
            dim = 1 if self._neighbours else 0
            channels = (torch.stack(pair, dim).flatten() for pair in zip(both, others, strict=True))
            self._tables[device] = frequencies, scaling, *channels
        return self._tables[device]


def _one_for_all_heads(positions: Tensor) -> Tensor:
    """Positions `[batch, heads, tokens]` are mostly one view repeated for all heads: work out the waves once."""
    shared = positions.ndim == 3 and positions.stride(1) == 0
    return positions[:, :1] if shared else positions
