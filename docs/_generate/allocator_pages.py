"""The guide to budget allocators, made of the registry."""

from __future__ import annotations

import measured
from writing import docstring, paper_link, signature, table

from hf_paged_eviction import available_allocators, make_allocator
from hf_paged_eviction.allocators import BudgetAllocator, FixedAllocator, HeadAllocator, Heads, LayerAllocator, Uniform

_OF_PROFILE = ", with a [profile](../guide.md#prepare-your-model)"
_KINDS = {
    FixedAllocator: ("layers, for each row", "by the index of the layer and the length of the row's text"),
    LayerAllocator: ("layers, for each row", "by attention, layer by layer during the prefill"),
    HeadAllocator: ("KV heads of a layer, for each row; needs `heads='separate'`", "by the policy's scores"),
}


def sections(_: str) -> str:
    """A section for each allocator."""
    allocators = {name: make_allocator(name) for name in available_allocators()} | {"heads": Heads.of([[1.0]])}
    return "\n\n".join(_section(name, allocators[name]) for name in sorted(allocators))


def _section(name: str, allocator: BudgetAllocator) -> str:
    cls = type(allocator)
    among, decided = next(
        (kind for base, kind in _KINDS.items() if isinstance(allocator, base)), ("unknown", "unknown")
    )
    if allocator.per_head:
        among = "KV heads of all layers" if not isinstance(allocator, HeadAllocator) else among
    facts = [
        ("Write", f"`allocator={name!r}`{_OF_PROFILE * allocator.reads_profile}"),
        ("Paper", paper_link(allocator.paper)),
        ("Divides the budget among", among),
        ("Decides", decided),
        ("Attention implementation", "any" if isinstance(allocator, Uniform) else "`paged_eviction`"),
        ("Extra memory", _memory(allocator)),
    ]
    is_measured = name == "uniform" or any(policy.endswith(f"@{name}") for policy in measured.measured_names())
    parts = [
        f"## `{name}`",
        docstring(cls),
        signature(cls, name),
        table(("", ""), facts, numbers_from=2),
        "" if is_measured else "Not measured.",
    ]
    return "\n\n".join(part for part in parts if part)


def _memory(allocator: BudgetAllocator) -> str:
    if not isinstance(allocator, LayerAllocator):
        return "none"
    names = allocator.token_statistics
    numbers = "number" if len(names) == 1 else "numbers"
    return f"{len(names)} {numbers} per token, KV head and layer during a forward ({', '.join(names)})"
