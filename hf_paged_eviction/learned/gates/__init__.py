"""Gates: per layer a small function of the hidden state, trained to say which tokens will be needed.

`gate.py` is the policy, `install.py` hands hidden states to the gates, `fit.py` trains them.
"""

from .files import load_gates, name_gates, save_gates
from .gate import Gate
from .gates import GateLayer, Gates

__all__ = ["Gate", "GateLayer", "Gates", "load_gates", "name_gates", "save_gates"]
