"""`paged-eviction report`: tables, plots and one page out of result folders."""

from .report import run_report

__all__ = ["run_report"]
