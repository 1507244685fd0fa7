"""The work of a cache before and between forwards: masks, pads, and refusals."""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..integration.models import named
from ..integration.window import Window
from ..masks.channel import MaskOffset
from ..masks.padding import Hidden, Padding, mask_of_slots
from ..options.checked import CheckedOptions
from ..options.static import check_static_attention
from ..queries.attention import PAGED_EVICTION, ModelAttention
from ..queries.handover import unattended
from ..table.spans import Spans, of_rows
from ..tensors.autocast import without_autocast
from .intake import commit_all
from .moves import remove_hidden
from .paged import PagedLayer
from .plan import Plan
from .states import LinearStates


class Forwards:
    """Answers transformers' questions about mask sizes, learns the pads from masks, and refuses forwards that would go
    wrong. The number of columns seen before a forward identifies it.

    A cache is used by one thread at a time; one forward may go through the layers in several, one after the other.

    Attributes:
        handed: whether `generate` was handed the cache.
        begun_at: number of columns seen when transformers last began to build a mask; the cache sets it.

    Args:
        config: `model.config`.
        layers: the layers that evict.
        counter: the layer whose tokens count as seen.
        counting: the last layer that counts its tokens; None if none does.
        states: linear states, whose layers count no tokens.
        padding: the pads of the batch.
        attention: attention implementation of the model.
        window: the longest distance that the model was made for.
        options: options of the cache.
        plan: what the layers decide together.
    """

    def __init__(
        self,
        config: Any,
        layers: Sequence[PagedLayer],
        counter: CacheLayerMixin,
        counting: CacheLayerMixin | None,
        states: LinearStates,
        padding: Padding,
        attention: ModelAttention,
        window: Window,
        options: CheckedOptions,
        plan: Plan,
    ) -> None:
        self._model_type: str = config.model_type
        self._config = config.get_text_config(decoder=True)
        self._layers = layers
        self._padding, self._attention, self._window = padding, attention, window
        # A budget that is a share of the first forward, `_first` tokens, until the warning about later ones was given.
        self._share = next((layer.budget.label for layer in layers if layer.budget.of_first_forward), None)
        self._counter, self._counting, self._states = counter, counting, states
        self._options, self._plan = options, plan
        self._uniform, self._needs_our_attention = options.uniform, options.needs_our_attention
        self._mask_was_made = False
        self._first = 0
        self.handed = False
        self._told_of_rereading = False
        self.reset()

    def reset(self) -> None:
        """Forget all forwards: the cache is empty again."""
        self._announced = 0  # number of tokens for which the first mask was made
        self.begun_at = self._asked_at = -1

    def begin(self, rows: int, count: int) -> None:
        """The first layer that evicts is about to take in `count` tokens of each row. What holds for all layers is
        decided here.

        Raises:
            ValueError: see `_check_brought_mask`, and `CheckedOptions.check_attention`. RuntimeError: see
                `_check_own_mask`.
        """
        seen = self._layers[0].state.seen + self._plan.uncounted
        if self.handed and seen == self._first == count - 1 and seen > 1 and not self._told_of_rereading:
            self._warn_of_rereading(count)
        if self.begun_at == seen != self._asked_at:
            # transformers began to build a mask and asked for no sizes: the caller brought one.
            if self._attention.has_masks:
                self._check_brought_mask(rows, count, seen)
        elif not seen <= self.begun_at <= seen + count:
            # transformers did not begin. (It may have begun before the step, for compiled decoding.)
            for layer in self._layers:
                self._check_own_mask(layer, rows, count)
        if count > 1 or self._needs_our_attention:
            self._check_attention(look=count > 1)
        if count and self._layers[0].state.budget.table.waits:
            self.commit()

    def _check_attention(self, look: bool) -> None:
        """Refuse an attention implementation that cannot serve the options; `look`: it may have changed."""
        if look:
            self._attention.look()
        if self._needs_our_attention and not self._attention.shows_queries:
            self._options.check_attention(self._attention)

    @without_autocast
    def commit(self) -> None:
        """Let all layers take in their pending tokens."""
        commit_all(self._plan)

    # ---- masks ----------------------------------------------------------------------------------------------------

    def mask_sizes(self, layer: PagedLayer | None, query_length: int | Tensor, seen: int) -> tuple[int, int] | None:
        """`(kv_length, kv_offset)` for the next `update` of this layer, after `seen` columns; None if it does not
        evict.

        The offset holds a callback that gets the 2-D mask, see `masks.channel`.
        """
        self.begun_at = self._asked_at = seen
        if layer is None:
            return None
        length, offset = layer.get_mask_sizes(query_length)
        if length + offset > self._window.tokens:
            self._window.check(length, offset, stacklevel=3)
        self._attention.look()
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        if not seen:
            self._first = count
        elif self._share is not None and self._first and count > 1 and 2 * (seen + count) >= 3 * self._first:
            self._warn_of_share(seen, count)
        # Layers that hold different numbers make their masks themselves, of which an empty one is no sign.
        alone = not self._uniform and layer.state.seen > 0
        no_mask = layer if count == 1 and self._attention.shows_queries and not alone else None
        tell = partial(self._see_mask, seen, count, no_mask)
        mask_offset = MaskOffset(offset)
        mask_offset.tell, mask_offset.placeholder, mask_offset.static = tell, alone, self._plan.static
        return length, mask_offset

    def _warn_of_share(self, seen: int, count: int) -> None:
        """The first forward was less than two thirds of the text."""
        share, self._share = self._share, None
        tokens = self._layers[0].state.budget.table.mean.tokens
        warnings.warn(
            f"The budget is {share}, and counts the tokens of the first forward, which were {self._first}: it is "
            f"{tokens} tokens per layer, and stays so with the {count} that come now, after {seen}. With "
            "prefill_chunk_size=, and for long later turns, give the budget in tokens, or as a share of a length that "
            "you name: '25% of memory of 8192 tokens'.",
            stacklevel=4,
        )

    def _warn_of_rereading(self, count: int) -> None:
        """The text that was read in one forward seems to come again, with the token that was generated."""
        self._told_of_rereading = True
        warnings.warn(
            f"{count - 1} tokens were read, and a forward of {count} follows. `generate` does so with use_cache=False: "
            "it feeds the whole text at every step, the cache takes it for new text, and the output is wrong. Leave "
            "out use_cache=False, or the cache.",
            stacklevel=4,
        )

    def _see_mask(
        self, seen: int, query_length: int, no_mask: PagedLayer | None, mask: Tensor | None, batch: int, config: Any
    ) -> tuple[Tensor | None, bool]:
        """Learn the 2-D mask of the coming forward, after `seen` columns.

        Returns:
            The one that its 4-D mask must be built from, and whether it needs none: where `no_mask` holds real tokens
            only.
        """
        self._check_attended(seen)
        if not seen:
            self._check_arrived(query_length, mask)
            self._check_layers(config)
            if self._states.any:
                self._states.begin(batch)
        single = query_length == 1
        mask = None if mask is None else mask.bool()  # converted once for all readers
        unchanged = self._padding.unchanged(mask, seen, batch) if single and mask is not None else None
        if unchanged is not None:
            mask = unchanged
        elif mask is not None or not seen or self._padding.all_real_from or self._padding.given is not None:
            if mask is not None or self._padding.all_real_from:
                self.hide(mask, seen, batch, single)
            mask = self._padding.observe(mask, seen, seen + query_length, batch)
        if single and self._plan.static:
            self.prepare_step(seen)
        if self._padding.irregular and seen and self._uniform:
            mask = self._mask_of_slots(mask, seen, query_length)
        return mask, no_mask is not None and no_mask.all_real

    def hide(self, mask: Tensor | None, seen: int, rows: int, single: bool = False) -> None:
        """Remove the tokens of the past that a mask hides, such as the pads that `generate` writes after a row has
        ended; see `Padding.newly_hidden`.

        Raises:
            ValueError: the mask shows tokens that were hidden, or hides tokens that cannot be removed. Nothing has
                changed then.
        """
        if mask is None and single and all(layer.table.all_real for layer in self._layers if layer.held):
            return  # the mask hides nothing, and `generate` was told that none is needed
        hidden = self._padding.newly_hidden(mask, seen, rows, single)
        if hidden is not None:
            self._remove(hidden)

    @without_autocast
    def forget(self, spans: Sequence[Spans]) -> None:
        """See `PagedEvictionCache.forget`; spans by row, or one entry for all rows."""
        if not self._layers or not self._layers[0].get_seq_length():
            raise ValueError("This cache has read no text of which it could forget a part.")
        if self._states.any:
            raise ValueError(
                f"{self._model_type} has linear states, which keep a trace of all that they have read, so this cache "
                "cannot forget a part of it. Call cache.reset() and read the text without that part."
            )
        self.commit()
        table = self._layers[0].table
        lengths = table.next_positions.tolist()
        positions = torch.zeros(len(lengths), self._layers[0].get_seq_length(), dtype=torch.bool, device=table.device)
        for row, (row_spans, length) in enumerate(zip(of_rows(spans, len(lengths), "forget"), lengths, strict=True)):
            for start, end in row_spans:
                if end > length:
                    raise ValueError(
                        f"forget has the span ({start}, {end}), and row {row} has {length} tokens so far: only what "
                        "was read can be forgotten."
                    )
                positions[row, start:end] = True
        self._remove(self._padding.without(positions))

    def _remove(self, hidden: Hidden) -> None:
        """Remove tokens of the past from all layers."""
        if self._plan.static:
            self._plan.interrupt()
        self.commit()
        remove_hidden([layer.state for layer in self._layers], hidden, self._uniform)
        self._padding.hide(hidden)

    def mask_of_others(self, sizes: tuple[int, int], query_length: int | Tensor) -> tuple[int, int]:
        """The mask sizes of a layer that does not evict; its mask hides what was forgotten."""
        if not self._padding.forgets:
            return sizes
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        offset = MaskOffset(sizes[1])
        offset.tell = partial(self._padding.mask_without_forgotten, self._counter.get_seq_length(), count)
        offset.placeholder = offset.static = False
        return sizes[0], offset

    def _mask_of_slots(self, mask: Tensor | None, seen: int, count: int) -> Tensor:
        self.commit()  # pads in the middle of the text move to other slots
        layer = self._layers[0]
        (length, offset), table = layer.get_mask_sizes(count), layer.table
        overwrites = length != table.held + layer.state.waiting + count
        # Slots of a static cache that are not in use yet are left to causality.
        overwrites = overwrites and (table.full or not self._plan.static)
        return mask_of_slots(mask, table.used[:, 0], overwrites, offset, seen + count)

    def _check_layers(self, config: Any) -> None:
        """Refuse a model of the same kind with another number of layers than the one that the cache was made for."""
        if type(config) is not type(self._config):
            return  # nothing is known of the model, or it may name its layers in another way
        made_for, has = (named(one, "num_hidden_layers") for one in (self._config, config))
        if made_for != has:
            raise ValueError(
                f"This cache was made for a model of {made_for} layers, and the model that uses it has {has}. Make it "
                "from the config of that model."
            )

    def _check_arrived(self, query_length: int, mask: Tensor | None) -> None:
        """Before anything was seen: if a mask was made before, did the tokens that it was made for come?

        They may come now: masks are made for several kinds of layers, and ahead of a compiled step. A shorter forward
        whose mask covers more than itself is the next one.
        """
        before, self._announced = self._announced, query_length
        if mask is not None and query_length < min(before, mask.shape[1]):
            raise RuntimeError(
                f"{self._model_type} asked how long its mask is for {before} tokens, and did not call update: it keeps "
                "its keys and values elsewhere, or nothing. Run it without this cache. If a forward has failed "
                "instead, call cache.reset() before the next."
            )

    def _check_attended(self, seen: int) -> None:
        """Between forwards: did attention follow the last update, unless the cache begins anew? Have all layers seen
        as many columns as the first one, `seen`?"""
        skipped = None
        if self._mask_was_made and seen and self._attention.shows_queries:
            skipped = unattended(self._layers)
        self._mask_was_made = True
        if skipped is not None:
            raise RuntimeError(
                f"Layer {skipped.layer_idx} took in tokens, and no attention followed. Either a forward failed: call "
                f"cache.reset() before the next. Or this model is set to {PAGED_EVICTION!r} and computes attention by "
                "code of its own, with a mask that is not made for it: load it with attn_implementation='eager', and "
                "choose a policy that needs no queries and allocator='uniform'."
            )
        if seen and self._states.changed_at and self._states.ahead(seen):
            raise RuntimeError(
                f"A linear state has seen more than the {seen} tokens that were counted: a forward failed in the "
                "middle. Call cache.reset() and begin anew."
            )
        last = seen if self._counting in (None, self._counter) else self._counting.get_seq_length()
        if last != seen:
            raise RuntimeError(
                f"The first layer of this cache has seen {seen} tokens and the last one {last}. Either a forward "
                "failed in the middle: call cache.reset() and begin anew. Or the model has fewer layers than the one "
                "that this cache was made for: make it from the config of this model."
            )

    def prepare_step(self, seen: int) -> None:
        """See `PagedEvictionCache.prepare_step`; the step comes after `seen` columns."""
        if not self._plan.static or seen == 0:
            return
        check_static_attention(self._attention.name)
        self._check_attention(look=True)
        for layer in self._layers:
            layer.state.exposed.check()
        for layer in () if self._attention.name == PAGED_EVICTION else self._layers:
            layer.kv_unchanged = False  # nothing would read what is attached to keys
        if seen < self._padding.all_real_from:
            raise ValueError(
                "A static cache cannot take a pad as a single token: give pads together with the tokens they stand "
                "before, or use static=False."
            )
        self._plan.prepare()

    # ---- update ---------------------------------------------------------------------------------------------------

    def _check_brought_mask(self, rows: int, count: int, seen: int) -> None:
        """Look at a forward of `count` tokens with a 4-D mask of the caller's own, `seen` columns being before it.

        Raises:
            ValueError: it does not say what the pads are, or its columns are not where the tokens lie.
        """
        if any(layer.held and not layer.table.counters.in_arrival_order for layer in self._layers):
            raise ValueError(
                f"A 4-D attention mask came, with a column for each of {seen} tokens of the past and {count} new ones. "
                "But tokens have been evicted or moved, and each layer holds others in an order of its own, so no such "
                "mask fits. Pass the 2-D mask [rows, seen + new] (what it hides of the past is gone then), or use a "
                "budget that holds the whole text where a mask needs four dimensions, as a tree of candidates does."
            )
        if count > 1 and rows > 1 and self._padding.given is None:
            raise ValueError(
                f"A batch of {rows} rows came with a 4-D attention mask, which does not say which tokens are pads. "
                "Pass the 2-D mask [rows, length] to the model, or attention_mask= to PagedEvictionCache (all ones "
                "where there are no pads)."
            )

    def _check_own_mask(self, layer: PagedLayer, rows: int, count: int) -> None:
        """Check a forward of `count` tokens whose mask the model made itself.

        Such a model assumes that slot `n` holds token `n`. This is true until something is evicted; after that, only a
        forward without a mask is right.

        Raises:
            RuntimeError: the model would mask the wrong slots.
        """
        if self._plan.static:
            raise RuntimeError(
                f"{self._model_type} builds its attention mask without asking the cache what it holds, so it would see "
                "slots of a static cache that are not in use. Use static=False."
            )
        seen, most, padding = layer.get_seq_length(), layer.budget.tokens, self._padding
        unknown = rows > 1 and padding.given is None
        evicting = most is None or seen + count > most
        if (count > 1 and seen > layer.held) or (evicting and (unknown or padding.irregular or padding.any_pads)):
            raise RuntimeError(
                f"In this transformers release {self._model_type} builds its attention mask without asking the cache "
                "what it holds, so after an eviction it would mask the wrong tokens. Only one unpadded prompt in one "
                "forward and single tokens after it are possible (for several rows, pass attention_mask= of ones to "
                "the cache). Use a budget that holds the whole text."
            )
