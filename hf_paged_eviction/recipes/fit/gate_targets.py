"""What gates are trained to foretell: what later tokens of a text really do with each token."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ...attention.weights import Attention
from ...queries.observer import Queries
from .future import future_attention

#: "attention": the largest weight that a token gets from afar, the mean over the query heads of a group.
#: "output": the largest part that it has in an attention output, as KVzip+ counts it.
Target = Literal["attention", "output"]
TARGETS: tuple[Target, ...] = ("attention", "output")

#: Attention weights that exist at one time, in bytes.
_PIECE = 64 * 2**20
#: What the projection behind attention is called.
_PROJECTIONS = ("o_proj", "out_proj", "dense")


def measure_of(
    target: Target, modules: Mapping[int, Any], hidden: Mapping[int, Tensor]
) -> Callable[[int, Queries, Tensor, Tensor, Tensor, int], Tensor]:
    """The function that works a target out, as `future.watch` wants it.

    Args:
        modules: the attention modules, by layer.
        hidden: what each was called with last, `[batch, tokens, hidden]`; filled while the model reads.

    Raises:
        ValueError: there is no such target, or the model's output projection is not known.
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}.")
    if target == "attention":
        return lambda layer, queries, values, keys, asked, distance: future_attention(queries, keys, asked, distance)
    projections = {index: _projection(module) for index, module in modules.items()}

    def measure(layer: int, queries: Queries, values: Tensor, keys: Tensor, asked: Tensor, distance: int) -> Tensor:
        size = projected_norms(values, projections[layer], queries.query.shape[1])
        return future_output(queries, size, hidden[layer], keys, asked, distance)

    return measure


def _projection(module: Any) -> Tensor:
    for name in _PROJECTIONS:
        found = getattr(module, name, None)
        if isinstance(found, torch.nn.Linear):
            return found.weight.detach()
    raise ValueError(
        f"{type(module).__name__} has no output projection called {', '.join(_PROJECTIONS)}, so the target 'output' is "
        "not known for this model: take the target 'attention'."
    )


def projected_norms(values: Tensor, projection: Tensor, query_heads: int) -> Tensor:
    """Length of each value after the output projection of each query head, `[batch, kv_heads, group, tokens]` float32.

    Args:
        values: `[batch, kv_heads, tokens, dim]`.
        projection: `[hidden, query_heads * dim]`.
    """
    _, heads, _, dim = values.shape
    parts = projection.float().view(-1, heads, query_heads // heads, dim)
    # |W v|^2 = v' (W' W) v needs no tensor as wide as the hidden state for each token.
    products = torch.einsum("ohgd,ohge->hgde", parts, parts)
    states = values.float()
    squares = torch.einsum("bhtd,hgde,bhte->bhgt", states, products, states)
    return squares.clamp_min(0).sqrt()


def future_output(
    queries: Queries, size: Tensor, hidden: Tensor, key_positions: Tensor, query_positions: Tensor, distance: int
) -> Tensor:
    r"""The largest :math:`a_{qt} |W_O v_t| / |h_q|` over queries `q` at least `distance` later, and a group's heads.

    Args:
        size: `[batch, kv_heads, group, tokens]`, see `projected_norms`.
        hidden: `[batch, q, hidden]` of the queries' tokens.

    Returns:
        `[batch, kv_heads, tokens]` float32.
    """
    rows, heads, count, _ = queries.query.shape
    step = max(1, _PIECE // (4 * rows * heads * queries.key.shape[2]))
    largest = torch.zeros(key_positions.shape, device=key_positions.device)
    lengths = hidden.float().norm(dim=-1).clamp_min(1e-6)  # [batch, q]
    for start in range(0, count, step):
        part = slice(start, start + step)
        asked = query_positions[:, part]
        seen = Attention(queries.query[:, :, part], queries.key, asked, key_positions, queries.logits)
        away = asked[:, None, :, None] - key_positions[:, :, None, :] >= distance
        shares = seen.weights / lengths[:, None, None, part, None] * away[:, :, None]
        largest = torch.maximum(largest, (shares.amax(3) * size).amax(2))
    return largest
