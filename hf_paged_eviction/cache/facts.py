"""Facts that identify the model and the text of a saved context."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from ..integration.models import shape_facts

#: Further names in a configuration whose values must be equal for one model to use the cache of another.
_NAMES = (
    "kv_lora_rank qk_rope_head_dim sliding_window layer_types num_kv_shared_layers rope_theta partial_rotary_factor"
).split()


def model_facts(config: Any) -> dict[str, Any]:
    """The shape and the positions of a model by its configuration, as JSON. Weights are not read."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    facts = {**shape_facts(text, *_NAMES), **{f"rope {name}": value for name, value in rope.items()}}
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return plain


def dtype_name(config: Any) -> str | None:
    """The dtype in a model's configuration, such as "float32"."""
    dtypes = (getattr(part, "dtype", None) for part in (config.get_text_config(decoder=True), config))
    return next((str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None), None)


def differences(saved: Mapping[str, Any], present: Mapping[str, Any], there: str, here: str) -> str:
    """The differences in words, of what is `there` and `here`. Facts that only one of the two has do not count."""
    return "; ".join(
        f"{name}: {saved[name]!r} {there}, {present[name]!r} {here}"
        for name in saved
        if None not in (saved[name], present.get(name)) and saved[name] != present[name]
    )


def text_digests(input_ids: Tensor, rows: int, columns: int, repeated: bool = False) -> list[str]:
    """Digests of the first columns of each row of a text.

    Args:
        input_ids: `[rows, >= columns]`.
        repeated: whether each row may stand there several times.

    Raises:
        TypeError, ValueError: the cache cannot have seen these tokens.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dtype.is_floating_point or input_ids.dtype == torch.bool:
        raise TypeError("input_ids must be a tensor of token ids [rows, length].")
    shape = input_ids.shape
    if len(shape) != 2 or shape[1] < columns or not shape[0] or (shape[0] % rows if repeated else shape[0] != rows):
        raise ValueError(
            f"input_ids is {list(shape)}, but the cache has seen {columns} tokens in {rows} rows: pass all of them, "
            "pads included."
        )
    ids = input_ids[:, :columns].to("cpu", torch.int64)
    return [sha256(row.numpy().astype("<i8").tobytes()).hexdigest() for row in ids]
