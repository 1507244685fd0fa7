"""The arguments of attention calls that the attention implementation does not read."""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..integration.cache_argument import CACHE_NAMES

#: Keyword arguments of attention calls that sdpa may ignore, because they change nothing or the mask says the same.
#: Some are those of `generate`, which come with the arguments of the model.
HARMLESS = frozenset(CACHE_NAMES) | set(
    """
    assistant_model assistant_tokenizer cache_position cu_seq_lens_k cu_seq_lens_q debug_io deterministic dropout
    generation_config is_causal logits_processor logits_to_keep max_length_k max_length_q num_items_in_batch
    output_attentions output_hidden_states output_router_logits position_ids return_dict seq_idx sliding_window
    stop_strings stopping_criteria streamer synced_gpus tokenizer use_cache
    """.split()
)

#: What the names of arguments contain that change what attention says: numbers that are added to logits, bound or scale
#: them, and choices of keys beyond those of the mask. Of the second kind they contain whole words.
_CHANGING = "alibi", "bias", "dropout", "indices", "mask", "sink", "slope", "softcap", "temperature", "topk"
_CHANGING_WORDS = frozenset("cap capping mod rel relative scale scales window".split())
#: How the names of arguments begin that say what else to return.
_OF_OUTPUTS = "output_", "return_"


def check_understood(module: torch.nn.Module, kwargs: dict[str, Any], name: str) -> None:
    """Look at the arguments that a model passes and the attention implementation `name` does not read. Warns once of
    each that is not known.

    Raises:
        ValueError: one of them changes what attention says, by its name, or because it holds numbers that are not
            whole, as a bias and keys do.
    """
    for argument, value in kwargs.items():
        if argument in HARMLESS or value is None or argument.startswith(_OF_OUTPUTS):
            continue
        changes = any(part in argument for part in _CHANGING) or not _CHANGING_WORDS.isdisjoint(argument.split("_"))
        if changes and isinstance(value, int | float) and not value:
            continue  # no bound, no share
        if changes or _has_numbers(value):
            raise ValueError(
                f"{type(module).__name__} hands {argument}= to attention, which {name!r} does not understand: leaving "
                "it out would give wrong results. Use the attention implementation 'sdpa' or 'eager' with this model, "
                "a policy that needs no queries, and allocator='uniform'."
            )
        if not torch.compiler.is_compiling():
            _warn_of_unknown(type(module).__name__, argument, name)


def _has_numbers(value: Any) -> bool:
    """Whether these are tensors of numbers that are not whole."""
    parts = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex()) for part in parts)


@cache
def _warn_of_unknown(module: str, argument: str, name: str) -> None:
    warnings.warn(
        f"{module} hands {argument}= to attention, which {name!r} does not know and leaves out. If this argument "
        "changes what attention says, results are wrong: compare with attn_implementation='sdpa', or run "
        "verify(model).",
        stacklevel=4,
    )
