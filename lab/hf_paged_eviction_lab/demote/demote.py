"""The choice to keep what leaves in few bits."""

from dataclasses import dataclass
from typing import ClassVar

from hf_paged_eviction import Disposal, PagedEvictionCache
from hf_paged_eviction.internals import BITS, DisposalContext, EvictionAction, Site, check_between, register_disposal

from ..actions import BESIDE, refuse
from .action import DemoteAction


@register_disposal("demote")
@dataclass(frozen=True)
class Demote(Disposal):
    r"""A token that leaves its slot is rounded to few bits and kept on in a store of its own (MiKV, 2402.18096).

    Tokens in the slots stay as they came. Attention reads both: the slots, and beside them all that was demoted, once
    decoded. Nothing is in both places. Where the low-bit store is full, the token that leaves for good is the one with
    the lowest score, of those in it and those that come; a score is what the policy said when the token left its slot.

    Both together have one number of bytes, of which `share` belongs to the low-bit store. With bytes as budget that is
    these; with tokens, which count the slots, both take the bytes of `budget / (1 - share)` slots. Positions,
    scores, levels and scales count.

    Keys are balanced before they are rounded, because a few channels may be far larger than others. With the largest
    query and key of each channel in a row's first forward,

    .. math:: k'_c = k_c \sqrt{\max |q_c| / \max |k_c|}

    is rounded, and divided again when it is read.

    Differences: the paper keeps every token, the unimportant ones in few bits, so that memory grows with the text; it
    reads importance from attention as H2O does, which is `policy="h2o"` here; a token that came back would be another
    difference, and none does. At 2 bits the levels may leave out the ends of the range, as those of `bits=`.

    Args:
        bits: 2, 4 or 8, of every number that is demoted.
        share: of all bytes, above 0 and below 1, that the low-bit store takes.

    Raises:
        ValueError: a value is out of range.
    """

    bits: int = 2
    share: float = 0.5
    paper: ClassVar[str | None] = "2402.18096"
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in BITS:
            raise ValueError(f"demote: bits must be one of {BITS}, got {self.bits!r}.")
        check_between("demote: share", self.share, 0, 1)
        if self.share in (0, 1):
            raise ValueError(f"demote: share must lie above 0 and below 1, got {self.share!r}.")

    def action(self, site: Site) -> EvictionAction:
        """See `Disposal.action`."""
        return DemoteAction(site, self.bits, self.share)

    def check(self, context: DisposalContext) -> None:
        """See `Disposal.check`."""
        coded = "tokens in the slots stay in full precision, that is what demoting is. Leave out bits="
        refuse(context, self.name, **BESIDE, coded=coded)


def demoted_tokens(cache: PagedEvictionCache) -> int:
    """Evicted tokens that a cache still holds in few bits, summed over layers and rows. Reads tensors."""
    actions = [layer.action for _, layer in cache.paged_layers]
    return sum(action.count for action in actions if isinstance(action, DemoteAction))
