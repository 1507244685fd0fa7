"""The host's share of a decode that is compiled into one graph.

A compiled step only writes: each layer's new keys and values go to the slot that stands in a tensor. Counting tokens
and choosing victims happen here, between the steps, for all layers together: one small copy per token, everything else
once per block. So the graph holds no counter and no branch, and it serves any policy.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Protocol

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


def _failed() -> RuntimeError:
    return RuntimeError(
        "A forward of one token failed in the middle, so some layers of this static cache hold its token and others do "
        "not: call cache.reset() and begin anew."
    )


class Stepping(Protocol):
    """What the steps ask of a layer that takes single tokens in compiled code."""

    @property
    def device(self) -> torch.device | None: ...

    @property
    def seen(self) -> int: ...

    def written(self) -> None:
        """The host has counted a token."""


class StaticSteps:
    """What all layers of a static cache that hold tokens take together. It knows their members, never the layers, which
    hold it.

    Attributes:
        ready: whether a single token may be written now. The last layer of a step takes it back.
        begun: a layer has written a token that the last layer has not: the step goes on, or a forward failed. Compiled
            code sets it and never reads it, since what it reads is guarded.
        uncounted: a step was taken that the host has not counted yet; as `begun`.
        seen: int64, columns seen, for compiled code: by device, because layers may be on several.
        joined: whether the layers take part in runs, which end with every forward of several tokens.

    Args:
        layer_groups: of the paged layers.
        sliding: of the others, in the order of the model.
        last: of the last layer of them all.
        padding: what is known of the batch's pads.
    """

    def __init__(
        self,
        layer_groups: LayerGroups,
        sliding: Sequence[Stepping],
        last: Stepping | None,
        padding: Padding,
    ) -> None:
        self.ready = False
        self.begun = False
        self.uncounted = False
        self.seen: dict[torch.device, Tensor] = {}
        self._runs: list[tuple[LayerGroup, NextSlots]] = []  # layers that are alike, and their next slots
        self.joined = False
        self._layer_groups = layer_groups
        self._paged: list[Member] = layer_groups.members
        self._sliding = list(sliding)
        self._all: list[Stepping] = [*self._paged, *sliding]
        self._last, self._padding = last, padding

    @property
    def all_real(self) -> bool:
        """Whether a single token needs no mask in the paged layers."""
        return self.joined and all(next_slots.all_real for _, next_slots in self._runs)

    # ---- between the steps ----------------------------------------------------------------------------------------

    @without_autocast
    def prepare(self) -> None:
        """Get ready for a single token. Doing it again changes nothing.

        Raises:
            RuntimeError: the step before failed in the middle, and a layer would take its token in twice.
        """
        self.count_step()
        if self.begun and self._sliding:  # a token written twice is held once, but a window moves on each time
            raise _failed()
        if self.ready:
            return
        moved = self._padding.irregular and any([member.in_steps.sort_pads() for member in self._paged])
        if moved or not self.joined:
            self._join()
        for layer_group, next_slots in self._runs:
            next_slots.prepare(layer_group.table, layer_group.choose_victims)
        for seen in self.seen.values():
            seen.fill_(self._all[0].seen)
        self.ready = True

    def count_step(self) -> None:
        """Count the step that was taken, if there is one."""
        if self.uncounted:
            self._count()

    @without_autocast
    def _count(self) -> None:
        self.uncounted = False
        for layer_group, _ in self._runs:
            layer_group.advance()
        for member in self._all:
            member.written()

    def count_whole_step(self) -> None:
        """As `count_step`, where what layers hold is going to be read or moved.

        Raises:
            RuntimeError: the step before failed in the middle: some layers have overwritten what others hold.
        """
        self.count_step()
        if self.begun:
            raise _failed()

    def interrupt(self) -> None:
        """Something else than a single token happens to the layers.

        Raises:
            RuntimeError: see `count_whole_step`.
        """
        self.count_whole_step()
        self.ready = self.joined = False

    def forget(self) -> None:
        """The layers begin anew."""
        self.ready = self.begun = self.uncounted = self.joined = False

    def resume(self, all_real: Sequence[bool | None]) -> None:
        """Go on after the layers were restored; whether a step needs no mask, by paged layer, None = not counted."""
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
        for layer in self._all:
            if layer.device is not None and layer.device not in self.seen:
                self.seen[layer.device] = static_zeros((), layer.device)
        self.joined = True

    # ---- within a step --------------------------------------------------------------------------------------------

    def seen_on(self, device: torch.device) -> Tensor:
        """Columns seen before the token of this compiled step, int64.

        Raises:
            RuntimeError: the step was not prepared, so the number would be that of another step.
        """
        self.check_ready()
        return self.seen[device]

    def check_ready(self) -> None:
        """Within a compiled step nothing can be prepared any more; otherwise do it now.

        Raises:
            RuntimeError: with the way out.
        """
        if self.ready:
            return
        if torch.compiler.is_compiling():
            raise RuntimeError(_FORGOTTEN)
        self.prepare()

    def took(self, member: Stepping) -> None:
        """The layer of this member has written the token."""
        self.begun = member is not self._last
        if not self.begun:
            self.ready = False
            self.uncounted = True
