"""The choice to fold what leaves into a state of constant size."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from hf_paged_eviction import Disposal
from hf_paged_eviction.internals import DisposalContext, EvictionAction, Site, register_disposal

from ..actions import BESIDE, refuse
from .action import FoldAction
from .kernels import Kernels, load_kernels


@register_disposal("fold")
@dataclass(frozen=True)
class Fold(Disposal):
    r"""Tokens that leave are summed up in a state of constant size, which attention reads beside the tokens held (LESS,
    2402.09398).

    For each KV head, with feature maps :math:`\psi` of keys and :math:`\varphi` of queries that were fitted to the
    model:

    .. math::

        S \leftarrow S + \psi(k_e) \, v_e^\top, \quad z \leftarrow z + \psi(k_e); \qquad
        o = \frac{\sum_{t \text{ held}} e^{q \cdot k_t / \sqrt d} \, v_t + \varphi(q)^\top S}
                 {\sum_{t \text{ held}} e^{q \cdot k_t / \sqrt d} + \varphi(q)^\top z}

    The sums are kept as logarithms where they are joined. A token that is overwritten goes into the state before the
    attention of the token that overwrites it, so that every token is in exactly one place.

    Only for the policy that the kernels were fitted under: others let other tokens go.

    Differences: both maps are exp(gelu(x A) B + x C + b) in place of absolute values of gelu, since exponentials of
    logits span many orders of magnitude; the maps learn the output of attention of each head, not that of the layer
    behind it; each is small (64 in its middle by default, where the paper has 512); no bound is put below
    :math:`\varphi(q)^\top z`, so a state that has taken nothing in changes nothing.

    Args:
        file: what `paged-eviction fit-fold` wrote, or "embedded". Spelled `fold(file='FILE')`.

    Raises:
        ValueError: there are no such kernels.
    """

    file: str

    paper: ClassVar[str | None] = "2402.09398"
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _ = self.kernels  # read at once, so that a file that is not there is an error here

    @cached_property
    def kernels(self) -> Kernels:
        """What the file says."""
        return load_kernels(self.file)

    def action(self, site: Site) -> EvictionAction:
        """See `Disposal.action`."""
        return FoldAction(self.kernels, site)

    def check(self, context: DisposalContext) -> None:
        """See `Disposal.check`."""
        refuse(
            context,
            self.label,
            **BESIDE,
            memory="the state's would come on top. Use tokens",
            coded="the kernels were fitted to keys as the model makes them. Leave out bits=",
        )
        self.kernels.check_model(context.config)
        self.kernels.check_policy(context.policy.label)
