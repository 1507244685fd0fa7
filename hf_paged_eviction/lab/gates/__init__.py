"""Gates: per layer a small function of the hidden state, trained to say which tokens will be needed.

The half that scores. `.install` hands hidden states to it, `recipes.gates` trains it.
"""

from .files import load_gates, name_gates, save_gates
from .gates import GateLayer, Gates

__all__ = ["GateLayer", "Gates", "load_gates", "name_gates", "save_gates"]
