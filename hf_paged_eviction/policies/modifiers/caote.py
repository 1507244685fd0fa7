"""CAOTE, arXiv 2504.14051."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ...ranking import without_noise
from ..attention_policy import AttentionPolicy
from ..base import EvictionPolicy, ScoreContext
from ..modifier import Modifier
from ..needs import Needs
from ..norms import l2_norm
from ..registry import available_policies, make_policy, register_policy


@register_policy("caote")
@dataclass(frozen=True)
class Caote(Modifier):
    r"""Keeps the tokens without which the output of attention would change most.

    .. math:: s_t = \frac{a_t}{1 - a_t} \lVert o - v_t \rVert, \quad o = \sum_u a_u v_u

    `a` is the attention that the policy `host` attributes to the token, scaled so that it sums to one in each row and
    KV head. `v` is the value, and `o` the weighted sum of the values of all held tokens. The score is exact for one
    missing token if `a` is the attention of one query. The score of a block is the mean of its tokens' scores, which is
    not the effect of missing the whole block. Tokens that `host` pins stay pinned. From arXiv 2504.14051.

    Args:
        host: a policy that attributes attention to tokens.

    Raises:
        TypeError: `host` is not a policy.
        ValueError: `host` does not attribute attention to tokens.
    """

    host: AttentionPolicy

    paper: ClassVar[str | None] = "2504.14051"
    example: ClassVar[str] = "caote(h2o)"

    def __post_init__(self) -> None:
        self._check_parts()
        if not isinstance(self.host, AttentionPolicy):
            hosts = [name for name in available_policies() if _attributes_attention(name)]
            raise ValueError(
                f"caote needs to know how much attention a token gets, which {self.host.label!r} does not say. "
                f"Policies that do: {', '.join(hosts)}."
            )

    @property
    def parts(self) -> tuple[EvictionPolicy, ...]:
        return (self.host,)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, supports_mla=False)  # values are compared

    def score(self, context: ScoreContext) -> Tensor:
        (own,) = self.contexts(context)
        attention = self.host.attention(own).masked_fill(~context.valid, 0.0)
        share = attention / attention.sum(-1, keepdim=True).clamp_min(1e-30)
        values = context.values.float()
        output = share[:, :, None] @ values  # [B, H, 1, Dv]
        rest = (1 - share).clamp_min(1e-6)
        # The output differs from the value by what the other tokens contribute.
        change = share / rest * without_noise(l2_norm(output - values), rest * l2_norm(values))
        return change.masked_fill(self.host.score(own).isposinf(), float("inf"))


def _attributes_attention(name: str) -> bool:
    return isinstance(make_policy(name), AttentionPolicy)
