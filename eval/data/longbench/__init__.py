"""LongBench, LongBench-E and LongBench v2: tasks, prompts, records."""

from . import v2
from .data import data_digest, data_note, load_samples, prompt_digest
from .tasks import CATEGORIES, PRESETS, PROMPTS, TASKS, LongBenchTask

V2 = v2.NAME

__all__ = [
    "CATEGORIES",
    "PRESETS",
    "PROMPTS",
    "TASKS",
    "V2",
    "LongBenchTask",
    "data_digest",
    "data_note",
    "load_samples",
    "prompt_digest",
]
