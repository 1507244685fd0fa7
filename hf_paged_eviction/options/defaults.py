"""The defaults of a cache for policy="auto", which are defined here and nowhere else.

A model with a profile (`prepare`) gets the cache that diverged least from the full cache when it was measured. Other
models get the best defaults without a file, see "The default" in docs/choosing.md.
"""

import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..allocators import BudgetAllocator
from ..integration.model_rotary import UnknownRotaryError, layer_rotaries
from ..integration.models import is_latent_attention, paged_layers
from ..integration.weights import registered_digest
from ..learned.calibration import Calibration, load_calibration
from ..learned.lookup import chosen_use, find_calibration
from ..learned.measured import BYTES, KEYS_AND_QUERIES, TOKENS, Bits, Row
from ..naming.by_object import ByObject
from ..naming.sizes import parse_budget, parse_memory_share
from ..policies import EvictionPolicy
from .cache_options import AUTO as AUTO
from .cache_options import BLOCK_SIZE, SMALL_BLOCK_SIZE

T = TypeVar("T")

_PACKAGE = __name__.partition(".")[0]
#: Bits for a budget in bytes without a profile: on the models that we measured, they lost less than fewer tokens did.
_BITS = 4
#: From this share of the memory on, keys and values in so many bits hold every token, so nothing is evicted.
_ROOMY: float = 1 / 2
_ROOMY_BITS: Bits = (8, 4)
#: Number of protected first tokens, if a profile chooses.
_SINKS = 4
#: The warning if there is no profile.
NO_PROFILE = "no profile"
#: Part of the warning if the weights are not registered.
UNKNOWN_WEIGHTS = "it is not known which weights these are"
#: Configurations for which this warning was given.
_TOLD = ByObject[bool]()


@dataclass(frozen=True)
class Default:
    """One default: policy, allocator, bits and protected tokens.

    Attributes:
        policy, allocator, bits: as in `CacheOptions`; the user's `bits` take precedence.
        profile: file for policy and allocator; None = what `CheckedOptions.check` finds.
        recent: share of the budget for the newest tokens, if `recent_tokens` is None; None = one block.
        sinks: number of protected first tokens, if `sink_tokens` is None; None = the policy's number.
        block_size: tokens per block, if `block_size` is None.
    """

    policy: str | EvictionPolicy
    allocator: str | BudgetAllocator = "uniform"
    bits: Bits = None
    recent: float | None = None
    sinks: int | None = None
    block_size: int = BLOCK_SIZE
    profile: str | None = None

    @property
    def name(self) -> str:
        """The spelling in commands: `observed@heads`."""
        bits = "" if self.bits is None else f" in {self.bits} bits"
        return (f"{self.policy}" if self.allocator == "uniform" else f"{self.policy}@{self.allocator}") + bits

    @property
    def spelling(self) -> str:
        """The arguments of a cache that ask for the policy and the bits."""
        return f"policy={self.policy!r}" + ("" if self.bits is None else f", bits={self.bits}")


#: Without a profile: if the model shows its queries, and if only keys are known.
WITHOUT_PROFILE = (
    Default(KEYS_AND_QUERIES, "first_prompt", recent=1 / 4, sinks=_SINKS),
    Default(KEYS_AND_QUERIES, recent=1 / 4, sinks=_SINKS),
    Default("keydiff", recent=1 / 4, sinks=_SINKS),
)
#: With fewer heads, of all layers that evict, equal shares are better than those of a prompt.
_FEW_HEADS = 8
#: For latents, whose norms mean nothing.
_OF_LATENTS = (Default("keydiff"),)


def of_profile(row: Row, profile: str) -> Default:
    """The default that a row of a profile describes.

    Args:
        profile: its file.
    """
    few = row.unit == BYTES and row.bits is not None
    size = SMALL_BLOCK_SIZE if few else BLOCK_SIZE
    return Default(row.policy, row.allocator, row.bits, sinks=_SINKS, block_size=size, profile=profile)


def defaults(config: Any, budget: object = None, profile: str | None = None) -> tuple[Default, ...]:
    """The defaults for a model, best first. The last one needs only keys and values.

    Args:
        config: `model.config`. To find a profile, its weights must be registered (`register_weights`, or `prepare`).
        budget: budget of the cache; bytes have other defaults than tokens, and so have large shares of the memory.
        profile: the user's; None = the one of the weights.

    Raises:
        ValueError: there is no such profile, or it belongs to another model.
    """
    calibration = None if profile is None else _of_this_model(profile, config)
    if is_latent_attention(config):
        return _OF_LATENTS
    unit, share = _size(budget)
    roomy = share is not None and share >= _ROOMY
    path = find_calibration(config) if profile is None else profile
    if path is None:
        rest = WITHOUT_PROFILE[_first_without(config) :]
        if unit == TOKENS:
            return rest
        # Models that cannot store few bits get the others.
        bits = _ROOMY_BITS if roomy else _BITS
        return (*(replace(default, bits=bits, block_size=SMALL_BLOCK_SIZE) for default in rest), *rest)
    calibration = calibration or load_calibration(path)
    best = None if calibration.measured is None else calibration.measured.best(unit, chosen_use(config))
    if best is None:
        best = Row("observed", "uniform" if calibration.shares is None else "heads", None, TOKENS, 1.0)
    elif roomy:
        best = replace(best, bits=_ROOMY_BITS)
    file = str(path)
    chosen, alone = of_profile(best, file), Default("calibrated", recent=1 / 8, sinks=_SINKS, profile=file)
    few = replace(alone, bits=chosen.bits, block_size=chosen.block_size)
    return tuple(dict.fromkeys((chosen, few, alone, WITHOUT_PROFILE[-1])))


def _of_this_model(profile: str, config: Any) -> Calibration:
    calibration = load_calibration(profile)
    calibration.check_model(config)
    return calibration


def _first_without(config: Any) -> int:
    """The first of `WITHOUT_PROFILE` that suits a model."""
    paged, text = paged_layers(config), config.get_text_config(decoder=True)
    try:
        layer_rotaries(config, paged)
    except UnknownRotaryError:  # the policy needs the rotation to predict queries
        return 2
    # Tokens of an image see each other, and a mask for that fits layers of one size only.
    of_images = getattr(config, "vision_config", None) is not None
    heads: int = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None) or 1
    return int(of_images or len(paged) * heads < _FEW_HEADS)


def _size(budget: object) -> tuple[str, float | None]:
    """The unit of a budget, and the share of the memory if it is one."""
    if not isinstance(budget, str):
        return TOKENS, None
    try:
        share = parse_memory_share(budget)
        if share is not None:
            return BYTES, share.share
        return TOKENS if parse_budget(budget)[2] is None else BYTES, None
    except ValueError:  # the check of the options raises
        return TOKENS, None


def choose(
    config: Any,
    policy: str | EvictionPolicy,
    allocator: str | BudgetAllocator | None,
    attempt: Callable[[Default], T],
    stacklevel: int,
    budget: object = None,
    profile: str | None = None,
) -> T:
    """Return the result of `attempt` for the user's policy, or for the first default that does not fail.

    One warning says why the best default failed; another, once per model, says that there is no profile.

    Args:
        config: `model.config`.
        policy: the user's policy; `AUTO` = use a default.
        allocator: the user's allocator; None = the one of the default.
        stacklevel: number of calls from here up to the user's line, for warnings.
        budget, profile: see `defaults`.

    Raises:
        TypeError, ValueError: `attempt` fails for the last default, too; or see `defaults`.
    """
    if policy != AUTO:
        return attempt(Default(policy, "uniform" if allocator is None else allocator, profile=profile))
    candidates = defaults(config, budget, profile)
    wanted = [default if allocator is None else replace(default, allocator=allocator) for default in candidates]
    attempted, reason, taken = _first(wanted, attempt)
    if replace(candidates[0], bits=None, block_size=BLOCK_SIZE) in WITHOUT_PROFILE:
        _tell_once(config, taken, reason)
    elif reason is not None:
        warnings.warn(
            f'policy="auto" takes {taken.name} where {wanted[0].name} would be best for this model, because of this: '
            f"{reason.removesuffix('.')}. With {taken.spelling} there is no warning.",
            stacklevel=stacklevel,
        )
    return attempted


def _tell_once(config: Any, taken: Default, reason: str | None) -> None:
    text = config.get_text_config(decoder=True)
    if text in _TOLD or not paged_layers(config):
        return
    _TOLD[text] = True
    which = f" to use ({UNKNOWN_WEIGHTS})" if registered_digest(config) is None else " of these weights"
    because = "" if reason is None else f", because {_clause(reason)}"
    warnings.warn(
        f'There is {NO_PROFILE}{which}: policy="auto" takes {taken.name}{because}. prepare(model, tokenizer) '
        "measures what is better, once, before caches are made (minutes on a CPU). "
        f"{taken.spelling} gives no warning.",
        stacklevel=_outside(),
    )


def _outside() -> int:
    """How many calls up, from who asks, the first one is that comes from another package than this."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    return level


def _clause(reason: str) -> str:
    """The beginning of a message, as a part of another."""
    sentence = re.split("[.;] ", reason)[0].removesuffix(".")
    return sentence[0].lower() + sentence[1:]


def _first(wanted: list[Default], attempt: Callable[[Default], T]) -> tuple[T, str | None, Default]:
    """The first result, the reason why the best default failed (None if it did not), and the default of the result."""
    reason = None
    for default in wanted[:-1]:
        try:
            return attempt(default), reason, default
        except ValueError as error:
            reason = reason or str(error)
    return attempt(wanted[-1]), reason, wanted[-1]
