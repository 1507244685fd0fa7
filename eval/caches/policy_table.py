"""What the registry of policies has of this package, in a file: a list of names must not cost the import of torch.

`python -m hf_paged_eviction_eval.caches.policy_table` writes the file anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from inspect import getdoc
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "policies.json"
_PACKAGE = "hf_paged_eviction."


def read_policy_table() -> dict[str, Any]:
    """The table as it stands in the file, see `make_policy_table`."""
    table: dict[str, Any] = json.loads(PATH.read_text("utf-8"))
    return table


def make_policy_table(own: bool = False) -> dict[str, Any]:
    """The table as the registry has it; imports torch.

    Args:
        own: leave out what other packages registered.

    Returns:
        `sections`, by title: name, arXiv id (empty without one) and first sentence of every policy; and the names of
        `modifiers`, `allocators` and `disposals`, which may stand around or behind a policy.
    """
    from hf_paged_eviction import (
        available_allocators,
        available_disposals,
        available_modifiers,
        available_policies,
        available_policy_files,
        make_policy,
    )
    from hf_paged_eviction.internals import ALLOCATORS, DISPOSALS, PAGED_EVICTION, POLICIES

    def listed(registry: Any, names: Iterable[str]) -> list[str]:
        classes = registry.classes
        return [name for name in names if not own or classes[name.removesuffix(":")].__module__.startswith(_PACKAGE)]

    seen: list[list[str]] = []
    by_queries: list[list[str]] = []
    for name in listed(POLICIES, available_policies()):
        try:
            policy = make_policy(name)
        except ValueError:  # one of another package, with a parameter that has no default
            continue
        (by_queries if policy.needs.queries else seen).append([name, policy.paper or "", _summary(type(policy))])
    files = [
        [f"{start}FILE", kind.paper or "", _summary(kind)]
        for start in listed(POLICIES, available_policy_files())
        for kind in [POLICIES.classes[start[:-1]]]
    ]
    return {
        "sections": {
            "by keys, values and positions; with every attention implementation": seen,
            f"by queries or attention too; with the attention implementation {PAGED_EVICTION}": by_queries,
            "fitted to the model at hand, made of a file": files,
        },
        "modifiers": listed(POLICIES, available_modifiers()),
        "allocators": listed(ALLOCATORS, available_allocators()),
        "disposals": sorted(
            name + "FILE" * name.endswith(":")
            for name in listed(DISPOSALS, (*available_disposals(), *DISPOSALS.files()))
        ),
    }


def _summary(kind: type) -> str:
    return (getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ").replace("`", "")


def main() -> None:
    """Write the file."""
    PATH.write_text(json.dumps(make_policy_table(own=True), indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
