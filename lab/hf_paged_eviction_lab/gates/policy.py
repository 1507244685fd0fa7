"""A score that a small network was trained to give: `paged-eviction fit-gate` makes the file."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_paged_eviction import EvictionPolicy, Needs, ScoreContext, register_policy
from hf_paged_eviction.internals import Cutoff, MarkSource, check_between, check_count

from .gates import Gates, is_here, load_gates
from .install import install_gates, is_installed


@register_policy("gate")
@dataclass(frozen=True)
class Gate(EvictionPolicy):
    r"""What the layer's hidden state says of a token, before attention sees it: will it be needed?

    .. math:: s_t = \exp\bigl( w_h \cdot \operatorname{gelu}(U x_t + a) + b_h \bigr)

    for KV head `h`, with `x` the input of the layer's attention; or a line through `x` alone. Attention-Gate
    (2410.12876) was the first of its kind, a head of attention trained with the language model's loss; KVzap
    (2601.07891) and Fast KVzip (2601.17668) train a function of the token's own hidden state by forward passes, as is
    done here, unless `--target straight_through` asks for Attention-Gate's loss. Different here: the target is what
    later tokens pay (`paged-eviction fit-gate` says which), so no second prompt has to be read; and tokens leave the
    memory, they are not masked.

    Hidden states reach a cache by hooks only: call `install_gates(model, file)` before the first forward. A token is
    marked once, when it comes, and its mark (one float32 per token and KV head) moves with it.

    Args:
        file: what `paged-eviction fit-gate` wrote, a name given to such a file, or `organisation/name` on the Hugging
            Face Hub.
        keep_above: keep what scores above this number, so that a text decides how much of it stays; the budget is the
            most. Every prompt, chunk or turn decides anew, for each row (`heads="shared"`) or KV head
            (`"separate"`), in whole blocks. While single tokens come, the number stays: each takes the place of
            another. Needs the attention implementation "paged_eviction".
        room: with `keep_above`, slots on top, for tokens that come one by one.

    Raises:
        ValueError: there are no such gates, or a number is out of range. By `check_model`: they belong to another
            model.
    """

    file: str
    keep_above: float | None = None
    room: int = 128
    network: Gates = field(init=False, repr=False, compare=False)

    of_file: ClassVar[bool] = True
    paper: ClassVar[str | None] = "2410.12876"

    def __post_init__(self) -> None:
        check_count("room", self.room, at_least=0)
        if self.keep_above is not None:
            check_between("keep_above", self.keep_above, 0)
        object.__setattr__(self, "network", load_gates(self.file))

    @property
    def needs(self) -> Needs:
        cutoff = None if self.keep_above is None else Cutoff(float(self.keep_above), self.room)
        remedy = (
            "Call install_gates(model, file) with the same file before the first forward, and leave the gates "
            "installed for as long as the cache is fed."
        )
        marks = MarkSource(f"gates {self.network.digest}", remedy)
        return Needs(heads="separate", supports_mla=False, common_unit=True, marks=marks, cutoff=cutoff)

    @staticmethod
    def is_here(file: str) -> bool:
        """See `EvictionPolicy.is_here`."""
        return is_here(file)

    @property
    def file_digests(self) -> dict[str, str]:
        return {self.file: self.network.digest}

    def check_model(self, config: Any) -> None:
        self.network.check_model(config)

    def prepare_model(self, model: Any) -> None:
        """See `EvictionPolicy.prepare_model`; gates that are installed already are not installed again."""
        if not is_installed(model, self.network):
            install_gates(model, self.network)

    def score(self, context: ScoreContext) -> Tensor:
        if context.marks is None:
            raise ValueError(f"{self.label!r} was given no marks: install_gates(model, {self.file!r}) hands them over.")
        return context.marks.to(torch.float32)
