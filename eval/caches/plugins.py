"""Modules named with `--plugin`: they register policies, allocators or disposals of their own."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from ..errors import UserError

#: Where the plugins of a process stand, one per line, for the processes that it starts.
VARIABLE = "PAGED_EVICTION_PLUGINS"


def load_plugins(names: Sequence[str]) -> None:
    """Import modules, or `.py` files, that register policies, allocators or disposals.

    The plugins of the process that started this one are loaded, too; a worker calls this without names.

    Raises:
        UserError: there is no such module or file, or it cannot be imported.
    """
    places = [str(Path(name).resolve()) if _is_file(name) else name for name in names]
    wanted = list(dict.fromkeys([*plugin_names(), *places]))
    for place in wanted:
        _load(place)
    if wanted:
        os.environ[VARIABLE] = "\n".join(wanted)


def plugin_names() -> list[str]:
    """The plugins that this process, and those that it starts, were told of."""
    return os.environ.get(VARIABLE, "").splitlines()


def plugin_facts() -> list[dict[str, Any]]:
    """What is registered and not of this package, however it came here: module, its package and SHA-256 of its file."""
    from hf_paged_eviction.internals import ALLOCATORS, DISPOSALS, POLICIES

    registries: tuple[Any, ...] = (POLICIES, ALLOCATORS, DISPOSALS)
    classes = [cls for registry in registries for cls in registry.classes.values()]
    modules = sorted({cls.__module__ for cls in classes if not cls.__module__.startswith("hf_paged_eviction")})
    return [_facts(name) for name in modules]


def _facts(name: str) -> dict[str, Any]:
    file = getattr(sys.modules.get(name), "__file__", None)
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else None
    return {"module": name, "package": _package(name), "sha256": digest}


def _package(module: str) -> str | None:
    """Name and version of the installed package that a module is of."""
    names = packages_distributions().get(module.partition(".")[0])
    return f"{names[0]} {version(names[0])}" if names else None


def _is_file(name: str) -> bool:
    return name.endswith(".py") or os.sep in name or Path(name).is_file()


def _load(name: str) -> None:
    try:
        _import_file(Path(name)) if _is_file(name) else _import_module(name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"--plugin {name}: {type(error).__name__}: {error}") from error


def _import_module(name: str) -> None:
    here = os.getcwd()
    if here not in sys.path:  # a module that lies in the folder of the command
        sys.path.append(here)
    importlib.import_module(name)


def _import_file(file: Path) -> None:
    if not file.is_file():
        raise UserError(f"--plugin {file}: there is no such file; give a .py file, or the name of a module")
    # Two files may have one name; and a file must not take the place of a module.
    name = f"plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise UserError(f"--plugin {file} is not a .py file")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
