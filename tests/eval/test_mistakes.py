"""What is typed wrong is explained in a line, before anything is read, computed or written."""

import shlex
from pathlib import Path

import pytest

from invoking import run

COMPRESS = f"compress --text {__file__} --output OUT/context.safetensors"
ALL_PROTECTED = "--model /no/such/model --policies recency --budgets 100 --output OUT"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("eval --policies nope", "paged_eviction"),
        ("eval --policies keydif", "did you mean 'keydiff'?"),
        ("eval --tasks nope", "`paged-eviction tasks` lists all"),
        ("eval --budgets 0%", "12.5%"),
        ("eval --length many", "1024"),
        (f"eval --length {'9' * 5000}", "1024"),
        ("eval --length 512 --tasks qasper", "--max-length"),
        ("eval --length 300 --tasks ruler_cwe --limit 1", "--length"),
        ("eval --batch-size many", "write a whole number from 1 up"),
        ("eval --limit 0", "--limit"),
        ("eval --text none.txt", "no such file: none.txt"),
        ("eval --text --tasks passkey --log-samples", "--tasks, --log-samples: only for tasks"),
        ("eval --positions text,cache", "both in one run only with --text"),
        ("eval --text --positions text,left", "write text or cache or text,cache"),
        ("eval --text --question-agnostic", "--question-aware: only for tasks"),
        ("eval --chunk 3", "--chunk: only for texts"),
        ("eval --device nowhere", "nowhere"),
        ("eval --model no/such/model/here", "no/such/model/here"),
        ("eval --tokenizer x", "--tokenizer"),
        ("eval --dataset-revision x", "--dataset"),
        ("eval --tasks passkey,ruler_data --dataset-revision a1b2", "--dataset"),
        ("eval --dataset a/b", "--task-file datasets:a/b"),
        ("eval --agreement --budgets 256", "add full to --budgets"),
        ("eval --agreement --budgets 1MiB", "1MiB"),
        ("eval --attn-implementation nope --limit 1", "nope"),
        ("eval --attn-implementation sdpa --policies h2o", "h2o: needs queries"),
        ("eval --tasks hotpotqa --data-dir none", "none"),
        ("eval --tasks passkey,qasper --stop-when-right", "--stop-when-right"),
        ("eval --metric qa_f1", "--metric"),
        ("eval --protect sytem", "system"),
        ("eval --task-file a:x:b.jsonl", "a:x:b.jsonl"),
        *((f"eval {what} {ALL_PROTECTED} {option} 200", "Smallest legal budget: 240")
          for what in ("--tasks kv_recall --length 256", f"--text {__file__}")
          for option in ("--sink-tokens", "--recent-tokens")),
        ("eval --polices full", "unknown option --polices: did you mean '--policies'?"),
        ("eval book.txt", "unknown argument book.txt"),
        ("eval --poli full", "unknown option --poli"),
        ("bench --variants paged,quest", "unknown variant quest (--variants); choose from full, floor, paged"),
        ("bench --contexts 1k", "--contexts '1k': write whole numbers"),
        ("bench --budgets 1000", "--budgets 1000: budget=1000 is not a multiple"),
        ("bench --budgets 1KiB", "--budgets 1KiB: budget='1KiB' is too small"),
        ("bench --steps 20", "--steps 20 must be a multiple of the block size 16"),
        ("bench --steps 1024", "use fewer steps"),
        ("bench --policy snapkv", "--policy snapkv needs attention"),
        ("bench --policy nonsense", "--policy nonsense: "),
        ("bench --device cuda:99", "device 'cuda:99' cannot be used"),
        ("bench --model /nowhere/at/all --contexts 64 --budgets 64 --steps 16", "cannot load"),
        ("verify --model no/such/model/here", "no/such/model/here"),
        ("verify --budget 18", "multiple of"),
        ("verify --budget 8", "16"),
        ("verify --budget '25% of memory'", "write a whole number from 16 up"),
        ("verify --output missing/file.json", "there is no folder missing"),
        ("verify --device nowhere", "nowhere"),
        (COMPRESS, "--budget is missing"),
        (f"{COMPRESS} --budget 60", "multiple of block_size"),
        (f"{COMPRESS} --budget 2G", "not a number of bytes"),
        (f"{COMPRESS} --budget 9kB", "is too small"),
        (f"{COMPRESS} --budget 0%", "is not a share"),
        (f"{COMPRESS} --budget '25% of mem'", "written '25% of memory'"),
        (f"{COMPRESS} --budget '1% of memory' --protect 10:60", "leaves no room for what protect"),
        (f"{COMPRESS} --budget 64 --policy snapcv", "unknown policy snapcv"),
        (f"{COMPRESS} --budget 64 --text missing.txt", "missing.txt"),
        (f"{COMPRESS} --budget 64 --output context.bin", "ends in .safetensors"),
        (f"{COMPRESS} --budget 64 --output nowhere/context.safetensors", "there is no folder nowhere"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = run(*shlex.split(command.replace("OUT", str(tmp_path))), status=2).output
    assert message in " ".join(output.split()) and "Traceback" not in output
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("rows") or path.suffix == ".safetensors"]
