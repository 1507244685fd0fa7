"""How much each layer's keys change when the text before is out of sight, and budgets that follow from it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction.internals import feed, paged_layers, share_out, whole_number


@torch.no_grad()
def layer_sensitivity(model: Any, input_ids: Tensor, *, block: int = 256, sinks: int = 16) -> Tensor:
    r"""How much a layer depends on text that lies further back (EpiCache, arXiv 2509.17396).

    The text is read as a whole, and each block of it once more with nothing before it but the first tokens. A layer
    whose keys differ has used what lay between:

    .. math:: \sigma_l = 1 - \text{mean}_{h,b} \cos(k^{\text{block}}_{l,h,b}, k^{\text{whole}}_{l,h,b})

    with the keys of a head and block as one vector. Measure it once per model, on text like that of the conversations.

    Differences from the paper: blocks do not overlap, and the keys of a block are compared as one vector, not in
    windows of 100.

    Args:
        model: a decoder, in evaluation mode.
        input_ids: `[1, length]`, more than `sinks + block` tokens. Keys and values of all of them are held.
        block: tokens read at once.
        sinks: first tokens of the text, which every block sees.

    Returns:
        `[paged layers]` float32, 0 = the layer needs nothing from far away.

    Raises:
        TypeError, ValueError: sizes, or a text that is too short or has several rows.
    """
    block, sinks = whole_number("block", block, 1), whole_number("sinks", sinks, 0)
    if input_ids.ndim != 2 or len(input_ids) != 1 or input_ids.shape[1] <= sinks + block:
        raise ValueError(
            f"input_ids must be [1, length] with more than sinks + block = {sinks + block} tokens, got "
            f"{list(input_ids.shape)}."
        )
    paged = paged_layers(model.config)
    whole = DynamicCache(config=model.config)
    feed(model, input_ids, None, whole)
    distances = []
    for start in range(sinks, input_ids.shape[1], block):
        places = torch.tensor([*range(sinks), *range(start, min(start + block, input_ids.shape[1]))])
        places = places.to(input_ids.device)
        alone = DynamicCache(config=model.config)
        feed(model, input_ids[:, places], None, alone, positions=places[None])
        distances.append([_unlike(alone, whole, index, places, sinks) for index in paged])
    return torch.tensor(distances).mean(0)


def _unlike(alone: DynamicCache, whole: DynamicCache, layer: int, places: Tensor, sinks: int) -> float:
    ours = alone.layers[layer].keys[0, :, sinks:].float().flatten(1)
    whole_keys = whole.layers[layer].keys[0][:, places[sinks:]].float().flatten(1)
    return 1 - float(torch.cosine_similarity(ours, whole_keys, dim=-1).mean())


def budgets_by_sensitivity(
    sensitivity: Tensor | Sequence[float], budget: int, *, block_size: int = 16, least: int, power: float = 1.1
) -> list[int]:
    """Tokens for each layer, more where it depends on text further back.

    A layer's weight is its sensitivity, scaled from 0 (the least sensitive layer) to 1 (the most), to the `power`. No
    layer gets less than a quarter of `budget` or than `least`; as a difference from the paper the others give what
    that takes, so that the total is kept exactly.

    Args:
        sensitivity: per layer, as `layer_sensitivity` measures it.
        budget: mean of all layers, a multiple of `block_size`.
        least: the smallest legal budget of a layer.
        power: 1.1 for Llama and 1.3 for Qwen in the paper.

    Raises:
        ValueError: nothing was measured, or not a number.
    """
    measured = torch.as_tensor(sensitivity, dtype=torch.float64)
    if measured.ndim != 1 or not len(measured) or not measured.isfinite().all():
        raise ValueError(f"layers= must be one finite number per paged layer, got {sensitivity!r}.")
    spread = measured - measured.min()
    weights = (spread / spread.max().clamp_min(1e-12)) ** power
    blocks = budget // block_size
    fewest = max(-(-blocks // 4), -(-least // block_size))
    shares = share_out(weights[None], blocks * len(measured), min(fewest, blocks))
    return [count * block_size for count in shares[0].tolist()]
