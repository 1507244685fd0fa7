"""Load plugins of other packages by entry points."""

import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any


class Plugins:
    """The entry points of one group.

    `name = "package.module:Class"` is a class, which gets that name. `name = "package.module"` is a module that
    registers its classes when it is imported.

    Args:
        group: name of the group, such as `hf_paged_eviction.policies`.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._waiting: list[EntryPoint] | None = None

    def load(self, register: Callable[[str, Any], Any]) -> None:
        """Load each entry point once. If one fails, there is a warning, and the others are loaded.

        Args:
            register: takes a name and a class; may raise.
        """
        if self._waiting is None:
            entries = entry_points(group=self._group)
            self._waiting = sorted(entries, key=lambda entry: (_package(entry), entry.name))
        while self._waiting:  # a plugin may ask for names itself while it is loaded
            entry = self._waiting.pop(0)
            try:
                loaded = entry.load()
                if entry.attr:
                    register(entry.name, loaded)
            except (Exception, SystemExit) as error:
                warnings.warn(
                    f"{entry.name!r} of the package {_package(entry)!r} (entry point {self._group}: {entry.value}) is "
                    f"left out: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _package(entry: EntryPoint) -> str:
    return "?" if entry.dist is None else entry.dist.name
