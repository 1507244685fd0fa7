"""The scores of a policy, one per token and set of victims."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from ..integration.heads import WHOLE, LocalHeads
from ..integration.rotary import Rotary
from . import EvictionPolicy, QueryCount, ScoreContext
from .needs import Heads


@dataclass(frozen=True)
class Scorer:
    """Calls the policy, and averages over heads that evict the same tokens."""

    policy: EvictionPolicy
    heads: Heads
    layer_idx: int
    local_heads: LocalHeads = WHOLE
    rotary: Rotary | None = None

    def sets(self, kv_heads: int) -> int:
        """Number of sets of victims.

        Raises:
            ValueError: heads that evict the same tokens are in other processes.
        """
        if self.heads == "separate":
            return kv_heads
        if self.local_heads.processes(kv_heads) > 1:
            raise ValueError(
                f"This process holds {kv_heads} of the {self.local_heads.total} KV heads of a layer (tensor "
                "parallelism), and with heads='shared' the mean over all of them decides. Use heads='separate'."
            )
        return 1

    def __call__(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        seen: Tensor,
        statistics: Mapping[str, Tensor] = MappingProxyType({}),
        observed: QueryCount | None = None,
        budget: int | Tensor = 0,
    ) -> Tensor:
        """Score tokens.

        Args:
            keys, values: `[batch, kv_heads, tokens, dim]`.
            positions: `[batch, sets, tokens]`, -1 for pads.
            seen: `[batch]` number of real tokens seen.
            statistics, observed: see `ScoreContext`.
            budget: see `ScoreContext`.

        Returns:
            `[batch, sets, tokens]` float32.

        Raises:
            ValueError: the policy returned a wrong shape.
        """
        positions = positions.expand(-1, keys.shape[1], -1)
        context = ScoreContext(
            keys=keys,
            values=values,
            positions=positions,
            seen=seen,
            layer_idx=self.layer_idx,
            statistics=statistics,
            observed=observed,
            local_heads=self.local_heads,
            budget=budget,
            rotary=self.rotary,
        )
        scores = self.policy.score(context)
        if scores.shape != positions.shape:
            raise ValueError(
                f"{type(self.policy).__name__}.score must return [batch, kv_heads, tokens] = "
                f"{tuple(positions.shape)}, got {tuple(scores.shape)}."
            )
        scores = scores.float()
        return scores.mean(1, keepdim=True) if self.heads == "shared" else scores
