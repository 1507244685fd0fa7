"""LongBench, LongBench-E and LongBench v2: tasks, prompts, records."""

from .tasks import CATEGORIES, PRESETS, PROMPTS, TASKS, LongBenchTask

__all__ = ["CATEGORIES", "PRESETS", "PROMPTS", "TASKS", "LongBenchTask"]
