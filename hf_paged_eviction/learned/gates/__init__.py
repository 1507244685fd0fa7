"""Gates: per layer a small function of the hidden state, trained to say which tokens will be needed.

The policy is `policies.fitted.gate`; `recipes.procedures.gates` hands hidden states to the gates, `recipes.fit.gates`
trains them.
"""

from .files import load_gates, name_gates, save_gates
from .gates import GateLayer, Gates

__all__ = ["GateLayer", "Gates", "load_gates", "name_gates", "save_gates"]
