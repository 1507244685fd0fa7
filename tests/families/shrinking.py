"""Any configuration, made tiny: every size gets the same small number, told by its name."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

from families.overrides import SETTINGS

VOCABULARY = 128
WIDTH = 64  # of all hidden states, text and vision alike
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
WINDOW = 8
MOST_LAYERS = 4

Rule = int | Callable[[Any], Any]


def _at_most(limit: int) -> Callable[[Any], Any]:
    return lambda value: min(value, limit)


def _token_id(value: Any) -> Any:
    """Ids beyond the vocabulary move to its end, which no prompt uses."""
    return value if value < VOCABULARY else VOCABULARY - 1 - value % 8


_KV_HEADS = re.compile(r".*(key_value|kv)_heads|kv_n_heads|num_query_groups")
#: The first pattern that fits a whole name says what becomes of its number.
_RULES: tuple[tuple[str, Rule], ...] = (
    (r".*(token_id|token_index|_bos_id|_eos_id|_pad_id|im_start_id|im_end_id)", _token_id),
    (r".*vocab(_size)?|vocab_size_per_layer_input", _at_most(VOCABULARY)),
    (
        r"(max|n)_(position|target_position|source_position)?s?(_embeddings)?|n_positions|n_ctx|max_seq_len",
        _at_most(512),
    ),
    (r".*(max_position_embeddings|max_target_positions)", _at_most(512)),
    # windows
    (r"(sliding|attention|local_attention)_?(window|chunk)(_size|_len)?|window_size|local_attention", _at_most(WINDOW)),
    # layers: those with types of their own are settled elsewhere
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", _at_most(1)),
    (r"depth|layers|n_layers?|.*(hidden|encoder|decoder|adapter|resampler)_layers|num_layers", _at_most(2)),
    # heads
    (_KV_HEADS.pattern, _at_most(KV_HEADS)),
    (r".*(heads?|head_num|n_heads)", _at_most(HEADS)),
    (r".*(head_dim|head_size|d_head|dim_head|headdim|d_kv|kv_channels)", HEAD_DIM),
    (r"rotary_dim", _at_most(HEAD_DIM)),
    # tokens that sparse attention picks
    (r"index(er)?_topk|index(er)?_budget|index_topk_blocks", _at_most(WINDOW)),
    # experts
    (r"(n|num)_shared_experts|moe_num_shared_experts", _at_most(1)),
    (r".*(num_experts_per_tok(en)?|experts_top_k|top_?k|moe_k)", _at_most(2)),
    (r"topk_group|n_group|num_expert_group", _at_most(1)),
    (r".*(num|routed|local)_experts|moe_num_experts", _at_most(4)),
    # ranks
    (r".*(_rank)", _at_most(16)),
    # widths
    (
        r".*(intermediate|ffn_hidden|ffw|feed_forward|ffn)_(size|dim)|.*(ffn_dim|d_ff|dff|dim_ff|n_inner|mlp_dim|d_inner)",
        96,
    ),
    (r".*(hidden_size|hidden_dim|d_model|n_embd|embed_dim|emb_dim|embedding_dim|embedding_size|dim_model)", WIDTH),
    (r".*(projection_dim|output_dim|out_dim|in_dim|proj_dim|input_dim|lru_width|hidden_sizes)", WIDTH),
    (r"image_size|img_size", _at_most(32)),
)
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in _RULES)


def shrink(config: Any, **settings: Any) -> Any:
    """A tiny configuration of the same class.

    Args:
        config: a default one.
        **settings: instead of what the rules and `overrides` say; a dict stands for changes of a part.
    """
    settings = {**SETTINGS.get(config.model_type, {}), **settings}
    layers = _Layers.of(config)
    changes: dict[str, Any] = {}
    for name, declared in _declared(type(config)).items():
        if name in settings:
            continue
        value = _value(config, name)
        new = _shrunk(name, value, declared, layers, config)
        if new is not value:
            changes[name] = new
    for name, value in settings.items():
        part = _value(config, name)
        changes[name] = shrink(part, **value) if isinstance(value, dict) and _is_config(part) else value
    return type(config)(**changes)


def _is_config(value: Any) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "to_dict")


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except AttributeError:
        raise
    except Exception:  # a number that differs from layer to layer is not to be read like this
        return vars(config).get(name)


def _declared(cls: Any) -> dict[str, Any]:
    """What the constructor takes, with the defaults; one of None is worked out from other settings."""
    if dataclasses.is_dataclass(cls):
        return {field.name: field.default for field in dataclasses.fields(cls)}
    return {name: parameter.default for name, parameter in inspect.signature(cls.__init__).parameters.items()}


def _shrunk(name: str, value: Any, declared: Any, layers: _Layers, config: Any) -> Any:
    if _is_config(value):
        return shrink(value)
    if value is None and name == "head_dim":
        return HEAD_DIM
    if isinstance(value, bool) or value is None:
        return value
    if "rope" in name and isinstance(value, dict):
        return _shrunk_rope(value)
    if name == layers.name:
        return len(layers.indices)
    if isinstance(value, (list, tuple)):
        return layers.cut(name, value)
    if name == "num_kv_shared_layers" and value:
        return len(layers.indices) // 2
    if not isinstance(value, int) or not isinstance(declared, int):
        return value  # worked out from other settings, which have shrunk
    if _KV_HEADS.fullmatch(name) and value == _value(config, "num_attention_heads"):
        return HEADS
    return _by_rule(name, value)


def _by_rule(name: str, value: int) -> int:
    for pattern, rule in _COMPILED:
        if pattern.fullmatch(name) and value > 0:
            return rule(value) if callable(rule) else rule
    return value


# ---- layers ---------------------------------------------------------------------------------------------------------

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")


@dataclasses.dataclass(frozen=True)
class _Layers:
    """The layers that a tiny model keeps: the first of every kind."""

    name: str | None  # of the setting that counts them
    count: int
    indices: list[int]

    @classmethod
    def of(cls, config: Any) -> _Layers:
        """Those of a default configuration."""
        values = {**vars(config), **{name: _value(config, name) for name in _declared(type(config))}}
        name = next((name for name in _COUNTS if isinstance(values.get(name), int)), None)
        layers = cls(name, 0 if name is None else values[name], [])
        layers.indices.extend(layers._choose(values))
        return layers

    def _choose(self, values: dict[str, Any]) -> list[int]:
        if not self.count:
            return []
        kinds: list[list[str]] = [[] for _ in range(self.count)]
        for name, value in sorted(values.items(), key=lambda item: "layer_types" not in item[0]):
            if isinstance(value, (list, tuple)) and len(value) == self.count:
                for kind, item in zip(kinds, value, strict=True):
                    kind.append(str(item))
            elif self._are_indices(name, value):
                for index, kind in enumerate(kinds):
                    kind.append(str(index in value))
        chosen = _first_of_each([kind[:1] for kind in kinds])[:MOST_LAYERS]  # attention before all else
        chosen += [index for index in _first_of_each(kinds) if index not in chosen]
        chosen = sorted(chosen[:MOST_LAYERS])
        if values.get("num_kv_shared_layers"):
            return (chosen * 2)[: 2 * len(chosen)]
        return chosen if len(chosen) > 1 or self.count == 1 else [0, 1]

    def _are_indices(self, name: str, value: Any) -> bool:
        return (
            isinstance(value, (list, tuple))
            and re.search(r"(layers|_ids|_idxs|_indexes|_indices)$", name) is not None
            and 0 < len(value) < self.count
            and all(isinstance(item, int) and 0 <= item < self.count for item in value)
        )

    def cut(self, name: str, value: Any) -> Any:
        """A list with an entry per layer, or of some layers' indices, for the layers that stay."""
        if self.count and len(value) == self.count:
            return type(value)(value[index] for index in self.indices)
        if self._are_indices(name, value):
            return type(value)(place for place, index in enumerate(self.indices) if index in value)
        return value


def _first_of_each(kinds: list[Any]) -> list[int]:
    return [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]


# ---- rotary positions -----------------------------------------------------------------------------------------------


def _shrunk_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """The same kind of rotary positions; per-dimension factors, which have the length of a head, are left out."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {name: _shrunk_rope(value) if isinstance(value, dict) else value for name, value in rope.items()}
    new = dict(rope)
    if "long_factor" in new:
        new = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    if "mrope_section" in new:
        half = int(HEAD_DIM * (new.get("partial_rotary_factor") or 1)) // 2
        new["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return new
