"""What a policy needs of the cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..store.marks import Told

#: "shared": the KV heads of a layer evict the same tokens. "separate": each evicts its own.
Heads = Literal["shared", "separate"]


@dataclass(frozen=True)
class Cutoff:
    """Tokens stay that score above a number, at most as many as the budget holds.

    Attributes:
        above: the number.
        room: slots on top, for tokens that come one by one; until they come, those that score next best stay there.
    """

    above: float
    room: int


@dataclass(frozen=True)
class Needs:
    """What a policy needs of the cache: what is kept for it, what it is shown, and how its scores are compared.

    The defaults fit a policy that compares the keys and values of all held tokens.
    The cache reads them once, when it is made.

    Attributes:
        heads: whether the KV heads of a layer evict the same tokens, if the user does not say. As the policy was
            published, or as it measured better on real models.
        token_local: True if a token's score depends on nothing but its own key, value and position. Such a score is
            computed once, when the token's block fills. A policy that compares tokens (KeyDiff) leaves it False and
            is asked again about all held tokens at every eviction.
        by_layer: False if a score does not depend on `layer_idx`, so that one call may score the tokens of several
            layers, stacked as rows. Asked of token-local policies only.
        absolute_noise: True if scores are differences, such as cosines, deviations from a mean or weighted sums of both
            signs: their rounding error does not shrink with the score. Then they are compared in steps of 1/4096 of
            their mean size. Otherwise each is compared in steps of 1/4096 of its own size, so that the smallest keep
            their order; that is right for what is added, multiplied and divided from numbers of one sign, such as
            attention and norms.
        common_unit: True if scores of different layers and heads can be compared as they are, such as expected
            attention: what allocator="global" asks for.
        supports_mla: False if the score is meaningless where a layer caches latents instead of keys and values
            (multi-head latent attention). The cache then refuses such a model.
        rotary: True if the policy undoes or foresees the rotation of queries and keys. A model whose rotation is not
            known is then refused when the cache is made.
        reads_budget: True if a score depends on `ScoreContext.budget`, so that it has to be worked out again where an
            allocator changes what a layer may hold.
        marks: who tells the policy a number of each token and KV head from outside, see `Told`; None = nobody.
        cutoff: how many tokens stay is decided by their scores; None = as many as the budget holds. Ask for it in
            policies that stand alone: a modifier changes what scores mean.
        sink_tokens: first tokens of each row that the cache never evicts where the user names none, for methods that
            were published with a number of their own; None = one block.
        decision_interval: decoded tokens between two decisions; where it is several blocks, so many victims are chosen
            together.
        by_probe: True if the score is made for the queries of a probe: see `hf_paged_eviction.compress_by_probe`.
        token_statistics: names of numbers kept per token and KV head; zero for a new token. Naming any makes `observe`
            be called.
        row_statistics: names of numbers kept per row, of any shape `[batch, ...]`; absent until `observe` returns them.
        window: how many of the last queries of a forward of several tokens are observed; None = all of them. Single
            tokens are observed a block at a time, always all of them.
        observes_decode: whether single tokens are observed; otherwise forwards of several tokens only.
        reads_weights: False if `observe` asks for queries and keys and never for `attention.weights`: then it is shown
            the queries of a long prompt in few large pieces.

    Raises:
        TypeError: names of statistics that are no tuple of texts.
        ValueError: statements that contradict each other, or a number out of range.
    """

    heads: Heads = "shared"
    token_local: bool = False
    by_layer: bool = True
    absolute_noise: bool = False
    common_unit: bool = False
    supports_mla: bool = True
    rotary: bool = False
    reads_budget: bool = False
    marks: Told | None = None
    cutoff: Cutoff | None = None
    sink_tokens: int | None = None
    decision_interval: int = 1
    by_probe: bool = False
    token_statistics: tuple[str, ...] = ()
    row_statistics: tuple[str, ...] = ()
    window: int | None = None
    observes_decode: bool = True
    reads_weights: bool = True

    def __post_init__(self) -> None:
        for kind in ("token_statistics", "row_statistics"):
            names = getattr(self, kind)
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                raise TypeError(f'{kind} must be a tuple of names, such as ("hits",), got {names!r}.')
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
        """Whether `observe` is called, for which the attention implementation "paged_eviction" is needed."""
        return bool(self.token_statistics or self.row_statistics)

    @classmethod
    def together(cls, parts: "Sequence[Needs]") -> "Needs":
        """What several policies need whose scores are joined, for a policy made of them.

        Statistics of part `n` get names that begin with `n.`. All parts are shown the same queries: where one needs the
        whole prompt, the others get more than their window.
        """
        watching = [part for part in parts if part.queries]
        marks = {part.marks for part in parts if part.marks is not None}
        if len(marks) > 1:
            raise ValueError("Two policies read marks from different sources, and a layer keeps those of one.")
        if any(part.cutoff is not None for part in parts):
            raise ValueError(
                "keep_above= counts in the scores of its own policy, which are others when policies are joined: leave "
                "it out of policies inside another."
            )
        windows = [part.window for part in watching]
        sinks = [part.sink_tokens for part in parts]
        return cls(
            heads="separate" if any(part.heads == "separate" for part in parts) else "shared",
            absolute_noise=any(part.absolute_noise for part in parts),
            supports_mla=all(part.supports_mla for part in parts),
            rotary=any(part.rotary for part in parts),
            reads_budget=any(part.reads_budget for part in parts),
            marks=next(iter(marks), None),
            sink_tokens=None if None in sinks else max((each for each in sinks if each is not None), default=None),
            decision_interval=max((part.decision_interval for part in parts), default=1),
            token_statistics=tuple(f"{at}.{name}" for at, part in enumerate(parts) for name in part.token_statistics),
            row_statistics=tuple(f"{at}.{name}" for at, part in enumerate(parts) for name in part.row_statistics),
            window=None if None in windows else max((each for each in windows if each is not None), default=None),
            observes_decode=any(part.observes_decode for part in watching) or not watching,
            reads_weights=any(part.reads_weights for part in watching) or not watching,
        )
