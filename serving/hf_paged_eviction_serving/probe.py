"""Check that the attention of a model passes keys and values to continuous batching, in its first layer."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache


class _Updated(BaseException):
    """The first layer has called `update`. No model catches it."""

    def __init__(self, with_arguments: bool) -> None:
        self.with_arguments = with_arguments


class _Probe(PagedAttentionCache):  # type: ignore[misc]
    """Holds nothing, and ends the forward at the first `update`."""

    def __init__(self) -> None:
        pass

    def update(self, key_states: Any, value_states: Any, layer_idx: int, kwargs: Any = None) -> Any:
        raise _Updated(kwargs is not None)


def check_takes_pages(model: PreTrainedModel) -> None:
    """Run one token through the model up to its first attention, as continuous batching would.

    Args:
        model: a model with an attention implementation of continuous batching.

    Raises:
        ValueError: the model's code in this release of transformers does not use the pages.
    """
    decoder = model.get_decoder()
    sizes = sorted({int(part.head_dim) for part in decoder.modules() if hasattr(part, "layer_idx") and _has_size(part)})
    if len(sizes) > 1:
        raise ValueError(
            f"Continuous batching does not work with {type(model).__name__}, with or without eviction: its layers have "
            f"heads of {' and '.join(map(str, sizes))} channels, and transformers' pages have one size for all. Use "
            "PagedEvictionCache with generate."
        )
    probe = _Probe()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
    reason = "its attention never asks for the pages"
    try:
        with torch.no_grad():
            model(input_ids=token, position_ids=token, attention_mask=mask, cache=probe, use_cache=False)
    except _Updated as updated:
        if updated.with_arguments:
            return
        reason = "its attention asks for the pages without the arguments that say where tokens lie in them"
    except AttributeError as error:
        if error.obj is not probe:
            raise
        reason = f"its layers ask the cache for {error.name!r}, which pages do not have"
    raise ValueError(
        f"Continuous batching does not work with {type(model).__name__} in transformers {transformers.__version__}, "
        f"with or without eviction: {reason}. Use PagedEvictionCache with generate, or a release of transformers "
        "whose own generate_batch serves this model."
    )


def _has_size(part: Any) -> bool:
    return isinstance(getattr(part, "head_dim", None), int)
