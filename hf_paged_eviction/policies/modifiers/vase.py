"""VaSE, arXiv 2606.03928."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..base import EvictionPolicy, ScoreContext
from ..checks import check_between, check_flag
from ..keys.random import check_seed, drawn
from ..modifier import Modifier
from ..needs import Needs
from ..registry import register_policy
from ..text_order import best_first

#: Number of first tokens that count as tokens with large values, although their values are small.
_SINKS = 4
#: Above every logarithm of a score plus its random number.
_PROTECTED = 64.0


@register_policy("vase")
@dataclass(frozen=True)
class Vase(Modifier):
    r"""Keeps tokens with large values, and draws the others at random, with odds given by another policy's score.

    .. math::

        s_t = \begin{cases} 64 & \max_c v_{t,c} - \min_c v_{t,c} \text{ among the largest} \\
        \log s^\text{host}_t + g_t & \text{otherwise} \end{cases}, \quad g_t = -\log(-\log u_t)

    arXiv 2606.03928 finds that long answers loop once a few values of abnormal size are evicted, and that varied
    choices work better than repeated ones. The share `protected` of the budget goes to the tokens whose values span the
    widest range over the channels `c`; as in the authors' code, the first four tokens of the row are among them. The
    other tokens get a Gumbel-distributed number `g` on top of the logarithm of the score of `host`. Keeping the best of
    them is a draw without replacement, with probabilities proportional to the scores of `host`. `u` in (0, 1) is a hash
    of seed, layer, KV head, position and number of tokens seen: each decision draws again, and a row does not depend on
    its batch.

    `vase(snapkv(window=64))` with `heads="separate"` and `block_size=1` is the published VaSE-AttnV, which decides
    every 64 tokens of the answer; larger blocks count by the mean of their tokens. Here `host` may be any policy, and
    the prompt is evicted in the same way. If scores of `host` are negative, all are shifted so that the lowest is 0.
    Tokens that `host` pins stay pinned.

    Args:
        host: any policy.
        protected: share of the budget, from 0 to 1; if the budget is not known, share of the scored tokens.
        stochastic: False leaves `g` out.
        seed: of the draws, any whole number.

    Raises:
        ValueError: a parameter is out of range.
        TypeError: `host` is not a policy.
    """

    host: EvictionPolicy
    _: KW_ONLY
    protected: float = 0.25
    stochastic: bool = True
    seed: int = 0

    paper: ClassVar[str | None] = "2606.03928"
    example: ClassVar[str] = "vase(tova, seed=1)"

    def __post_init__(self) -> None:
        self._check_parts()
        check_between("protected", self.protected, 0, 1)
        check_flag("stochastic", self.stochastic)
        check_seed(self.seed)

    @property
    def parts(self) -> tuple[EvictionPolicy, ...]:
        return (self.host,)

    @property
    def needs(self) -> Needs:
        return replace(
            super().needs,
            heads="separate",
            absolute_noise=True,
            reads_budget=True,
            supports_mla=False,
        )

    def score(self, context: ScoreContext) -> Tensor:
        (host,) = self.part_scores(context)
        pinned = host.isposinf()
        host = host.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        lowest = host.where(context.valid, 0.0).amin(-1, keepdim=True).clamp_max(0)
        scores = (host - lowest).clamp_min(1e-30).log()
        if self.stochastic:
            chance = drawn(self.seed, context, context.seen) + 2**-25  # greater than 0
            scores = scores - (-chance.log()).log()
        return scores.masked_fill(self._large(context, pinned), _PROTECTED).masked_fill(pinned, float("inf"))

    def _large(self, context: ScoreContext, pinned: Tensor) -> Tensor:
        """`[batch, kv_heads, tokens]` bool, the tokens whose values are protected; those that are pinned come last."""
        values = context.values.float()
        ranges = (values.amax(-1) - values.amin(-1)).masked_fill(context.positions < _SINKS, float("inf"))
        ranges = ranges.masked_fill(pinned, -1.0)
        _, place = best_first(ranges, context.positions)
        budget = torch.as_tensor(context.budget, device=place.device)
        size = torch.where(budget > 0, budget, context.valid.sum(-1, keepdim=True))
        return context.valid & (place < (size * self.protected).floor())
