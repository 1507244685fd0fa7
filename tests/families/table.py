"""Writes docs/reference/families.md from what the last run over all families left: `python tests/families/table.py`."""

import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import transformers

from families.listing import families
from families.outcomes import ROWS, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"
_LONGEST = 160
_PLAIN = "Exact with every option: "
#: What differs in reasons that are the same.
_GENERAL = (
    (r"\blayer \d+ of\b", "a layer of"),
    (r": by [\d.e+-]+$", ""),
    (r"^[\w.-]+ (?=uses |is an |reads |weighs |works |repeats |computes )", ""),
    (r"\bDynamicCache for \w+", "DynamicCache for it"),
    (r"\battention of \w+", "attention of it"),
    (r"'\w+Config'", "its configuration"),
)
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

Exact with every option: {plain}.

The others:

| | families | why not all is exact |
|---|---|---|
"""


def page(rows: list[Outcome]) -> str:
    """The page as Markdown: a list of those of which there is nothing more to say, and a line for each reason."""
    counts = Counter(row.word for row in rows)
    listed = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        groups[row.word, _reason(row)].append(_cited(row))
    plain = ", ".join(groups.pop(("exact", ""), []))
    counted = f"{len(rows)} families: {listed}."
    head = _HEAD.format(version=transformers.__version__, counts=counted, plain=plain)
    ordered = sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1])))
    return head + "".join(f"| {word} | {', '.join(names)} | {reason} |\n" for (word, reason), names in ordered)


def words_of(text: str) -> dict[str, str]:
    """What a page says of each family; empty where it is of another version of transformers."""
    if f"of transformers {transformers.__version__}:" not in text:
        return {}
    plain = next(line for line in text.splitlines() if line.startswith(_PLAIN))
    cells = [("exact", plain), *(line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| "))]
    return {name: word.removeprefix("| ") for word, names in cells for name in re.findall("`(.+?)`", names)}


def _cited(row: Outcome) -> str:
    pads = any("depends on its pads" in note for note in row.notes)
    return f"`{row.family}`" + " (pads)" * pads


def _reason(row: Outcome) -> str:
    """The first sentence of the first reason, the same for all models that have it."""
    if not row.reasons:
        return ""
    text = " ".join(row.reasons[0].split()).partition(". ")[0].replace("|", "\\|").replace("<", "&lt;")
    for pattern, general in _GENERAL:
        text = re.sub(pattern, general, text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1].rsplit(" ", 1)[0] + " …"


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
