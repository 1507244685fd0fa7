"""The page of a report and the files beside it: whole, self-contained, and safe whatever the results say."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.report import run_report
from hf_paged_eviction_eval.report.pages.examples import CUT, cut, ends, examples
from hf_paged_eviction_eval.report.report import write_report
from hf_paged_eviction_eval.report.runs import load_runs
from hf_paged_eviction_eval.running.requests import task_requests
from hf_paged_eviction_eval.running.terminal import run as run_all
from report_rows import FULL, VARIANTS, make_row, make_rows, write_run

VOID = {"meta", "img", "wbr", "br", "link", "input", "hr"}
EVIL = "<script>alert('x')</script><img src=http://evil.example/x.png onerror=a>\"'&amp;$x$ \\frac"


class Page(HTMLParser):
    """Checks that tags close, and collects addresses, anchors and text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.anchors: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name in ("src", "href", "srcset", "action", "data"):
                self.addresses.append(value or "")
            if name == "id":
                assert value not in self.anchors
                self.anchors.add(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report(folders: list[Path], target: Path) -> tuple[Page, str]:
    run_report(folders, target)
    content = (target / "report.html").read_text("utf-8")
    return Page(content), content


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, str, Path]:
    """A report with every section."""
    base = tmp_path_factory.mktemp("everything")
    rows = make_rows(["qasper", "qasper_e", "trec"], count=4) + make_rows(["niah"], lengths=[512, 1024], count=11)
    rows += [
        make_row("longbench_v2", variant, 0, metadata={"difficulty": "hard", "length": "short"}) for variant in VARIANTS
    ]
    texts = [
        {"text": "t", "tokens": 64, "length": 64, "policy": policy, "budget": budget, "budget_tokens": 32,
         "block_size": 16, "loss": [2.0] * 15 + [0.0], "count": [4] * 15 + [0]}
        for policy, budget in VARIANTS
    ]  # fmt: skip
    folders = [
        write_run(base / "a", rows + texts),
        write_run(base / "b", rows[:20:2] + rows[60:140:3], dtype="bfloat16"),
    ]
    page, content = report(folders, base / "out")
    return page, content, base / "out"


def test_the_page_is_whole_and_loads_nothing(everything: tuple[Page, str, Path]) -> None:
    page, content, _ = everything
    assert page.tags.isdisjoint({"script", "link", "iframe", "object", "base"})
    for address in page.addresses:
        assert address.startswith(("data:image/svg+xml;base64,", "#"))
        assert not address.startswith("#") or address[1:] in page.anchors
    assert not re.search(r"https?:|@import|url\(", content)
    assert not re.search(r"\b(NaN|nan|Infinity|None)\b", page.text)
    assert not {name for name in page.attributes if name.startswith("on")}
    assert 'style="--shade: 1.0"' in content and content.index("leaderboard") < content.index('id="scores"')
    assert content.index("<img") < content.index('id="table-leaderboard"'), "the plot of the means comes first"


def test_the_pictures_are_pictures(everything: tuple[Page, str, Path]) -> None:
    page, _, folder = everything
    pictures = [address for address in page.addresses if address.startswith("data:")]
    plots = sorted((folder / "plots").glob("*.svg"))
    assert len(pictures) == len(plots) > 10 and all(path.stat().st_size > 5000 for path in plots)
    for address in pictures:
        root = ElementTree.fromstring(b64decode(address.partition(",")[2]))
        assert root.tag.endswith("svg")
        assert not [value for node in root.iter() for name, value in node.attrib.items()
                    if name.endswith("href") and not value.startswith(("#", "data:"))]  # fmt: skip


def test_every_section_is_there(everything: tuple[Page, str, Path]) -> None:
    page, _, folder = everything
    sections = "scores length needles perplexity agreement efficiency comparison predictions reading metadata"
    assert set(sections.split()) <= page.anchors
    names = {path.name for path in (folder / "tables").iterdir()}
    assert {"leaderboard.csv", "longbench.tex", "longbench_e_3.csv", "depths.csv", "perplexity.tex"} <= names
    assert {path.name for path in folder.iterdir()} == {"plots", "tables", "report.html", "report.md"}
    assert {"score_over_length_1.svg", "score_over_buckets_1.svg", "agreement_1.svg"} <= {
        path.name for path in (folder / "plots").iterdir()
    }


def test_markdown_shows_plots_that_exist(everything: tuple[Page, str, Path]) -> None:
    _, _, folder = everything
    images = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", (folder / "report.md").read_text("utf-8"))
    assert images and all((folder / name).is_file() for name in images)


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    rows = make_rows(["kv_recall"], lengths=[512])
    for row in rows:  # as an older version wrote them
        for name in ("efficiency", "agreement", "truncated", "chat", "metric", "record_length", "new_tokens",
                     "question_aware", "all_classes"):  # fmt: skip
            del row[name]
    page, _ = report([write_run(tmp_path, rows)], tmp_path / "out")
    absent = {"length", "needles", "perplexity", "agreement", "efficiency", "comparison"}
    assert page.anchors.isdisjoint(absent) and {"scores", "predictions"} <= page.anchors


@pytest.mark.parametrize("variants", [[FULL], [("new:$x$ \\frac", "25%+odd")]])
def test_few_and_strange_policies(tmp_path: Path, variants: list[tuple[str, str]]) -> None:
    rows = make_rows(["niah", "qasper"], variants, count=1) + make_rows(["niah"], variants, lengths=[64], count=1)
    page, _ = report([write_run(tmp_path, rows)], tmp_path / "out")
    assert variants[0][0] in page.text


@pytest.mark.usefixtures("drawn")
def test_what_results_say_is_text(tmp_path: Path) -> None:
    row = make_row(EVIL, (EVIL, "64"), 0, prediction=EVIL, answers=[EVIL], id=EVIL, metadata={EVIL: EVIL, "depth": 0.5})
    lone = make_row(EVIL, FULL, 0, prediction="\ud800 \x00 \u202e", id=EVIL)
    folder = write_run(tmp_path / "a", [row], model=EVIL, other={EVIL: [EVIL]})
    with (folder / "rows.0.jsonl").open("a", encoding="ascii") as file:
        file.write(json.dumps(lone | {"settings": "0"}) + "\n")
    other = write_run(tmp_path / "b", [row], model="m", other={})
    page, content = report([folder, other], tmp_path / "out")
    assert page.tags.isdisjoint({"script"}) and "onerror" not in page.attributes
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert "<script" not in content and EVIL in page.text
    assert "<script" not in (tmp_path / "out" / "report.md").read_text("utf-8")
    assert all(path.parent == tmp_path / "out" / "plots" for path in (tmp_path / "out").rglob("*.svg"))


def test_the_report_lies_beside_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, make_rows(["qasper"])[:-1], tasks=["qasper", "lcc"])
    run_report([folder], None)
    assert (folder / "report" / "report.html").is_file()
    message = capsys.readouterr().err
    assert (
        f"written to {folder / 'report'}" in message
        and "no row yet of lcc" in message
        and "1 answers are missing" in message
    )


def test_examples_are_the_largest_losses_and_a_gain(tmp_path: Path) -> None:
    scores = {0: (1.0, 0.0), 1: (0.5, 0.4), 2: (0.0, 1.0), 3: (1.0, 0.2), 4: (0.3, 0.3)}
    rows = [
        make_row("qasper", variant, index, score=pair[place])
        for index, pair in scores.items()
        for place, variant in enumerate((FULL, ("recency", "64")))
    ]
    (run,) = load_runs([write_run(tmp_path, rows)])
    shown = [(kind, row["id"], row["score"], full["score"]) for kind, row, full, _ in examples(run, "qasper")]
    assert shown == [
        ("worst", "qasper/0", 0.0, 1.0),
        ("worst", "qasper/3", 0.2, 1.0),
        ("best", "qasper/2", 1.0, 0.0),
    ]


def test_examples_are_cut() -> None:
    assert cut(" short ") == "short"
    long = cut("x" * 10_000_000)
    assert len(long) < CUT + 50 and long.endswith("(10000000 characters)")


def test_exact_prompts_stand_beside_answers(tmp_path: Path) -> None:
    """`--log-samples` writes what the model read, and the page shows its beginning and end."""
    options = EvalOptions(
        tasks="passkey", length="256", limit=2, policies="keydiff,full", budgets="64", log_samples=True, output=tmp_path
    )
    assert run_all(task_requests(options))
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == 2 and all(line["context"].startswith("<bos>") for line in lines)
    assert all(line["context"].endswith("The vault opens with passkey") and not line["question"] for line in lines)
    assert all(len(line["ids"]) + line["max_new_tokens"] <= 256 for line in lines)
    (run,) = load_runs([tmp_path])
    prompt = examples(run, "passkey")[0].prompt
    assert prompt is not None and prompt.endswith("The vault opens with passkey")
    assert "… (5000 characters) …" in str(ends("x" * 5000)) and ends(None) is None
    write_report([run], tmp_path / "out")
    assert "<dt>prompt</dt>" in (tmp_path / "out" / "report.html").read_text("utf-8")
