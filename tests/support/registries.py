"""Registries that are afterwards as before."""

import pytest

from hf_paged_eviction.naming import Registry


def forget_after(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:  # type: ignore[type-arg]
    """What a test registers is gone after it."""
    registry.load()
    monkeypatch.setattr(registry, "classes", dict(registry.classes))
