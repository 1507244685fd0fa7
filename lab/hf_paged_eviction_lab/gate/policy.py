"""The policy that scores a token by what its gate said of it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_paged_eviction import EvictionPolicy, Needs, ScoreContext
from hf_paged_eviction.internals import Attention, Statistics

from .gates import Gates, load_gates
from .marks import log_scores_of


@dataclass(frozen=True)
class Gate(EvictionPolicy):
    r"""A small network reads the hidden state of each token, before attention, and predicts how much attention the
    token will get from later tokens.

    .. math:: s_t = \exp\bigl( w_h \cdot \operatorname{gelu}(U x_t + a) + b_h \bigr)

    for KV head `h`, with `x` the input of the layer's attention. Attention-Gate (arXiv 2410.12876) was the first of
    its kind. A token is scored once, when it comes; the score (one float32 per token and KV head) is a statistic that
    the cache moves with its token.

    A cache never sees hidden states, so call `install_gates` before the first forward. The model must use the attention
    implementation "paged_eviction".

    Differences from the paper: its gate is a head of attention and is trained with the loss of the language model, and
    what it rejects is masked. Here it is a function of the token's own hidden state, trained by forward passes, as in
    KVzap (arXiv 2601.07891).

    Args:
        file: file that `paged-eviction fit-gate` wrote for this model, or `Gates`.

    Raises:
        ValueError: there is no such file. `check_model` raises it for another model, `observe` if the gates are not
            installed.
    """

    file: str | Path | Gates

    name: ClassVar[str] = "gate"
    paper: ClassVar[str | None] = "2410.12876"
    needs = Needs(heads="separate", supports_mla=False, token_statistics=("score",), reads=(), reads_weights=False)

    def __post_init__(self) -> None:
        _ = self.gates  # read now, so that a missing file is an error here

    @cached_property
    def gates(self) -> Gates:
        """The gates in the file."""
        return self.file if isinstance(self.file, Gates) else load_gates(self.file)

    @property
    def label(self) -> str:
        """Names the weights and not the file, so that a saved context is continued with the same gates only."""
        return f"{self.name}(digest={self.gates.digest!r})"

    def check_model(self, config: Any) -> None:
        self.gates.check_model(config)

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        new = log_scores_of(attention)
        if new is None:
            raise ValueError(
                f"{self.label!r} got no hidden states. Call install_gates(model, file) with the same gates before the "
                "first forward, and give the cache policy=Gate(file) itself: inside another policy it gets none."
            )
        queries, keys = attention.query_positions, attention.key_positions
        count, real = queries.shape[1], queries >= 0
        # The real tokens among the queries are consecutive: sort them by position, then look each key up.
        first = queries.masked_fill(~real, torch.iinfo(torch.int64).max).amin(-1, keepdim=True)
        place = torch.where(real, queries - first, count)[:, None].expand(-1, new.shape[1], -1)
        by_position = new.new_zeros(*new.shape[:2], count + 1).scatter_(-1, place, new.exp())
        offset = torch.where(keys >= 0, keys - first[:, None], -1)
        scored = (offset >= 0) & (offset < count)
        score = by_position.gather(-1, offset.clamp(0, count - 1))
        return {"score": torch.where(scored, score, statistics["score"])}

    def score(self, context: ScoreContext) -> Tensor:
        return context.statistics["score"]
