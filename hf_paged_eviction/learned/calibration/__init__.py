"""A score fitted to a model: linear in cheap features of key, value and position, for each layer and KV head.

The scoring half, which the policies need. The fitting half is in `.fit`.
"""

from .calibration import Calibration, LayerScore
from .files import load_calibration, name_calibration, save_calibration
from .lookup import find_calibration, profile_dir, profile_path

__all__ = [
    "Calibration",
    "LayerScore",
    "find_calibration",
    "load_calibration",
    "name_calibration",
    "profile_dir",
    "profile_path",
    "save_calibration",
]
