"""What a policy needs of the cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: "shared": the KV heads of a layer evict the same tokens. "separate": each evicts its own.
Heads = Literal["shared", "separate"]


@dataclass(frozen=True)
class Needs:
    """What a policy needs from the cache: what the cache stores for it and shows to it, and how it compares its scores.

    The defaults fit a policy that compares the keys and values of all held tokens. The cache reads `needs` once, when
    it is made.

    Attributes:
        heads: default of the cache's option `heads`: "shared" or "separate". It is set as the policy was published, or
            as it measured better on real models.
        token_local: True if the score of a token depends only on its own key, value and position. The score is then
            computed once, when the token's block fills. Otherwise all held tokens are scored at each decision.
        by_layer: False if a score does not depend on `layer_idx`, so that one call may score the tokens of several
            layers, stacked as rows. Read for token-local policies only.
        absolute_noise: True if scores are differences, such as cosines, deviations from a mean, or weighted sums of
            both signs, because their rounding error does not shrink with the score. Scores are then rounded to steps of
            1/4096 of their mean size. If False, each score is rounded to 1/4096 of its own size, which suits attention,
            norms, and products and sums of numbers of one sign.
        supports_mla: False if the score means nothing for latents (multi-head latent attention). The cache then refuses
            models that cache latents.
        rotary: True if the policy reads keys or queries before rotary embedding, or rotates them. The cache then
            refuses models whose rotation is not understood.
        reads_budget: True if a score depends on `ScoreContext.budget`, so that it is computed again when an allocator
            changes the budget of a layer.
        sink_tokens: default of the cache's option `sink_tokens`, for methods that were published with their own number;
            None = one block.
        decision_interval: number of decoded tokens between two decisions. If this is several blocks, as many victims
            are chosen at once.
        by_probe: True if the score is meant for the queries of a probe, see `hf_paged_eviction.compress_by_probe`.
        token_statistics: names of numbers stored per token and KV head, zero for a new token. If there are any, the
            cache calls `observe`.
        row_statistics: names of tensors stored per row, of any shape `[batch, ...]`; missing until `observe` returns
            them.
        window: how many of the last queries of a forward of several tokens are observed; None = all. All queries of
            decoded tokens are observed, a block at a time.
        observes_decode: False if the queries of decoded tokens are not observed.
        reads: which of "keys" and "values" `score` reads; () for a score of statistics and positions. Of tokens in few
            bits the others are not decoded, and have no channels in `ScoreContext`.
        reads_weights: False if `observe` never reads `attention.weights`. The queries of a long prompt then come in few
            large pieces.

    Raises:
        TypeError: names of statistics are not a tuple of strings.
        ValueError: fields contradict each other, or a number is out of range.
    """

    heads: Heads = "shared"
    token_local: bool = False
    by_layer: bool = True
    absolute_noise: bool = False
    supports_mla: bool = True
    rotary: bool = False
    reads_budget: bool = False
    sink_tokens: int | None = None
    decision_interval: int = 1
    by_probe: bool = False
    token_statistics: tuple[str, ...] = ()
    row_statistics: tuple[str, ...] = ()
    window: int | None = None
    observes_decode: bool = True
    reads_weights: bool = True
    reads: tuple[str, ...] = ("keys", "values")

    def __post_init__(self) -> None:
        for kind in ("token_statistics", "row_statistics"):
            names = getattr(self, kind)
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                raise TypeError(f'{kind} must be a tuple of names, such as ("hits",), got {names!r}.')
        if not isinstance(self.reads, tuple) or not {*self.reads} <= {"keys", "values"}:
            raise ValueError(
                f'reads must be a tuple of "keys" and "values", or of one of them, or (), got {self.reads!r}.'
            )
        names = self.token_statistics + self.row_statistics
        if len(set(names)) < len(names):
            raise ValueError(f"Statistics need names of their own, got {', '.join(names)}.")
        if self.token_local and names:
            raise ValueError(
                f"token_local says that a score never changes, and statistics ({', '.join(names)}) do: leave one out."
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be a number of queries above 0, or None for all, got {self.window}.")

    @property
    def queries(self) -> bool:
        """Whether the cache calls `observe`. This needs the attention implementation "paged_eviction"."""
        return bool(self.token_statistics or self.row_statistics)

    @classmethod
    def together(cls, parts: "Sequence[Needs]") -> "Needs":
        """The combined needs of several policies, for a policy made of them.

        The statistics of part `n` get names that begin with `n.`. All parts observe the same queries: if one of them
        needs the whole prompt, the others get more than their window.
        """
        watching = [part for part in parts if part.queries]
        windows = [part.window for part in watching]
        sinks = [part.sink_tokens for part in parts]
        return cls(
            heads="separate" if any(part.heads == "separate" for part in parts) else "shared",
            absolute_noise=any(part.absolute_noise for part in parts),
            supports_mla=all(part.supports_mla for part in parts),
            rotary=any(part.rotary for part in parts),
            reads_budget=any(part.reads_budget for part in parts),
            sink_tokens=None if None in sinks else max((count for count in sinks if count is not None), default=None),
            decision_interval=max((part.decision_interval for part in parts), default=1),
            token_statistics=tuple(f"{at}.{name}" for at, part in enumerate(parts) for name in part.token_statistics),
            row_statistics=tuple(f"{at}.{name}" for at, part in enumerate(parts) for name in part.row_statistics),
            window=None if None in windows else max((size for size in windows if size is not None), default=None),
            observes_decode=any(part.observes_decode for part in watching) or not watching,
            reads_weights=any(part.reads_weights for part in watching) or not watching,
        )
