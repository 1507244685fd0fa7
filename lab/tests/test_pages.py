"""The pages of the lab: their Python runs, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.eval.test_docs_code import as_before, run

LAB = Path(__file__).parents[1]
PAGES = [LAB / "README.md", *sorted((LAB / "docs").glob("*.md"))]
__all__ = ["as_before"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_and_links_lead_somewhere(page: Path) -> None:
    torch.manual_seed(0)
    run(page)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).is_file()] == []
