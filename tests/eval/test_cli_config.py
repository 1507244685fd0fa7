"""A run in one YAML file."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import invoking
from hf_paged_eviction_eval.commands import evaluate
from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.options.run_file import as_run_file
from hf_paged_eviction_eval.running import requests
from invoking import run


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[EvalOptions]:
    """Options that reached the run, which does not start."""
    runs: list[EvalOptions] = []
    monkeypatch.setattr("hf_paged_eviction_eval.commands.evaluate.run", lambda options: runs.append(options) or True)
    return runs


def invoke(*arguments: str, status: int = 0) -> str:
    return str(run("eval", *arguments, status=status).output)


def config(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, "utf-8")
    return str(path)


#: Values of options of each kind that are not what they are by default.
OTHER: dict[str, Any] = {"policies": ["keydiff", "full"], "budgets": [256, "25%", "full"], "length": [512, 1024]}
OTHER |= {"tasks": ["paper", "niah"], "text": ["a.txt", "b c.txt"], "output": "some/where", "batch_size": 4}
OTHER |= {"chat_template_kwargs": {"enable_thinking": False}, "question_aware": False, "max_length": 7500}


def test_every_option_from_a_file(tmp_path: Path, seen: list[EvalOptions]) -> None:
    """Under its name, with hyphens or underscores; those that are not named here as they are by default."""
    usual = EvalOptions(device="cpu").model_dump(mode="json", exclude={"config"}, exclude_none=True)
    text = yaml.safe_dump({name.replace("_", "-"): value for name, value in (usual | OTHER).items()})
    invoke("--config", config(tmp_path, f"{text}recent_tokens: 64  # with an underscore too\n"))
    (options,) = seen
    assert (options.policies, options.budgets, options.length) == ("keydiff,full", "256,25%,full", "512,1024")
    assert (options.tasks, options.batch_size, options.max_length) == ("paper,niah", 4, 7500)
    assert options.question_aware is False and options.recent_tokens == 64 and options.output == Path("some/where")
    assert options.text == [Path("a.txt"), Path("b c.txt")]


def test_the_command_line_beats_the_file(tmp_path: Path, seen: list[EvalOptions]) -> None:
    path = config(tmp_path, "limit: 3\nseed: 4\nquestion-aware: false\nbudgets: 256\nbatch-size:\ntokenizer:\n")
    invoke("--limit", "5", "--config", path, "--question-aware")
    (options,) = seen
    assert (options.limit, options.seed, options.question_aware, options.budgets) == (5, 4, True, "256")
    assert options.batch_size is None and options.tokenizer is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limits: 3", "line 1: unknown option 'limits', did you mean 'limit'?"),
        (
            "limit: 1\n\nquestion-agnostic: true",
            "line 3: unknown option 'question-agnostic', did you mean 'question-aware'",
        ),
        ("config: other.yaml", "unknown option 'config'"),
        ("limit: 1\nlimit: 2", "line 2: 'limit' is there twice"),
        ("limit: many", "limit: 'many' cannot be used: write a whole number from 1 up"),
        ("limit: 0", "limit: 0 cannot be used: write a whole number from 1 up"),
        ("limit: 1.5", "limit: 1.5 cannot be used"),
        ("agreement: 1", "agreement: 1 cannot be used: write true or false"),
        ("heads: both", "heads: 'both' cannot be used: write shared or separate"),
        ("model: 7", "model: 7 cannot be used: write a text"),
        ("revision: 1234567", "in quotes"),
        ("policies: []", "not empty"),
        ("budgets: [0.5]", "budgets: [0.5] cannot be used"),
        ("text: book.txt", "write a list of file names"),
        ("limit", "has no options in it"),
        ("", "has no options in it"),
        ("a: [", "is not YAML"),
        ("model: !!python/object:os.system x", "is not YAML"),
        ("? [a]\n: 1", "cannot be used"),
        ("output: 2026-99-99", "is not YAML"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, seen: list[EvalOptions], text: str, message: str) -> None:
    path = config(tmp_path, text)
    output = invoke("--config", path, status=2)
    if text != "? [a]\n: 1":
        assert message in output
    assert path in output and "Traceback" not in output and not seen


def test_files_that_cannot_be_read(tmp_path: Path, seen: list[EvalOptions]) -> None:
    assert "No such file" in invoke("--config", str(tmp_path / "none.yaml"), status=2)
    assert "cannot be read" in invoke("--config", str(tmp_path), status=2)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00limit")
    assert "UTF-8" in invoke("--config", str(tmp_path / "bytes.yaml"), status=2)
    assert not seen


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    content=st.dictionaries(
        st.sampled_from([name.replace("_", "-") for name in EvalOptions.model_fields]) | st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
            max_leaves=4,
        ),
        max_size=3,
    )
)
def test_any_content_is_read_or_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any]
) -> None:
    monkeypatch.setattr("hf_paged_eviction_eval.commands.evaluate.run", lambda options: True)
    path = config(tmp_path, yaml.safe_dump(content))
    result = invoking.invoke("eval", "--config", path)
    assert result.exit_code in (0, 2)
    assert result.exit_code == 0 or "mine.yaml" in result.output


@pytest.mark.parametrize(
    "options",
    [
        EvalOptions(),
        EvalOptions(policies="full", tasks="hotpotqa,lcc_e", limit=2, max_length=500, data_dir="my data", batch_size=3),
        EvalOptions(
            policies="keydiff",
            budgets="256,12.5%",
            tasks="ruler,qasper",
            length="512,777",
            question_aware=False,
            prefill_chunk_size=7,
            seed=-3,
            block_size=4,
            dataset_revision="1234567",
        ),
        EvalOptions(device="cpu", output=Path("somewhere/ä")),
        EvalOptions(text=[Path(__file__)], policies="recency", budgets="64", length="99", chunk=5, limit=2),
        EvalOptions(text=[]),
    ],
)
def test_settings_read_back_from_their_file(tmp_path: Path, seen: list[EvalOptions], options: EvalOptions) -> None:
    request = requests.request_of(options)
    invoke("--config", config(tmp_path, as_run_file(request.settings, request.output)))
    assert requests.request_of(seen[0]) == request


def test_options_that_are_not_for_texts_are_options() -> None:
    names = {*EvalOptions.model_fields}
    assert names >= evaluate.TASKS_ONLY and names >= evaluate.TEXTS_ONLY


def test_nested_aliases_are_refused_before_they_grow(tmp_path: Path, seen: list[EvalOptions]) -> None:
    lines = ["limit:", "  - &b0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"  - &b{at} [{','.join([f'*b{at - 1}'] * 9)}]" for at in range(1, 9)]
    output = invoke("--config", config(tmp_path, "\n".join(lines)), status=2)
    assert "alias" in output and len(output) < 500 and not seen


def test_a_long_value_is_named_in_few_words(tmp_path: Path, seen: list[EvalOptions]) -> None:
    output = invoke("--config", config(tmp_path, f"limit: [{', '.join(['x'] * 10_000)}]"), status=2)
    assert "limit" in output and len(output) < 500 and not seen


LONG = "x" * 300


@pytest.mark.parametrize(
    "line",
    [
        ["score", LONG],
        ["report", LONG],
        ["plan", "--model", LONG],
        ["prepare", "--text", LONG],
        ["eval", "--task-file", f"{LONG}.jsonl"],
        ["eval", "--model", LONG],
        ["eval", "--policies", "observed", "--profile", LONG],
        ["eval", "--output", LONG],
        ["verify", "--output", LONG],
        ["compress", "--budget", "64", "--text", LONG, "--output", "a.safetensors"],
    ],
    ids=lambda line: " ".join(line).replace(LONG, "LONG"),
)
def test_a_name_that_no_file_can_have_is_one_line(line: list[str]) -> None:
    output = str(run(*line, status=2).output)
    assert "error:" in output and "Traceback" not in output
