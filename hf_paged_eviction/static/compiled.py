"""What a layer of a static cache does within a compiled step, and right after it."""

import torch
from torch import Tensor

from ..layer.contents import Contents
from ..queries.observer import Queries
from .place import Place
from .ring import RingSnapshot
from .steps import StaticSteps


class Compiled:
    """How one layer takes a single token in the compiled steps of its cache. Code in a graph only writes, see
    `static.steps`.

    Attributes:
        steps: what all layers of the cache share.
        ring: see `Place`.

    Args:
        steps: see above.
        place: of the layer.
        contents: of the layer.
        layer_idx: index in the model.
    """

    def __init__(self, steps: StaticSteps, place: Place, contents: Contents, layer_idx: int) -> None:
        self.steps = steps
        self.ring = place.ring
        self._place, self._contents = place, contents
        self._layer_idx = layer_idx

    # ---- within a step --------------------------------------------------------------------------------------------

    def seen(self) -> Tensor:
        """Columns seen before the token of this step, int64."""
        return self.steps.seen_on(self._contents.device)

    def write(self, keys: Tensor, values: Tensor, as_given: bool) -> tuple[Tensor, Tensor]:
        """Take in a single token, `[B, H, 1, dim]`; returns all that attention gets. `as_given`: see `QueryListener`.

        Raises:
            RuntimeError: the step was not prepared. ValueError: another number of rows than are held.
        """
        self.steps.check_ready()
        contents, place = self._contents, self._place
        given, first, end = place.given, place.first_row, place.end_row
        if contents.listener is not None:
            contents.listener.check_told(self._layer_idx)
            contents.listener.expect()
        if given is None or keys.shape[0] != end - first:
            contents.known.check_rows(keys.shape[0])
            raise RuntimeError(f"Layer {self._layer_idx} was left out of the forward before this one.")
        slots = given.slots[first:end]
        if contents.outlet.takes:
            contents.let_go(slots, given.leaving[first:end])
        contents.store.write(slots[:, :, 0], keys, values)
        if contents.marks is not None:
            contents.marks.expect(contents.marks.take_arrived(keys))
            contents.marks.overwrite(slots)
            contents.marks.expect(None)
        noted = contents.store.noted(keys) if as_given else None
        return contents.shown() if noted is None else (noted, values)

    def leave(self, queries: Queries) -> bool:
        """Keep the query of a single token for the host; returns False for any other forward."""
        if self.ring is None or self._place.given is None or queries.query.shape[2] != 1:
            return False
        self.ring.put(self.steps.seen[self._contents.device], queries.query)
        return True

    # ---- between the steps ----------------------------------------------------------------------------------------

    def mask_sizes(self) -> tuple[int, int | Tensor]:
        """See `PagedLayer.get_mask_sizes`, of a single token: always the whole storage."""
        capacity = self._contents.quota.budget.capacity
        if torch.compiler.is_compiling():
            return capacity, self.seen().add(1 - capacity).clamp_min(0)
        self.steps.settle()
        return capacity, max(self._contents.known.seen + self._contents.waiting + 1 - capacity, 0)

    # ---- life -----------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Something else than a single token happens to the layer."""
        self.steps.interrupt()

    def clear(self) -> None:
        """The layer begins anew."""
        self.steps.forget()
        self._place.given = None

    @property
    def all_real(self) -> bool | None:
        """To be saved: see `NextSlots`; None where no run goes on."""
        given = self._place.given
        return given.all_real if given is not None and self.steps.joined else None

    def ring_snapshot(self) -> RingSnapshot | None:
        """To be saved; None where there is nothing."""
        return None if self.ring is None else self.ring.snapshot()

    def restore_ring(self, saved: RingSnapshot | None, device: torch.device) -> None:
        """Know what another ring knew, if there is one."""
        if self.ring is not None and saved is not None:
            self.ring.restore(saved, device)
