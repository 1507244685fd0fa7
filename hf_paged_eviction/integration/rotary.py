"""The rotary embedding of a layer, and its inverse."""

from math import pi
from typing import Any

import torch
from torch import Tensor

from ..graphs import static


class Rotary:
    r"""The rotary embedding of one layer: each pair of channels rotates by position times frequency.

    .. math:: x'_c = s_c \bigl(x_c \cos p f_c \pm x_{\pi(c)} \sin p f_c\bigr)

    The first `width` channels of a head take part; the others do not change. Angles are computed in float32, as models
    do; results are float32 (float64 for float64). Position 0 is the row's first real token, as in the cache. If a model
    counts from another number (left pads without `position_ids`), all unrotated states of a row differ by the same
    angle, which changes no product between them. No tensor is read on the host.

    Args:
        frequencies: `[width]` float32, radians per position; 0 = the channel does not rotate.
        partners: `[width]` int64, the other channel of the pair.
        signs: `[width]` float32, 1 or -1, sign of the partner's share.
        scaling: `[width]` float32, factor on rotated states (yarn's attention factor), mostly 1.
    """

    def __init__(self, frequencies: Tensor, partners: Tensor, signs: Tensor, scaling: Tensor) -> None:
        self.width = len(frequencies)
        tables = frequencies.float(), partners, signs.float(), scaling.float()
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor, Tensor]] = {frequencies.device: tables}
        self._given = tables
        self._pairs = _pairs(*tables)
        self._scales = not bool((self._given[3] == 1).all())
        # Channels for which waves are computed.
        self._turned = slice(0, self.width) if self._pairs is None else self._pairs[0]

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
        return self._turn(states, *self._waves(_one_for_all_heads(positions), states), scaled=1)

    def unrotate(self, states: Tensor, positions: Tensor) -> Tensor:
        """Undo `rotate` for states that the model rotated to these positions; same arguments."""
        cos, sin = self._waves(_one_for_all_heads(positions), states)
        return self._turn(states, cos, -sin, scaled=-1)

    def rotate_by(self, states: Tensor, offsets: Tensor) -> Tensor:
        """Move rotated states by so many positions; negative = towards the start. Same shapes as `rotate`.

        Angles are computed in float64 if the device has it, so that a move by millions of positions is as exact as one
        by one.
        """
        return self._turn(states, *self._exact_waves(_one_for_all_heads(offsets), states), scaled=0)

    def rotate_by_into(self, target: Tensor, states: Tensor, offsets: Tensor) -> None:
        """Like `rotate_by`, but write the result to `target` `[..., head_dim]`, of any dtype, in few passes over
        memory."""
        if self._pairs is None:
            target.copy_(self.rotate_by(states, offsets))
            return
        one, other = self._pairs
        cos, sin = self._exact_waves(_one_for_all_heads(offsets), states)
        for new, own, partner, sign in ((one, one, other, 1), (other, other, one, -1)):
            if target.dtype == states.dtype == cos.dtype:
                torch.mul(states[..., own], cos, out=target[..., new]).addcmul_(states[..., partner], sin, value=sign)
            else:
                turned = states[..., own] * cos
                target[..., new] = turned.addcmul_(states[..., partner].to(cos.dtype), sin, value=sign)
        target[..., other.stop :] = states[..., other.stop :]

    def add_products(
        self, products: Tensor, query: Tensor, state: Tensor, positions: Tensor, lengths: list[int] | None = None
    ) -> Tensor:
        """Add to `products` the products of queries with `state` rotated to these positions, without rotating the
        state.

        Args:
            products: `[batch * heads, group, n]`, written to.
            query: `[batch * heads, group, head_dim]`, after rotary embedding.
            state: `[batch * heads, 1, head_dim]`, before rotary embedding.
            positions: `[batch, 1 or heads, n]`; with lengths `[total]`.
            lengths: how many of the positions are each head's, one after the other; products beyond do not change.
        """
        frequencies, _, signs, scaling = self._on(query.device)
        even, odd = self._shares(query, state, signs)
        if self._scales:
            even, odd = even * scaling[self._turned], odd * scaling[self._turned]
        places = positions.flatten(0, 1) if lengths is None else positions
        angles = places[..., None] * frequencies[self._turned]  # as in `rotate`
        sums = products if lengths is not None else products.view(len(places), -1, products.shape[-1])
        for share, wave in ((even, angles.cos()), (odd, angles.sin())):
            waves = wave.to(query.dtype)
            if lengths is None:  # all heads share these positions
                sums.baddbmm_(share.view(len(places), -1, share.shape[-1]), waves.mT)
            else:
                for own, factors, part in zip(products, share, waves.split(lengths), strict=True):
                    own[:, : len(part)].addmm_(factors, part.mT)
        still = self.width if self._pairs is None else self._pairs[1].stop
        if still < query.shape[-1]:
            products.add_((query[..., still:] * state[..., still:]).sum(-1, keepdim=True))
        return products

    def _shares(self, query: Tensor, state: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
        """What the cosine and the sine of each channel `_turned` count in a product of the two."""
        if self._pairs is None:
            turning, partners = query[..., : self.width], state.index_select(-1, self._on(query.device)[1])
            return turning * state[..., : self.width], turning * (partners * signs)
        one, other = self._pairs
        query_one, query_other = query[..., one], query[..., other]
        own, partner = state[..., one], state[..., other]
        sign = signs[one]
        even = torch.addcmul(query_one * own, query_other, partner)
        odd = torch.addcmul(query_one * partner, query_other, own, value=-1)
        return even, odd * sign

    def prepare(self, device: torch.device) -> None:
        """Move the tensors to this device before a graph is compiled, which need not copy them."""
        for table in self._on(device):
            static(table)

    def in_pairs(self, device: torch.device) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int, int]] | None:
        """Frequencies, signs and scaling per channel, and the layout of the pairs: their number, the step from one to
        the next, the distance between the channels of a pair, and the first channel that does not rotate. None =
        another layout."""
        if self._pairs is None:
            return None
        frequencies, _, signs, scaling = self._on(device)
        one, other = self._pairs
        return (frequencies, signs, scaling), (other.stop // 2, one.step or 1, other.start, other.stop)

    def rotate_mean(self, states: Tensor, positions: Tensor) -> Tensor:
        """The mean of `rotate` over several positions.

        To rotate a covariance, call it for the rows and then, transposed, for the columns.

        Args:
            states: `[..., head_dim]`.
            positions: `[..., n]` int64, broadcastable to the states in all but the last dimension.
        """
        cos, sin = self._waves(positions, states)
        return self._turn(states, cos.mean(-2), sin.mean(-2), scaled=1)

    def _waves(self, positions: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of the channels `_turned`."""
        if states.shape[-1] < self.width:
            raise ValueError(f"This rotation needs {self.width} channels, but the heads have only {states.shape[-1]}.")
        frequencies, _, signs, _ = self._on(states.device)
        angles = positions.to(states.device)[..., None].float() * frequencies[self._turned]
        return angles.cos(), angles.sin() * signs[self._turned]

    def _exact_waves(self, offsets: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """As `_waves`, without the rounding of large angles."""
        frequencies, _, signs, _ = self._on(states.device)
        wide = torch.float32 if states.device.type == "mps" else torch.float64
        angles = offsets.to(states.device)[..., None].to(wide) * frequencies[self._turned]
        angles = angles.remainder_(2 * pi).to(torch.promote_types(states.dtype, torch.float32))
        return angles.cos(), angles.sin() * signs[self._turned]

    def _turn(self, states: Tensor, cos: Tensor, sin: Tensor, scaled: int) -> Tensor:
        _, partners, _, scaling = self._on(states.device)
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        if scaled:
            factor = scaling[self._turned] ** scaled
            cos, sin = cos * factor, sin * factor
        if self._pairs is None:
            turning, still = states[..., : self.width], states[..., self.width :]
            turned = turning * cos + turning.index_select(-1, partners) * sin
        else:
            one, other = (states[..., channels] for channels in self._pairs)
            both = _turn_both(one, other, cos.to(states.dtype), sin.to(states.dtype))
            by_turns = self._pairs[0].step is not None
            turned = torch.stack(both, dim=-1).flatten(-2) if by_turns else torch.cat(both, dim=-1)
            still = states[..., self._pairs[1].stop :]
        if not still.shape[-1]:
            return turned
        return torch.cat([turned, still.expand(*turned.shape[:-1], -1)], dim=-1)  # one state at many positions

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if device not in self._tables:
            frequencies, partners, signs, scaling = (table.to(device) for table in self._given)
            self._tables[device] = frequencies, partners, signs, scaling
        return self._tables[device]


def _turn_both(one: Tensor, other: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The two strides of `_pairs`, turned."""
    return torch.addcmul(one * cos, other, sin), torch.addcmul(other * cos, one, sin, value=-1)


def _pairs(frequencies: Tensor, partners: Tensor, signs: Tensor, scaling: Tensor) -> tuple[slice, slice] | None:
    """Two slices of channels that are partners of each other, as in all common layouts; None for other layouts.

    Channels behind them are left as they are.
    """
    channels = torch.arange(len(partners), device=partners.device)
    width = int(((partners != channels) * (channels + 1)).max())
    for one, other in ((slice(0, width // 2), slice(width // 2, width)), (slice(0, width, 2), slice(1, width, 2))):
        matching = channels[one].shape == channels[other].shape and torch.equal(partners[one], channels[other])
        if matching and torch.equal(partners[other], channels[one]):
            same = all(torch.equal(tensor[one], tensor[other]) for tensor in (frequencies, scaling))
            alike = same and torch.equal(signs[one], -signs[other]) and bool((scaling[width:] == 1).all())
            return (one, other) if alike else None
    return None


def _one_for_all_heads(positions: Tensor) -> Tensor:
    """Positions `[batch, heads, tokens]` are mostly one view repeated for all heads: work out the waves once."""
    shared = positions.ndim == 3 and positions.stride(1) == 0
    return positions[:, :1] if shared else positions
