"""Facts that identify the model and the text of a saved context."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from ..integration.models import named, shape_facts

#: Further names in a configuration whose values must be equal for one model to use the cache of another.
_NAMES = (
    "kv_lora_rank",
    "qk_rope_head_dim",
    "sliding_window",
    "layer_types",
    "num_kv_shared_layers",
)


def model_facts(config: Any) -> dict[str, Any]:
    """The shape and the positions of a model by its configuration, as JSON. Weights are not read."""
    text = config.get_text_config(decoder=True)
    facts = shape_facts(text, *_NAMES)
    facts.update({f"rope {name}": value for name, value in _rope(text).items() if value is not None})
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return plain


def _rope(text: Any) -> dict[str, Any]:
    """The rotary parameters under the names of transformers 5."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    rope = dict(parameters) if isinstance(parameters, Mapping) else {}
    for name in ("rope_theta", "partial_rotary_factor"):
        rope.setdefault(name, named(text, name))
    kind = rope.pop("type", None)
    if not any(isinstance(value, Mapping) for value in rope.values()):  # otherwise there is one table per layer type
        rope.setdefault("rope_type", kind or "default")
    return rope


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """The differences in words. Facts that only one of the two has do not count."""
    return [
        f"{name}: {saved[name]!r} in the file, {present[name]!r} here"
        for name in saved
        if name in present and saved[name] != present[name]
    ]


def dtype_name(dtype: Any) -> str | None:
    """torch.float32 -> "float32"."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def config_dtype(config: Any) -> str | None:
    """The dtype in a model's configuration."""
    text = config.get_text_config(decoder=True)
    dtypes = (vars(part).get(name) for part in (text, config) for name in ("dtype", "_dtype", "torch_dtype"))
    return dtype_name(next((dtype for dtype in dtypes if dtype is not None), None))


# ---- the text ------------------------------------------------------------------------------------------------------


def text_facts(input_ids: Tensor, rows: int, seen: int) -> dict[str, Any]:
    """Facts that identify a text.

    Args:
        input_ids: `[rows, >= seen]`; columns from `seen` on do not count.

    Raises:
        TypeError, ValueError: the cache cannot have seen these tokens.
    """
    ids = _checked(input_ids)
    if ids.shape[0] != rows or ids.shape[1] < seen:
        raise ValueError(
            f"input_ids is {list(ids.shape)}, but the cache has seen {seen} tokens in {rows} rows: pass all of them, "
            "pads included."
        )
    return {"rows": rows, "columns": seen, "sha256": _digest(ids[:, :seen])}


def check_text(saved: Mapping[str, Any], input_ids: Tensor) -> None:
    """Refuse another text than that of the saved context.

    Args:
        input_ids: `[rows, >= seen]`, or each row repeated several times. New tokens may follow the text.

    Raises:
        TypeError: `input_ids` is not a tensor of ids. ValueError: the text differs.
    """
    ids, rows, columns = _checked(input_ids), saved["rows"], saved["columns"]
    if ids.shape[0] % rows or not ids.shape[0] or ids.shape[1] < columns:
        raise ValueError(
            f"input_ids is {list(ids.shape)}, and the text of this context has {columns} tokens in {rows} rows"
        )
    groups = ids[:, :columns].reshape(rows, -1, columns)
    if _digest(groups[:, 0]) != saved["sha256"] or not bool((groups == groups[:, :1]).all()):
        raise ValueError("input_ids does not begin with the text of this context")


def _checked(input_ids: Tensor) -> Tensor:
    if not isinstance(input_ids, Tensor) or input_ids.dtype.is_floating_point or input_ids.dtype == torch.bool:
        raise TypeError("input_ids must be a tensor of token ids [rows, length].")
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids must be [rows, length], got shape {tuple(input_ids.shape)}.")
    return input_ids.to("cpu", torch.int64)


def _digest(ids: Tensor) -> str:
    return sha256(f"{tuple(ids.shape)}".encode() + ids.contiguous().numpy().astype("<i8").tobytes()).hexdigest()
