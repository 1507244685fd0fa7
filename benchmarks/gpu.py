"""Everything that needs a GPU, in one command: tests, `verify`, times and memory.

    python benchmarks/gpu.py              # or: make gpu
    python benchmarks/gpu.py --dry-run    # the same steps, small and on the CPU

An hour at most: each step is a process of its own with a limit, and one that fails or hangs stops none of the others.
Steps that are finished are not run again, and benchmarks that were cut off go on where they were, so the command may be
stopped and repeated. What was found goes into one file, `gpu.json`, and one page, `gpu.md`, in
`benchmarks/results`, both made to be committed as they are. Logs and rows lie in `results/gpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_paged_eviction_eval.store.results import write_whole

HERE = Path(__file__).parents[1]
EVAL = (sys.executable, "-m", "hf_paged_eviction_eval")
TESTS = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=")
DONE, FAILED, STOPPED = "done", "failed", "stopped"
_PATIENCE = 10
#: Families of `verify`: plain, with a window, sinks, latents, and a linear state beside keys and values.
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next")


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        says: what it shows.
        command: what runs; `{out}` is the folder of the step and `{device}` the device.
        small: what is put behind the command in a dry run.
        minutes: after so many it is stopped; in a dry run, which may have to share a small machine, ten times later.
    """

    name: str
    says: str
    command: tuple[str, ...]
    small: tuple[str, ...] = ()
    minutes: float = 10
    result: str | None = "summary.json"


def timed(script: str, name: str, says: str, words: str, small: str, minutes: float) -> Step:
    """A run of `paged-eviction bench`, or of another script of this folder, on a model of the shape of Llama 3.2 1B."""
    program = (*EVAL, "bench") if script == "bench" else (sys.executable, str(Path(__file__).with_name(script)))
    command = (*program, *words.split(), "--model", "llama-3.2-1b", "--device", "{device}", "--output", "{out}")
    return Step(name, says, command, tuple(f"--threads 1 {small}".split()), minutes)


STEPS = (
    Step(
        "cuda",
        "no synchronisation in a decode step, CUDA graphs, attention kernels, Triton kernels for few bits",
        (*TESTS, "tests/contract/test_cuda.py", "tests/precision/test_kernel.py", "-n", "6"),
        ("-n", "0"),
        minutes=6,
        result=None,
    ),
    Step(
        "contract",
        "the contract suite on the device",
        (*TESTS, "-m", "contract", "tests/contract", "--device", "{device}", "-n", "12"),
        ("-n", "0", "--device", "pretend", "-k", "test_low_precision and greedy"),
        minutes=10,
        result=None,
    ),
    Step(
        "verify",
        "logits against DynamicCache for five families",
        (sys.executable, str(Path(__file__)), "--verify", "{out}/verify.json", "--device", "{device}"),
        minutes=3,
        result="verify.json",
    ),
    timed(
        "bench",
        "decode",
        "a decoded token at 128k, eager and with CUDA graphs",
        "--contexts 131072 --budgets 1024 --batch-sizes 1,8 --rounds 3 --variants floor_compiled,paged_static_own,full",
        "--model 100m --contexts 64,128 --budgets 64 --batch-sizes 1 --steps 16 --rounds 1 --variants floor,paged,full",
        minutes=5,
    ),
    *(
        timed(
            "bench",
            name,
            f"a decoded token in compiled steps, {says}: the context does not matter",
            f"--contexts 16384 --budgets 1024,8192 --batch-sizes 1,8 {words} --variants paged_static_own",
            "--model 100m --contexts 128 --budgets 64 --batch-sizes 1 --steps 16 --rounds 1 --variants paged",
            minutes=5,
        )
        for name, says, words in (("no_bits", "as it came", ""), ("bits", "in 4 bits", "--bits 4"))
    ),
    Step(
        "codes",
        "attention of a step to codes: Triton kernels, operators of torch, and without bits",
        (
            sys.executable,
            str(Path(__file__).with_name("gpu_codes.py")),
            *("--device", "{device}", "--output", "{out}/summary.json"),
        ),
        tuple("--tokens 64,128 --rows 1 --bits 4 --steps 2 --rounds 1".split()),
        minutes=5,
    ),
    timed(
        "answers.py",
        "answers",
        "throughput of 64 requests, 1,024 tokens in and 8,192 out",
        "--budgets 1024 --variants paged_static_own",
        "--model 100m --budgets 96 --requests 1 --input-tokens 32 --output-tokens 16",
        minutes=4,
    ),
    timed(
        "prefill.py",
        "prefill",
        "the time to the first token of 2k to 128k tokens",
        "--contexts 2048 8192 32768 131072",
        "--model prefill --contexts 256 512 --budgets 128",
        minutes=5,
    ),
    timed(
        "answers.py",
        "paper",
        "the figures of the PagedEviction paper at one budget and with CUDA graphs, answers of 1,024 tokens",
        "--budgets 1024 --output-tokens 1024 --variants full paged_static_own paged_8 paged_16 paged_32 streaming_llm "
        "keydiff key_norm",
        "--model 100m --budgets 96 --requests 1 --input-tokens 128 --output-tokens 16 --variants full paged_16 keydiff",
        minutes=8,
    ),
    Step(  # never run on a GPU so far
        "vllm",
        "64 requests of 8k + 512 tokens at budget 1,024 inside vLLM, beside stock vLLM, where vLLM is installed",
        (
            *(sys.executable, str(Path(__file__).with_name("vllm_serving.py")), "--model", "llama-3.2-1b"),
            *"--requests 64 --tokens 8192 --new 512 --budget 1024 --chunk 8192 --dtype bfloat16".split(),
            *("--variants", "stock,evicting", "--output", "{out}/summary.json"),
        ),
        tuple("--requests 2 --tokens 64 --new 8 --budget 64 --chunk 64 --dtype float32 --share 2".split()),
        minutes=10,
    ),
)


def run(step: Step, folder: Path, device: str, dry: bool) -> dict[str, Any]:
    """Run a step to its end or its limit: what became of it. Its output goes to the terminal and into a log."""
    out = folder / step.name
    out.mkdir(parents=True, exist_ok=True)
    words = [word.format(out=out, device=device) for word in (*step.command, *(step.small if dry else ()))]
    shown = " ".join(words).replace(sys.executable, "python").replace(str(HERE) + "/", "")
    print(f"\n== {step.name}: {step.says}\n   {shown}", flush=True)
    started, log = time.monotonic(), out / "log.txt"
    limit = 60 * step.minutes * (_PATIENCE if dry else 1)
    with log.open("w", encoding="utf-8") as written:
        state = _state(words, limit, env=_environment(folder), cwd=HERE, stdout=written, stderr=subprocess.STDOUT)
    lines, seconds = _lines(log)[-12:], round(time.monotonic() - started, 1)
    print("\n".join(f"   {line}" for line in lines[-6:]) + f"\n   {state} after {seconds:.0f} s", flush=True)
    result = out / (step.result or "")
    return {
        "state": state,
        "seconds": seconds,
        "command": shown,
        "last_lines": [] if state == DONE else lines,
        "result": json.loads(result.read_text("utf-8")) if result.is_file() else None,
    }


def _state(words: Sequence[str], limit: float, **popen_arguments: Any) -> str:
    """How a process ended; none that it started outlives it, or this one, unless this one is killed without a word."""
    with subprocess.Popen(words, start_new_session=True, **popen_arguments) as process:
        try:
            return DONE if process.wait(limit) == 0 else FAILED
        except subprocess.TimeoutExpired:
            return STOPPED
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _environment(folder: Path) -> dict[str, str]:
    """That of this process; a checkout that is not installed is found, too, `eval` under its long name."""
    link = folder / "path" / "hf_paged_eviction_eval"
    if not link.exists():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(HERE / "eval")
    paths = [str(HERE), str(link.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "140"}


def verify_families(target: Path, device: str) -> bool:
    """`verify` of a tiny model of each family; whether none is wrong."""
    sys.path[:0] = [str(HERE / "tests"), str(HERE / "tests" / "support")]
    from families.building import build
    from families.listing import families
    from hf_paged_eviction import verify

    checks, fine = {}, True
    for family in families():
        if str(family) not in FAMILIES:
            continue
        report = verify(build(family).to(device))
        print(str(report).splitlines()[0])
        checks[str(family)] = {"exact": len(report.of("exact")), "wrong": [str(check) for check in report.of("wrong")]}
        fine = fine and report.ok
    target.write_text(json.dumps(checks, indent=1) + "\n", "utf-8")
    return fine and len(checks) == len(FAMILIES)


def page(facts: dict[str, Any], outcomes: dict[str, Any], tables: dict[str, str]) -> str:
    """What was found, to be read."""
    cards = ", ".join(card["name"] for card in facts["hardware"]["accelerators"]) or facts["hardware"]["cpu"]
    words = {name: facts["versions"][name] for name in ("torch", "transformers")}
    lines = [
        f"# On {cards}",
        "",
        f"`make gpu`, torch {words['torch']}, transformers {words['transformers']}, commit {facts['commit']}."
        + (" A dry run: small sizes on a CPU, which say nothing about a GPU." if facts["dry_run"] else ""),
        "",
        "| step | what it shows | state | seconds |",
        "|---|---|---|---:|",
    ]
    parts: list[str] = []
    for step in STEPS:
        outcome = outcomes.get(step.name)
        state, seconds = (outcome["state"], f"{outcome['seconds']:.0f}") if outcome else ("not run", "")
        lines.append(f"| {step.name} | {step.says} | {state} | {seconds} |")
        if outcome:
            parts += ["", f"## {step.name}", "", f"`{outcome['command']}`"]
            for text in filter(None, (tables[step.name], "\n".join(outcome["last_lines"]))):
                parts += ["", "```text", text, "```"]
    return "\n".join([*lines, *parts]) + "\n"


def _lines(log: Path) -> list[str]:
    """What a step printed, without the path of this folder."""
    text = log.read_text("utf-8", errors="replace").replace("\r", "\n").replace(f"{HERE}/", "")
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _table(out: Path, step: Step) -> str:
    """The same without progress and warnings; of tests the last line."""
    lines = _lines(out / "log.txt")
    if step.result is None:
        return "\n".join(lines[-1:])
    noise = ("measurements, ", "prompts ", "note:", "written to", "Loading", "Warning", "get_mask_sizes")
    return "\n".join(line for line in lines if not any(word in line for word in noise))[-6000:]


def main(words: Sequence[str] | None = None) -> int:
    """0 if every step is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU: does every step run?")
    parser.add_argument("--device", help="cuda, cuda:1, ...")
    parser.add_argument("--steps", nargs="*", choices=[step.name for step in STEPS], help="these alone")
    parser.add_argument("--work", type=Path, help="folder of logs and rows; default results/gpu")
    parser.add_argument("--output", type=Path, help="folder of gpu.json and gpu.md; default benchmarks/results")
    parser.add_argument("--verify", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.verify is not None:
        return 0 if verify_families(options.verify, options.device or "cuda") else 1
    device = options.device or ("cpu" if options.dry_run else "cuda")
    folder = options.work or HERE / "results" / ("gpu_dry" if options.dry_run else "gpu")
    target = options.output or (folder if options.dry_run else HERE / "benchmarks" / "results")
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA device in sight: --dry-run tries every step on this CPU", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    target.mkdir(parents=True, exist_ok=True)
    state = folder / "steps.json"
    steps: dict[str, Any] = json.loads(state.read_text("utf-8")) if state.exists() else {}
    chosen = [step for step in STEPS if not options.steps or step.name in options.steps]
    sys.path[:0] = _environment(folder)["PYTHONPATH"].split(os.pathsep)
    from hf_paged_eviction_eval.models.environment import commit, hardware, versions

    facts = {"device": device, "dry_run": options.dry_run, "commit": commit()}
    facts |= {"hardware": hardware(1), "versions": versions()}
    for step in chosen:
        if steps.get(step.name, {}).get("state") == DONE:
            print(f"== {step.name}: done already")
            continue
        steps[step.name] = run(step, folder, device, options.dry_run)
        write_whole(state, f"{json.dumps(steps, indent=1)}\n".encode())
        contents = json.dumps({"facts": facts, "steps": steps}, indent=1)
        write_whole(target / "gpu.json", f"{contents}\n".encode())
        tables = {step.name: _table(folder / step.name, step) for step in STEPS if step.name in steps}
        write_whole(target / "gpu.md", page(facts, steps, tables).encode())
    print(f"\n{target / 'gpu.json'}, {target / 'gpu.md'}")
    return 0 if all(steps.get(step.name, {}).get("state") == DONE for step in chosen) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves as an interruption does: with the running step
    sys.exit(main())
