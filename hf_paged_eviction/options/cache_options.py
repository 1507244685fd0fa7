"""The options of a cache. Each is written here and nowhere else: the constructor, the commands, the arguments of
lm-evaluation-harness, continuous batching and the function on the Hub take theirs from `CacheOptions`.

Loads neither torch nor transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from ..naming.arguments import suggest_arguments
from ..naming.sizes import MemoryShare, parse_budget, parse_memory_share
from ..table.budget import BlockBudget
from ..table.spans import read_protect

if TYPE_CHECKING:
    from ..allocators import BudgetAllocator
    from ..disposals import Disposal
    from ..policies import EvictionPolicy
    from ..precision.base import Precision

#: Not the name of a policy: choose a default for the model.
AUTO = "auto"
#: Tokens per block, and if few bits are stored for a budget in bytes: the newest block is not rounded, so that smaller
#: ones leave more bytes to other tokens.
BLOCK_SIZE, SMALL_BLOCK_SIZE = 16, 8


@dataclass(frozen=True)
class Typed:
    """The spelling of an option in a command.

    Attributes:
        help: one sentence.
        kind: type of the value: int, str or some words (a `Literal`).
        at_least: smallest number.
        metavar: placeholder of the value in `--help`; None = by `kind`.
        shown: default in `--help`; None = the default itself.
        read: parses a text; raises ValueError that says what to write instead. None = the value itself.
    """

    help: str
    kind: Any = str
    at_least: int | None = None
    metavar: str | None = None
    shown: str | None = None
    read: Callable[[Any], Any] | None = None


def read_bits(bits: Any) -> Any:
    """See `precision.base.read_bits`, which imports torch."""
    if bits is None:
        return None
    from ..precision.base import read_bits as read

    return read(bits)


def read_size(budget: Any) -> int | str:
    """Parse the budget of one cache: tokens, bytes, or a share of the tokens or of the memory.

    Raises:
        ValueError: the text is none of these.
    """
    if parse_memory_share(str(budget)) is not None:
        return str(budget)
    tokens, _, _ = parse_budget(str(budget))
    if tokens == 0:
        raise ValueError("write tokens, such as 256, a share ('25%', '25% of memory'), or bytes, such as 512MiB")
    return tokens or str(budget)


def budget_of_text(budget: Any, length: int, options: Mapping[str, Any]) -> Any:
    """The budget for a text of `length` tokens that is read in chunks: a share counts all of them, and not those of the
    first chunk.

    Args:
        budget, options: of the cache.

    Raises:
        TypeError, ValueError: the budget is not valid.
    """
    share = parse_memory_share(budget) if isinstance(budget, str) else None
    if share is not None:
        return MemoryShare(share.share, share.tokens or length).text
    if not isinstance(budget, str) or parse_budget(budget)[1] is None:
        return budget
    block_size, names = options.get("block_size") or BLOCK_SIZE, ("sink_tokens", "recent_tokens", "protect")
    sizes = BlockBudget.validate(budget, block_size, *(options.get(name) for name in names))
    return sizes.resolve(length).tokens


def _typed(help: str, kind: Any = str, **more: Any) -> dict[str, Typed]:
    return {"typed": Typed(help, kind, **more)}


@suggest_arguments
@dataclass(frozen=True)
class CacheOptions:
    """The options of a `PagedEvictionCache`: `PagedEvictionCache(config, **vars(options))`.

    Attributes:
        budget: how much the cache may hold per layer and row. Four forms: a number of tokens, a multiple of
            `block_size`; a share of the tokens of the first forward ("25%"), rounded up to a block (with chunked
            prefill the first forward is the first chunk, so give tokens or bytes there); a share of the bytes that the
            first forward, or a number of tokens that you name, would take in 16 bits, whatever the model's dtype ("25%
            of memory", "25% of memory of 8192 tokens"); the bytes of keys and values of all paged layers and rows
            together ("2GiB", "512MiB"), which become tokens at the first forward, in whole blocks and equally many for
            every layer. `cache.budget` is the resulting number of tokens, the mean if an allocator divides it. Not
            counted: layers that are not paged (`stats().other_bytes`), the new tokens of a forward, and rows that
            `batch_repeat_interleave` adds later. Under tensor parallelism bytes are those of each process.
        block_size: number of tokens per block. None = 16, or 8 if policy="auto" stores few bits for a budget in bytes.
        policy: a name from `available_policies()` or an `EvictionPolicy`. "auto" takes the cache that diverged least
            when `prepare` measured the model, with its allocator and, for a budget in bytes, its `bits`; for a model
            without a profile, a default that needs none.
        heads: "shared" = the KV heads of a layer evict the same tokens, by the mean of their scores. "separate" = each
            KV head evicts its own tokens. None = the policy's default (`Needs.heads`), and "separate" for allocators
            that give heads different budgets.
        sink_tokens: number of first real tokens of each row that are never evicted, such as a system prompt. None = the
            number that the policy was published with ("streaming_llm" 4, "recency" 0), one block for all others, and 4
            if policy="auto" chooses.
        recent_tokens: number of newest real tokens of each row that are never evicted. None = one block (a quarter of
            the budget if policy="auto" has no profile). When several tokens overflow the cache, and in `shrink`, the
            number is exact. When single tokens come, whole blocks are evicted, so a block that holds one of these
            tokens stays, and so does the newest block.
        protect: spans of the text that are never evicted, such as instructions: a list of pairs `(start, end)`, for the
            tokens from `start` up to but not including `end`, or text ("0:64,100:120"). Positions count the real tokens
            of a row from 0, without pads. A list of such lists has one entry for each row; beams count as one row. A
            span may lie in text that is still to come. `spans_of_roles` finds the spans of chat messages;
            `cache.protect` replaces them later. When single tokens come, a block with a protected token stays as a
            whole. A budget that is too small for that is refused.
        allocator: how the budget is divided among layers and KV heads: a name from `available_allocators()`, with or
            without parameters, or a `BudgetAllocator`. All but "uniform" need the attention implementation
            "paged_eviction". None = "uniform", or what policy="auto" chooses.
        profile: file of `prepare`, for policies and allocators that read one ("calibrated", "observed", "heads") and
            for "auto". None = the one that `prepare` chose, else that of the weights on this machine or in the package,
            if the weights are registered (`register_weights`, or `prepare`).
        disposal: what happens to evicted tokens: a name from `available_disposals()` or a `Disposal`.
        positions: positions of held tokens. "text" = their positions in the text, so distances grow with the text.
            "cache" = consecutive positions (StreamingLLM, arXiv 2309.17453), so no distance exceeds the budget, one
            block and the tokens of the forward together. Queries keep their positions and held keys are rotated again.
            This needs a rotary embedding and, after the first eviction, half as much memory again; it cannot be
            combined with `bits`.
        bits: store keys and values in 8, 4, 3 or 2 bits per number, rounded token by token. A forward decodes them (a
            compiled step of a static cache reads the codes). A pair `(keys, values)` sets them separately. The first
            four protected tokens and the newest `block_size` tokens of a row are not rounded. None = the model's dtype.
            The budget still counts tokens; `stats` reports the bytes.
            A `Precision` of another package is passed as an object.
        static: keep all tensors at fixed addresses, so that a decode step compiles into one graph. On an accelerator
            `generate` compiles it by itself, with CUDA graphs. A static cache cannot `shrink` or take tokens back
            (assisted decoding, `crop`). It needs the attention implementation "sdpa", "eager" or, for the fastest step
            and for heads of different size, "paged_eviction". Models with sliding windows are refused.
    """

    budget: int | str | None = field(
        default=None,
        metadata=_typed(
            "Tokens held per layer, a multiple of the block size; a share of the text's (25%); bytes of keys and "
            "values in all paged layers, such as 512MiB; or a share of what those of the text take in 16 bits, such as "
            "'25% of memory'.",
            metavar="N|P%|SIZE",
            read=read_size,
        ),
    )
    block_size: int | None = field(
        default=None, metadata=_typed("Tokens per block.", int, at_least=1, shown="16, or 8 for bytes in few bits")
    )
    policy: "str | EvictionPolicy" = field(
        default=AUTO,
        metadata=_typed(
            "One of `paged-eviction policies`, with parameters, modifiers and an allocator: snapkv(window=16), "
            "caote(h2o), h2o@pyramid. auto: the best one for the model, see paged-eviction prepare.",
            metavar="NAME",
        ),
    )
    heads: Literal["shared", "separate"] | None = field(
        default=None,
        metadata=_typed(
            "Shared: all KV heads of a layer evict the same tokens. Separate: each evicts its own.",
            Literal["shared", "separate"],
            shown="the policy's",
        ),
    )
    sink_tokens: int | None = field(
        default=None,
        metadata=_typed(
            "Number of first tokens that are never evicted: attention sinks, or a system prompt.",
            int,
            at_least=0,
            shown="the policy's",
        ),
    )
    recent_tokens: int | None = field(
        default=None,
        kw_only=True,
        metadata=_typed("Number of newest tokens that are never evicted.", int, at_least=0, shown="one block"),
    )
    protect: "Sequence[tuple[int, int]] | Sequence[Sequence[tuple[int, int]]] | None" = field(
        default=None,
        kw_only=True,
        metadata=_typed(
            "Spans of tokens that are never evicted, START:END,...; in a chat also roles of messages: system.",
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
    profile: "str | PathLike[str] | None" = field(
        default=None,
        kw_only=True,
        metadata=_typed(
            "File of paged-eviction prepare, for policies and allocators that read one: auto, calibrated, observed, "
            "heads.",
            metavar="FILE",
            shown="that of the model's weights",
        ),
    )
    disposal: "str | Disposal" = field(
        default="drop",
        kw_only=True,
        metadata=_typed("What happens to evicted tokens, with parameters.", metavar="NAME"),
    )
    positions: Literal["text", "cache"] = field(
        default="text",
        kw_only=True,
        metadata=_typed(
            "Positions of held tokens: those of the text, or consecutive ones (cache).", Literal["text", "cache"]
        ),
    )
    bits: "int | str | tuple[int, int] | Precision | None" = field(
        default=None,
        kw_only=True,
        metadata=_typed(
            "Bits per stored number: 8, 4, 3 or 2; two numbers for keys and values, such as 8,4.",
            metavar="N",
            shown="the model's",
            read=read_bits,
        ),
    )
    static: bool = field(
        default=False, kw_only=True, metadata=_typed("Keep every tensor at its place, for compiled steps.", bool)
    )


def typed_options(*names: str) -> dict[str, tuple[Any, Typed]]:
    """The default and the spelling of some options, or of all, by name."""
    typed = {option.name: (option.default, option.metadata["typed"]) for option in fields(CacheOptions)}
    return {name: typed[name] for name in names or typed}
