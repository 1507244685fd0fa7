"""The documentation builds without a warning, leads nowhere that is not there, and shows all that is registered."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

import hf_paged_eviction
from hf_paged_eviction import (
    EvictionPolicy,
    ScoreContext,
    available_allocators,
    available_modifiers,
    available_policies,
    make_allocator,
    make_policy,
    register_policy,
)
from hf_paged_eviction.policies import registry
from processes import Commands
from registries import forget_after
from scripts import load

for package in ("sphinx", "myst_nb", "furo", "sphinx_copybutton"):
    pytest.importorskip(package, reason="the extra `docs` is not installed")

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def html(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    words = ["-W", "-n", "--keep-going", "-q", "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")]
    child = commands.start(words, main="sphinx.cmd.build:main")
    assert child.wait() == 0, child.output
    return folder / "html"


def test_every_link_inside_leads_somewhere_and_nothing_is_loaded(html: Path) -> None:
    assert load(DOCS / "check_links.py").problems(html) == []


def test_the_check_of_links_notices(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<p id="here">x</p>', "utf-8")
    (tmp_path / "page.html").write_text(
        '<a href="other.html#here"></a><a href="other.html#there"></a><a href="gone.html"></a>'
        '<script src="https://cdn.example/x.js"></script><a href="https://example.org/"></a><img src="gone.png">',
        "utf-8",
    )
    problems = load(DOCS / "check_links.py").problems(tmp_path)
    assert [line.rpartition(" ")[0].partition(":")[0] for line in problems] == [
        "page.html loads",
        "page.html leads to other.html#there",
        "page.html leads to gone.html",
        "page.html leads to gone.png",
    ]


@pytest.mark.usefixtures("drawn")
def test_generated_parts_are_up_to_date(generate: ModuleType) -> None:
    stale = [path.name for path, before, after in generate.pages() if before != after]
    assert not stale, "run: make docs-pages"


def test_there_are_few_pages() -> None:
    assert len([*DOCS.glob("**/*.md"), *(DOCS.parent / "notebooks").glob("*.ipynb")]) <= 30


def test_a_new_policy_appears_by_itself(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_after(monkeypatch, registry.POLICIES)

    @register_policy("longest_key")
    @dataclass(frozen=True)
    class LongestKey(EvictionPolicy):
        """The norm of the key."""

        weight: float = 1.0

        def score(self, context: ScoreContext) -> Tensor:
            return self.weight * context.keys.float().norm(dim=-1)

    policies = generate.policy_pages
    assert "| `longest_key(weight=1.0)` | The norm of the key. | keys | none |  |  |" in policies.others("")
    monkeypatch.setattr(policies, "beats_random", lambda name: name == "longest_key")
    section = policies.sections("keys-and-values").partition("### `longest_key`")[2].partition("\n### ")[0]
    assert "The norm of the key." in section and "longest_key(weight: float = 1.0)" in section
    assert "[`longest_key`](policies.md#longest_key) | keys | at each decision | none |" in policies.overview("")


def test_policies_and_allocators_of_the_package_have_a_formula() -> None:
    things = [*map(make_policy, available_policies()), *map(make_allocator, available_allocators())]
    ours = [type(thing) for thing in things if type(thing).__module__.startswith("hf_paged_eviction.")]
    assert [cls.__name__ for cls in ours if ".. math::" not in (cls.__doc__ or "")] == []


def test_every_name_is_described() -> None:
    headings = {
        page.stem: re.findall(r"^#+ `(.+)`$", page.read_text("utf-8"), re.MULTILINE) for page in DOCS.rglob("*.md")
    }
    names = set(hf_paged_eviction.__all__) - {"__version__"}
    assert names <= {*headings["api"], *headings["policies"]}
    listed = re.findall(r"^\| `(\w+)\(", (DOCS / "reference" / "policies.md").read_text("utf-8"), re.MULTILINE)
    assert {*available_policies(), *available_modifiers()} <= {*headings["policies"], *listed}
    assert set(available_allocators()) <= set(headings["allocators"])
