"""The choice to keep everything in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Literal

from ...table.budget import BlockBudget
from ..base import Disposal, EvictionAction, Site, Surroundings
from ..registry import register_disposal
from ..replacement import Replacement, make_replacement
from .action import RecallAction
from .summaries import Kind


@register_disposal("recall")
@dataclass(frozen=True)
class Recall(Disposal):
    """Nothing is lost: evicted blocks lie in host memory, and those that a query needs are brought back.

    The device holds the budget's slots and a summary of each block of the text. Each step's query scores the
    summaries; blocks of the best `blocks` that are missing overwrite blocks in the slots that are not among them, and
    attention runs over all slots, in place. A forward of several tokens (a chunk, a second turn) attends to the whole
    text: blocks in host memory are read in rounds, and the outputs are joined by the sums of their exponentials.

    After a forward of several tokens, the policy's scores say which blocks stay in the slots at first. From then on
    the query says so.

    Differences: Quest (2406.10774) keeps everything on the device, chooses per query head and attends to the chosen
    blocks alone; here, as in ArkVale (NeurIPS 2024), the KV heads of a layer, or with heads="separate" each, choose by
    the mean of their query heads, and attention sees all that is in the slots. Blocks that a single token brought back
    stay in the slots also where `crop` takes that token back.

    Args:
        blocks: how many blocks each query asks for, beside those that are always there; "all" reads the whole text at
            every step.
        every: choose anew every so many tokens.
        summary: "box" (largest and smallest number of each channel, a bound of every product) or "vector" (MPCache,
            2501.06807: half the memory, no bound).
        replacement: which block in the slots makes room; a name from `available_replacements()`.
        layers: so many neighbouring layers use what the query of the first of them asked for; the others need no
            summaries. What the first one does not find is lost to all of them, and in a small model one layer may be
            the only one that finds a fact: see what it costs yours before you use more than 1.
        keep: share of a prompt's blocks that may come back for a single query, decided once by the attention of the
            prompt's last queries (MPCache's first stage). Only a prompt of one forward is looked at, or the first chunk
            of it, and what comes later may always come back.
        prefetch: so many blocks that scored best after those that are asked for are fetched to the device already, for
            the next choice, while other layers run. Changes nothing but the time, and costs the room of those blocks.
        length: tokens of the longest text, needed with bytes as budget, which are shared out for the summaries of so
            many; a longer one is refused. None = any length.

    Raises:
        ValueError: a value is out of range.
    """

    blocks: int | Literal["all"] = 8
    every: int = 1
    summary: Kind = "box"
    replacement: str | Replacement = "lru"
    layers: int = 1
    keep: float = 1.0
    prefetch: int = 0
    length: int | None = None
    paper: ClassVar[str | None] = "2406.10774"
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        leasts = {"blocks": 1, "every": 1, "layers": 1, "prefetch": 0, "length": 1}
        for name, least in leasts.items():
            value = getattr(self, name)
            if (name == "blocks" and value == "all") or (name == "length" and value is None):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                also = ' or "all"' if name == "blocks" else ""
                raise ValueError(f"recall: {name} must be a whole number of at least {least}{also}, got {value!r}.")
        if self.prefetch and self.blocks == "all":
            raise ValueError("recall: blocks='all' reads everything at every step, so there is nothing to prefetch.")
        if self.summary not in ("box", "vector"):
            raise ValueError(f'recall: summary must be "box" or "vector", got {self.summary!r}.')
        if isinstance(self.keep, bool) or not isinstance(self.keep, Real) or not 0 < self.keep <= 1:
            raise ValueError(f"recall: keep must lie in (0, 1], got {self.keep!r}.")
        make_replacement(self.replacement)

    def action(self, site: Site) -> EvictionAction:
        """See `Disposal.action`."""
        return RecallAction(self, site)

    def introduce(self, actions: Sequence[EvictionAction]) -> None:
        """See `Disposal.introduce`."""
        ours = [action for action in actions if isinstance(action, RecallAction)]
        for at, action in enumerate(ours):
            action.leader = ours[at - at % self.layers] if at % self.layers else None

    def check(self, around: Surroundings) -> None:
        """See `Disposal.check`."""
        long = {"memory": "summaries grow with the text, however long it may become. Use recall(length=TOKENS)"}
        around.refuse(
            self.name,
            static="a compiled step cannot ask host memory. Use static=False",
            allocator="recall holds equally many blocks in every layer and head. Use allocator='uniform' and one "
            "number as budget",
            latent="no bound of a block's keys follows from bounds of latents. Use disposal='drop'",
            queries="recall asks the queries itself, and the policy only says which blocks stay at first. Use one that "
            "reads keys and values, such as 'keydiff'",
            shared="each would need blocks of its own. Use disposal='drop'",
            share="how many blocks a query may ask for depends on the number of tokens. Use tokens or bytes",
            **({} if self.length is not None else long),
            coded=f"blocks travel to host memory and back as they came. Leave out {around.coded}",
            positions="each step may bring back other blocks, so all keys in the slots would have to be turned anew at "
            "every step, and a text longer than the model's positions would still be attended to as a whole by a "
            "forward of several tokens. Use positions='text'",
        )
        if around.sizes.tokens is not None:
            self.check_sizes(around.sizes)

    def check_sizes(self, sizes: BlockBudget) -> None:
        """See `Disposal.check_sizes`: there must be room for the blocks that are asked for."""
        budget, size = sizes.capacity, sizes.block_size
        always = sizes.protected_blocks + sizes.recent_blocks + 1
        asked = 1 if self.blocks == "all" else self.blocks
        room = budget // size - always
        if asked > room:
            smallest = (always + asked) * size
            fits = f", or blocks={room} at most" if room > 0 and self.blocks != "all" else ""
            raise ValueError(
                f"recall(blocks={self.blocks}): a budget of {budget} tokens has room for {max(room, 0)} recalled "
                f"blocks of {size}, beside {sizes.protected_blocks} at the start, {sizes.recent_blocks} with the "
                "newest tokens and the one that is being filled. "
                f"Use a budget of {smallest} or more{fits}."
            )
