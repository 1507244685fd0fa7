"""How gates are trained."""

from dataclasses import dataclass
from typing import Literal, get_args

from hf_paged_eviction.internals import check_between, check_count

#: "attention": the largest weight that a token gets from tokens of the text at least 64 later, the mean over the query
#: heads of a group. "kvzip": the largest that it gets from any query head while the model repeats the text.
#: "straight_through": Attention-Gate's loss, see `straight_through.py`.
GateTarget = Literal["attention", "kvzip", "straight_through"]


@dataclass(frozen=True)
class Training:
    """How gates are trained.

    Attributes:
        target: what is learned.
        units: of the layer between hidden state and mark; 0 = a line, which a regression has in closed form, of the
            target's logarithm.
        epochs: how often each token is looked at; None = 6, and 2 of "straight_through".
        keep: of "straight_through", the share of tokens that is asked for: the budget, as a share of the text.

    Raises:
        ValueError: a value is out of range.
    """

    target: GateTarget = "attention"
    units: int = 64
    epochs: int | None = None
    keep: float = 1 / 16

    def __post_init__(self) -> None:
        if self.target not in get_args(GateTarget):
            raise ValueError(f"target must be one of {', '.join(get_args(GateTarget))}, got {self.target!r}.")
        check_count("units", self.units)
        check_count("epochs", self.rounds, at_least=1)
        check_between("keep", self.keep, 0, 1)

    @property
    def rounds(self) -> int:
        """Epochs, also where none are given."""
        if self.epochs is not None:
            return self.epochs
        return 2 if self.target == "straight_through" else 6
