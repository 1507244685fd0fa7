"""The Python blocks of the documentation run, and print what the pages say they print."""

import contextlib
import doctest
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt

from hf_paged_eviction.policies import registry
from hf_paged_eviction_eval.commands import COMMANDS
from registries import forget_after

DOCS = Path(__file__).parents[2] / "docs"
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")


@dataclass(frozen=True)
class Block:
    """A Python block of a page.

    Attributes:
        line: where it begins in the page, from 0.
        code: what it says.
        prints: the `text` block right behind it.
        runs: no comment `<!-- not run: REASON -->` stands before it.
    """

    line: int
    code: str
    prints: str | None
    runs: bool


def blocks(page: Path) -> Iterator[Block]:
    tokens = MarkdownIt().parse(page.read_text("utf-8"))
    for at, token in enumerate(tokens):
        if token.type == "fence" and token.info == "python":
            assert token.map is not None
            after = tokens[at + 1] if at + 1 < len(tokens) else None
            prints = after.content if after is not None and after.type == "fence" and after.info == "text" else None
            before = tokens[at - 1] if at else None
            skipped = before is not None and before.type == "html_block" and NOT_RUN.match(before.content)
            yield Block(token.map[0] + 1, token.content, prints, not skipped)


PAGES = [
    page
    for page in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md")))
    if "_build" not in page.parts and any(blocks(page))
]


def run(page: Path) -> None:
    """All blocks of a page, one after the other, in one namespace."""
    namespace: dict[str, Any] = {"__name__": f"docs.{page.stem}"}
    for block in blocks(page):
        if not block.runs:
            continue
        printed = io.StringIO()
        code = compile("\n" * block.line + block.code, str(page), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block.prints is not None:
            equal = doctest.OutputChecker().check_output(block.prints, printed.getvalue(), doctest.ELLIPSIS)
            assert equal, f"{page.name}, line {block.line}: it printed\n{printed.getvalue()}"


@pytest.fixture(autouse=True)
def as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that a page registers, and files that it writes, are gone afterwards."""
    monkeypatch.chdir(tmp_path)
    forget_after(monkeypatch, registry.POLICIES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_blocks_run(page: Path) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "(?s).*no profile")  # what a reader is told once for each model
        run(page)


def test_most_blocks_run() -> None:
    all_blocks = [block for page in PAGES for block in blocks(page)]
    assert len(PAGES) > 6
    assert sum(block.runs for block in all_blocks) > 0.8 * len(all_blocks)


def test_a_wrong_page_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n", "utf-8")
    with pytest.raises(AssertionError, match=r"page.md, line 1.*\s+1"):
        run(page)
    page.write_text("```python\nx = 1\n```\n\ntext\n\n```python\nx / 0\n```\n", "utf-8")
    with pytest.raises(ZeroDivisionError) as caught:
        run(page)
    assert caught.traceback[-1].lineno == 7  # counted from 0
    page.write_text("<!-- not run: because -->\n```python\nx / 0\n```\n", "utf-8")
    run(page)


def test_every_command_that_is_shown_is_there() -> None:
    shown = {
        (page.name, name)
        for page in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md")))
        for name in re.findall(r"^ *paged-eviction ([a-z]\S*)", page.read_text("utf-8"), re.MULTILINE)
    }
    assert {name for _, name in shown} >= {"eval", "prepare", "verify"}
    assert [pair for pair in sorted(shown) if pair[1] not in COMMANDS] == []
