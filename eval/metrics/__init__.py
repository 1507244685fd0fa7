"""Metrics of LongBench, LongBench v2, RULER and LongEval: pure functions of a prediction and its answers."""

from .longbench import EDIT_SIMILARITIES, first_line_of
from .rouge import ROUGES
from .score import METRICS, score_sample

__all__ = ["EDIT_SIMILARITIES", "METRICS", "ROUGES", "first_line_of", "score_sample"]
