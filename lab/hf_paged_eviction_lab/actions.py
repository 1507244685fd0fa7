"""What the disposals of the lab have in common: a state of a few tensors for each layer."""

from typing import Generic, TypeVar

from hf_paged_eviction.internals import (
    BlockTable,
    DisposalContext,
    EvictionAction,
    map_tensors,
    mixes_heads,
    persistent,
)

S = TypeVar("S")
#: Why attention cannot read something beside the slots, by kind of cache; see `refuse`.
BESIDE = {
    "static": "a compiled step attends to the slots alone. Use static=False",
    "allocator": "what stands beside the slots belongs to layers, rows and heads that hold equally many tokens. Use "
    "allocator='uniform' and one number as budget",
    "latent": "keys and values of its heads are never cached. Use bits= or disposal='drop'",
    "shared": "the others would not see what left. Use disposal='drop'",
    "mixed": "attention would read what left head by head. Use disposal='drop'",
    "positions": "what left stands at its place in the text. Use positions='text'",
}


def refuse(context: DisposalContext, disposal: str, **reasons: str) -> None:
    """Raise an error if the cache is of one of these kinds.

    Args:
        disposal: its label.
        **reasons: by kind (a key of `kinds` below): why it is refused, and what to use instead.

    Raises:
        ValueError: with the kind, the reason and what to use instead.
    """
    config, sizes = context.config, context.sizes
    kinds = {
        "static": (context.static, "static=True"),
        "allocator": (not context.uniform, "an allocator"),
        "latent": (context.latent, "a model that caches latents (MLA)"),
        "queries": (context.policy.needs.queries, f"the policy {context.policy.label!r}"),
        "shared": (bool(getattr(config, "num_kv_shared_layers", 0)), "a model whose layers share keys and values"),
        "mixed": (mixes_heads(config), f"{config.model_type}, whose attention mixes KV heads"),
        "share": (sizes.keep_ratio is not None, "a share as budget"),
        "memory": (sizes.in_bytes, "bytes as budget"),
        "coded": (context.coded, "bits="),
        "positions": (context.positions != "text", f"positions={context.positions!r}"),
    }
    for kind, reason in reasons.items():
        refused, name = kinds[kind]
        if refused:
            raise ValueError(f"{disposal} cannot be combined with {name}: {reason}.")


class StatefulAction(EvictionAction, Generic[S]):
    """Keeps a dataclass of tensors, with rows in dimension 0.

    Attributes:
        kept: the state; None = the layer has met no token.
        any: whether anything may have left. Before, there is nothing to read.
    """

    acts = True
    STATE = "kept", "any"
    kept: S | None = None
    any = False

    def use(self, state: S) -> None:
        """Keep a copy of this state from now on."""
        self.kept = map_tensors(persistent, state)

    @property
    def state(self) -> S:
        """The state.

        Raises:
            RuntimeError: the layer has met no token.
        """
        if self.kept is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self.kept

    def start(self, table: BlockTable | None) -> None:
        """See `EvictionAction.start`."""
        self.kept, self.any = None, False
        if table is not None:
            self.use(self.empty(table))

    def empty(self, table: BlockTable) -> S:
        """The state of a layer that has met no token."""
        raise NotImplementedError
