"""Gates: per layer a small function of the hidden state, trained to say which tokens will be needed."""

from .gates import GateLayer, Gates, load_gates, name_gates, save_gates
from .install import install_gates
from .policy import Gate

__all__ = ["Gate", "GateLayer", "Gates", "install_gates", "load_gates", "name_gates", "save_gates"]
