"""`paged-eviction report`: tables, plots and a page in Markdown out of result folders; `paged-eviction score`."""

from .page import run_report

__all__ = ["run_report"]
