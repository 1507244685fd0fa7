"""From a configuration and options to layers: which parts each needs, and how much it may hold."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from .allocators import BudgetAllocator, FixedAllocator, Given, HeadAllocator, LayerAllocator, Uniform, share_out
from .allocators.cascade import Cascade
from .allocators.quota import HeadQuota, MakeQuota, Quota, RowQuota
from .calibration.basis import Basis
from .disposals import Disposal
from .hybrid_layer import HybridLayer, paged_part
from .integration.heads import HeadShare
from .integration.model_rotary import UnknownRotaryError, layer_rotaries
from .integration.models import asks_for_mask_sizes, is_latent_attention, is_paged
from .integration.padding import Padding
from .layer import PagedLayer
from .policies import EvictionPolicy
from .policies.scorer import Heads
from .queries.attention import PAGED_EVICTION
from .rotary import Rotary
from .store.codec import Codec
from .store.low_rank import RankCodec
from .store.sliding import StaticSlidingLayer
from .store.turning import Turning
from .table.budget import BlockBudget, whole_number
from .table.cohort import Cohorts
from .table.gaps import Positions
from .table.memory import MemoryPlan
from .table.steps import StaticSteps


class LayerBuilder:
    """Makes the paged layers of one cache.

    Args:
        sizes: what the user asked for.
        policy, heads, allocator, static, disposal, positions: of the cache.
        bits, ranks: of keys and of values.
        basis: where ranks are given.

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
        disposal: Disposal | None = None,
        positions: Positions = "text",
        bits: tuple[int | None, int | None] = (None, None),
        ranks: tuple[int | None, int | None] = (None, None),
        basis: Basis | None = None,
    ) -> None:
        if sizes.keep_ratio is not None and not isinstance(allocator, Uniform):
            raise ValueError(f"The allocator {allocator.name!r} needs budget= in tokens, not keep_ratio=.")
        if sizes.memory is not None and isinstance(allocator, LayerAllocator | HeadAllocator):
            raise ValueError(
                f"The allocator {allocator.name!r} decides for each row or head, and a layer's storage is as long as "
                "the longest of them, so memory= could not be kept to: give budget= in tokens, or use "
                "allocator='uniform' or 'pyramid'."
            )
        if isinstance(allocator, HeadAllocator) and heads != "separate":
            raise ValueError(f'The allocator {allocator.name!r} shares out among KV heads: use heads="separate".')
        if static and not isinstance(allocator, Uniform):
            raise ValueError(
                f"static=True needs layers and heads of one size, and {allocator.name!r} makes them differ: use "
                "allocator='uniform' and one number as budget."
            )
        self._sizes, self._policy, self._allocator, self._static = sizes, policy, allocator, static
        self._positions, self._bits, self._ranks, self._basis = positions, bits, ranks, basis
        self.cascade = Cascade(allocator, sizes) if isinstance(allocator, LayerAllocator) else None
        self._heads: Heads = heads
        self._memory: MemoryPlan | None = None
        self._disposal = disposal

    def _codecs(self, config: Any, index: int, share: HeadShare) -> tuple[Codec, Codec] | None:
        """Of keys and of values of one layer."""
        keys, values = self._bits
        if self._basis is not None:
            found = self._basis.layer(index, self._ranks)
            pairs = zip((found.keys, found.values), self._ranks, self._bits, (True, False), strict=True)
            made = [
                Codec(bits, turned) if rank is None else RankCodec(axes, rank, bits, share)
                for axes, rank, bits, turned in pairs
            ]
            return made[0], made[1]
        # What latent attention (MLA) hands over as values are keys too.
        return None if keys is values is None else (Codec(keys, True), Codec(values, is_latent_attention(config)))

    def _make(
        self,
        budget: BlockBudget,
        index: int,
        padding: Padding,
        share: HeadShare,
        rotary: Rotary | None,
        turning: Turning | None,
        codecs: tuple[Codec, Codec] | None,
    ) -> Any:
        own_size = not isinstance(self._allocator, Uniform)
        quota: MakeQuota = Quota
        if self.cascade is not None:
            quota = partial(RowQuota, cascade=self.cascade, place=self.cascade.layers)
        elif isinstance(self._allocator, HeadAllocator):
            quota = partial(HeadQuota, allocator=self._allocator)
        layer = PagedLayer(
            *(budget, self._policy, self._heads, index, padding, share, rotary),
            masks_itself=own_size,
            static=self._static,
            disposal=self._disposal,
            turning=turning,
            codecs=codecs,
            quota=quota,
        )
        if self._memory is not None:
            layer.memory = self._memory
            self._memory.add(layer)
        if self.cascade is not None:
            self.cascade.add(layer)
        return layer

    def fill(self, plan: Sequence[Any], padding: Padding, config: Any) -> list[Any]:
        """The layers of the model: those of `plan`, and paged ones where it says so.

        Raises:
            ValueError: the policy asks for the model's rotation, and that is not known; or keys are to be turned to
                other positions, and cannot be.
        """
        paged = [index for index, layer in enumerate(plan) if is_paged(layer)]
        budgets = dict(zip(paged, layer_budgets(self._sizes, self._allocator, len(paged)), strict=True))
        if self._sizes.memory is not None:
            self._memory = MemoryPlan(self._sizes, partial(layer_budgets, allocator=self._allocator, layers=len(paged)))
        rotaries = self._rotaries(config, paged)
        turnings = turnings_of(config, paged) if self._positions == "cache" else {}
        layers = []
        for index, layer in enumerate(plan):
            if index in budgets:
                share, rotary = HeadShare.of(config, index), rotaries.get(index)
                codecs = self._codecs(config, index, share)
                made = self._make(budgets[index], index, padding, share, rotary, turnings.get(index), codecs)
                layers.append(made if layer is None else HybridLayer(made, layer))
            else:
                layers.append(static_layer(layer, index) if self._static else layer)
        made = [part for part in map(paged_part, layers) if part is not None]
        if self._disposal is not None:
            self._disposal.introduce([layer.outlet for layer in made])
        return layers

    def _rotaries(self, config: Any, paged: Sequence[int]) -> Mapping[int, Rotary | None]:
        if not self._policy.needs.rotary:
            return {}
        try:
            return layer_rotaries(config, paged)
        except UnknownRotaryError as error:
            raise ValueError(
                f"The policy {self._policy.label!r} reads queries or keys without their rotary embedding, and that of "
                f"this {config.model_type} model cannot be undone: {error}. Use a policy that reads them as they are, "
                "such as 'keydiff', 'leverage' or 'snapkv'."
            ) from error


def turnings_of(config: Any, paged: Sequence[int]) -> dict[int, Turning]:
    """What turns the states held in each of these layers to other positions; layers that do not rotate have none.

    Raises:
        ValueError: they cannot be turned, with the reason.
    """
    latent = is_latent_attention(config)
    try:
        rotaries = layer_rotaries(config, paged, latents=latent)
        if paged and not any(rotaries.values()):
            raise UnknownRotaryError("no layer that evicts rotates its keys by their position")
    except UnknownRotaryError as error:
        raise ValueError(
            'positions="cache" turns the keys held to the positions where they then stand, and those of this '
            f'{config.model_type} model cannot be turned: {error}. Use positions="text".'
        ) from error
    return {index: Turning(rotary, int(latent)) for index, rotary in rotaries.items() if rotary is not None}


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


# ---- static caches ---------------------------------------------------------------------------------------------------

#: Attention implementations that hide slots which are not in use yet.
_MASKING = ("sdpa", "eager", PAGED_EVICTION)


def check_static(config: Any, attention: str | None, policy: EvictionPolicy) -> None:
    """Refuse what a static cache cannot serve.

    Raises:
        ValueError: with the reason and the way out.
    """
    if not hasattr(Cache, "get_query_offset"):
        raise ValueError("static=True needs transformers 5.14 or later. Upgrade, or use static=False.")
    if config.is_encoder_decoder or not asks_for_mask_sizes(config):
        raise ValueError(
            f"static=True: {config.model_type} does not ask its cache for the size of its masks. Use static=False."
        )
    if policy.needs.queries and is_latent_attention(config):
        raise ValueError(
            f"static=True: {policy.label!r} compares queries with keys, and this model caches latents (MLA). Use "
            "static=False or a policy that reads keys and values."
        )
    check_static_attention(attention)


def check_static_attention(name: str | None) -> None:
    """Refuse an attention implementation that would see slots which are not in use yet.

    Raises:
        ValueError: with those that fit.
    """
    if name is not None and name not in _MASKING:
        raise ValueError(
            f"static=True does not work with the attention implementation {name!r}, which would see unused slots. Call "
            f"model.set_attn_implementation({PAGED_EVICTION!r}) (or 'sdpa', 'eager'), or use static=False."
        )


def make_steps(layers: Sequence[Any], cohorts: Cohorts[PagedLayer]) -> StaticSteps:
    """What the layers of a static cache share.

    Args:
        layers: all of them.
        cohorts: of those that are paged.

    Raises:
        ValueError: no layer is paged.
    """
    paged = cohorts.layers
    if not paged:
        raise ValueError("static=True: no layer of this model can evict. Use transformers' StaticCache.")
    sliding = [layer for layer in layers if isinstance(layer, StaticSlidingLayer)]
    last = next((layer for layer in reversed(layers) if layer in paged or layer in sliding), None)
    return StaticSteps(cohorts, sliding, last)
