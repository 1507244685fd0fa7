"""A score fitted to a model: linear in cheap features of key, value and position, for each layer and KV head.

The scoring half, which the policies need. The fitting half is in `preparing.fitting`.
"""

from .calibration import Calibration
from .files import load_calibration, name_calibration, save_calibration
from .lookup import find_calibration, profile_dir, profile_path
from .score import LayerScore

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
