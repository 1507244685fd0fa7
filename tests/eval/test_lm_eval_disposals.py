"""lm-evaluation-harness by its command line, with what becomes of evicted tokens: answers are those of `generate`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval.models.huggingface", reason="the extra `lm-eval` is not installed")

from lm_eval import tasks

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.lm_eval import __main__ as command

TEXTS = [" ".join(f"The {noun} number {index} is {index * 7}." for index in range(20)) for noun in ("door", "lamp")]
_TASK = """
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/documents.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: ""
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.mark.parametrize(
    ("typed", "cache"),
    [
        (
            "policy=keydiff,block_size=8,disposal=recall(blocks=2,every=2)",
            {"policy": "keydiff", "block_size": 8, "disposal": "recall(blocks=2, every=2)"},
        ),
        (
            "policy=snapkv(window=8,kernel=5),block_size=8,bits=8",
            {"policy": "snapkv(window=8, kernel=5)", "block_size": 8, "bits": 8},
        ),
    ],
    ids=["recall", "bits"],
)
def test_disposals_from_the_command_line(
    typed: str, cache: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), "utf-8")
    (tmp_path / "own.yaml").write_text(_TASK.format(folder=tmp_path.as_posix()), "utf-8")
    words = ["--model", "hf-paged-eviction", "--model_args", f"pretrained=embedded,budget=64,{typed}", "--tasks", "own"]
    words += ["--include_path", str(tmp_path), "--device", "cpu", "--batch_size", "2", "--log_samples"]
    monkeypatch.setattr(sys, "argv", ["lm-eval", *words, "--output_path", str(tmp_path / "out")])
    # The harness's own thousands of tasks take seconds to list.
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    command.main()
    (path,) = (tmp_path / "out").rglob("samples_own_*.jsonl")
    rows = sorted(map(json.loads, path.read_text("utf-8").splitlines()), key=lambda row: row["doc_id"])
    model, tokenizer = embedded.load()
    model.set_attn_implementation(PAGED_EVICTION)
    for row, text in zip(rows, TEXTS, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        held = PagedEvictionCache(model.config, budget=64, **cache)
        tokens = model.generate(ids, **{CACHE_ARGUMENT: held}, max_new_tokens=12, do_sample=False)
        answer = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
        assert ids.shape[1] > 100, "something has to go"
        assert row["resps"] == [[answer.split("\n")[0]]]
