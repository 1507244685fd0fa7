"""Gates: per layer a small function of the hidden state, trained to say which tokens will be needed."""

from .files import load_gates, name_gates, save_gates
from .gates import GateLayer, Gates
from .install import InstalledGates, install_gates
from .policy import Gate

__all__ = ["Gate", "GateLayer", "Gates", "InstalledGates", "install_gates", "load_gates", "name_gates", "save_gates"]
