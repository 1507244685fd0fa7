"""Pictures of the docs: everything in them can be read, on a light page and on a dark one."""

import re
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.figure import Figure

import legible

DOCS = Path(__file__).parents[2] / "docs"
IMAGES = sorted((DOCS / "images").glob("*.svg"))
DRAWN = ("endless_text", "peers_speed", "quality")


def test_texts_of_drawn_pictures(generate: ModuleType) -> None:
    assert sorted(module.IMAGE.stem for module in generate.DRAWN) == [*DRAWN]
    for module in generate.DRAWN:
        assert legible.of_figure(module.draw()) == [], module.IMAGE.name


@pytest.mark.parametrize("path", [path for path in IMAGES if path.stem not in DRAWN], ids=lambda path: path.stem)
def test_texts_of_pictures_by_hand(path: Path) -> None:
    assert legible.of_drawing(path) == []


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_they_change_with_the_page_and_are_shown_somewhere(path: Path) -> None:
    assert "prefers-color-scheme: dark" in path.read_text("utf-8")
    pages = [*DOCS.glob("*.md"), DOCS.parent / "README.md"]
    assert any(f"images/{path.name}" in page.read_text("utf-8") for page in pages)


def test_every_colour_of_a_drawn_picture_has_a_dark_one(generate: ModuleType) -> None:
    known = {light for light, _ in generate.pictures.COLOURS.values()}
    for module in generate.DRAWN:
        used = set(re.findall(r"(?:fill|stroke): (#\w{6})", module.IMAGE.read_text("utf-8")))
        assert used <= known, (module.IMAGE.name, used - known)


def test_texts_that_cannot_be_read_are_found() -> None:
    figure = Figure(figsize=(3, 2))
    figure.text(0.1, 0.5, "one on the other")
    figure.text(0.12, 0.5, "the other")
    figure.text(0.8, 0.9, "beyond the right edge")
    assert legible.of_figure(figure) == [
        "'beyond the right edge' leaves the picture",
        "'one on the other' meets 'the other'",
    ]


def test_texts_by_hand_that_cannot_be_read_are_found(tmp_path: Path) -> None:
    (tmp_path / "picture.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 60"><style>.small { font-size: 12.5px; }</style>'
        '<text x="50" y="20">too long for it</text><text x="10" y="45">a</text>'
        '<text x="12" y="45" class="small">a</text>'
        "</svg>",
        "utf-8",
    )
    assert legible.of_drawing(tmp_path / "picture.svg") == ["'too long for it' leaves the picture", "'a' meets 'a'"]


def test_numbers_of_the_picture_and_of_the_text_are_those_of_the_table(generate: ModuleType) -> None:
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    page = (DOCS / "real_models.md").read_text("utf-8")
    table = page.partition("<!-- generated: memory -->")[2].partition("\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in table.strip().splitlines()]
    column = rows[0].index("one fact, asked after compression: right, %")
    models = [*accumulate((row[0] for row in rows), lambda above, own: own or above)]
    of_picture = [row for row, model in zip(rows, models, strict=True) if model == "SmolLM2-135M-Instruct"]
    answers = {f"{row[1]}, {row[2]}": row[column].split(" ")[0] for row in of_picture}
    (axes,) = generate.quality_picture.draw().axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    shown = dict(zip(names, (text.get_text() for text in axes.texts), strict=True))
    drawn = {name.replace("`", "").replace(", as published", ""): f"{share} %" for name, share in answers.items()}
    assert shown and shown.items() <= drawn.items()
    assert f"memory, and {answers['after `prepare`, 1/8']} of 100 answers" in readme
    after, without = (answers[f"{cache} `prepare`, 1/16"] for cache in ("after", "without"))
    assert f"at a sixteenth {after} % of the answers against {without} %" in " ".join(readme.split())


def _long_rows(model: str, length: int, documents: int, answered: bool = True) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"kind": "run"}]
    for document in range(documents):
        key = {"model": model, "length": length, "chunk": 512, "document": document}
        for cache, share in (("keydiff", "1/4"), ("prepared", "1/8"), ("prepared", "1/4"), ("full", "")):
            own = {**key, "cache": cache, "share": share}
            rows += [{**own, "kind": kind, "question": 0, "right": answered} for kind in ("one", "hop", "of12")]
            rows += [{**own, "kind": "text", "nats": 2.0 + document}]
            rows += [{**own, "kind": "read", "seconds": 1.0, "peak": 2**20, "bytes": 2**20}]
    return rows


def test_the_long_table_of_the_readme_is_of_the_longest_texts_that_are_enough(
    generate: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = generate.long_pages
    rows = _long_rows("smollm2", 4096, 9) + _long_rows("qwen", 2048, 6) + _long_rows("qwen", 7680, 3)
    monkeypatch.setattr(pages, "_rows", lambda: tuple(rows))
    text = pages.front("")
    assert "Qwen2.5-Coder-0.5B-Instruct, 6 documents of 2,048 tokens" in text
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert lines[0][2:] == ["one fact", "two hops", "all kinds", "text: nats lost |"]
    assert [cell.split(" ")[0] for cell in lines[2][2:5]] == ["6/6", "6/6", "18/18"]
    assert [" ".join(line[:2]) for line in lines[2:]] == [
        "| full cache 1",
        "| after `prepare` 1/4",
        "| after `prepare` 1/8",
        "| `keydiff` 1/4",
    ]
    rows += _long_rows("qwen", 7680, 4)  # a document that was measured twice counts once
    assert "4 documents of 7,680 tokens" in pages.front("")
    rows[:] = _long_rows("qwen", 7680, 3)
    with pytest.raises(ValueError, match="4 documents"):
        pages.front("")
