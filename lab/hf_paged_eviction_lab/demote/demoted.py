"""The low-bit store of one layer."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_paged_eviction.internals import Codes, gather_slots, make_storage, rank_keys, slot_index

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
        channels: `[B, H, 1, D]` float32, by what the channels of keys are divided; see `Balancer`.
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
        cls, shapes: list[tuple[tuple[int, ...], torch.dtype]], sets: int, block_size: int, channels: Tensor
    ) -> "Demoted":
        """Room for tokens.

        Args:
            shapes: of the codes, see `Balancer.shapes`.
            sets, block_size: `S` and `P`.
            channels: see above.
        """
        device, (rows, _, places, _) = channels.device, shapes[0][0]
        codes = [make_storage(shape, dtype, device).zero_() for shape, dtype in shapes]
        labels = []
        for count in (places, block_size):
            labels.append(make_storage((rows, sets, count), torch.int32, device).fill_(-1))
            labels.append(make_storage((rows, sets, count), torch.float32, device).zero_())
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
