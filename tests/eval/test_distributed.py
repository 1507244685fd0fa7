"""Several processes share a run: the same rows, whoever dies."""

import json
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_paged_eviction_eval.data.prompting.prompts import Batch
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.plans import share_batches
from hf_paged_eviction_eval.running.processes.distributed import Team, join, speaker
from processes import Child, Commands, meta_of, reserved_port, rows_of, wait_for

#: Bytes of rows after which one dies.
ENOUGH = 4 * 1024

ROWS = 24


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as number:
        yield number


def start(commands: Commands, command: list[str], port: int, dies: int | None = None) -> list[Child]:
    """Two processes that no launcher watches over; one of them may die in the middle of its rows."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        commands.start(
            command,
            most_bytes=ENOUGH if rank == dies else 0,
            environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            deadly=True,
        )
        for rank in range(2)
    ]


def those_of(few: Path, all_of_them: Path) -> list[dict[str, Any]]:
    """The rows of the samples of a run of `recency` alone; eight."""
    names = {row["id"] for row in rows_of(few)}
    rows = [row for row in rows_of(all_of_them) if row["id"] in names and row["policy"] != "paged_eviction"]
    assert len(rows) == 8
    return rows


#: Says what the launcher told it, and ends as the process that ran in its place, or with the launcher.
_STAND_IN = """
import json, os, pathlib, sys, time
told, ended = (pathlib.Path(sys.argv[1], name + os.environ["RANK"]) for name in ("told", "ended"))
told.with_suffix(".part").write_text(json.dumps(dict(os.environ)))
told.with_suffix(".part").rename(told)
launcher = os.getppid()
while not ended.exists():
    time.sleep(0.02)
    if os.getppid() != launcher:
        sys.exit(1)
sys.exit(int(ended.read_text()))
"""


def launch(arguments: list[str]) -> None:
    """`accelerate launch`."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    launch_command(launch_command_parser().parse_args(arguments))


def test_accelerate_launch_gives_the_rows_of_one_process(
    commands: Commands, words: list[str], expected: Path, tmp_path: Path
) -> None:
    """With what the launcher sets, as long as it runs; its processes would import everything anew."""
    (tmp_path / "stand_in.py").write_text(_STAND_IN)
    command = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    command += f" --main_process_port 0 {tmp_path / 'stand_in.py'} {tmp_path}"
    few = ["--policies", "recency", "--limit", "2", "--output", str(tmp_path / "out")]
    launcher = commands.start(command.split(), main=f"{__name__}:launch", environment={"OMP_NUM_THREADS": "1"})
    variable_files = [tmp_path / f"told{rank}" for rank in range(2)]
    wait_for(lambda: "Traceback" in launcher.output or all(path.exists() for path in variable_files))
    environments = [json.loads(path.read_text()) for path in variable_files]
    children = [commands.start([*words, *few], environment=environment) for environment in environments]
    for rank, child in enumerate(children):
        (tmp_path / f"part{rank}").write_text(str(child.wait()))
        (tmp_path / f"part{rank}").rename(tmp_path / f"ended{rank}")
    assert launcher.wait() == 0, [child.output for child in (launcher, *children)]
    assert rows_of(tmp_path / "out") == those_of(tmp_path / "out", expected)
    output = "".join(child.output for child in children)
    assert output.count("mean of 2") == 1 and output.count("written to") == 1
    meta = meta_of(tmp_path / "out")
    assert meta["hardware"]["processes"] == 2 and meta["complete"]


def test_shards_come_and_go_on_their_own(commands: Commands, words: list[str], expected: Path, tmp_path: Path) -> None:
    """One is killed and started again, two run at once, and the last to end shows the tables."""
    command = [*words, "--output", str(tmp_path), "--shard"]
    status, output = commands.run([*command, "1/3"], most_bytes=ENOUGH, deadly=True)
    assert status == -signal.SIGXFSZ, output
    (killed,) = tmp_path.glob("rows.*")
    assert killed.stat().st_size == ENOUGH
    children = [commands.start([*command, "2/3"]), commands.start([*command, "3/3"])]
    assert [child.wait() for child in children] == [0, 0], [child.output for child in children]
    assert all("rows are those of other shards" in child.output for child in children)
    assert len(rows_of(tmp_path)) < ROWS and not (tmp_path / "summary.json").exists()
    assert not meta_of(tmp_path)["complete"]
    status, output = commands.run([*command, "1/3"])
    assert status == 0 and "mean of 2" in output, output
    assert rows_of(tmp_path) == rows_of(expected)
    assert len(list(tmp_path.glob("rows.*"))) == 4 and meta_of(tmp_path)["complete"]


@pytest.mark.parametrize("dies", [0, 1])
def test_who_is_left_does_its_share(
    commands: Commands, words: list[str], expected: Path, tmp_path: Path, port: int, dies: int
) -> None:
    """A launcher ends all when one dies; without one that watches, the others write what is theirs and say why."""
    command = [*words, "--output", str(tmp_path)]
    children = start(commands, command, port, dies)
    assert children[dies].wait() == -signal.SIGXFSZ, children[dies].output
    left = children[1 - dies]
    assert left.wait() == 2, left.output
    assert "another process of this run ended early; run the same command again" in left.output
    status, output = commands.run(command)
    assert status == 0, output
    assert rows_of(tmp_path) == rows_of(expected)


def test_what_the_main_one_refuses_it_says_alone(
    commands: Commands, words: list[str], expected: Path, port: int
) -> None:
    before = rows_of(expected)
    children = start(commands, [*words, "--output", str(expected), "--budgets", "10%", "--agreement"], port)
    assert [child.wait() for child in children] == [2, 2]
    assert "add full to --budgets" in children[0].output
    assert "error" not in children[1].output and "Traceback" not in children[1].output
    assert rows_of(expected) == before


def test_questions_about_one_context_stay_together() -> None:
    """However large the batches are in each process: free memory decides that."""

    def batches(size: int) -> list[Batch]:
        prompts = [
            SimpleNamespace(context=(context,), id=(context, index)) for context in range(5) for index in range(2)
        ]
        return [
            Batch(task, None, tuple(prompts[at : at + size]))  # type: ignore[arg-type]
            for task in ("a", "b")
            for at in range(0, 10, size)
        ]

    shares = [share_batches(Team(rank, 3), batches(size)) for rank, size in enumerate((2, 4, 5))]
    ids = [[(batch.task, prompt.id) for batch in share for prompt in batch.prompts] for share in shares]
    every = [name for share in ids for name in share]
    assert sorted(every) == [(task, (text, at)) for task in "ab" for text in range(5) for at in range(2)]
    assert [len(own_ids) for own_ids in ids] == [8, 6, 6], "who begins changes from task to task"
    for share in ids:
        assert all((task, (text, 1 - at)) in share for task, (text, at) in share)


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({"device_map": "auto"}, "2", "without a launcher"),
        ({"device": "cuda:1"}, "2", "--device cuda$"),
        ({"shard": "1/2"}, "2", "--shard 1/2"),
        ({"shard": "0/2"}, "1", r"--shard 0/2.*1"),
        ({"shard": "3"}, "1", r"--shard 3.*1"),
    ],
)
def test_settings_that_do_not_go_with_the_launcher(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], world: str, message: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    shard = changes.pop("shard", None)
    with pytest.raises(UserError, match=message):
        join(TaskSettings(policies=(), budgets=("full",), tasks=("passkey",), **changes), shard)  # type: ignore[arg-type]


def test_who_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speaker() == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert speaker() == ""
    monkeypatch.setenv("RANK", "1")
    assert speaker() is None


@pytest.mark.parametrize("cpu", ["True", "False", None])
def test_accelerate_starts_one_process_on_a_cpu(cpu: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of `--num_processes` to the one that it starts, so this one says it."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if cpu is not None:
        monkeypatch.setenv("ACCELERATE_USE_CPU", cpu)
    settings = TaskSettings(policies=(), budgets=("full",), tasks=("passkey",))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert join(settings) == Team()
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (cpu == "True") and all("--workers 2" in text for text in messages)
