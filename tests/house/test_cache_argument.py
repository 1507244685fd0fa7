"""The argument for a cache has a name of its own in each transformers release, which one place knows."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = "hf_paged_eviction eval lab serving examples benchmarks docs training tests notebooks".split()
#: Run with a release of transformers that knows the old name alone, which the other party needs.
OF_ANOTHER_RELEASE = {"benchmarks/peers.py"}
OLD = "past_key_values"


def hands_over(path: Path) -> bool:
    """Whether a call, or a dictionary of arguments, gives something by the old name."""
    text = path.read_text("utf-8")
    for node in ast.walk(ast.parse(text)) if OLD in text else ():
        if isinstance(node, ast.keyword) and node.arg == OLD:
            return True
        if isinstance(node, ast.Dict):
            names = zip(node.keys, node.values, strict=True)
            values = [value for name, value in names if isinstance(name, ast.Constant) and name.value == OLD]
            if any(not isinstance(value, ast.Constant) for value in values):
                return True
    return False


def test_nobody_hands_a_cache_over_by_a_name_that_is_written_out() -> None:
    programs = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    offenders = {str(path.relative_to(ROOT)) for path in programs if hands_over(path)}
    assert offenders == OF_ANOTHER_RELEASE, "use hf_paged_eviction.integration.cache_argument instead"
    notebooks = [path for path in (ROOT / "notebooks").rglob("*.ipynb") if f"{OLD}=" in path.read_text("utf-8")]
    assert not notebooks
