"""Tokens that leave are summed up in a state of constant size."""

from .action import FoldAction
from .files import load_kernels, name_kernels, save_kernels
from .fold import Fold
from .kernels import Kernels, LayerKernels

__all__ = ["Fold", "FoldAction", "Kernels", "LayerKernels", "load_kernels", "name_kernels", "save_kernels"]
