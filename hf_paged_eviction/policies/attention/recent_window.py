"""The last few tokens of a text apart from those before them."""

from abc import abstractmethod

from torch import Tensor

from ..attention_policy import AttentionPolicy
from ..base import ScoreContext
from ..text_order import Pooling, pool


class RecentWindow(AttentionPolicy):
    """Scores tokens by the row's last `window` queries; keeps the position of the newest as statistic `newest`."""

    @property
    @abstractmethod
    def window(self) -> int:
        """Number of queries."""

    def before(self, context: ScoreContext) -> Tensor:
        """`[batch, kv_heads, tokens]` bool: real tokens that came before the window."""
        newest = context.statistics.get("newest")
        if newest is None:
            return context.valid
        return context.valid & (context.positions <= newest[:, None, None] - self.window)

    def pooled(self, values: Tensor, context: ScoreContext, kernel: int, pooling: Pooling) -> Tensor:
        """Pool along the text before the window. The values of the window's tokens do not change."""
        if "newest" not in context.statistics:
            return values
        before = self.before(context)
        return pool(values * before, context.positions, kernel, pooling).where(before, values)

    def with_window(self, scores: Tensor, context: ScoreContext) -> Tensor:
        """The scores, with the tokens of the window pinned."""
        newest = context.statistics.get("newest")
        if newest is None:
            return scores
        begins = (newest[:, None, None] - self.window).clamp_min(-1)  # pads are at -1, too
        return scores.masked_fill(context.positions > begins, float("inf"))
