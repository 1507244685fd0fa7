"""The cache that is handed to `generate`."""

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from ..allocators import BudgetAllocator
from ..disposals import Disposal
from ..integration.models import cross_attention_layers, layer_plan, warn_of_surprises
from ..integration.turns import SeenTokens
from ..integration.weights import registered_digest, weights_digest
from ..integration.window import Window
from ..layer.build import LayerBuilder
from ..layer.forwards import Forwards
from ..layer.hybrid import HybridLayer, repeat_rows, select_rows
from ..layer.moves import check_crop, crop_held, crop_pending
from ..layer.overflow import cut_anew, protected_gone, shrink
from ..layer.paged import PagedLayer
from ..layer.plan import Plan
from ..layer.reading import in_order
from ..layer.states import LinearStates
from ..layer.stats import CacheStats
from ..masks.channel import wrap_mask_functions
from ..masks.padding import Padding
from ..naming.arguments import suggest_arguments
from ..naming.sizes import readable_bytes
from ..options.cache_options import AUTO, CacheOptions
from ..options.checked import CheckedOptions, check_config, profile_path
from ..options.defaults import Default, choose
from ..options.static import check_static, refusal
from ..policies import EvictionPolicy
from ..policies.needs import Heads
from ..precision.base import Precision
from ..queries.attention import ModelAttention
from ..queries.handover import forget_handover, hand_over
from ..store.tensors import byte_count
from ..table.bounds import spans_in
from ..table.gaps import Positions
from ..table.rollback import columns_to_remove, crop_all_or_none
from ..table.spans import Spans, of_rows, read_spans
from ..tensors.autocast import without_autocast
from ..tensors.graphs import leave_graphs, warn_of_leaving
from . import context
from .facts import differences, model_facts
from .follow_up import check_new
from .follow_up import follow_up as follow_up_inputs
from .labels import choosers


class _CacheClass(type):
    """The class of the class: `generate` notes on the cache that it was handed one, also where it was the class."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "_is_user_defined":
            raise TypeError(
                f"The cache must be an object, not the class: pass {cls.__name__}(model.config, budget=1024), or "
                "another budget."
            )
        super().__setattr__(name, value)


@suggest_arguments
class PagedEvictionCache(DynamicCache, metaclass=_CacheClass):  # type: ignore[misc]
    """A `DynamicCache` that holds at most `budget` tokens per layer and row (PagedEviction, arXiv 2509.04377).

    Pass it to `generate` or to the model as `cache=` (before transformers 5.24: `past_key_values=`). Full-attention
    layers are paged, including those that also hold a linear state; other layers are those of `DynamicCache`. Queries
    attend to all tokens of their own forward, and eviction follows the forward. With `prefill_chunk_size=n` the peak is
    `budget + n` tokens. Gradients flow through the tokens of one forward; `backward` raises an error if it would need
    the tokens of an earlier one.

    The arguments from `budget` to `static` are the fields of `CacheOptions`, which documents them.

    Args:
        config: `model.config`, or the config of a multimodal model.
        attention_mask: `[rows, length]`, nonzero = real token. The cache normally learns it from the model. If given,
            it takes precedence for the columns that it covers. The batch may be a multiple of `rows` (beams). `reset`
            forgets it.

    Raises:
        TypeError, ValueError: the options cannot work together or with the model; the message says what would work.
    """

    def __init__(
        self,
        config: Any,
        budget: int | str | None = None,
        block_size: int | None = None,
        policy: str | EvictionPolicy = AUTO,
        heads: Heads | None = None,
        sink_tokens: int | None = None,
        *,
        recent_tokens: int | None = None,
        protect: Spans | Sequence[Spans] | None = None,
        allocator: str | BudgetAllocator | None = None,
        profile: str | PathLike[str] | None = None,
        disposal: str | Disposal = "drop",
        positions: Positions = "text",
        bits: int | str | tuple[int, int] | Precision | None = None,
        static: bool = False,
        attention_mask: Tensor | None = None,
    ) -> None:
        options = CacheOptions(
            budget=budget,
            block_size=block_size,
            policy=policy,
            heads=heads,
            sink_tokens=sink_tokens,
            recent_tokens=recent_tokens,
            protect=protect,
            allocator=allocator,
            profile=profile,
            disposal=disposal,
            positions=positions,
            bits=bits,
            static=static,
        )
        self._make(config, options, attention_mask)

    def _make(self, config: Any, user_options: CacheOptions, mask: Tensor | None) -> None:
        check_config(config)
        self._attention = ModelAttention(config.get_text_config(decoder=True))
        self._weights = registered_digest(config)

        def check(default: Default) -> CheckedOptions:
            options = CheckedOptions.check(config, user_options, default)
            options.check_attention(self._attention)
            options.check_together()
            return options

        self._was_handed = self._turn_begins = self._crop_warned = False
        profile = profile_path(user_options.profile)
        self._options = options = choose(
            config, user_options.policy, user_options.allocator, check, 5, user_options.budget, profile
        )
        plan = layer_plan(config)
        if options.static:
            check_static(config, plan, self._attention.name, options.policy)
        known_bad = None if options.precision is None else options.precision.known_bad
        warn_of_surprises(config, plan, known_bad, stacklevel=5)
        self._padding = Padding(mask)
        builder = LayerBuilder(options)
        self._limits = builder.limits
        Cache.__init__(self, layers=builder.fill(plan, self._padding, config))
        self._evicting = [layer for _, layer in self.paged_layers]
        self._first_paged = next((at for at, _ in self.paged_layers), None)
        self._plan = Plan([layer.state for layer in self._evicting], self._padding, options.static)
        for layer in self._evicting:
            layer.plan = self._plan
        # Computed here, because masks and `update` read it for every token.
        self._parts = [layer if isinstance(layer, PagedLayer) else None for layer in self.layers]
        self._sliding: list[bool] = [getattr(layer, "is_sliding", False) for layer in self.layers]
        self._first = next((at for at, layer in enumerate(self.layers) if isinstance(layer, CacheLayerMixin)), 0)
        self._counter = self.layers[self._first]  # whose tokens count as seen
        window = Window(config, [index for index, _ in self.paged_layers], options.positions == "text")
        of_images = cross_attention_layers(config)
        of_the_text = [layer for at, layer in enumerate(self.layers) if at not in of_images]
        counting = next((layer for layer in reversed(of_the_text) if isinstance(layer, CacheLayerMixin)), None)
        self._states = LinearStates(self.layers, counting, options.static)
        self._forwards = Forwards(
            config,
            self._evicting,
            self._counter,
            counting,
            self._states,
            self._padding,
            self._attention,
            window,
            options,
            self._plan,
        )
        wrap_mask_functions()

    @property
    def policy(self) -> EvictionPolicy:
        """The policy that scores the tokens."""
        return self._options.policy

    @property
    def allocator(self) -> BudgetAllocator:
        """The allocator that divides the budget among layers and heads."""
        return self._options.allocator

    @property
    def profile(self) -> str | None:
        """The file of the profile that policy and allocator read; None if they read none."""
        return None if self._options.profile is None else self._options.profile[0]

    @property
    def bits(self) -> Any:
        """The bits in which keys and values are stored, as `CacheOptions.bits`; None for the dtype of the model."""
        return None if self._options.precision is None else self._options.precision.saved

    @property
    def budget(self) -> int | None:
        """The number of tokens held per layer and row, averaged over layers and rounded down.

        None before the first forward if the budget is a share or bytes.
        """
        return self._limits.mean.tokens

    @property
    def disposal(self) -> Disposal:
        """What happens to evicted tokens."""
        return self._options.disposal

    @property
    def paged_layers(self) -> list[tuple[int, PagedLayer]]:
        """The layers that evict, with their index in the model."""
        return [(index, layer) for index, layer in enumerate(self.layers) if isinstance(layer, PagedLayer)]

    def _paged(self, layer_idx: int) -> PagedLayer:
        if isinstance(layer_idx, bool) or not isinstance(layer_idx, int) or not 0 <= layer_idx < len(self.layers):
            raise ValueError(f"layer_idx must be from 0 to {len(self.layers) - 1}, got {layer_idx!r}.")
        layer = self.layers[layer_idx]
        if not isinstance(layer, PagedLayer):
            paged, kind = [index for index, _ in self.paged_layers], type(layer).__name__
            raise ValueError(f"Layer {layer_idx} is a {kind}, not paged. Paged layers: {paged}.")
        return layer

    # ---- turns ----------------------------------------------------------------------------------------------------

    @property
    def _is_user_defined(self) -> bool:
        """Whether `generate` was handed this cache. It notes so when it begins, and then asks what has been seen."""
        return self._was_handed

    @_is_user_defined.setter
    def _is_user_defined(self, was_handed: bool) -> None:
        self._was_handed = self._turn_begins = self._forwards.handed = was_handed

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens seen (not held) per row, pads included. New tokens get positions from here on."""
        layer = self._parts[layer_idx] if layer_idx < len(self._parts) else None
        if layer is None or self._plan.static:
            seen: int = super().get_seq_length(layer_idx)
        else:  # read here, because transformers asks twice per token
            seen = layer.state.seen
        if self._turn_begins and seen and not torch.compiler.is_compiling():
            self._turn_begins = False
            return SeenTokens(seen)
        return seen

    # ---- update ---------------------------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add the new keys and values of a layer.

        Args:
            key_states, value_states: `[batch, kv_heads, new, dim]`.

        Returns:
            What the queries of this forward attend to: `[batch, kv_heads, held + new, dim]` each, or `[batch, kv_heads,
            budget, dim]` for a single token once the storage is full (for a static cache: always).

        Raises:
            RuntimeError: the model (in this transformers release) would mask the wrong slots, or a policy that needs
                queries was not shown those of the last forward.
            ValueError: the policy needs queries and the model's attention implementation does not show them; the number
                of rows changed; keys or values differ in shape or dtype from those held; the model has more layers than
                the cache was made for; or a forward after an eviction, or one of several rows and tokens, has a 4-D
                mask, which does not say where the pads are.
        """
        if layer_idx >= len(self._parts):
            raise ValueError(
                f"This cache was made for a model of {len(self._parts)} layers, and the model that uses it has at "
                f"least {layer_idx + 1}. Make it from the config of that model."
            )
        compiling = torch.compiler.is_compiling()
        if compiling:
            self._leave_graphs(key_states.shape[2])
            compiling = torch.compiler.is_compiling()  # still: a step of a static cache
        if layer_idx == self._first_paged and not compiling:
            self._forwards.begin(key_states.shape[0], key_states.shape[2])
        updated: tuple[Tensor, Tensor]
        if self.offloading:
            updated = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        else:
            updated = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        if self._attention.shows_queries:
            layer = self._parts[layer_idx]
            if layer is not None:
                hand_over(layer, *updated, key_states.shape[2])
        return updated

    def _leave_graphs(self, new: int | Tensor = 1) -> None:
        """Of a compiled call: leave it, unless this is a step of a static cache. Then `is_compiling` is False from here
        on."""
        if not (self._plan.static and new == 1):
            leave_graphs()
            if not self._plan.static:
                warn_of_leaving()

    # ---- masks ----------------------------------------------------------------------------------------------------

    @property
    def is_sliding(self) -> list[bool]:
        """Whether each layer holds a sliding window.

        Reading this attribute has a side effect: transformers reads it when it is about to build a mask, so the cache
        notes the beginning of a forward. For similar reasons `get_mask_sizes`, `get_conv_state`, `get_recurrent_state`
        and `block_scores` take notes, and a static cache counts the last step when it is asked what it holds. No other
        getter changes anything.
        """
        if torch.compiler.is_compiling():
            self._leave_graphs()
        if not torch.compiler.is_compiling():
            self._forwards.begun_at = self._counter.get_seq_length()
        return self._sliding

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """See `transformers.Cache`.

        The cache notes the call, because kernels write a single token straight into the returned tensor and no other
        call reports it.
        """
        self._states.changing(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)  # type: ignore[no-any-return]

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """See `get_conv_state`."""
        self._states.changing(layer_idx)
        return super().get_recurrent_state(layer_idx, *args, **kwargs)  # type: ignore[no-any-return]

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """`(kv_length, kv_offset)` of what the next `update` of this layer returns."""
        if torch.compiler.is_compiling():
            self._leave_graphs(query_length)
        if layer_idx == 0:  # some releases ask the first layer, whatever it is, and mean the first one with attention
            layer_idx = self._first
        layer = self._parts[layer_idx] if layer_idx < len(self._parts) else None
        sizes: tuple[int, int] | None = None
        if not torch.compiler.is_compiling():  # remembers the call, see `is_sliding`
            sizes = self._forwards.mask_sizes(layer, query_length, self._counter.get_seq_length())
        elif layer is not None:  # in the graph of a static cache masks are not examined, and the count is a tensor
            sizes = layer.get_mask_sizes(query_length)
        if sizes is None:
            sizes = super().get_mask_sizes(query_length, layer_idx)
            sizes = sizes if torch.compiler.is_compiling() else self._forwards.mask_of_others(sizes, query_length)
        return sizes

    def prepare_step(self) -> None:
        """Prepare a static cache for a compiled step of one token. Other caches need no preparation.

        `generate` and every call of a model that is not compiled prepare the step when they build the mask. Call this
        before every step in your own loop around a compiled model. It reads no tensor.

        Raises:
            ValueError: the token is a pad in some row, or the attention implementation does not fit a static cache.
        """
        if self._plan.static:
            self._forwards.prepare_step(self.get_seq_length())

    # ---- rows and rollback ----------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each row `i` by row `beam_idx[i]`; `beam_idx` is int64 `[rows]`."""
        self._map_padding(lambda rows: rows[beam_idx.to(rows.device)])
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times in place."""
        self._map_padding(lambda rows: rows.repeat_interleave(repeats, dim=0))
        for layer in self.layers:
            repeat_rows(layer, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (int64 or bool `[rows]`)."""
        self._map_padding(lambda rows: rows[indices.to(rows.device)])
        for layer in self.layers:
            select_rows(layer, indices)

    def _map_padding(self, change: Callable[[Tensor], Tensor]) -> None:
        batch = next((layer.table.rows for _, layer in self.paged_layers if layer.get_seq_length()), None)
        if batch is not None:
            self._padding.map_rows(change, batch)
            self._limits.map_rows(change)

    def activate_past_recording(self) -> None:
        """Keep new tokens pending, so that `crop` can take them back exactly. The next forward commits them."""
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens, in all layers or in none.

        Statistics of attention and rounded blocks keep traces of tokens that were not pending; a warning says so once.
        To answer again as if nothing had been answered, keep `copy.deepcopy(cache)`.

        Args:
            tokens_to_remove: `-n` or 0 removes `n` tokens; `n > 0` keeps `n` of those seen (as in transformers 5.14).

        Raises:
            ValueError: some of these tokens were evicted and nothing was recorded. Nothing has changed then.
            RuntimeError: a layer that is not paged recorded nothing, or too little. Nothing has changed then.
        """
        paged = [layer for _, layer in self.paged_layers]
        if paged and self._plan.static:
            raise refusal("take tokens back (crop)")
        count = columns_to_remove(tokens_to_remove, self.get_seq_length())
        for layer in paged:
            check_crop(layer.state, count)
        others = [layer for layer in self.layers if isinstance(layer, HybridLayer) or not isinstance(layer, PagedLayer)]
        crops = [layer.crop_state if isinstance(layer, HybridLayer) else layer.crop for layer in others]
        crop_all_or_none(others, crops, count, self.get_seq_length() - count)
        held = [crop_pending(layer.state, count) for layer in paged]
        self._forwards.commit()
        if any(held):
            self._warn_of_traces()
        for layer, held_count in zip(paged, held, strict=True):
            crop_held(layer.state, held_count)
        if count:
            self._padding.crop(self.get_seq_length())
            self._states.taken_back()

    def _warn_of_traces(self) -> None:
        """Warn once that tokens which are taken back have left traces in what stays, if they have."""
        policy, rounds = self._options.policy, self._options.precision is not None
        if self._crop_warned or not (policy.needs.queries or rounds):
            return
        self._crop_warned = True
        traces = [f"the policy {policy.label!r} has observed their attention"] if policy.needs.queries else []
        traces += ["bits= has rounded other tokens with them"] if rounds else []
        warnings.warn(
            f"crop takes tokens back, but {' and '.join(traces)}: another answer may differ from one of a cache that "
            "never had them. To answer again, keep a copy from before the answer, copy.deepcopy(cache); it takes "
            f"{readable_bytes(self.stats().device_bytes)}.",
            stacklevel=3,
        )

    # ---- protecting, shrinking ------------------------------------------------------------------------------------

    @without_autocast
    def protect(self, spans: Spans | Sequence[Spans] | None) -> None:
        """Protect these spans from now on, instead of all spans given before; `sink_tokens` stay protected.

        Use it between turns, for example to protect the user's last message. Give a span before its tokens come:
        evicted tokens do not come back, and a warning tells how many are missing. Blocks are divided again, as at the
        end of a prompt, and pending tokens are committed first. `reset` keeps the new spans.

        Args:
            spans: see `CacheOptions.protect`; None or an empty list = none.

        Raises:
            TypeError, ValueError: the constructor would refuse the spans, the budget is too small for them, or a static
                cache has seen a token. Nothing has changed then.
        """
        present = self.budget
        options = self._options.protecting(spans, present)
        if self._plan.static and self.get_seq_length():
            raise refusal("protect other tokens once it has seen some, because blocks would have to be cut anew")
        rows = self._evicting[0].table.rows if self.get_seq_length() and self._evicting else 0
        new_spans = options.sizes.spans
        of_rows(new_spans, rows)
        self._forwards.commit()
        self._limits.protect(new_spans)
        for layer in self._evicting:
            if layer.state.table is not None:
                layer.state.table.protect(layer.budget)
        self._plan.divide()
        for layer in self._evicting:
            cut_anew(layer.state)
        self._options = options
        gone = max((protected_gone(layer.state) for layer in self._evicting), default=0)
        if gone:
            warnings.warn(
                f"{gone} of the tokens to protect have been evicted already, in the layer, row and head that lacks "
                "most of them, and do not come back. Give spans before their tokens come.",
                stacklevel=2,
            )

    def forget(self, spans: Spans | Sequence[Spans]) -> None:
        """Evict these tokens now, whatever their scores: the output of a tool, the thinking that a chat template drops.

        No query attends to them again, and new tokens take their slots first. Positions do not change: all other tokens
        keep theirs, and new tokens go on behind the last one that was read. Later masks may show what was forgotten or
        hide it, so that `generate(**whole_chat, cache=cache)` and `follow_up` go on as before; positions are right
        where masks show it. Tokens that were protected go, too. Pending tokens are committed first.

        The result is that of a `DynamicCache` with a mask over these tokens and the same position ids. With equal
        budgets all layers share one mask, so a layer that has already evicted some of these tokens evicts as many of
        those with the lowest scores instead.

        Args:
            spans: pairs `(start, end)` of real tokens of a row, counted from 0, for all rows, or a list of such lists,
                one for each row. `spans_of_roles` makes them of messages.

        Raises:
            TypeError: the spans have another form.
            ValueError: nothing was read, a span reaches beyond what was read, the spans do not fit the number of rows,
                the model has linear states (Mamba, short convolutions), which cannot forget, or the disposal keeps
                something of evicted tokens. Nothing has changed then.
        """
        rows = read_spans(spans, "forget")
        if rows:
            self._forwards.forget(rows)

    @without_autocast
    def shrink(self, budget: int) -> None:
        """Lower the budget and evict the excess at once, in all paged layers.

        The tokens with the highest scores stay, chosen one by one and with the same protection as at the end of a
        prompt. Statistics of attention move along, and an allocator divides the new total. The storage becomes smaller
        too, one layer after the other. Pending tokens are committed first. Nothing is evicted if no more than `budget`
        tokens are held. `reset` keeps the new budget.

        Args:
            budget: number of tokens held per layer and row from now on, a multiple of the block size.

        Raises:
            TypeError, ValueError: the constructor would refuse the budget, it is larger than the present one, or the
                cache is static. Nothing has changed then.
        """
        options = self.check_shrink(budget)
        self._forwards.commit()
        self._options = options
        self._limits.shrink(options.sizes)
        self._plan.divide()
        for layer in self._evicting:
            shrink(layer.state)

    def check_shrink(self, budget: int) -> CheckedOptions:
        """Raise the error that `shrink` would raise, if any. Returns the options that it would set."""
        if self._plan.static:
            raise refusal("shrink")
        return self._options.shrunk(budget, self.budget)

    @contextmanager
    def forward_aside(self) -> Iterator[None]:
        """Context manager around forwards that you take back inside it, by `crop`.

        On exit the cache forgets the pads and the changes of linear states that these forwards noted.
        """
        before = vars(self._padding).copy()
        try:
            yield
        finally:
            vars(self._padding).update(before)
            self._states.taken_back()

    # ---- life -----------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> "PagedEvictionCache":
        """Copy the cache. The copy may be written to inside and outside of `torch.inference_mode`."""
        memo[id(self)] = copied = type(self).__new__(type(self))
        with torch.inference_mode(False):
            copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by `torch.save`, because `pickle` copies tensors that share memory."""
        held = io.BytesIO()
        torch.save(self.__dict__, held)
        return _unpickled, (type(self), held.getvalue())

    def reset(self) -> None:
        """Forget all tokens and the attention mask. Keeps the storage for the next prompt of the same shape."""
        self._padding.reset()
        self._forwards.reset()
        forget_handover(self._evicting)
        super().reset()
        if not self._plan.static:
            self._states.forget()

    def release(self) -> None:
        """Forget all tokens and free the storage. The cache may be used again."""
        self.reset()
        self._states.forget()
        for layer in self._evicting:
            layer.release()

    # ---- saving ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, input_ids: Tensor | None = None, *, model: Module | None = None) -> None:
        """Write the cache to a file for `load`. The cache does not change.

        The file is a safetensors file: named tensors and JSON, no pickle. It holds the options, the tokens held and the
        counters, but neither the model's weights nor the text. It appears only when it is complete, and only its owner
        can read it, because keys and values reveal the text.

        Args:
            path: for example "context.safetensors".
            input_ids: `[rows, length]` int64, the tokens that were read, pads included. Ids after them are ignored.
                Only a digest of these tokens is saved, which `load` can compare.
            model: the model that made the keys and values. The digest of its weights is saved, which `load` can
                compare. Without it, the digest that was registered when the cache was made is saved
                (`register_weights`), if any.

        Raises:
            ValueError: the cache was made for another model, is empty, or has pending tokens; or a layer that is not
                paged holds a tensor that cannot be named; or `input_ids` is not what was read.
            TypeError: `input_ids` is not an int64 tensor.
            OSError: the file cannot be written.
        """
        recording = any(getattr(layer, "record_past", False) for layer in self.layers)
        settings = {**self._options.settings(self.budget), "record_past": recording}
        if len(self._options.sizes.spans) > 1:  # for the present rows
            settings["protect"] = spans_in(self._evicting[0].table.phase.bounds)
        config, weights = self._attention.config, self._weights
        if model is not None:
            facts = model_facts(config), model_facts(model.config)
            if differing := differences(*facts, "of this cache", "of model="):
                raise ValueError(f"model= is another model than this cache was made for ({differing}).")
            weights = weights_digest(model)
        parts = self.layers, self._padding, self._limits
        context.save(path, config, settings, *parts, input_ids, weights, self._options.profile)

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: Any,
        *,
        input_ids: Tensor | None = None,
        device: context.Devices = "cpu",
        policy: str | EvictionPolicy | None = None,
        allocator: str | BudgetAllocator | None = None,
        profile: str | PathLike[str] | None = None,
    ) -> "PagedEvictionCache":
        """Load a cache, which continues exactly as the saved one would have.

        To answer `n` questions at once, call `batch_repeat_interleave(n)`.

        Args:
            path: file that `save` wrote.
            config: the model, or `model.config`. The digest of its weights must be that in the file. A model always has
                a digest, and then a file without one is refused. A config has a digest if its weights were registered
                (`register_weights`). If it has none, or the file has none, other weights of the same shape are not
                noticed.
            input_ids: `[rows, length]`; refuse the file unless they begin with the text of the context. Rows may be
                repeated. Needs a file that was saved with `input_ids=`.
            device: where the model is; for a model on several devices, a list with one entry per layer.
            policy: the same policy as in the file, if it cannot be made here by name, because its class is not
                registered.
            allocator: likewise.
            profile: the profile that the cache was saved with, if it has another path here. None = the file of that
                path, or the profile of the weights.

        Raises:
            ValueError: the file is damaged or was changed, or it belongs to another model, other weights or another
                text, or a file of its policy has changed, or (with a model) it does not say which weights it belongs
                to, or the constructor refuses its options. The message names the difference.
            OSError: there is no such file, or it cannot be read.
        """
        model = config if isinstance(config, Module) else None
        weights = registered_digest(config) if model is None else weights_digest(model)
        config = config if model is None else model.config
        check_config(config)
        with context.naming(path):
            content = context.read(path, config, input_ids, weights, must_say=model is not None)
            made = choosers(content, policy, allocator, profile_path(profile), config)
            settings = {**content["settings"], "policy": made[0], "allocator": made[1], "profile": None}
            recording = settings.pop("record_past")
            cache = cls(config, **settings)
            cache._weights = content["weights"] or cache._weights
            if recording:
                cache.activate_past_recording()
            parts, static = (cache.layers, cache._padding, cache._limits), cache._plan.static
            all_real = context.load(content, *parts, device, static)
            if static:
                cache._plan.resume(all_real)
        return cache

    def follow_up(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Make the arguments of `generate`, or of the model, for new tokens after a text that the cache has read.

        >>> model.generate(**cache.follow_up(question_ids), cache=cache)

        Args:
            input_ids: `[rows, new]`.
            attention_mask: `[rows, new]`, nonzero = real token; rows of different length are padded on the left. None =
                all are real. `[rows, seen + new]` also hides tokens of the past: pads that `generate` wrote after a row
                had ended. The cache removes them at once, see "Masks" in docs/footguns.md.

        Returns:
            `input_ids` and `attention_mask`, `[rows, seen + new]`. The first `seen` ids are placeholders, which repeat
            the first new token of the row; they are never fed.

        Raises:
            TypeError: `input_ids` or `attention_mask` is no tensor.
            ValueError: the cache has read nothing, the shapes do not match, the cache has other rows, or the mask shows
                tokens that were hidden before.
        """
        seen = self.get_seq_length()
        if not seen:
            raise ValueError(
                "This cache has read no text that new tokens could follow: feed the first text to generate, or to the "
                "model, as it is."
            )
        check_new(input_ids, attention_mask, seen)
        rows = self._evicting[0].table.rows if self._evicting else None
        whole = (rows, seen + input_ids.shape[-1])
        if rows is not None and attention_mask is not None and tuple(attention_mask.shape) == whole:
            self._forwards.hide(attention_mask, seen, rows)
            attention_mask = attention_mask[:, seen:]
        return follow_up_inputs(input_ids, attention_mask, seen, rows, self._padding)

    # ---- reading --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Yield keys, values and, if there is one, the sliding window of each layer, as `DynamicCache` does.

        Paged layers give copies of the held tokens in the order of the text, see `in_order`.

        Warns if tokens have been evicted: a `DynamicCache` made of these counts the held tokens, so it needs its own
        `position_ids` and mask.

        Raises:
            ValueError: rows or heads of a layer hold different numbers of tokens.
        """
        if any(layer.state.table is not None and layer.table.evicted_tokens.any() for layer in self._evicting):
            warnings.warn(
                f"{self.get_seq_length()} tokens were seen and fewer are held: a cache made of what is held does not "
                "know how long the text was. Give position_ids with it, or use copy.deepcopy(cache).",
                stacklevel=2,
            )
        for layer, part in zip(self.layers, self._parts, strict=True):
            if part is not None:
                yield *(in_order(part.state) or (None, None)), None
            else:
                yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)

    def block_table(self, layer_idx: int = 0) -> Tensor:
        """Positions of the tokens in each block of a layer, `[batch, kv_heads, blocks, block_size]` int64.

        Blocks are in logical order (the order in which real tokens arrived); -1 marks places without a real token.

        Raises:
            ValueError: the layer is not paged.
            RuntimeError: the layer has seen no token.
        """
        return self._paged(layer_idx).block_table()

    def block_scores(self, layer_idx: int = 0) -> Tensor:
        """The policy's present score of each block, `[batch, kv_heads, blocks]` float32, high = keep.

        nan for blocks that are not full. With `heads="shared"` all heads show the mean that decides. Under tensor
        parallelism all processes have to call this if the policy compares heads.

        Raises:
            ValueError: the layer is not paged.
            RuntimeError: the layer has seen no token.
        """
        return self._paged(layer_idx).block_scores()

    def stats(self) -> CacheStats:
        """Counts and bytes, per layer and in total. It reads tensors, so it synchronises with an accelerator."""
        others = [layer for layer in self.layers if not isinstance(layer, PagedLayer)]
        other_bytes = sum(byte_count(getattr(one, "keys", None), getattr(one, "values", None)) for one in others)
        return CacheStats.of([layer.stats() for _, layer in self.paged_layers], other_bytes)

    def __repr__(self) -> str:
        paged = self.paged_layers
        if not paged:
            return f"{type(self).__name__}(no paged layer, {len(self.layers)} others)"
        layer, stats = paged[0][1], self.stats()
        sizes, configured = layer.budget, self._options.sizes
        alike = len({layer.budget.label for _, layer in paged}) == 1
        budget = sizes.label if alike else f"{self.budget} tokens on average"
        if configured.in_bytes and sizes.tokens is not None:
            budget = f"{self.budget} tokens ({configured.label})"
        held = f"{stats.largest_held}"
        if stats.mean_held != stats.largest_held:
            held = f"{stats.mean_held:.1f} on average and {stats.largest_held} in the largest layer"
        rows = layer.table.rows if stats.evicted_tokens else 1
        precision = self._options.precision
        profile = "" if self.profile is None else f"profile={self.profile}, "
        return (
            f"{type(self).__name__}(policy={layer.policy.label}, allocator={self.allocator.label}, {profile}"
            f"bits={None if precision is None else precision.label}, heads={layer.heads}, "
            f"budget={budget} in blocks of {sizes.block_size}, layers={len(paged)} paged + "
            f"{len(self.layers) - len(paged)} other, seen={stats.seen}, held={held}, "
            f"evicted={stats.evicted_tokens / len(paged) / rows:g} tokens per layer and row, "
            f"storage={readable_bytes(stats.storage_bytes)})"
        )


def _unpickled(kind: type[PagedEvictionCache], held: bytes) -> PagedEvictionCache:
    """Undo `PagedEvictionCache.__reduce__`."""
    cache = kind.__new__(kind)
    with torch.inference_mode(False):
        cache.__dict__ = torch.load(io.BytesIO(held), weights_only=False)
    return cache
