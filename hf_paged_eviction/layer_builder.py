"""Which kind of layer a cache needs, and how much each may hold."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from .allocation import Allocation
from .allocators import BudgetAllocator, FixedAllocator, Given, HeadAllocator, LayerAllocator, Uniform, share_out
from .hybrid_layer import HybridLayer
from .layer import PagedLayer
from .model_rotary import UnknownRotaryError, layer_rotaries
from .models import is_paged
from .observed_layer import ObservedLayer
from .padding import Padding
from .parallel import HeadShare
from .policies import EvictionPolicy
from .rotary import Rotary
from .scoring import Heads
from .static_layer import StaticLayer, StaticObservedLayer
from .static_sliding_layer import StaticSlidingLayer
from .table.budget import BlockBudget, whole_number
from .unequal_layer import UnequalLayer


class LayerBuilder:
    """Makes the paged layers of one cache.

    Args:
        sizes: what the user asked for.
        policy, heads, allocator, static: of the cache.

    Raises:
        ValueError: they do not go together.
    """

    def __init__(
        self,
        sizes: BlockBudget,
        policy: EvictionPolicy,
        heads: Heads,
        allocator: BudgetAllocator,
        static: bool = False,
    ) -> None:
        if sizes.tokens is None and not isinstance(allocator, Uniform):
            raise ValueError(f"The allocator {allocator.name!r} needs budget= in tokens, not keep_ratio=.")
        if isinstance(allocator, HeadAllocator) and heads != "separate":
            raise ValueError(f'The allocator {allocator.name!r} shares out among KV heads: use heads="separate".')
        if static and not isinstance(allocator, Uniform):
            raise ValueError(
                f"static=True needs layers and heads of one size, and {allocator.name!r} makes them differ: use "
                "allocator='uniform' and one number as budget."
            )
        self._sizes, self._policy, self._allocator, self._static = sizes, policy, allocator, static
        self.allocation = Allocation(allocator, sizes) if isinstance(allocator, LayerAllocator) else None
        self._make = partial(self._class_for(policy), policy=policy, heads=heads)

    def _class_for(self, policy: EvictionPolicy) -> Any:
        if self.allocation is not None:
            return partial(UnequalLayer, masks_itself=True, allocation=self.allocation)
        if isinstance(self._allocator, HeadAllocator):
            return partial(UnequalLayer, masks_itself=True, head_allocator=self._allocator)
        if not isinstance(self._allocator, Uniform):
            return partial(ObservedLayer, masks_itself=True)
        if self._static:
            return StaticObservedLayer if policy.needs_queries else StaticLayer
        return ObservedLayer if policy.needs_queries else PagedLayer

    def fill(self, plan: Sequence[Any], padding: Padding, config: Any) -> list[Any]:
        """The layers of the model: those of `plan`, and paged ones where it says so.

        Raises:
            ValueError: the policy asks for the model's rotation, and that is not known.
        """
        paged = [index for index, layer in enumerate(plan) if is_paged(layer)]
        budgets = dict(zip(paged, layer_budgets(self._sizes, self._allocator, len(paged)), strict=True))
        rotaries = self._rotaries(config, paged)
        layers = []
        for index, layer in enumerate(plan):
            if index in budgets:
                share, rotary = HeadShare.of(config, index), rotaries.get(index)
                made = self._make(budgets[index], layer_idx=index, padding=padding, share=share, rotary=rotary)
                layers.append(made if layer is None else HybridLayer(made, layer))
            else:
                layers.append(static_layer(layer, index) if self._static else layer)
        return layers

    def _rotaries(self, config: Any, paged: Sequence[int]) -> Mapping[int, Rotary | None]:
        if not self._policy.needs_rotary:
            return {}
        try:
            return layer_rotaries(config, paged)
        except UnknownRotaryError as error:
            raise ValueError(
                f"The policy {self._policy.label!r} reads queries or keys without their rotary embedding, and that of "
                f"this {config.model_type} model cannot be undone: {error}. Use a policy that reads them as they are, "
                "such as 'keydiff', 'leverage' or 'snapkv'."
            ) from error


def static_layer(layer: Any, index: int) -> Any:
    """The layer that takes the place of one that is not paged, in a static cache.

    Raises:
        ValueError: there is none.
    """
    if type(layer) is DynamicSlidingWindowLayer:
        return StaticSlidingLayer(layer.sliding_window)
    if not layer.is_compileable:
        raise ValueError(
            f"static=True: layer {index} of this model needs a {type(layer).__name__}, which cannot be compiled. Use "
            "static=False."
        )
    return layer


def layer_budgets(sizes: BlockBudget, allocator: BudgetAllocator, layers: int) -> list[BlockBudget]:
    """What each paged layer may hold, as far as it is known before anything was read.

    Args:
        sizes: mean share.
        layers: paged layers of the model.
    """
    if isinstance(allocator, Given):
        return allocator.budgets(sizes, layers)
    if not isinstance(allocator, FixedAllocator) or sizes.tokens is None or not layers:
        return [sizes] * layers
    size, tokens = sizes.block_size, sizes.capacity
    weights = torch.tensor([allocator.weights(layers, tokens)])
    blocks = share_out(weights, tokens // size * layers, sizes.smallest // size)
    return [sizes.of(count * size) for count in blocks[0].tolist()]


def given_shares(tokens: Sequence[int], allocator: BudgetAllocator) -> tuple[int, Given]:
    """The smallest budget of a user's list, and the list as an allocator.

    Raises:
        TypeError: an entry is no whole number.
        ValueError: the list is empty, or an allocator is asked to share out as well.
    """
    if not isinstance(allocator, Uniform):
        raise ValueError(
            f"allocator= shares out one budget: give a single number with {allocator.name!r}, or a list of budgets "
            "without an allocator."
        )
    if not tokens:
        raise ValueError("budget= is an empty list: give one number per paged layer.")
    counts = tuple(whole_number(f"budget[{at}]", count, 1) for at, count in enumerate(tokens))
    return min(counts), Given(counts)
