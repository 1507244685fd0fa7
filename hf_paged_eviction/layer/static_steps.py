"""The host's work between the compiled steps of a static cache.

A compiled step only writes: each layer reads the slot of its new key and value from a tensor. The host counts tokens
and chooses victims between the steps, for all layers together: one small copy per token, everything else once per
block. So the graph has no counter and no branch, and it fits any policy.
"""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from ..autocast import without_autocast
from ..masks.padding import Padding
from ..static.next_slots import NextSlots
from ..store.room import static_zeros
from .layer_group import LayerGroup, LayerGroups
from .member import Member

_FORGOTTEN = (
    "A step was compiled without this cache knowing of it. generate() tells it by itself; in a loop of your own call "
    "cache.prepare_step() before every compiled step of one token."
)


class StaticSteps:
    """The compiled steps of the paged layers of a static cache. It holds their members, not the layers.

    Attributes:
        ready: whether a single token may be written now. The last layer of a step sets it to False.
        begun: some layer has written a token that the last layer has not written: a step is running, or a forward
            failed. Compiled code sets it and never reads it, because reading would add a guard.
        uncounted: the host has not counted the last step yet. Compiled code sets it and never reads it, too.
        seen: int64 number of columns seen, by device, for compiled code.
        joined: whether the layers belong to runs. Every forward of several tokens ends the runs.

    Args:
        layer_groups: groups of the paged layers.
        padding: the pads of the batch.
    """

    def __init__(self, layer_groups: LayerGroups, padding: Padding) -> None:
        self.ready = False
        self.begun = False
        self.uncounted = False
        self.seen: dict[torch.device, Tensor] = {}
        self._runs: list[tuple[LayerGroup, NextSlots]] = []  # groups of equal layers and their next slots
        self.joined = False
        self._layer_groups = layer_groups
        self._paged: list[Member] = layer_groups.members
        self._rounds = any(member.state.store.rounds for member in self._paged)
        self._last, self._padding = self._paged[-1], padding

    @property
    def all_real(self) -> bool:
        """Whether a single token needs no mask in the paged layers."""
        return self.joined and all(next_slots.all_real for _, next_slots in self._runs)

    # ---- between the steps ----------------------------------------------------------------------------------------

    @without_autocast
    def prepare(self) -> None:
        """Prepare a step of one token. A second call changes nothing."""
        self.count_step()
        if self.ready:
            return
        moved = self._padding.irregular and any([member.rollback.sort_pads() for member in self._paged])
        if moved or not self.joined:
            self._join()
        for layer_group, next_slots in self._runs:
            next_slots.prepare(layer_group.table, layer_group.choose_victims)
        for seen in self.seen.values():
            seen.fill_(self._paged[0].seen)
        self.ready = True

    def count_step(self) -> None:
        """Count the last step, if it is not counted yet."""
        if self.uncounted:
            self._count()

    @without_autocast
    def _count(self) -> None:
        self.uncounted = False
        for layer_group, _ in self._runs:
            layer_group.advance()
        for member in self._paged:
            member.written()
        if self._rounds:
            self._layer_groups.encode_blocks()

    def count_whole_step(self) -> None:
        """Like `count_step`, before held tokens are read or moved.

        Raises:
            RuntimeError: the last step failed in the middle, so layers hold different tokens.
        """
        self.count_step()
        if self.begun:
            raise RuntimeError(
                "A forward of one token failed in the middle, so some layers of this static cache hold its token and "
                "others do not: call cache.reset() and begin anew."
            )

    def interrupt(self) -> None:
        """Called before anything but a single token changes the layers.

        Raises:
            RuntimeError: see `count_whole_step`.
        """
        self.count_whole_step()
        self.ready = self.joined = False

    def forget(self) -> None:
        """Forget all steps: the layers are empty again."""
        self.ready = self.begun = self.uncounted = self.joined = False

    def resume(self, all_real: Sequence[bool | None]) -> None:
        """Continue after the layers were restored. `all_real`: by paged layer, whether a step needs no mask; None =
        unknown."""
        if not all_real or any(real is None for real in all_real):
            return
        self._join()
        for layer_group, next_slots in self._runs:
            next_slots.all_real = bool(all_real[self._paged.index(layer_group.members[0])])

    def _join(self) -> None:
        pairs = zip_longest(self._layer_groups.all(), self._runs)
        self._runs = [
            (layer_group, NextSlots(layer_group.table, old and old[1], layer_group.members[0].in_steps.own_mask))
            for layer_group, old in pairs
            if layer_group
        ]
        for layer_group, next_slots in self._runs:
            for index, member in enumerate(layer_group.members):
                member.in_steps.join(next_slots, index)
        for member in self._paged:
            if member.device is not None and member.device not in self.seen:
                self.seen[member.device] = static_zeros((), member.device)
        self.joined = True

    # ---- within a step --------------------------------------------------------------------------------------------

    def seen_on(self, device: torch.device) -> Tensor:
        """Number of columns seen before the token of this compiled step, int64.

        Raises:
            RuntimeError: the step was not prepared.
        """
        self.check_ready()
        return self.seen[device]

    def check_ready(self) -> None:
        """Prepare the step; inside compiled code, check that it was prepared.

        Raises:
            RuntimeError: the step was not prepared; the message says what to do.
        """
        if self.ready:
            return
        if torch.compiler.is_compiling():
            raise RuntimeError(_FORGOTTEN)
        self.prepare()

    def took(self, member: Member) -> None:
        """The layer of this member has written the token."""
        self.begun = member is not self._last
        if not self.begun:
            self.ready = False
            self.uncounted = True
