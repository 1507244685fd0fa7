"""Metrics of LongBench, LongBench v2 and RULER: pure functions of a prediction and its answers."""

from .longbench import first_line_of
from .score import METRICS, score_sample

__all__ = ["METRICS", "first_line_of", "score_sample"]
