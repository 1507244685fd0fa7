"""Tokens that leave are summed up in a state of constant size."""

from .files import load_kernels, name_kernels, save_kernels
from .fold import Fold
from .kernels import Kernels, LayerKernels
from .outlet import FoldOutlet

__all__ = ["Fold", "FoldOutlet", "Kernels", "LayerKernels", "load_kernels", "name_kernels", "save_kernels"]
