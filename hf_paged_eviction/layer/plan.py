"""What the layers of one cache decide together: once for all of them, between the layers of a forward or between steps.

In an eager step the first layer whose block is full chooses the next block for all layers. A compiled step only writes:
each layer reads the slot of its new key and value from a tensor. The host counts tokens and chooses victims between the
steps: one small copy per token, everything else once per block. So the graph has no counter and no branch, and it fits
any policy.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ..masks.padding import Padding
from ..tensors.autocast import without_autocast
from ..tensors.graphs import static_zeros
from .group import Group, append
from .layer_state import LayerState
from .moves import sort_pads
from .observing import observe
from .scores import block_waits, encode

#: Makes a context manager.
Around = Callable[[], AbstractContextManager[Any]]

_FORGOTTEN = (
    "A step was compiled without this cache knowing of it. generate() tells it by itself; in a loop of your own call "
    "cache.prepare_step() before every compiled step of one token."
)


class Plan:
    """The decisions of all paged layers of a cache.

    Attributes:
        layers: the layers, in the order of the model; see `LayerState`.
        static: whether single tokens are taken in compiled steps.
        ready: whether a single token may be written now. The last layer of a step sets it to False.
        begun: some layer has written a token that the last layer has not written: a step is running, or a forward
            failed. Compiled code sets it and never reads it, because reading would add a guard.
        uncounted: the host has not counted the last step yet. Compiled code sets it and never reads it, too.
        seen: int64 number of columns seen, by device, for compiled code.
        joined: whether groups take compiled steps. Every forward of several tokens ends that.

    Args:
        layers, static: see above.
        padding: the pads of the batch.
    """

    def __init__(self, layers: Sequence[LayerState], padding: Padding, static: bool = False) -> None:
        self.layers = list(layers)
        self.static = static
        self.ready = self.begun = self.uncounted = self.joined = False
        self.seen: dict[torch.device, Tensor] = {}
        self._padding = padding
        self._around: Around = nullcontext
        self._groups: list[Group] = []  # no layer is in two

    def surround(self, around: Around) -> None:
        """Choose victims inside a context manager that `around` makes, for clocks and profilers."""
        self._around = around

    def begin_block(self, state: LayerState, real: Tensor | None) -> None:
        """Choose the next blocks to overwrite, if that is due, and prepare single tokens to be written to them: for all
        layers that have seen as many tokens as this one.

        Args:
            real: `[B, 1]` bool, rows whose next token is no pad; None = all.
        """
        group = self._group_of(state)
        if group.table.counters.victims_due:
            self._choose(group, real)
        if state.may_fill and real is None:
            group.fill()

    def begin_appending(self, state: LayerState) -> None:
        """Prepare single tokens to be appended: for all layers that have seen as many tokens as this one."""
        kind, exact = state.alike, state.exact_kind
        layers = [state]
        for other in self.layers:
            if other is not state and kind and other.may_fill and other.alike == kind and other.exact_kind == exact:
                layers.append(other)
        append(layers)

    def _choose(self, group: Group, real: Tensor | None = None) -> None:
        with self._around():
            group.choose_victims(real)

    def _group_of(self, state: LayerState) -> Group:
        """The layers that choose together with this one now."""
        group = next(filter(lambda group: state in group.layers, self._groups), None)
        if group is None or len(group.layers) < len(self.layers) or not group.serves():
            kind = state.alike
            layers = [other for other in self.layers if other is state or (kind and other.alike == kind)]
            if group is None or group.layers != layers or not group.serves():
                self._groups = [other for other in self._groups if not {*layers} & {*other.layers}]
                group = Group(layers)
                self._groups.append(group)
        group.joint.take_counters()
        return group

    # ---- eager forwards -------------------------------------------------------------------------------------------

    def divide(self) -> None:
        """Divide the budget anew among the held tokens, because its total or what is protected has changed."""
        holding = [layer for layer in self.layers if layer.held]
        if holding:
            table = holding[0].known
            holding[0].budget.table.divide_anew(table.seen - table.pads)

    def encode_blocks(self) -> None:
        """Make the codes of the newest block of all layers at once, as soon as the last of them has filled it."""
        # The last layer first: in most calls it still waits for its token.
        if all(not layer.store.uncoded or block_waits(layer) for layer in reversed(self.layers)):
            encode(*self.layers)

    def observe_blocks(self, state: LayerState) -> None:
        """This layer has the queries of its full block: observe those of all layers at once, as soon as the last of
        them has."""
        seen = state.unobserved_at = state.seen
        size = state.budget.now.block_size
        for other in reversed(self.layers):  # in most calls the last one still waits for its token
            if other is state:
                break
            if other.table is not None and other.seen == seen - 1 and seen % size in other.table.counters.residues:
                return
        observe([layer for layer in self.layers if layer.unobserved_at == seen])

    # ---- between compiled steps -----------------------------------------------------------------------------------

    @property
    def all_real(self) -> bool:
        """Whether a single token needs no mask in the paged layers."""
        return self.joined and all(group.next_slots is not None and group.next_slots.all_real for group in self._groups)

    @without_autocast
    def prepare(self) -> None:
        """Prepare a step of one token. A second call changes nothing."""
        self.count_step()
        if self.ready:
            return
        moved = self._padding.irregular and any([sort_pads(layer) for layer in self.layers])
        if moved or not self.joined:
            self._join()
        for group in self._groups:
            if group.table.counters.victims_due:
                self._choose(group)
            group.prepare_step()
        for seen in self.seen.values():
            seen.fill_(self.layers[0].seen)
        self.ready = True

    def count_step(self) -> None:
        """Count the last step, if it is not counted yet."""
        if self.uncounted:
            self._count()

    @without_autocast
    def _count(self) -> None:
        self.uncounted = False
        for group in self._groups:
            group.joint.count_step()
        for layer in self.layers:
            layer.written()
        if self.layers[0].store.rounds:
            self.encode_blocks()

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
        for group in self._groups:
            if group.next_slots is not None:
                group.next_slots.all_real = bool(all_real[self.layers.index(group.layers[0])])

    def _join(self) -> None:
        old, groups = [group.next_slots for group in self._groups], list[Group]()
        for layer in self.layers:
            if all(layer not in group.layers for group in groups):
                groups.append(self._group_of(layer))
        self._groups = groups
        for group, before in zip_longest(groups, old[: len(groups)]):
            group.begin_steps(before)
        for device in {layer.device for layer in self.layers} - {*self.seen}:
            self.seen[device] = static_zeros((), device)
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

    def took(self, state: LayerState) -> None:
        """This layer has written the token."""
        self.begun = state is not self.layers[-1]
        if not self.begun:
            self.ready = False
            self.uncounted = True
