"""A long conversation as several compressed caches, one for each of its topics."""

from .embedding import Embed, HiddenStates, RareTokens
from .episodes import Episode, Episodes, read_episodes
from .layer_tokens import LayerTokens
from .sensitivity import budgets_by_sensitivity, layer_sensitivity

__all__ = [
    "Embed",
    "Episode",
    "Episodes",
    "HiddenStates",
    "LayerTokens",
    "RareTokens",
    "budgets_by_sensitivity",
    "layer_sensitivity",
    "read_episodes",
]
