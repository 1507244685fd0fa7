"""Tokens that leave are summed up in a state of constant size."""

from .action import FoldAction
from .fold import Fold
from .kernels import Kernels, LayerKernels, load_kernels, save_kernels

__all__ = ["Fold", "FoldAction", "Kernels", "LayerKernels", "load_kernels", "save_kernels"]
