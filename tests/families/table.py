"""Writes docs/reference/families.md from what the last run over all families left: `python tests/families/table.py`."""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import transformers

from families.listing import families
from families.outcomes import ROWS, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"
_LONGEST = 160
_HEAD = """# Model families

Made by `make test-families`; do not edit. `verify(model)` was run on a tiny random model of every decoder in the tables
of transformers {version}: causal language models, models that read images or sound beside text (fed with text alone),
and encoder-decoder models.

{counts}

- *exact*: logits equal those of full attention in which the evicted tokens are masked. This was compared in every
  attention implementation and mode that is not refused and in which evictions can be compared.
- *refused*: the cache raises an error that gives the reason.
- *nothing evicts*: no layer of the model can lose tokens.
- *not covered*: there is nothing to compare with. The last column gives the reason.
- *not built*: no tiny model could be made.

*pads*: a row of this model depends on its pads with `DynamicCache`, too. This cache is then compared in a batch without
pads.

| family | model | | pads | why not all is exact |
|---|---|---|---|---|
"""


def page(rows: list[Outcome]) -> str:
    """The page as Markdown."""
    counts = Counter(row.word for row in rows)
    listed = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    head = _HEAD.format(version=transformers.__version__, counts=f"{len(rows)} families: {listed}.")
    return head + "".join(_line(row) for row in rows)


def words_of(text: str) -> dict[str, str]:
    """What a page says of each family; empty where it is of another version of transformers."""
    if f"of transformers {transformers.__version__}:" not in text:
        return {}
    cells = (line.split(" | ") for line in text.splitlines() if line.startswith("| "))
    return {family.removeprefix("| "): word for family, _, word, *_ in cells}


def _line(row: Outcome) -> str:
    return f"| {row.family} | {row.model} | {row.word} | {_own(row)} | {_reason(row)} |\n"


def _own(row: Outcome) -> str:
    return "pads" if any("depends on its pads" in note for note in row.notes) else ""


def _reason(row: Outcome) -> str:
    if not row.reasons:
        return ""
    first = " ".join(row.reasons[0].split()).replace("|", "\\|").replace("<", "&lt;")
    return first if len(first) <= _LONGEST else first[: _LONGEST - 1].rsplit(" ", 1)[0] + " …"


def main() -> None:
    """Write the page; complain about families that were not run."""
    paths = {str(family): ROWS / f"{family}.json" for family in families()}
    missing = [name for name, path in paths.items() if not path.exists()]
    if missing:
        sys.exit(f"{len(missing)} families have not been run: {', '.join(missing[:9])} ...")
    PAGE.write_text(page([Outcome.load(path) for path in paths.values()]), "utf-8")
    print(f"{PAGE.name}: {len(paths)} families")


if __name__ == "__main__":
    main()
