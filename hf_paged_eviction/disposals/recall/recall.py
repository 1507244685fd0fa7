"""Recall: evicted blocks go to host memory and come back when a query needs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...table.budget import BlockBudget
from ..base import Disposal, DisposalContext, EvictionAction, Site
from ..registry import register_disposal
from .action import RecallAction
from .settings import Settings


@register_disposal("recall")
@dataclass(frozen=True)
class Recall(Settings, Disposal):
    """Keeps evicted blocks in host memory and brings back the blocks that a query needs.

    The device holds the slots of the budget and a summary of each block of the text. The query of each step scores the
    summaries. The best `blocks` that are not in the slots replace the blocks that no query has needed for longest, and
    attention runs over all slots, in place. A forward of several tokens (a chunk, a second turn) attends to the whole
    text: blocks in host memory are read in rounds, and the outputs are combined by their log-sum-exp. After such a
    forward the policy's scores decide which blocks stay in the slots; from then on the queries decide.

    Like ArkVale (NeurIPS 2024), the KV heads of a layer (with heads="separate" each KV head) choose by the mean of
    their query heads, and attention sees all slots. Quest (arXiv 2406.10774) keeps everything on the device, chooses
    per query head and attends to the chosen blocks only. Blocks that a single token brought back stay in the slots
    after `crop` takes that token back.

    Args:
        blocks: number of blocks that each query chooses, in addition to the protected ones; "all" reads the whole text
            at every step.
        every: number of tokens between two choices.
        summary: "box" (the smallest and the largest number of each channel, which bounds every product) or "vector"
            (MPCache, arXiv 2501.06807: half the memory, no bound).
        layers: number of neighbouring layers that share the choice of the first of them; the others need no summaries.
            A fact that the first layer does not look for is lost for all of them, and in a small model one layer may be
            the only one that finds it. Measure the cost before you use more than 1.
        keep: share of the blocks of a prompt that may come back, chosen once by the attention of the prompt's last
            queries (first stage of MPCache). It applies to a prompt of one forward, or to the first chunk; later blocks
            may always come back.
        prefetch: number of next best blocks that are copied to the device before the next choice, while other layers
            run. It changes only the time, and needs memory for these blocks.
        length: number of tokens of the longest text. Needed with a budget in bytes, which must have room for the
            summaries of so many; a longer text is refused. None = any length.

    Raises:
        ValueError: a value is out of range.
    """

    paper: ClassVar[str | None] = "2406.10774"
    needs_queries: ClassVar[bool] = True

    def action(self, site: Site) -> EvictionAction:
        """See `Disposal.action`."""
        return RecallAction(self, site)

    def introduce(self, actions: Sequence[EvictionAction]) -> None:
        """See `Disposal.introduce`."""
        ours = [action for action in actions if isinstance(action, RecallAction)]
        for at, action in enumerate(ours):
            action.leader = ours[at - at % self.layers] if at % self.layers else None

    def check(self, context: DisposalContext) -> None:
        """See `Disposal.check`."""
        long = {"memory": "summaries grow with the text, however long it may become. Use recall(length=TOKENS)"}
        context.refuse(
            self.name,
            static="a compiled step cannot read host memory. Use static=False",
            allocator="recall holds equally many blocks in every layer and head. Use allocator='uniform' and one "
            "number as budget",
            latent="no bound of a block's keys follows from bounds of latents. Use disposal='drop'",
            queries="under recall the queries choose the blocks, and the policy only scores blocks at first. Use one "
            "that reads keys and values, such as 'keydiff'",
            shared="each would need blocks of its own. Use disposal='drop'",
            mixed="attention would read recalled keys and values head by head. Use disposal='drop'",
            share="the number of blocks that a query may ask for depends on the budget in tokens. Use tokens or bytes",
            **({} if self.length is not None else long),
            coded=f"blocks are moved to host memory and back unrounded. Leave out {context.coded}",
            positions="each step may bring back other blocks, so all keys in the slots would have to be rotated again "
            "at every step, and a forward of several tokens would still attend to the whole text. Use positions='text'",
        )
        if context.sizes.tokens is not None:
            self.check_sizes(context.sizes)

    def check_sizes(self, sizes: BlockBudget) -> None:
        """See `Disposal.check_sizes`: the slots must have room for `blocks` recalled blocks."""
        budget, size = sizes.capacity, sizes.block_size
        always = sizes.protected_blocks + sizes.recent_blocks + 1
        recalled = 1 if self.blocks == "all" else self.blocks
        room = budget // size - always
        if recalled > room:
            smallest = (always + recalled) * size
            fits = f", or blocks={room} at most" if room > 0 and self.blocks != "all" else ""
            raise ValueError(
                f"recall(blocks={self.blocks}): a budget of {budget} tokens has room for {max(room, 0)} recalled "
                f"blocks of {size}, beside {sizes.protected_blocks} at the start, {sizes.recent_blocks} with the "
                "newest tokens and the one that is being filled. "
                f"Use a budget of {smallest} or more{fits}."
            )
