"""A score fitted to a model: linear in cheap features of key, value and position, for each layer and KV head.

The scoring half, which the policies need. The fitting half is in `.fit`.
"""

from .calibration import Calibration, LayerScore
from .files import load_calibration, name_calibration, save_calibration

__all__ = ["Calibration", "LayerScore", "load_calibration", "name_calibration", "save_calibration"]
