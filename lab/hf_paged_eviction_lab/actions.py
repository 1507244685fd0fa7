"""What the disposals of the lab have in common: a state of a few tensors for each layer."""

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from hf_paged_eviction.internals import EvictionAction, StateDict, map_tensors, persistent

S = TypeVar("S")
#: Why attention cannot read something beside the slots, by kind of cache; see `DisposalContext.refuse`.
BESIDE = {
    "static": "a compiled step attends to the slots alone. Use static=False",
    "allocator": "what stands beside the slots belongs to layers, rows and heads that hold equally many tokens. Use "
    "allocator='uniform' and one number as budget",
    "latent": "keys and values of its heads are never cached. Use bits= or disposal='drop'",
    "shared": "the others would not see what left. Use disposal='drop'",
    "mixed": "attention would read what left head by head. Use disposal='drop'",
    "positions": "what left stands at its place in the text. Use positions='text'",
}


class StatefulAction(EvictionAction, Generic[S]):
    """Keeps a dataclass of tensors, with rows in dimension 0.

    Attributes:
        any: whether anything may have left. Before, there is nothing to read or to save.
    """

    _state: S | None = None
    any = False

    def use(self, state: S) -> None:
        """Keep a copy of this state from now on."""
        self._state = map_tensors(persistent, state)

    @property
    def state(self) -> S:
        """The state.

        Raises:
            RuntimeError: the layer has met no token.
        """
        if self._state is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self._state

    def stats(self) -> dict[str, int]:
        """See `EvictionAction.stats`."""
        return {} if self._state is None else {"summary_bytes": state_bytes(self._state)}

    def clear(self) -> None:
        """See `EvictionAction.clear`."""
        self._state, self.any = None, False

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `EvictionAction.map_rows`."""
        if self._state is not None:
            self.use(map_tensors(change, self._state))

    def state_dict(self) -> StateDict | None:
        """See `EvictionAction.state_dict`."""
        return dict(vars(self.state)) if self.any else None


def state_bytes(state: object) -> int:
    """Of all tensors of a dataclass."""
    sizes: list[int] = [tensor.nbytes for tensor in vars(state).values() if isinstance(tensor, Tensor)]
    return sum(sizes)
