"""The caches that `prepare` tries on a model."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..cache import PagedEvictionCache
from ..learned.measured import BYTES, TOKENS, Bits, Row
from ..naming.sizes import MemoryShare
from ..options.cache_options import BLOCK_SIZE
from ..options.checked import reads_profile
from ..options.defaults import of_profile

#: By index of a layer that evicts, a token's keys and values in 16 bits, `[1, kv_heads, 1, dim]` each.
TokenStates = Mapping[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Candidate:
    """One kind of cache.

    Attributes:
        policy, allocator, bits: see `Row`.
    """

    policy: str
    allocator: str = "uniform"
    bits: Bits = None

    def row(self, unit: str, share: float) -> Row:
        """The row of this cache, without divergences."""
        return Row(self.policy, self.allocator, self.bits, unit, share)

    def make(self, config: Any, profile: Path, share: float, tokens: int, token: TokenStates) -> PagedEvictionCache:
        """Make an empty cache for a share of the memory of a prompt. It holds as many tokens as it would in a model of
        16 bits, whatever the dtype of this one.

        Args:
            profile: file with scores and shares.
            share: share of the bytes of all tokens in 16 bits; without `bits`, the share of the tokens.
            tokens: number of tokens of the prompt.
            token: see `TokenStates`.

        Raises:
            ValueError: the model does not support such a cache, or the share is too small for it.
        """
        if self.bits is None:
            return self._of(config, profile, max(round(tokens * share / BLOCK_SIZE), 4) * BLOCK_SIZE)
        trial = self._of(config, profile, MemoryShare(share, tokens).text)
        for index, layer in trial.paged_layers:
            layer.state.measure(*token[index])
        if trial.budget is None:
            raise RuntimeError("A budget in bytes is one of tokens once all layers know the size of a token.")
        return self._of(config, profile, trial.budget)

    def _of(self, config: Any, profile: Path, budget: int | str) -> PagedEvictionCache:
        default = of_profile(self.row(TOKENS if self.bits is None else BYTES, 1), str(profile))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the cost of few bits is part of the measurement
            return PagedEvictionCache(
                config,
                budget,
                policy=default.policy,
                allocator=default.allocator,
                profile=default.profile if reads_profile(default.policy, default.allocator) else None,
                bits=default.bits,
                sink_tokens=default.sinks,
                block_size=default.block_size,
            )
