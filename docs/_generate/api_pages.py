"""The reference of the public names, made of their docstrings: those of the package itself whole but for what they
raise, those that extend it by their first paragraph and their arguments, and methods by a line each."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from writing import call, docstring, first_paragraph, signature

from hf_paged_eviction.allocators import BudgetAllocator
from hf_paged_eviction.policies import EvictionPolicy

_ROOT = "hf_paged_eviction"
#: Classes that pages of their own describe.
_ELSEWHERE = (EvictionPolicy, BudgetAllocator)
#: What `help` says and the page does not.
_LEFT_OUT = ("Raises",)


def sections(name: str) -> str:
    """A section for each public name of a module that is defined in its package."""
    module = importlib.import_module(name)
    described: dict[str, str] = {}
    parts = []
    for entry_name, thing in _public(module):
        text = docstring(thing, without=_LEFT_OUT)
        parts.append(_section(entry_name, thing, described.get(text, text)))
        described.setdefault(text, f"See `{entry_name}`.")
    return "\n\n".join(parts)


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    names = getattr(module, "__all__", None) or [
        name for name, thing in vars(module).items() if getattr(thing, "__module__", None) == module.__name__
    ]
    for name in names:
        thing = getattr(module, name)
        listed = (inspect.isclass(thing) or inspect.isroutine(thing)) and thing is not Any and not name.startswith("_")
        if listed and not _is_elsewhere(thing) and not _is_of_library(module, name):
            yield name, thing


def _is_elsewhere(thing: Any) -> bool:
    """A policy or an allocator that has a name: the reference of policies and that of allocators have it."""
    return inspect.isclass(thing) and issubclass(thing, _ELSEWHERE) and bool(vars(thing).get("name"))


def _is_of_library(module: ModuleType, name: str) -> bool:
    library = importlib.import_module(_ROOT)
    return module is not library and name in library.__all__


def _section(name: str, thing: Any, text: str) -> str:
    parts = [f"### `{name}`"]
    if not (inspect.isclass(thing) and issubclass(thing, BaseException)):
        parts.append(signature(thing, name))
    parts.append(text)
    if inspect.isclass(thing):
        parts.append("\n".join(_member(member_name, member) for member_name, member in _members(thing)))
    return "\n\n".join(part for part in parts if part)


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties of a class that it documents itself, and not as those of its base."""
    for name, member in vars(cls).items():
        inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(inner) and not (inner.__doc__ or "See ").startswith("See "):
            yield name, member


def _member(name: str, member: Any) -> str:
    if isinstance(member, property):
        return f"- `.{name}`: {first_paragraph(member.fget)}"
    return f"- `.{call(member, name)}`: {first_paragraph(member)}"
