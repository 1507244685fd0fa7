"""Continuous batching with a fixed pool of pages: how many requests are live, how fast they are answered.

The preset `serving` of `paged-eviction bench`.
"""

from .answering import run_serving
from .bookkeeping import run_bookkeeping
from .trace import ServingSettings, trace

__all__ = ["ServingSettings", "run_bookkeeping", "run_serving", "trace"]
