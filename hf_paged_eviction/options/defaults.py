"""What a cache does where nobody says which policy: the one place where that is decided.

Measured on real models, see docs/policies/index.md, "The default". A model with a calibration gets that: where its
attention implementation can serve it, with what the newest queries look at and one threshold over all layers and heads,
else with equal shares; with an eighth of the budget for the newest tokens, and four first tokens. Any other model gets
the published policy, which needs nothing.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..allocators import BudgetAllocator
from ..integration.models import is_latent_attention
from ..integration.weights import registered_digest
from ..learned.calibration.shelf import find_calibration, has_calibrations
from ..naming.of_files import quoted
from ..policies import EvictionPolicy
from .cache_options import AUTO as AUTO

T = TypeVar("T")


@dataclass(frozen=True)
class Default:
    """One way to keep tokens.

    Attributes:
        policy, allocator: as `PagedEvictionCache` takes them.
        recent: share of the budget for the newest tokens, where `recent_tokens` is not given; None = one block.
        sinks: first tokens that are never evicted, where `sink_tokens` is not given; None = as the policy says.
    """

    policy: str | EvictionPolicy
    allocator: str | BudgetAllocator = "uniform"
    recent: float | None = None
    sinks: int | None = None

    @property
    def name(self) -> str:
        """As commands write it: `calibrated:F@global`."""
        return f"{self.policy}" if self.allocator == "uniform" else f"{self.policy}@{self.allocator}"


def defaults(config: Any) -> tuple[Default, ...]:
    """What suits a model, the best first; the last one needs nothing but keys and values.

    Args:
        config: `model.config`, registered by `register_weights` where a calibration is to be found.
    """
    if is_latent_attention(config):
        return (Default("keydiff"),)  # latents have no norms that mean anything
    file = find_calibration(config)
    if file is None:
        return (Default("paged_eviction"),)
    name = quoted(str(file))
    alone = Default(f"calibrated:{name}", recent=1 / 8, sinks=4)
    return replace(alone, policy=f"observed:{name}", allocator="global"), alone, Default("paged_eviction")


def choose(
    config: Any,
    policy: str | EvictionPolicy,
    allocator: str | BudgetAllocator | None,
    attempt: Callable[[Default], T],
    stacklevel: int,
) -> T:
    """What `attempt` makes of what was asked for, or of the first default with which it succeeds.

    One warning says why it is not the best of them, or why no calibration could be looked for.

    Args:
        config: `model.config`.
        policy: `AUTO` for the default.
        allocator: None = what goes with the policy.
        stacklevel: of the warning, how many calls up it points.

    Raises:
        TypeError, ValueError: as `attempt` does with the last of them.
    """
    if policy != AUTO:
        return attempt(Default(policy, "uniform" if allocator is None else allocator))
    known = defaults(config)
    wanted = [each if allocator is None else replace(each, allocator=allocator) for each in known]
    made, reason, taken = _first(wanted, attempt)
    if reason is not None:
        warnings.warn(
            f'policy="auto" takes {taken.name} where {wanted[0].name} would be best for this model, because of this: '
            f"{reason.removesuffix('.')}. With policy={taken.policy!r} there is no warning.",
            stacklevel=stacklevel,
        )
    elif len(known) == 1 and registered_digest(config) is None and has_calibrations(config):
        warnings.warn(
            f'policy="auto" takes {taken.name}: there are calibrations for models of this shape, but which weights '
            "this configuration belongs to is not known. Call register_weights(model) before the cache is made. With "
            f"policy={taken.policy!r} there is no warning.",
            stacklevel=stacklevel,
        )
    return made


def _first(wanted: list[Default], attempt: Callable[[Default], T]) -> tuple[T, str | None, Default]:
    """What succeeds first, why the best did not (None if it did), and which it is."""
    reason = None
    for each in wanted[:-1]:
        try:
            return attempt(each), reason, each
        except ValueError as error:
            reason = reason or str(error)
    return attempt(wanted[-1]), reason, wanted[-1]
