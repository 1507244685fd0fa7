"""Builds the layers of a cache from a configuration and options."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..allocators.limits import Limits
from ..integration.heads import LocalHeads
from ..integration.model_rotary import UnknownRotaryError, known_rotaries, layer_rotaries
from ..integration.models import is_latent_attention, is_paged
from ..integration.rotary import Rotary
from ..masks.padding import Padding
from ..options.checked import CheckedOptions
from ..precision.codec import Codec
from ..table.budget import BlockBudget
from .hybrid import HybridLayer
from .memory_plan import MemoryPlan
from .paged import PagedLayer
from .parameters import Common, Place


class LayerBuilder:
    """Makes the paged layers of one cache.

    Attributes:
        limits: how many tokens each layer may hold.

    Args:
        options: the user's options; their combination has been checked.
    """

    def __init__(self, options: CheckedOptions) -> None:
        self._options = options
        self.limits = Limits(options.allocator, options.sizes)

    def _codecs(
        self, config: Any, index: int, local_heads: LocalHeads, rotary: Rotary | None
    ) -> tuple[Codec, Codec] | None:
        """Of keys and of values of one layer; `rotary` turns the keys, or the rotary part of latents."""
        precision = self._options.precision
        if precision is None:
            return None
        keys, values = precision.rounding
        if is_latent_attention(config):  # what it hands over as values are the keys' rotary part
            plain = Codec(keys, True, centred=True), Codec(values, True, centred=True, rotary=rotary)
        else:
            plain = Codec(keys, True, centred=True, rotary=rotary), Codec(values, True)
        return precision.codecs(index, plain, local_heads)

    def fill(self, plan: Sequence[Any], padding: Padding, config: Any) -> list[Any]:
        """Make the layers of the model: those of `plan`, and a paged layer for each None.

        Raises:
            ValueError: the policy needs the model's rotation, and it is not known; or `positions="cache"` cannot rotate
                the keys.
        """
        sizes, allocator, disposal = self._options.sizes, self._options.allocator, self._options.disposal
        paged = [index for index, layer in enumerate(plan) if is_paged(layer)]
        budgets = dict(zip(paged, allocator.budgets(sizes, len(paged)), strict=True))
        memory = None
        if sizes.in_bytes:
            memory = MemoryPlan(self.limits, partial(checked_storage, self._options, len(paged)))
        common = Common(
            policy=self._options.policy,
            heads=self._options.heads,
            padding=padding,
            masks_itself=not self._options.uniform,
            static=self._options.static,
            disposal=disposal,
            limits=self.limits,
            memory=memory,
        )
        rotaries = self._rotaries(config, paged)
        rerotations = rerotations_of(config, paged) if self._options.positions == "cache" else {}
        turns = {} if self._options.precision is None else known_rotaries(config, paged)
        layers, heads, previous = [], LocalHeads.of_layers(config, paged), None
        for index, layer in enumerate(plan):
            if index in budgets:
                codecs = self._codecs(config, index, heads[index], turns.get(index))
                place = Place(index, heads[index], rotaries.get(index), rerotations.get(index), codecs, previous)
                parts = budgets[index], common, place
                layers.append(PagedLayer(*parts) if layer is None else HybridLayer(*parts, layer.number_of_states))
                previous = layers[-1].action
            else:
                layers.append(layer)
        return layers

    def _rotaries(self, config: Any, paged: Sequence[int]) -> Mapping[int, Rotary | None]:
        if not self._options.policy.needs.rotary or is_latent_attention(config):
            return {}  # latents are not rotated; a policy to which they say nothing was refused before
        try:
            return layer_rotaries(config, paged)
        except UnknownRotaryError as error:
            raise ValueError(
                f"The policy {self._options.policy.label!r} reads queries or keys without their rotary embedding, and "
                f"that of this {config.model_type} model cannot be undone: {error}. Use a policy that reads them as "
                "they are, such as 'keydiff', 'leverage' or 'snapkv'."
            ) from error


def checked_storage(options: CheckedOptions, layers: int, sizes: BlockBudget, rows: int) -> int:
    """See `BudgetAllocator.most_stored`; for a budget in bytes that has become tokens.

    Raises:
        ValueError: the disposal needs more tokens.
    """
    try:
        options.check_disposal(sizes)
    except ValueError as error:
        raise ValueError(f"budget={options.sizes.text!r} leaves {sizes.tokens} tokens: {error}") from error
    return options.allocator.most_stored(sizes, layers, rows)


def rerotations_of(config: Any, paged: Sequence[int]) -> dict[int, Rotary]:
    """The rotation of each of these layers, for `positions="cache"`; layers that do not rotate have none.

    Raises:
        ValueError: keys cannot be rotated again; the message gives the reason.
    """
    try:
        rotaries = layer_rotaries(config, paged)
        if paged and not any(rotaries.values()):
            raise UnknownRotaryError("no layer that evicts rotates its keys by their position")
    except UnknownRotaryError as error:
        raise ValueError(
            'positions="cache" turns the keys held to the positions where they then stand, and those of this '
            f'{config.model_type} model cannot be turned: {error}. Use positions="text".'
        ) from error
    return {index: rotary for index, rotary in rotaries.items() if rotary is not None}
