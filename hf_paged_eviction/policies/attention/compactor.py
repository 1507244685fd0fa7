"""Compactor, arXiv 2507.08143."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...attention.weights import Attention
from ...learned.moments import exact
from ...ranking import without_noise
from ..base import EvictionPolicy, ScoreContext, Statistics
from ..checks import check_between, check_count, check_kernel, check_positive
from ..keys.leverage import leverage
from ..needs import Needs
from ..norms import l2_norm
from ..registry import register_policy
from ..text_order import pool


@register_policy("compactor")
@dataclass(frozen=True)
class Compactor(EvictionPolicy):
    r"""Adds the leverage of a key and the attention that the token receives without a causal mask.

    .. math::

        s_t = \text{blending} \cdot z(\ell_t) + z \Bigl( \operatorname{pool}_{u \text{ near } t}
        \lVert v_u \rVert \sum_{q \in \text{chunk}(u)} a_{q,u} \Bigr)

    `l` is the leverage of the key before rotary embedding, less the mean key (see `leverage`); it is exact here, where
    the paper estimates it by a random sketch. `a` is the softmax of `q k` over the tokens of the query's own chunk,
    averaged over the query heads that share a KV head. It has no causal mask and, as in the authors' code, is not
    divided by the root of the head size. `z` shifts and scales the numbers to mean 0 and standard deviation 1 over all
    KV heads and competing tokens. The first `n_sink` and the newest `n_recent` tokens do not compete; they are pinned.

    A query sees those tokens of its chunk that are in the cache when it is observed: all of them in one forward of the
    whole prompt, earlier ones only while decoding. From arXiv 2507.08143.

    Args:
        blending: weight of the leverage. None = the share of the text that is evicted, as in kvpress: the fewer tokens
            stay, the more leverage counts. The authors' engine uses 0.5.
        chunk: number of tokens in a chunk, counted from the end of the sinks.
        kernel: number of pooled tokens, odd; 1 = no pooling.
        n_sink, n_recent: number of first and of newest tokens that are pinned.
        ridge: regularisation of the leverage, in units of the mean eigenvalue of the keys; above 0.

    Raises:
        ValueError: a parameter is out of range.
    """

    blending: float | None = None
    chunk: int = 256
    kernel: int = 3
    n_sink: int = 8
    n_recent: int = 4
    ridge: float = 1e-4

    paper: ClassVar[str | None] = "2507.08143"
    needs = Needs(
        heads="separate",
        absolute_noise=True,
        supports_mla=False,
        rotary=True,
        reads_budget=True,
        token_statistics=("received",),
        reads_weights=False,
    )

    def __post_init__(self) -> None:
        if self.blending is not None:
            check_between("blending", self.blending, 0)
        check_count("chunk", self.chunk, at_least=1)
        check_kernel("kernel", self.kernel)
        check_count("n_sink", self.n_sink)
        check_count("n_recent", self.n_recent)
        check_positive("ridge", self.ridge)

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        received = statistics["received"]
        queries, chunk_positions = (
            attention.queries.split(self.chunk, 2),
            attention.query_positions.split(self.chunk, 1),
        )
        for some, positions in zip(queries, chunk_positions, strict=True):
            received = received + self._received(replace(attention, queries=some, query_positions=positions))
        return {"received": received}

    def _received(self, attention: Attention) -> Tensor:
        """`[B, H, T]`, what the queries pay to the tokens of their chunks, mean over a group."""
        query_positions, positions = attention.query_positions, attention.key_positions
        heads, tokens = positions.shape[1:]
        # Only tokens of the chunks of these queries matter: as many chunks as consecutive queries can touch.
        span = (query_positions.shape[1] // self.chunk + 2) * self.chunk
        first = query_positions.masked_fill(query_positions < 0, torch.iinfo(torch.int64).max).amin(-1)
        start = self.n_sink + self._chunk_of(first) * self.chunk  # [B]
        place = positions - start[:, None, None]
        near = (positions >= self.n_sink) & (place >= 0) & (place < span)
        place = place.where(near, span)  # all others share one more place
        slots = torch.full((*positions.shape[:2], span + 1), tokens, device=place.device)
        slots = slots.scatter(-1, place, torch.arange(tokens, device=place.device).expand_as(place))[..., :span]
        held = slots < tokens
        index = slots.clamp_max(tokens - 1)[..., None].expand(-1, -1, -1, attention.keys.shape[-1])
        keys = attention.keys.gather(2, index).float()  # [B, H, span, D]
        queries = attention.queries.float().unflatten(1, (heads, -1))  # [B, H, G, q, D]
        logits = queries @ keys[:, :, None].mT
        chunks = (torch.arange(span, device=place.device) // self.chunk)[None] + self._chunk_of(first)[:, None]
        same = self._chunk_of(query_positions)[:, :, None] == chunks[:, None]  # [B, q, span]
        seen = same[:, None, None] & held[:, :, None, None]
        counts = (query_positions >= self.n_sink)[:, None, None, :, None]
        weights = logits.masked_fill(~seen, -1e30).softmax(-1) * (seen & counts)
        paid = weights.mean(2).sum(2)  # [B, H, span]
        received: Tensor = pad(paid, (0, 1)).gather(-1, place) * near
        return received

    def _chunk_of(self, positions: Tensor) -> Tensor:
        return (positions - self.n_sink).clamp_min(0).div(self.chunk, rounding_mode="floor")

    def score(self, context: ScoreContext) -> Tensor:
        positions, seen = context.positions, context.seen[:, None, None]
        rivals = context.valid & (positions >= self.n_sink) & (positions < seen - self.n_recent)
        # float64, because the inverse is ill-conditioned if the keys have few directions.
        keys = _centred(context.unrotated_keys.to(exact(positions.device)), rivals)
        geometry = self._standard(leverage(keys, self.ridge).float(), rivals, context)
        paid = context.statistics["received"] * l2_norm(context.values)
        paid = pool(paid.where(rivals, 0.0), positions, self.kernel, "avg")
        scores = self._blending(context) * geometry + self._standard(paid, rivals, context)
        return scores.masked_fill(context.valid & ~rivals, float("inf"))

    def _blending(self, context: ScoreContext) -> float | Tensor:
        """The weight of leverage, by row where it is the share that is evicted."""
        if self.blending is not None:
            return self.blending
        evicted: Tensor = (1 - context.budget / context.seen[:, None, None].clamp_min(1)).clamp_min(0)
        return evicted

    def _standard(self, scores: Tensor, rivals: Tensor, context: ScoreContext) -> Tensor:
        """Mean 0 and standard deviation 1 over the row's rivals of all heads."""
        everywhere, counted = context.all_heads(scores.where(rivals, 0.0)), context.all_heads(rivals.float())
        count = counted.sum((1, 2), keepdim=True)
        mean = everywhere.sum((1, 2), keepdim=True) / count.clamp_min(1)
        variance = ((everywhere - mean).square() * counted).sum((1, 2), keepdim=True) / (count - 1).clamp_min(1)
        # Scores that differ only by noise stay equal.
        deviation = without_noise(variance.sqrt(), mean.abs())
        return torch.where(deviation > 0, (scores - mean) / deviation, 0.0)


def _centred(keys: Tensor, rivals: Tensor) -> Tensor:
    """The keys less the mean of the rivals, zero where a token is none."""
    keys = keys.where(rivals[..., None], 0.0)
    mean = keys.sum(2, keepdim=True) / rivals.sum(2)[..., None, None].clamp_min(1)
    centred = (keys - mean).where(rivals[..., None], 0.0)
    # Keys that differ only by noise have no direction.
    spread = without_noise(l2_norm(centred).amax(-1), l2_norm(keys).amax(-1))
    return centred * (spread > 0)[..., None, None]
