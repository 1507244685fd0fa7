"""Write the tables and plots of a run into the page of results.

    python benchmarks/results_page.py results/demo

What stands between `<!-- results:begin -->` and `<!-- results:end -->` is replaced; for a run over texts the markers
are `<!-- perplexity:begin -->` and `<!-- perplexity:end -->`. The plots are copied to `notebooks/images/`.
Run it in the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.store.summaries.formats import to_markdown
from hf_paged_eviction_eval.store.summaries.grids import accuracy_grids, perplexity_grid
from hf_paged_eviction_eval.store.summaries.summary import Cell, Curve

PAGE = Path("docs/results.md")
IMAGES = Path("notebooks/images")


def results_section(folder: Path) -> tuple[str, str, list[Path]]:
    """Name of the section, its Markdown, and the plots it shows."""
    meta = json.loads((folder / "run_meta.json").read_text("utf-8"))
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    if "tasks" in meta["settings"]:
        grids = [table for group in accuracy_grids([Cell(**cell) for cell in summary]) for table in group]
        tables = [to_markdown(grids[0]), _details("Per task", "\n".join(map(to_markdown, grids[1:])))]
        return (
            "results",
            "\n\n".join([caption(meta), *tables]),
            [
                folder / "accuracy.png",
                folder / "accuracy_by_task.png",
            ],
        )
    table = to_markdown(perplexity_grid([Curve(**curve) for curve in summary]))
    return "perplexity", f"{caption(meta)}\n\n{table}", [folder / "perplexity.png"]


def caption(meta: dict[str, Any]) -> str:
    """What was run, and where."""
    settings, versions, hardware = meta["settings"], meta["versions"], meta["hardware"]
    if "tasks" in settings:
        samples = max((facts["samples"] for facts in meta["tasks"].values()), default=0)
        what = f"{samples} questions per task, seed {settings['seed']}, " + (
            "compressed after the question was read" if settings["question_aware"] else "compressed before the question"
        )
    else:
        what = f"{settings['limit']} texts of up to {settings['length']} tokens, {settings['chunk']} tokens per forward"
    cards = [f"{card['count']} x {card['name']}" for card in hardware["accelerators"]]
    processes = f"{hardware['cpu']}, {meta['workers'] * hardware['processes']} processes of one thread"
    where = ", ".join(cards) if cards and settings["device"] != "cpu" else processes
    return (
        f"Model `{settings['model']}`, {what}, blocks of {settings['block_size']}, heads {settings['heads']}; "
        f"{meta['seconds']:.0f} s on {where}; transformers {versions['transformers']}, torch {versions['torch']}. "
        "Best of each column in bold."
    )


def _details(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"


def replace_section(text: str, name: str, content: str) -> str:
    """Put `content` between the markers of a section."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise UserError(f"no markers {begin} and {end}")
    return f"{head}{begin}\n{content}\n{end}{tail}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the tables and plots of a run into the page of results.")
    parser.add_argument("folder", type=Path, help="folder of results")
    parser.add_argument("page", type=Path, nargs="?", default=PAGE, help="file to change")
    options = parser.parse_args()
    try:
        name, content, plots = results_section(options.folder)
        text = replace_section(options.page.read_text("utf-8"), name, content)
    except (OSError, UserError) as error:
        sys.exit(f"error: {error}")
    IMAGES.mkdir(parents=True, exist_ok=True)
    for plot in plots:
        shutil.copy(plot, IMAGES)
    options.page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
