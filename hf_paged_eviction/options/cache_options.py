"""What may be asked of a cache. Each option is written here and nowhere else: the constructor, the commands, the
arguments of lm-evaluation-harness, continuous batching and the function on the Hub take theirs from `CacheOptions`.

Loads neither torch nor transformers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from ..naming.sizes import parse_budget
from ..table.spans import read_protect

if TYPE_CHECKING:
    from ..allocators import BudgetAllocator
    from ..disposals import Disposal
    from ..policies import EvictionPolicy
    from ..precision.base import Precision

#: The policy that is none: choose for this model.
AUTO = "auto"


@dataclass(frozen=True)
class Typed:
    """How an option is typed in a command.

    Attributes:
        help: one sentence.
        kind: what is typed: int, str or some words (a `Literal`).
        at_least: the smallest number.
        metavar: stands for the value; None for what goes with the kind.
        shown: stands for the default; None for the default itself.
        read: what a text means; raises ValueError with what to write instead. None: the value itself.
    """

    help: str
    kind: Any = str
    at_least: int | None = None
    metavar: str | None = None
    shown: str | None = None
    read: Callable[[Any], Any] | None = None


def read_bits(given: Any) -> Any:
    """See `precision.base.read_bits`, which brings torch."""
    if given is None:
        return None
    from ..precision.base import read_bits as read

    return read(given)


def read_size(given: Any) -> int | str:
    """A budget of one cache: tokens, or bytes.

    Raises:
        ValueError: it is neither.
    """
    tokens, share, _ = parse_budget(str(given))
    if share is not None or tokens == 0:
        raise ValueError("write tokens, such as 256, or bytes, such as 512MiB")
    return tokens or str(given)


def _typed(help: str, kind: Any = str, **more: Any) -> dict[str, Typed]:
    return {"typed": Typed(help, kind, **more)}


@dataclass(frozen=True)
class CacheOptions:
    """What a `PagedEvictionCache` is told: its arguments by name, `PagedEvictionCache(config, **vars(options))`.

    Attributes:
        budget: what is held per layer and row: tokens, a multiple of `block_size`; a share of the first forward's
            tokens ("25%"), rounded up to a block (with chunked prefill the first chunk counts, so give tokens there);
            or the bytes that keys and values of all paged layers and rows may take together ("2GiB", "512MiB",
            "1.5GB"). Bytes become tokens, in whole blocks and the same for every layer, at the first forward, which
            shows rows, widths and precision; `cache.budget` then tells how many. What is not paged comes on top
            (`stats().other_bytes`), and so do the new tokens of a forward. Rows that are added later
            (`batch_repeat_interleave`) add bytes. Under tensor parallelism these are the bytes of each process. A list
            of tokens gives each paged layer its own; that needs the attention implementation "paged_eviction".
        block_size: tokens per block.
        policy: a name from `available_policies()`, a name with a file (`available_policy_files()`) or an
            `EvictionPolicy`. "auto" = the cache that diverged least when the model was measured
            (`prepare`), with its allocator and, for a budget in bytes, its `bits`; without a profile what is best
            without a file; see `defaults`.
        heads: "shared" = the KV heads of a layer evict the same tokens (scores are averaged), "separate" = each
            evicts its own. None = what the policy says (`Needs.heads`), "separate" for allocators that share out among
            heads.
        sink_tokens: first real tokens of each row that are never evicted: sinks, or a beginning that you know, such as
            a system prompt. None = as many as the policy was published with ("streaming_llm" 4, "recency" 0), which
            for all others is one block; 4 where policy="auto" chooses.
        recent_tokens: newest real tokens of each row that are never evicted; one block if None (a quarter of
            the budget where policy="auto" has no profile). Exact to the token where a prompt, chunk or turn
            overflows, and in `shrink`. While single tokens come, whole blocks go: any that holds one of these tokens
            stays, and so does the newest block, even if this is less than a block. (Not with allocator="global": there
            single tokens, too, are chosen one by one.)
        protect: parts of the text that are never evicted wherever they stand, such as instructions: a list of pairs
            `(start, end)`, the tokens from `start` up to `end`, which is the first one behind it, or a text
            ("0:64,100:120"). Each row counts its own real tokens from 0 on, so pads change nothing. A list of such
            lists has one for each row; beams count as one. A span may lie in what is still to come. `spans_of_roles`
            makes spans of a chat's messages; `cache.protect` gives others later. A block in which a protected token
            stands stays as a whole while single tokens come, and a budget that is too small for that is refused.
        allocator: how the budget of all layers together is shared out among layers and KV heads; a name from
            `available_allocators()`, perhaps with parameters, or a `BudgetAllocator`. All but "uniform" need the
            attention implementation "paged_eviction". None = "uniform"; of policy="auto" what goes with it.
        disposal: what becomes of the tokens that are evicted; a name from `available_disposals()` or a `Disposal`.
        positions: where the tokens held stand. "text" = at their place in the text, so that distances grow with it;
            "cache" = one after the other (StreamingLLM, arXiv 2309.17453), so that no distance exceeds the budget plus
            a block plus the forward, however long the text is. The model's queries keep their positions; the keys held
            are turned, which needs a rotary embedding and half as much memory again once something was evicted; with
            `bits` instead of memory a slower step, which turns them whenever they are read.
        bits: 8, 4, 3 or 2: keep keys and values in so many bits per number, rounded token by token, and decode them for
            each forward (a compiled step of a static cache reads them as they lie); a pair `(keys, values)` gives each
            its own. The first four protected and the newest `block_size` tokens of a row stay as they came. None = the
            model's own type. The budget still counts tokens; `stats` tells the bytes. Other precisions go by name, such
            as "low_rank:FILE(rank=64)" of the lab.
        static: keep every tensor at its place, so that a decode step compiles into one graph that never changes:
            `generate` compiles it by itself on an accelerator, with CUDA graphs. Cannot `shrink` or take tokens back
            (assisted decoding, `crop`); needs layers of one size and the attention implementation "sdpa", "eager" or,
            for the fastest step, "paged_eviction".
    """

    budget: int | str | Sequence[int] | None = field(
        default=None,
        metadata=_typed(
            "Tokens held per layer, a multiple of the block size, or bytes of keys and values in all paged layers, "
            "such as 512MiB.",
            metavar="N|SIZE",
            read=read_size,
        ),
    )
    block_size: int = field(default=16, metadata=_typed("Tokens per block.", int, at_least=1))
    policy: "str | EvictionPolicy" = field(
        default=AUTO,
        metadata=_typed(
            "One of `paged-eviction policies`, with parameters, modifiers and an allocator: snapkv(window=16), "
            "caote(h2o), h2o@pyramid. auto: what suits the model best, see paged-eviction prepare.",
            metavar="NAME",
        ),
    )
    heads: Literal["shared", "separate"] | None = field(
        default=None,
        metadata=_typed(
            "One decision for all KV heads of a layer, or one for each.",
            Literal["shared", "separate"],
            shown="the policy's",
        ),
    )
    sink_tokens: int | None = field(
        default=None,
        metadata=_typed(
            "First tokens that are never evicted: sinks, or a beginning that you know, such as a system prompt.",
            int,
            at_least=0,
            shown="the policy's",
        ),
    )
    recent_tokens: int | None = field(
        default=None,
        kw_only=True,
        metadata=_typed("Newest tokens that are never evicted.", int, at_least=0, shown="one block"),
    )
    protect: "Sequence[tuple[int, int]] | Sequence[Sequence[tuple[int, int]]] | None" = field(
        default=None,
        kw_only=True,
        metadata=_typed(
            "Tokens that are never evicted, START:END,...; where there are messages, also those of roles: system.",
            metavar="SPANS",
            shown="none",
            read=read_protect,
        ),
    )
    allocator: "str | BudgetAllocator | None" = field(
        default=None,
        kw_only=True,
        metadata=_typed(
            "How the budget is shared out among layers and heads.", metavar="NAME", shown="what goes with the policy"
        ),
    )
    disposal: "str | Disposal" = field(
        default="drop",
        kw_only=True,
        metadata=_typed("What becomes of evicted tokens, with parameters.", metavar="NAME"),
    )
    positions: Literal["text", "cache"] = field(
        default="text",
        kw_only=True,
        metadata=_typed(
            "Where held tokens stand: at their place in the text, or one after the other.", Literal["text", "cache"]
        ),
    )
    bits: "int | str | tuple[int | None, int | None] | Precision | None" = field(
        default=None,
        kw_only=True,
        metadata=_typed(
            "Bits of a number that is kept, 8, 4, 3 or 2; two numbers for keys and values, such as 8,4; or another "
            "precision by name.",
            metavar="N",
            shown="the model's",
            read=read_bits,
        ),
    )
    static: bool = field(
        default=False, kw_only=True, metadata=_typed("Keep every tensor at its place, for compiled steps.", bool)
    )


def typed_options(*names: str) -> dict[str, tuple[Any, Typed]]:
    """Default and spelling of some options, or of all, by name."""
    found = {each.name: (each.default, each.metadata["typed"]) for each in fields(CacheOptions)}
    return {name: found[name] for name in names or found}
