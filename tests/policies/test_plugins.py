"""Policies and allocators of other packages: entry points written by hand into a folder on the path."""

import sys
import textwrap
import warnings
from pathlib import Path

import pytest

import untouched
from hf_paged_eviction.allocators.registry import ALLOCATORS
from hf_paged_eviction.naming import Registry
from hf_paged_eviction.policies.registry import POLICIES
from processes import in_processes
from registries import forget_after

GOOD = """
    from dataclasses import dataclass

    from hf_paged_eviction import EvictionPolicy, available_policies, register_policy
    from hf_paged_eviction.allocators import FixedAllocator

    assert "keydiff" in available_policies()  # names may be asked for while a plugin is loaded


    @dataclass(frozen=True)
    class Oldest(EvictionPolicy):
        bias: float = 0.0

        def score(self, context):
            return self.bias - context.positions.float()


    @dataclass(frozen=True)
    class Steps(FixedAllocator):
        rise: float = 2.0

        def weights(self, layers, budget):
            return [self.rise**layer for layer in range(layers)]
"""
REGISTERS = """
    from hf_paged_eviction import EvictionPolicy, register_policy


    @register_policy("by_decorator")
    class ByDecorator(EvictionPolicy):
        def score(self, context):
            return context.positions.float()
"""


def install(folder: Path, package: str, code: str, entries: str) -> None:
    """A package as pip would leave it."""
    (folder / f"{package}.py").write_text(textwrap.dedent(code))
    facts = folder / f"{package}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(textwrap.dedent(entries))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for packages, and registries that have not looked for plugins yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for registry in (POLICIES, ALLOCATORS):
        _anew(monkeypatch, registry)
    return tmp_path


def _anew(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:  # type: ignore[type-arg]
    forget_after(monkeypatch, registry)
    monkeypatch.setattr(registry, "_plugins", None)


def test_policies_and_allocators_of_another_package(fresh: Path) -> None:
    entries = """
        [hf_paged_eviction.policies]
        good_oldest = good_plugin:Oldest
        good_decorated = good_decorating

        [hf_paged_eviction.allocators]
        good_steps = good_plugin:Steps
    """
    install(fresh, "good_plugin", GOOD, entries)
    (fresh / "good_decorating.py").write_text(textwrap.dedent(REGISTERS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert POLICIES.make("keydiff").label == "keydiff"
        assert "good_plugin" not in sys.modules  # a name that is known loads nothing
        assert POLICIES.make("graphkv(good_oldest(bias=1.5))").label == "graphkv(good_oldest(bias=1.5))"
        assert {"good_oldest", "by_decorator"} <= set(POLICIES.names())
        assert ALLOCATORS.make("good_steps(rise=3.0)").label == "good_steps(rise=3.0)"


def test_a_broken_one_is_named_and_harms_nobody(fresh: Path) -> None:
    install(
        *(fresh, "broken_plugin", "import no_such_module\n"),
        "[hf_paged_eviction.policies]\nbroken_one = broken_plugin:Policy\n",
    )
    install(fresh, "working_plugin", REGISTERS, "[hf_paged_eviction.policies]\nworking = working_plugin\n")
    with pytest.warns(RuntimeWarning) as caught:
        assert "by_decorator" in POLICIES.names()
        with pytest.raises(ValueError, match="Unknown policy 'broken_one'"):
            POLICIES.make("broken_one")
        POLICIES.names()
    assert [str(warning.message) for warning in caught] == [
        "'broken_one' of the package 'broken_plugin' (entry point hf_paged_eviction.policies: broken_plugin:Policy) is "
        "left out: ModuleNotFoundError: No module named 'no_such_module'"
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("keydiff = clashing_plugin:Oldest", r"'keydiff'.*hf_paged_eviction.policies.keys.keydiff.KeyDiff"),
        ("clash = clashing_plugin:Steps", "EvictionPolicy"),
        ("clash = clashing_plugin:Nothing", "'Nothing'"),
    ],
)
def test_what_does_not_fit_is_left_out(fresh: Path, entry: str, message: str) -> None:
    install(fresh, "clashing_plugin", GOOD, f"[hf_paged_eviction.policies]\n{entry}\n")
    with pytest.warns(RuntimeWarning, match=message):
        assert POLICIES.make("keydiff") in [POLICIES.classes["keydiff"]()]
        POLICIES.names()
    assert "clash" not in POLICIES.names()
    assert POLICIES.classes["keydiff"].__module__ == "hf_paged_eviction.policies.keys.keydiff"


def test_importing_the_library_loads_no_plugin(tmp_path: Path) -> None:
    """Nor does naming what there is: a broken plugin cannot break what does without it."""
    install(tmp_path, "quiet_plugin", "", "[hf_paged_eviction.policies]\nx = quiet_plugin:X\n")
    assert in_processes(1, untouched.plugins_loaded, str(tmp_path), "quiet_plugin") == [False]
