"""The cache that is handed to `generate`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from .allocators import BudgetAllocator, Given, Uniform, make_allocator
from .arguments import check_config, check_flag, check_instance
from .build import LayerBuilder, check_static, check_static_attention, given_shares, layer_budgets, make_steps
from .calibration.basis import Basis, chosen_basis
from .disposals import Disposal, Surroundings, make_disposal
from .hybrid_layer import HybridLayer, paged_part
from .integration.masks import MaskWatch, TellingOffset, open_channel
from .integration.models import (
    asks_for_mask_sizes,
    check_model,
    is_latent_attention,
    layer_plan,
    warn_of_surprises,
    why_not_ours,
)
from .integration.padding import Padding
from .integration.window import Window
from .layer import PagedLayer
from .policies import EvictionPolicy, make_policy
from .policies.scorer import Heads
from .queries.attention import PAGED_EVICTION, ModelAttention, forget_handover, hand_over, unattended
from .saving import context
from .stats import CacheStats, LayerStats, readable_bytes
from .store.codec import check_bits
from .store.pool import StoragePool
from .store.tensors import byte_count
from .table.budget import BlockBudget
from .table.cohort import Cohorts
from .table.gaps import Positions
from .table.memory import parse_bytes
from .table.steps import refusal
from .table.takeback import columns_to_remove, crop_all_or_none


class PagedEvictionCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` that holds at most `budget` tokens per layer and row (PagedEviction, arXiv 2509.04377).

    Pass it as `past_key_values=` to `generate` or to the model. Full-attention layers are paged, also where they hold a
    linear state next to their keys and values; other layers stay what `DynamicCache` makes of them. Eviction works on
    what a forward leaves behind: the queries of a forward always attend to all of its own tokens. With
    `prefill_chunk_size=n` the peak is `budget + n` tokens. Gradients flow through the tokens of one forward of several,
    not into what earlier ones left.

    Args:
        config: `model.config`; the text part of a multimodal config is found by itself.
        budget: tokens held per layer and row, a multiple of `block_size`. A list gives each paged layer its own; that
            needs the attention implementation "paged_eviction".
        block_size: tokens per block.
        policy: a name from `available_policies()` or an `EvictionPolicy`.
        heads: "shared" = the KV heads of a layer evict the same tokens (scores are averaged), "separate" = each
            evicts its own.
        sink_tokens: first real tokens of each row that are never evicted; one block if None.
        protected_prefix: the same for a prefix you know, such as a system prompt; the larger of the two counts.
        recent_tokens: newest real tokens of each row that are never evicted; one block if None. Exact to the token
            where a prompt, chunk or turn overflows, and in `shrink`. While single tokens come, whole blocks go: any
            that holds one of these tokens stays, and so does the newest block, even if this is less than a block.
        attention_mask: `[rows, length]`, nonzero = real token. Normally learned from the model by itself; if given,
            it wins for the columns it covers. `rows` may divide the batch (beams). `reset` forgets it.
        allocator: how the budget of all layers together is shared out among layers and KV heads; a name from
            `available_allocators()`, perhaps with parameters, or a `BudgetAllocator`. All but "uniform" need the
            attention implementation "paged_eviction".
        disposal: what becomes of the tokens that are evicted; a name from `available_disposals()` or a `Disposal`.
        keep_ratio: instead of `budget`, the share of the first forward's tokens to hold, rounded up to a block. With
            chunked prefill the first chunk counts, so give `budget` there.
        memory: instead of `budget`, the bytes that keys and values of all paged layers and rows may take together, as
            an int or as text ("2GiB", "512MiB", "1.5GB"). They become tokens, in whole blocks and the same for every
            layer, at the first forward, which shows rows, widths and precision; `budget` then tells how many. What is
            not paged comes on top (`stats().other_bytes`), and so do the new tokens of a forward. Rows that are added
            later (`batch_repeat_interleave`) add bytes. Under tensor parallelism these are the bytes of each process.
        static: keep every tensor at its place, so that a decode step compiles into one graph that never changes:
            `generate` compiles it by itself on an accelerator, with CUDA graphs. Cannot `shrink` or take tokens back
            (assisted decoding, `crop`); needs layers of one size and the attention implementation "sdpa", "eager" or,
            for the fastest step, "paged_eviction".
        pool: where storage comes from and `release` brings it back to; for services that make a cache per request.
        record_past: hold new tokens back until `crop` or the next forward, so that they can be taken back exactly.
            transformers 5.14 and later switches this on by itself for assisted decoding; earlier ones do not.
        positions: where the tokens held stand. "text" = at their place in the text, so that distances grow with it;
            "cache" = one after the other (StreamingLLM, arXiv 2309.17453), so that no distance exceeds the budget plus
            a block plus the forward, however long the text is. The model's queries keep their positions; the keys held
            are turned, which needs a rotary embedding and half as much memory again once something was evicted; with
            bits= instead of memory a slower step, which turns them whenever they are read.
        bits: 8, 4 or 2: keep keys and values in so many bits per number, rounded token by token, and decode them for
            each forward; a pair `(keys, values)` gives each its own. The first `sink_tokens` (or `protected_prefix`)
            and the newest `block_size` tokens of a row stay as they came. None = the model's own type. The budget
            still counts tokens; `stats` tells the bytes.
        rank: keep of keys and values the coefficients of so many directions of `basis`, a pair `(keys, values)` gives
            each its own, None = as many as there are channels; `bits` is then that of a coefficient. What `bits` leaves
            as it came stays as it came. Such a cache cannot be saved.
        basis: a file that `paged-eviction fit-basis` wrote for this model, or a `Basis`; with `rank` only.

    Raises:
        TypeError, ValueError: sizes, policy or model that cannot work; the message says what would.
    """

    def __init__(
        self,
        config: Any,
        budget: int | Sequence[int] | None = None,
        block_size: int = 16,
        policy: str | EvictionPolicy = "paged_eviction",
        heads: Heads = "shared",
        sink_tokens: int | None = None,
        protected_prefix: int = 0,
        attention_mask: Tensor | None = None,
        *,
        recent_tokens: int | None = None,
        allocator: str | BudgetAllocator = "uniform",
        disposal: str | Disposal = "drop",
        keep_ratio: float | None = None,
        memory: int | str | None = None,
        static: bool = False,
        pool: StoragePool | None = None,
        record_past: bool = False,
        positions: Positions = "text",
        bits: int | tuple[int | None, int | None] | None = None,
        rank: int | tuple[int | None, int | None] | None = None,
        basis: str | Path | Basis | None = None,
        _inside_encoder_decoder: bool = False,
    ) -> None:
        check_config(config)
        check_flag("static", static)
        check_flag("record_past", record_past)
        check_instance("pool", pool, StoragePool)
        scorer, shares, precision = make_policy(policy), make_allocator(allocator), check_bits(bits)
        if isinstance(budget, Sequence) and not isinstance(budget, str | bytes):
            budget, shares = given_shares(budget, shares)
        protection = (sink_tokens, protected_prefix, recent_tokens)
        most_bytes = None if memory is None else parse_bytes(memory)
        sizes = BlockBudget.validate(cast(int | None, budget), keep_ratio, block_size, *protection, memory=most_bytes)
        if heads not in ("shared", "separate"):
            raise ValueError(f'heads must be "shared" or "separate", got {heads!r}.')
        if positions not in ("text", "cache"):
            raise ValueError(f'positions must be "text" or "cache", got {positions!r}.')
        check_model(config, _inside_encoder_decoder, heads)
        scorer.check_model(config)
        if is_latent_attention(config) and not scorer.needs.supports_mla:
            raise ValueError(
                f"The policy {scorer.name!r} compares norms of keys and values, but this model caches latents (MLA). "
                "Use one that does not, such as 'keydiff', 'streaming_llm' or 'random'."
            )
        self._attention = ModelAttention(config.get_text_config(decoder=True))
        self._why_not_ours = why_not_ours(config)
        self._policy, self._allocator = scorer, shares
        self._sizes, self._protection = sizes, protection
        self._heads: Heads = heads
        self._positions: Positions = positions
        self._bits = precision
        ranks, directions = chosen_basis(rank, basis, config)
        self._ranks = ranks
        # Settled here, because `update` asks for every layer and token.
        self._disposal = make_disposal(disposal)
        self._needs_our_attention = (
            scorer.needs.queries or not isinstance(shares, Uniform) or self._disposal.needs_queries
        )
        self._disposal.check(
            Surroundings(
                config.get_text_config(decoder=True),
                *(sizes, scorer, heads, static),
                uniform=isinstance(shares, Uniform),
                latent=is_latent_attention(config),
                positions=positions,
                coded=any(bits is not None for bits in (*precision, *ranks)),
            )
        )
        self._check_attention()
        if static:
            check_static(config, self._attention.name, scorer)
        plan = layer_plan(config)
        warn_of_surprises(config, plan, stacklevel=4 if _inside_encoder_decoder else 3)
        self._model_type: str = config.model_type
        self._alone = not _inside_encoder_decoder
        self._model_masks_itself = not asks_for_mask_sizes(config)
        # The decoder's own prompt is a start token: no pads to be told of.
        self._padding = Padding(attention_mask, expected=not _inside_encoder_decoder)
        self._masks = MaskWatch()
        builder = LayerBuilder(
            sizes, scorer, heads, shares, static, self._disposal, positions, precision, ranks, directions
        )
        self._cascade = builder.cascade
        Cache.__init__(self, layers=builder.fill(plan, self._padding, config))
        self._window = Window(config, [index for index, _ in self.paged_layers], positions == "text")
        self._cohorts = Cohorts([layer for _, layer in self.paged_layers])
        for layer in self._cohorts.layers:
            layer.cohorts, layer.store.pool = self._cohorts, pool
        self.pool = pool
        parts = [paged_part(layer) or layer for layer in self.layers]
        self._steps = make_steps(parts, self._cohorts) if static else None
        self._mask_was_made = False
        if record_past:
            self.activate_past_recording()
        open_channel()

    @property
    def policy(self) -> EvictionPolicy:
        """What scores the tokens."""
        return self._policy

    @property
    def budget(self) -> int | None:
        """Tokens held per layer and row, on average over layers; None before the first forward where it is given as
        `keep_ratio` or `memory`."""
        if self._sizes.tokens is not None:
            return self._sizes.tokens
        shares = [layer.budget.tokens for _, layer in self.paged_layers]
        known = [tokens for tokens in shares if tokens is not None]
        return sum(known) // len(known) if len(known) == len(shares) and known else None

    @property
    def disposal(self) -> Disposal:
        """What becomes of evicted tokens."""
        return self._disposal

    def _check_attention(self) -> None:
        if self._attention.shows_queries and self._why_not_ours is not None:
            raise ValueError(
                f"{self._why_not_ours}, so the attention implementation {PAGED_EVICTION!r} would give wrong results "
                "without a message. Load the model with another, such as attn_implementation='eager', and choose a "
                "policy that needs no queries and allocator='uniform'."
            )
        if self._attention.shows_queries or not self._needs_our_attention:
            return
        if self._disposal.needs_queries:
            reason = f"disposal={self._disposal.label!r} takes part in attention, and only"
        elif self._policy.needs.queries:
            reason = f"The policy {self._policy.label!r} decides by queries or attention, and only"
        else:
            reason = f"With the allocator {self._allocator.label!r} layers or heads hold different numbers, and only"
        reason = f"{reason} the attention implementation {PAGED_EVICTION!r} can serve that"
        if self._why_not_ours is not None:
            raise ValueError(
                f"{reason}; but {self._why_not_ours}. Choose a policy that needs no queries and allocator='uniform'."
            )
        raise ValueError(
            f"{reason}; this model uses {self._attention.name!r}. Call "
            f"model.set_attn_implementation({PAGED_EVICTION!r}) first, or load the model with "
            f"attn_implementation={PAGED_EVICTION!r}."
        )

    @property
    def paged_layers(self) -> list[tuple[int, PagedLayer]]:
        """The layers that evict, with their index in the model."""
        parts = [(index, paged_part(layer)) for index, layer in enumerate(self.layers)]
        return [(index, layer) for index, layer in parts if layer is not None]

    def _paged(self, layer_idx: int) -> PagedLayer:
        if isinstance(layer_idx, bool) or not isinstance(layer_idx, int) or not 0 <= layer_idx < len(self.layers):
            raise ValueError(f"layer_idx must be from 0 to {len(self.layers) - 1}, got {layer_idx!r}.")
        layer = paged_part(self.layers[layer_idx])
        if layer is None:
            paged, kind = [index for index, _ in self.paged_layers], type(self.layers[layer_idx]).__name__
            raise ValueError(f"Layer {layer_idx} is a {kind}, not paged. Paged layers: {paged}.")
        return layer

    # ---- update ---------------------------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in a layer's new keys and values.

        Args:
            key_states, value_states: `[batch, kv_heads, new, dim]`.

        Returns:
            What the queries of this forward may attend to: `[batch, kv_heads, held + new, dim]` each, or `[batch,
            kv_heads, budget, dim]` for a single token once the storage is full (of a static cache: always).

        Raises:
            RuntimeError: this model (in this transformers release) would mask the wrong slots, or attention did not
                tell a policy that needs them of the last forward's queries.
            ValueError: the policy needs queries and the model's attention implementation does not show them, the
                number of rows is another than before, the model has more layers than the cache was made for, or a
                forward of several rows and tokens came with a 4-D mask, which does not say what the pads are.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"This cache was made for a model of {len(self.layers)} layers, and the model that uses it has at "
                f"least {layer_idx + 1}. Make it from the config of that model."
            )
        if self._model_masks_itself:
            self._refuse_wrong_mask(layer_idx, key_states)
        if key_states.shape[2] > 1:
            self._attention.look()
            self._refuse_unknown_pads(key_states.shape[0])
        if self._needs_our_attention:
            self._check_attention()
        updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._attention.shows_queries:
            layer = paged_part(self.layers[layer_idx])
            if layer is not None:
                hand_over(layer, updated[0])
        return updated

    def _refuse_unknown_pads(self, rows: int) -> None:
        """Of a 4-D mask that the caller made the cache sees nothing, so it would take pads for tokens."""
        if torch.compiler.is_compiling() or not self._masks.brought_along(self.get_seq_length()):
            return
        if rows > 1 and self._padding.expected and not self._padding.given and self._attention.has_masks:
            raise ValueError(
                f"A batch of {rows} rows came with a 4-D attention mask, which does not say which tokens are pads. "
                "Pass the 2-D mask [rows, length] to the model, or attention_mask= to PagedEvictionCache (all ones "
                "where there are no pads)."
            )

    def _refuse_wrong_mask(self, layer_idx: int, key_states: Tensor) -> None:
        """Such a model takes slot `n` for token `n`: right until something is evicted, then only without any mask."""
        layer = paged_part(self.layers[layer_idx])
        if layer is None:
            return
        rows, _, count, _ = key_states.shape
        seen, padding = layer.get_seq_length(), self._padding
        unknown = rows > 1 and padding.expected and not padding.given
        evicting = layer.budget.tokens is None or seen + count > layer.budget.tokens
        if (count > 1 and seen > layer.held) or (evicting and (unknown or padding.any_pads)):
            raise RuntimeError(
                f"In this transformers release {self._model_type} builds its attention mask without asking the cache "
                "what it holds, so after an eviction it would mask the wrong tokens. Only one unpadded prompt in one "
                "forward and single tokens after it are possible (for several rows, pass attention_mask= of ones to "
                "the cache). Upgrade transformers to 5.14 or later, or use a budget that holds the whole text."
            )

    # ---- masks ----------------------------------------------------------------------------------------------------

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers hold a sliding window. Asked when a mask is about to be built."""
        # A getter that takes note of being asked: at this moment transformers asks a cache for nothing else.
        if not torch.compiler.is_compiling():
            self._masks.begin()
        # Written out: `torch.compile` cannot trace a property of a base class.
        return [getattr(layer, "is_sliding", False) for layer in self.layers]

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """`(kv_length, kv_offset)` of what the next `update` of this layer returns."""
        if not torch.compiler.is_compiling():
            self._masks.ask(self.get_seq_length())  # notes it, see `is_sliding`
        if layer_idx == 0:  # some releases ask the first layer, whatever it is, and mean the first one with attention
            layer_idx = next((i for i, layer in enumerate(self.layers) if isinstance(layer, CacheLayerMixin)), 0)
        layer = paged_part(self.layers[layer_idx]) if layer_idx < len(self.layers) else None
        if layer is None:
            sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
            return sizes
        length, offset = layer.get_mask_sizes(query_length)
        if self._steps is not None and (torch.compiler.is_compiling() or isinstance(offset, Tensor)):
            return length, offset
        self._window.check(length, offset, stacklevel=2)
        self._attention.look()
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        no_mask = count == 1 and self._attention.shows_queries
        # Layers that hold different numbers make their masks themselves, of which an empty one is no sign.
        alone = not isinstance(self._allocator, Uniform) and layer.get_seq_length() > 0
        no_mask = no_mask and not alone
        see_mask = partial(self._see_mask, count)
        return length, TellingOffset.of(offset, see_mask, lambda: no_mask and layer.all_real, placeholder=alone)

    def _see_mask(self, query_length: int, mask: Tensor | None, batch: int) -> Tensor | None:
        """Learn the 2-D mask of the coming forward; return the one its 4-D mask must be built from."""
        seen = self.get_seq_length()
        self._check_attended()
        mask = self._padding.observe(mask, seen, seen + query_length, batch)
        if query_length == 1:
            self.prepare_step()
        if not self._padding.irregular or seen == 0 or not isinstance(self._allocator, Uniform):
            return mask
        # Pads in the middle do not stay in the columns they came in.
        for _, layer in self.paged_layers:
            layer.commit()
        layer = self.paged_layers[0][1]
        visible = layer.visible_next(query_length)
        columns = visible.new_ones(batch, seen + query_length) if mask is None else mask.clone()
        _, offset = layer.get_mask_sizes(query_length)
        columns[:, offset : offset + visible.shape[1]] = visible.to(columns.device)
        return columns

    def _check_attended(self) -> None:
        """Between forwards: did attention follow the last update?"""
        skipped = unattended(self._cohorts.layers) if self._mask_was_made else None
        self._mask_was_made = True
        if skipped is not None:
            raise RuntimeError(
                f"Layer {skipped.layer_idx} took in tokens, and no attention followed. Either a forward failed: call "
                f"cache.reset() before the next. Or this model is set to {PAGED_EVICTION!r} and computes attention by "
                "code of its own, with a mask that is not made for it: load it with attn_implementation='eager', and "
                "choose a policy that needs no queries and allocator='uniform'."
            )

    def prepare_step(self) -> None:
        """Get a static cache ready for a compiled step of one token; for all others this does nothing.

        `generate` gets it done through the construction of masks, as does every call of the model that is not compiled.
        Call it before every step in a loop of your own around a compiled model. Reads no tensor.

        Raises:
            ValueError: the token is a pad in some row, or the attention implementation does not fit a static cache.
        """
        if self._steps is None:
            return
        seen = self.get_seq_length()
        if seen == 0:
            return
        check_static_attention(self._attention.name)
        if self._padding.columns(seen, seen + 1, self.paged_layers[0][1].table.rows, torch.device("cpu")) is not None:
            raise ValueError(
                "A static cache cannot take a pad as a single token: give pads together with the tokens they stand "
                "before, or use static=False."
            )
        self._steps.prepare()

    # ---- rows and rollback ----------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was."""
        self._map_padding(lambda rows: rows[beam_idx.to(rows.device)])
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times in place."""
        self._map_padding(lambda rows: rows.repeat_interleave(repeats, dim=0))
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (int64 or bool `[rows]`)."""
        self._map_padding(lambda rows: rows[indices.to(rows.device)])
        super().batch_select_indices(indices)

    def _map_padding(self, change: Callable[[Tensor], Tensor]) -> None:
        batch = next((layer.table.rows for _, layer in self.paged_layers if layer.get_seq_length()), None)
        if batch is not None:
            self._padding.map_rows(change, batch)
            if self._cascade is not None:
                self._cascade.map_rows(lambda rows: change(rows.to("cpu")))

    def activate_past_recording(self) -> None:
        """From now on new tokens wait until `crop` (or the next forward) commits them, so they can be taken back."""
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens of all layers, or of none.

        Args:
            tokens_to_remove: `-n` or 0 removes `n` tokens; `n > 0` keeps `n` of those seen (transformers up to 5.12).

        Raises:
            ValueError: some of these tokens have been evicted already and nothing was recorded. By a layer that is not
                paged also RuntimeError: it recorded nothing, or too little. Nothing has changed then.
        """
        paged = [layer for _, layer in self.paged_layers]
        count = columns_to_remove(tokens_to_remove, self.get_seq_length())
        for layer in paged:
            layer.check_crop(-count)
        others = [layer for layer in self.layers if not isinstance(layer, PagedLayer)]
        crop_all_or_none(
            others, [layer.crop_state if isinstance(layer, HybridLayer) else layer.crop for layer in others], count
        )
        for layer in paged:
            layer.crop(-count)

    # ---- shrinking ------------------------------------------------------------------------------------------------

    def shrink(self, budget: int) -> None:
        """Become a cache of a smaller budget, evicting at once what is too much in all paged layers.

        What stays is what the policy scores highest, chosen token by token and with the same protection as at the end
        of a prompt; statistics of attention move along, and an allocator shares the new total out. The storage becomes
        smaller too, one layer after the other. `reset` keeps the new budget. Tokens that wait for `crop` are taken in
        first. Where no more than `budget` tokens are held, none goes.

        Args:
            budget: tokens held per layer and row from now on, a multiple of the block size.

        Raises:
            TypeError, ValueError: a budget that the constructor would refuse, one above the present, layers that were
                given a list of budgets, or a static cache. Nothing has changed then.
        """
        sizes = self.check_shrink(budget)
        paged = [layer for _, layer in self.paged_layers]
        for layer in paged:
            layer.commit()
        self._sizes = sizes
        if self._cascade is not None:
            self._cascade.shrink(sizes)
        for layer, share in zip(paged, layer_budgets(sizes, self._allocator, len(paged)), strict=True):
            layer.shrink(share)

    def check_shrink(self, budget: int) -> BlockBudget:
        """Raise the error of `shrink`, if it would; returns the sizes that it would set."""
        if self._steps is not None:
            raise refusal("shrink")
        sizes = BlockBudget.validate(budget, None, self._sizes.block_size, *self._protection)
        if isinstance(self._allocator, Given):
            raise ValueError(
                f"The layers of this cache were given budgets of their own, {list(self._allocator.tokens)}, and one "
                "number does not say how to share it out: make a new cache with a smaller list."
            )
        self._disposal.check_sizes(sizes)
        present = self.budget
        if present is not None and sizes.capacity > present:
            raise ValueError(
                f"shrink({sizes.capacity}) would be growth: the budget is {present}, and evicted tokens cannot come "
                "back. Make a new cache."
            )
        return sizes

    @contextmanager
    def padding_aside(self) -> Iterator[None]:
        """Pads that are met inside are forgotten afterwards: their columns will have been taken back."""
        before = vars(self._padding).copy()
        try:
            yield
        finally:
            vars(self._padding).update(before)

    # ---- life -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens and the attention mask; keep the storage for the next prompt of the same shape."""
        self._padding.reset()
        self._masks = MaskWatch()
        if self._cascade is not None:
            self._cascade.clear()
        forget_handover(self._cohorts.layers)
        super().reset()

    def release(self) -> None:
        """Forget all tokens and give the storage up, to the pool where there is one. The cache may be used again."""
        self.reset()
        for _, layer in reversed(self.paged_layers):  # the pool hands out first what it got last
            layer.release()

    # ---- saving ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, input_ids: Tensor | None = None) -> None:
        """Write all that the cache holds to a file, for `load`. The cache stays as it is.

        The file holds named tensors and JSON (safetensors): no pickle. It is complete or not there, and readable by
        its owner only: keys and values tell about the text. How caches are made, what they hold and how far they are
        is in it; the model's weights and the text are not.

        Args:
            path: such as "context.safetensors".
            input_ids: `[rows, length]` int64, the tokens that were read, pads included; more may follow. Only their
                digest is saved, so that `load` can compare.

        Raises:
            ValueError: the cache is empty, tokens wait for `crop`, it is half of an encoder-decoder cache, or a layer
                that is not paged holds something without a name. TypeError, ValueError: `input_ids` is not what was
                read. OSError: the file cannot be written.
        """
        if not self._alone:
            raise ValueError("What the encoder has read is in another cache, so this one would be of no use in a file.")
        if self._ranks != (None, None):
            raise ValueError(
                "rank= keeps tokens as coefficients, which mean nothing without the very basis that made them, and "
                "that is not in the file. Save a cache without rank=, with bits= where it has to be small."
            )
        snapshot = context.CacheSnapshot(
            [context.snapshot_layer(index, layer) for index, layer in enumerate(self.layers)],
            self._padding.snapshot(),
            None if self._cascade is None else self._cascade.snapshot(),
        )
        context.save(path, self._attention.config, self._settings(), snapshot, input_ids)

    def _settings(self) -> dict[str, Any]:
        """The arguments that make such a cache, as JSON."""
        sinks, prefix, recent = self._protection
        given = isinstance(self._allocator, Given)
        return {
            "budget": list(self._allocator.tokens) if isinstance(self._allocator, Given) else self._sizes.tokens,
            "keep_ratio": self._sizes.keep_ratio,
            "memory": self._sizes.memory,
            "block_size": self._sizes.block_size,
            "policy": self._policy.label,
            "heads": self._heads,
            "sink_tokens": None if sinks is None else int(sinks),
            "protected_prefix": int(prefix),
            "recent_tokens": None if recent is None else int(recent),
            "allocator": "uniform" if given else self._allocator.label,
            "disposal": self._disposal.label,
            "positions": self._positions,
            "bits": list(self._bits),
            "static": self._steps is not None,
            "record_past": any(getattr(layer, "record_past", False) for layer in self.layers),
        }

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: Any,
        *,
        input_ids: Tensor | None = None,
        device: context.Devices = "cpu",
        policy: str | EvictionPolicy | None = None,
        pool: StoragePool | None = None,
    ) -> "PagedEvictionCache":
        """A cache that goes on exactly as the one that was saved would have.

        `batch_repeat_interleave(n)` makes it serve `n` different questions at once.

        Args:
            path: what `save` wrote.
            config: `model.config` of the same model. Its weights are not compared.
            input_ids: `[rows, length]`, to be refused if it does not begin with the text of the context; rows may be
                repeated. Needs a file that was saved with `input_ids=`.
            device: where the model is; for a model on several devices a list, one for each layer.
            policy: where the one that the file names cannot be made here: a class that is not registered, or a
                calibration that lies elsewhere. It has to be the same.
            pool: as for the constructor.

        Raises:
            ValueError: the file is damaged, was changed, or belongs to another model or text; the message names the
                difference. Also what the constructor refuses. OSError: it cannot be read.
        """
        check_config(config)
        with context.naming(path):
            saved = context.read(path, config, input_ids, policy)
            cache = cls(config, **saved.settings, pool=pool)
            context.restore(saved, cache.layers, cache._padding, cache._cascade, device, cache._steps is not None)
            if cache._steps is not None:
                cache._steps.resume(saved.all_real)
        return cache

    def follow_up(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        """What `generate` and the model are to be given when only the new tokens are at hand, not the text before them.

        >>> model.generate(**cache.follow_up(question_ids), past_key_values=cache)  # doctest: +SKIP

        Args:
            input_ids: `[rows, new]`.
            attention_mask: `[rows, new]`, nonzero = real token; rows of different length are padded on the left. None
                = all real.

        Returns:
            `input_ids` and `attention_mask`, `[rows, seen + new]`. The first ids stand for tokens that the cache has
            seen: they are never fed, and repeat the row's first new token.

        Raises:
            ValueError: shapes that do not go together, or other rows than the cache has.
        """
        seen, mask = self.get_seq_length(), attention_mask
        mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids)
        if input_ids.ndim != 2 or not input_ids.shape[1] or mask.shape != input_ids.shape:
            raise ValueError(
                f"input_ids must be [rows, new] with at least one token, and attention_mask the same; got "
                f"{list(input_ids.shape)} and {list(mask.shape)}."
            )
        if seen:
            rows = next(layer.table.rows for _, layer in self.paged_layers)
            if len(input_ids) != rows:
                raise ValueError(
                    f"input_ids has {len(input_ids)} rows and the cache {rows}: cache.batch_repeat_interleave(n) makes "
                    "n of each."
                )
        real = self._padding.columns(0, seen, len(input_ids), input_ids.device)
        before = mask.new_ones(len(mask), seen) if real is None else real.to(mask.dtype)
        return {
            "input_ids": torch.cat([input_ids[:, :1].expand(-1, seen), input_ids], dim=1),
            "attention_mask": torch.cat([before, mask], dim=1),
        }

    # ---- reading --------------------------------------------------------------------------------------------------

    def block_table(self, layer_idx: int = 0) -> Tensor:
        """Positions of the tokens in each block of a layer, `[batch, kv_heads, blocks, block_size]` int64.

        Blocks are in logical order (arrival order of real tokens); -1 where no real token is.

        Raises:
            ValueError: the layer is not paged. RuntimeError: nothing was seen yet.
        """
        return self._paged(layer_idx).block_table()

    def block_scores(self, layer_idx: int = 0) -> Tensor:
        """What the policy thinks of each block now, `[batch, kv_heads, blocks]` float32, high = keep.

        nan for blocks that are not yet filled. With `heads="shared"` all heads show the mean that decides; under
        tensor parallelism every process has to ask, because the others' heads count.

        Raises:
            ValueError: the layer is not paged. RuntimeError: nothing was seen yet.
        """
        return self._paged(layer_idx).block_scores()

    def stats(self) -> CacheStats:
        """Counts and bytes, per layer and in total. Reads tensors, so it synchronises an accelerator."""
        layers = tuple(_layer_stats(layer) for _, layer in self.paged_layers)
        others = [layer for layer in self.layers if paged_part(layer) is None]
        return CacheStats(
            seen=max((layer.seen for layer in layers), default=0),
            held=max((layer.held for layer in layers), default=0),
            budget=max((layer.budget for layer in layers if layer.budget is not None), default=None),
            evicted_tokens=sum(layer.evicted_tokens for layer in layers),
            evicted_blocks=sum(layer.evicted_blocks for layer in layers),
            storage_bytes=sum(layer.storage_bytes for layer in layers),
            other_bytes=sum(_plain_bytes(layer) for layer in others),
            summary_bytes=sum(layer.summary_bytes for layer in layers),
            host_bytes=sum(layer.host_bytes for layer in layers),
            faults=sum(layer.faults for layer in layers),
            demoted_tokens=sum(layer.demoted_tokens for layer in layers),
            layers=layers,
        )

    def __repr__(self) -> str:
        paged = self.paged_layers
        if not paged:
            return f"{type(self).__name__}(no paged layer, {len(self.layers)} others)"
        layer, stats = paged[0][1], self.stats()
        sizes = layer.budget
        budget = sizes.label
        if self._sizes.memory is not None and sizes.tokens is not None:
            budget = f"{self.budget} tokens ({self._sizes.label})"
        return (
            f"{type(self).__name__}(policy={layer.policy.label}, heads={layer.heads}, "
            f"budget={budget} in blocks of {sizes.block_size}, layers={len(paged)} paged + "
            f"{len(self.layers) - len(paged)} other, seen={stats.seen}, held={stats.held}, "
            f"evicted={stats.evicted_tokens} tokens, storage={readable_bytes(stats.storage_bytes)})"
        )


def _layer_stats(layer: PagedLayer) -> LayerStats:
    evicted_tokens = evicted_blocks = 0
    held, budget = layer.held, layer.budget.tokens
    if layer.held:
        if layer.table.limits is not None:
            held = budget = round(layer.table.limits.double().mean().item())
        evicted_tokens = int(layer.table.evicted_tokens.sum())
        evicted_blocks = int(layer.table.evicted_blocks.sum())
    return LayerStats(
        layer_idx=layer.layer_idx,
        seen=layer.get_seq_length(),
        held=held,
        budget=budget,
        evicted_tokens=evicted_tokens,
        evicted_blocks=evicted_blocks,
        storage_bytes=layer.storage_bytes,
        summary_bytes=layer.outlet.device_bytes,
        host_bytes=layer.outlet.host_bytes,
        faults=layer.outlet.faults,
        demoted_tokens=layer.outlet.tokens_beside,
    )


def _plain_bytes(layer: Any) -> int:
    return byte_count(getattr(layer, "keys", None), getattr(layer, "values", None))
