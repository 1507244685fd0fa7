"""A learned gate: a small network per layer that reads hidden states and predicts which tokens will be needed."""

from .gates import GateLayer, Gates, load_gates, save_gates
from .install import install_gates
from .policy import Gate

__all__ = ["Gate", "GateLayer", "Gates", "install_gates", "load_gates", "save_gates"]
