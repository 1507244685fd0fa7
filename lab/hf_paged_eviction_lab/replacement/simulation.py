"""Play recorded traces against a replacement."""

from collections.abc import Sequence, Set

import torch

from .base import Replacement, Resident, order


def faults(
    trace: Sequence[Set[int]], frames: int, replacement: Replacement, unlikely: Sequence[Set[int]] | None = None
) -> int:
    """Count the blocks that have to be fetched.

    Args:
        trace: the blocks needed at each moment, at most `frames` of them.
        frames: number of blocks held at a time; at first none are held.
        unlikely: for each moment, which blocks are predicted not to be needed soon.

    Raises:
        ValueError: more blocks are needed at a time than there are frames.
    """
    most = max(map(len, trace), default=0)
    if most > frames:
        raise ValueError(f"{most} blocks are asked for at a time, and there are {frames} frames.")
    ids = torch.full((1, 1, frames), -1, device="cpu")
    resident = Resident.empty(ids)
    count = 0
    for moment, wanted in enumerate(trace):
        now = torch.tensor([moment], device="cpu")
        there = torch.tensor([[[block in wanted for block in ids[0, 0].tolist()]]], device="cpu")
        missing = sorted(wanted - set(ids[0, 0].tolist()))
        if missing:
            count += len(missing)
            # Free frames first.
            ranks = replacement.ranks(resident, ids, now).masked_fill(ids < 0, torch.iinfo(torch.int64).min)
            going = order(ranks, ids).masked_fill(there, frames).argsort(dim=-1)[..., : len(missing)]
            needed = torch.tensor([[len(missing) - int((ids < 0).sum())]], device="cpu").clamp_min(0)
            resident = replacement.after(resident, ~there & (ids >= 0), needed, now)
            ids = ids.scatter(-1, going, torch.tensor([[missing]], device="cpu"))
            resident = resident.came(going, torch.ones_like(going, dtype=torch.bool), now)
        resident = resident.hit(there, now)
        if unlikely is not None:
            bits = [block in unlikely[moment] for block in ids[0, 0].tolist()]
            resident = Resident(
                resident.wanted_at, resident.asked, torch.tensor([[bits]], device="cpu"), resident.phase
            )
    return count
