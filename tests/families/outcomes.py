"""What `verify` says of a family, in one word and a few reasons."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_paged_eviction import Verification

#: Where a run over all families leaves a file for each.
ROWS = Path(__file__).parents[2] / "results" / "families"
_EVICTING = "exact for what it holds"


@dataclass(frozen=True)
class Outcome:
    """One family.

    Attributes:
        family: its name here.
        model: class of the model; empty if it cannot be built.
        word: "exact", "refused", "wrong", "nothing evicts", "not covered" or "not built".
        reasons: why not everything is exact, the most frequent first.
        notes: what the model does with `DynamicCache`.
    """

    family: str
    model: str
    word: str
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def save(self) -> None:
        """For `table`, which makes a page of all families."""
        ROWS.mkdir(parents=True, exist_ok=True)
        (ROWS / f"{self.family}.json").write_text(json.dumps(asdict(self), indent=1), "utf-8")

    @classmethod
    def load(cls, path: Path) -> Outcome:
        """What `save` wrote."""
        row = json.loads(path.read_text("utf-8"))
        return cls(row["family"], row["model"], row["word"], tuple(row["reasons"]), tuple(row["notes"]))


def outcome_of(family: str, report: Verification) -> Outcome:
    """The word for a whole report: exact if evictions are, in any mode, and nothing is wrong."""
    reasons = [check.reason for check in report.checks if check.reason and check.outcome != "exact"]
    ranked = sorted(dict.fromkeys(reasons), key=lambda reason: -reasons.count(reason))
    return Outcome(family, report.model, _word(report, ranked), tuple(ranked), report.notes)


def _word(report: Verification, reasons: list[str]) -> str:
    if not report.ok:
        return "wrong"
    if any(check.question == _EVICTING for check in report.of("exact")):
        return "exact"
    if any(reason == "no layer of this model evicts" for reason in reasons):
        return "nothing evicts"
    first = report.checks[0]  # under the model's own attention implementation
    plain = [check for check in report.checks if (check.attention, check.mode) == (first.attention, "dynamic")]
    return "refused" if all(check.outcome == "refused" for check in plain) else "not covered"
