"""The choice to merge what leaves into what stays."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from hf_paged_eviction import Disposal
from hf_paged_eviction.internals import (
    DisposalContext,
    EvictionAction,
    Site,
    check_between,
    check_flag,
    register_disposal,
)

from ..actions import refuse
from .action import MergeAction


@register_disposal("merge")
@dataclass(frozen=True)
class Merge(Disposal):
    r"""A token that leaves goes into the token that stays whose key is most alike (D2O, 2406.13035).

    For each KV head alone, with `m` the cosine of the keys as they are cached and `c` the token it is largest for:

    .. math::

        m_e > 0, \; m_e \ge \tau: \quad
        k_c \leftarrow \frac{k_c + \sum_e m_e k_e}{1 + \sum_e m_e}, \quad v_c \text{ alike};
        \qquad \tau \leftarrow \bar m \text{ at first, then } \tfrac12 \tau + \tfrac12 \bar m

    The mean is over the tokens that leave together: many where a prompt, chunk or turn overflows, one when a single
    token overwrites another. Tokens below the threshold are dropped. Of tokens that are equally alike the newest takes
    it in. The block that is being overwritten takes nothing in, protected tokens do. The sums go on for as long as a
    token is held, and one that leaves takes along what it took in.

    Scores do not follow: what a policy has observed of a token, or has worked out once, stays when it takes others in.
    A policy that compares the tokens held anew at each choice compares them as they are then.

    Differences: in the authors' code the denominator counts tokens in place of their weights, so that norms shrink at
    each merge; the threshold is compared with a mean over heads of tokens that need not be the same; and each merge
    begins anew with a weight of 1 for the token that stays. `allocator="d2o"` is the other half of D2O.

    Args:
        values_only: keys stay as they are. Each token in the slots counts how many it stands for, its value is their
            mean, and the logarithm of the count is added to its logits: exact where keys are equal (ToMe's proportional
            attention, 2210.09461).
        threshold: "ema" as above, or a fixed cosine from -1 to 1.

    Raises:
        ValueError: a value is out of range.
    """

    values_only: bool = False
    threshold: float | Literal["ema"] = "ema"
    paper: ClassVar[str | None] = "2406.13035"

    def __post_init__(self) -> None:
        check_flag("merge: values_only", self.values_only)
        if self.threshold != "ema":
            check_between("merge: threshold, if not 'ema',", self.threshold, -1, 1)

    @property
    def needs_queries(self) -> bool:  # type: ignore[override]
        """Counts are added to logits, which only our attention implementation does."""
        return self.values_only

    def action(self, site: Site) -> EvictionAction:
        """See `Disposal.action`."""
        return MergeAction(site, self.values_only, self.threshold)

    def check(self, context: DisposalContext) -> None:
        """See `Disposal.check`."""
        refuse(
            context,
            self.label,
            latent="how alike latents are says little of the keys made of them. Use disposal='drop'",
            coded="each merge would round the token that takes others in anew. Leave out bits=",
        )
        if self.values_only:
            refuse(context, self.label, shared="the others would not learn of the counts. Use disposal='merge'")
        else:
            way_out = "Use disposal='merge(values_only=True)', or positions='text'"
            refuse(
                context,
                self.label,
                positions=f"a mean of keys has no position of its own from which it could be turned. {way_out}",
            )
