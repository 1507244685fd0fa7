"""The low-bit store of one layer."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_paged_eviction.internals import LEVELS, Codec, Codes, gather_slots, rank_keys, slot_index

_STATES = ("key_codes", "key_levels", "value_codes", "value_levels")


@dataclass(frozen=True)
class Demoted:
    """Tokens in few bits, in `L` places.

    Attributes:
        key_codes, key_levels, value_codes, value_levels: see `Codes`, `[B, H, L, ...]`.
        positions: `[B, S, L]` int32, -1 where no token is.
        scores: `[B, S, L]` float32, what the policy thought of each token when it chose it to leave its slot.
        leaving, leaving_scores: `[B, S, P]` int32 and float32, slots of the block that is being overwritten and the
            scores of the tokens in them; slot -1 where none was chosen so far.
        channels: `[B, H, 1, D]` float32, by what the channels of keys are divided; see `balance`.
    """

    key_codes: Tensor
    key_levels: Tensor
    value_codes: Tensor
    value_levels: Tensor
    positions: Tensor
    scores: Tensor
    leaving: Tensor
    leaving_scores: Tensor
    channels: Tensor

    @classmethod
    def empty(
        cls, codec: Codec, keys: Tensor, values: Tensor, sets: int, places: int, block_size: int, channels: Tensor
    ) -> "Demoted":
        """Room for tokens like `keys` and `values`; the rest as above. It lies where `channels` do."""
        rows, device = len(keys), channels.device

        def room(shape: tuple[int, ...], dtype: torch.dtype, fill: float = 0.0) -> Tensor:
            with torch.inference_mode(False):  # later forwards outside of it write here, too
                return torch.full(shape, fill, dtype=dtype, device=device)

        codes = []
        for states in (keys, values):
            packed, levels = codec.shapes(states, places)
            codes += [room(packed, codec.packed_dtype(states.dtype)), room(levels, LEVELS)]
        labels = []
        for count in (places, block_size):
            labels += [room((rows, sets, count), torch.int32, -1), room((rows, sets, count), torch.float32)]
        return cls(codes[0], codes[1], codes[2], codes[3], labels[0], labels[1], labels[2], labels[3], channels)

    @property
    def states(self) -> tuple[Tensor, ...]:
        """Codes and levels of keys, then of values."""
        return tuple(getattr(self, name) for name in _STATES)

    @property
    def codes(self) -> tuple[Codes, Codes]:
        """Of keys and of values."""
        return Codes(self.key_codes, self.key_levels), Codes(self.value_codes, self.value_levels)

    def ranks(self, positions: Tensor, scores: Tensor, absolute_noise: bool) -> Tensor:
        """`[B, S, L + n]` int64, the lowest leaves first: of the tokens here, and of `n` others `[B, S, n]`."""
        every = torch.cat([self.positions.long(), positions], dim=-1)
        return rank_keys(torch.cat([self.scores, scores], dim=-1), every, every >= 0, absolute_noise)

    def begin(self, slots: Tensor, begins: Tensor, scores: Tensor) -> None:
        """A block was chosen where `begins` `[B, S]`: its slots `[B, S, P]`, and the scores `[B, S, C]` of all."""
        begins = begins[..., None]
        self.leaving.copy_(torch.where(begins, slots.int(), self.leaving))
        self.leaving_scores.copy_(torch.where(begins, scores.gather(-1, slots), self.leaving_scores))

    def scores_of(self, slots: Tensor) -> Tensor:
        """`[B, S, 1]` of the tokens in these slots `[B, S, 1]`, which are among those of the block."""
        scores = self.leaving_scores.masked_fill(self.leaving != slots, float("-inf"))
        return scores.amax(-1, keepdim=True)

    def put(self, place: Tensor, goes_in: Tensor, codes: list[Tensor], position: Tensor, score: Tensor) -> None:
        """A token of every row and set, to the place `[B, S, 1]`; only where `goes_in` `[B, S, 1]`."""
        for held, new in ((self.positions, position.int()), (self.scores, score)):
            held.scatter_(-1, place, torch.where(goes_in, new, held.gather(-1, place)))
        for held, new in zip(self.states, codes, strict=True):
            index = slot_index(place, held)
            held.scatter_(2, index, torch.where(goes_in[..., None], new, held.gather(2, index)))

    def replaced(self, chosen: Tensor, codes: list[Tensor] | None, positions: Tensor, scores: Tensor) -> "Demoted":
        """Other tokens in the places.

        Args:
            chosen: `[B, S, L']`: up to `L` means a token that is here, above it one of the others.
            codes: of the tokens that come to each place, `[B, H, L', ...]`, where they are others; None = none is.
            positions, scores: `[B, S, L + n]` of the tokens here and of the others.
        """
        places = self.positions.shape[-1]
        other, own = chosen >= places, chosen.clamp_max(places - 1)
        states = [gather_slots(held, own) for held in self.states]
        if codes is not None:
            states = [torch.where(other[..., None], new, held) for new, held in zip(codes, states, strict=True)]
        gathered = positions.gather(-1, chosen).int(), scores.gather(-1, chosen)
        return replace(self, **dict(zip(_STATES, states, strict=True)), positions=gathered[0], scores=gathered[1])


def balance(queries: Tensor, keys: Tensor, real: Tensor | None) -> Tensor:
    """`[batch, kv_heads, 1, dim]` float32: by what the channels of a row's keys are divided before they are rounded,
    so that a few large ones do not take all levels for themselves; given the first keys of the row.

    Args:
        queries: `[batch, query_heads, n, dim]` of the same tokens.
        keys: `[batch, kv_heads, n, dim]`.
        real: `[batch, n]` bool, False for pads; None = all real.
    """
    largest_query = _largest(queries.unflatten(1, (keys.shape[1], -1)), real).amax(2)
    # The paper multiplies keys by the root of (query / key), and so do we, by dividing by the inverse.
    factors = (_largest(keys, real) / largest_query).sqrt().nan_to_num(1.0, 1.0, 1.0).clamp(1e-4, 1e4)
    # To four binary digits, so that what is rounded does not depend on the last one.
    mantissa, exponent = factors.frexp()
    return ((mantissa * 16).round() / 16).ldexp(exponent)


def _largest(states: Tensor, real: Tensor | None) -> Tensor:
    """`[..., 1, dim]` float32, the largest size of each channel over the tokens `[..., n, dim]`."""
    sizes = states.float().abs()
    if real is not None:
        hidden = ~real.view(len(real), *[1] * (states.ndim - 3), -1, 1)
        sizes = sizes.masked_fill(hidden, 0.0)
    return sizes.amax(-2, keepdim=True)
