"""The model type `hf-paged-eviction` of lm-evaluation-harness, on tasks of our own and the embedded model."""

import io
import json
import random
import shutil
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BartConfig, BloomConfig

pytest.importorskip("lm_eval.models.huggingface", reason="the extra `lm-eval` is not installed")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.options import defaults
from hf_paged_eviction.options.defaults import Default
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.lm_eval import PagedEvictionLM
from hf_paged_eviction_eval.lm_eval import __main__ as main

SMALL = {"budget": 32, "block_size": 4}
FULL = {"budget": 2048}
TASKS = ["words_gen", "words_choice", "words_rolling"]
_WORDS = "alpha beta gamma delta tree stone river cloud green blue".split()
_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {folder}/documents.jsonl, cache_dir: {folder}/cache}}
test_split: train
output_type: {kind}
doc_to_text: "{text}"
{rest}
"""
_KINDS = {
    "words_gen": (
        "generate_until",
        "{{text}}",
        'doc_to_target: "{{answer}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 10, do_sample: false}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]",
    ),
    "words_choice": (
        "multiple_choice",
        "{{text}}",
        'doc_to_choice: "{{choices}}"\ndoc_to_target: 0\ntarget_delimiter: ""\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]",
    ),
    "words_rolling": (
        "loglikelihood_rolling",
        "",
        'doc_to_target: "{{text}}"\n'
        "metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]",
    ),
}


def documents() -> list[dict[str, Any]]:
    """Prompts of 30 to 65 tokens, only the first within the small budget; choices of one token and of several."""
    draw = random.Random(1)
    texts = []
    for lines in (1, 5, 3):
        key = str(draw.randrange(10000, 99999))
        text = [f"the {draw.choice(_WORDS)} {draw.choice(_WORDS)} is {draw.choice(_WORDS)}" for _ in range(lines)]
        text.insert(lines // 2, f"The pass key is {key}. Remember it.")
        choices = [f" {key}", f" {key}1", f" {key[::-1]}", " a", " b", " the stone river is green"]
        texts.append({"text": "\n".join([*text, "The pass key is"]), "answer": f" {key}", "choices": choices})
    return texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("harness")
    (path / "documents.jsonl").write_text("\n".join(map(json.dumps, documents())), encoding="utf-8")
    for name, (kind, text, rest) in _KINDS.items():
        task = _TASK.format(name=name, folder=path.as_posix(), kind=kind, text=text, rest=rest)
        (path / f"{name}.yaml").write_text(task, encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def no_network() -> Iterator[None]:
    """Nor does the harness ask pip and others which packages and devices there are: half of the time of a run."""

    def refuse(self: Any, address: Any) -> None:
        raise OSError(f"a test wanted to reach {address}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        yield


def paged(batch_size: int | str = 1, **arguments: Any) -> PagedEvictionLM:
    return PagedEvictionLM(pretrained="embedded", device="cpu", batch_size=batch_size, **arguments)


def plain(batch_size: int = 1, **arguments: Any) -> HFLM:
    return HFLM(str(embedded.path()), dtype="float32", device="cpu", batch_size=batch_size, **arguments)


def run(lm: HFLM, folder: Path, tasks: list[str] = TASKS) -> dict[str, list[Any]]:
    """What the model answered, by task, in the order of the documents."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(lm, tasks=tasks, task_manager=manager, bootstrap_iters=0)
    samples = {task: sorted(results["samples"][task], key=lambda sample: sample["doc_id"]) for task in tasks}
    return {task: [sample["resps"] for sample in samples[task]] for task in tasks}


def assert_same(actual: Any, expected: Any) -> None:
    """Texts and flags equal, likelihoods up to rounding."""
    if isinstance(expected, dict):
        assert_same(list(actual.items()), list(expected.items()))
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-3)
    else:
        assert actual == expected


# ---- the same numbers as ... ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(folder: Path) -> dict[str, list[Any]]:
    """What the harness's own model answers."""
    return run(plain(4), folder)


def test_a_budget_that_holds_everything_is_the_full_cache(folder: Path, full: dict[str, list[Any]]) -> None:
    assert_same(run(paged(4, **FULL), folder), full)


@pytest.mark.parametrize(
    ("arguments", "tasks"),
    [(SMALL, TASKS), ({"budget": "40%", "block_size": 4}, TASKS[:1]), ({**SMALL, "prefill_chunk_size": 25}, TASKS[:1])],
    ids=["shared", "ratio", "chunks"],
)
def test_the_batch_does_not_matter(
    folder: Path, full: dict[str, list[Any]], arguments: dict[str, Any], tasks: list[str]
) -> None:
    alone, together = (run(paged(size, **arguments), folder, tasks) for size in (1, 3))
    assert_same(together, alone)
    assert all(alone[task] != full[task] for task in tasks)


@pytest.mark.parametrize(
    ("arguments", "generate"),
    [
        ({**SMALL, "policy": "streaming_llm", "sink_tokens": 8}, {}),
        ({"budget": "30%", "block_size": 4, "sink_tokens": 9}, {}),
        ({**SMALL, "prefill_chunk_size": 20}, {"prefill_chunk_size": 20}),
        ({**SMALL, "bits": (8, 4)}, {}),
    ],
    ids=["streaming_llm", "ratio", "chunks", "two precisions"],
)
def test_answers_are_those_of_generate(folder: Path, arguments: dict[str, Any], generate: dict[str, Any]) -> None:
    answers = run(paged(4, **arguments), folder, ["words_gen"])["words_gen"]
    model, tokenizer = embedded.load()
    for (((answer,),)), document in zip(answers, documents(), strict=True):
        ids = tokenizer(document["text"], return_tensors="pt").input_ids
        settings = {name: value for name, value in arguments.items() if name != "prefill_chunk_size"}
        cache = PagedEvictionCache(model.config, **settings)
        tokens = model.generate(ids, **{CACHE_ARGUMENT: cache}, max_new_tokens=10, do_sample=False, **generate)
        text = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer == text.split("\n")[0]


def test_an_answer_ends_where_its_task_says(folder: Path) -> None:
    """And not at the strings of the model's own generation configuration, which need a tokenizer."""
    lm = paged(4, **SMALL)
    expected = run(lm, folder, ["words_gen"])
    lm.model.generation_config.stop_strings = ["0", "1"]
    assert run(lm, folder, ["words_gen"]) == expected


def test_settings_of_the_checkpoint_change_no_answer_and_those_of_the_task_are_refused_by_name(folder: Path) -> None:
    lm = paged(4, **SMALL)
    expected = run(lm, folder, ["words_gen"])
    for name, value in {"prompt_lookup_num_tokens": 3, "use_cache": False, "cache_implementation": "static"}.items():
        setattr(lm.model.generation_config, name, value)
        assert run(lm, folder, ["words_gen"]) == expected, name
        with pytest.raises(UserError, match=f"{name}="):
            lm._model_generate(
                torch.ones(1, 4, dtype=torch.long), 8, [], attention_mask=torch.ones(1, 4), **{name: value}
            )
    lm.model.generation_config.max_new_tokens, lm.model.generation_config.return_dict_in_generate = 1, True
    assert run(lm, folder, ["words_gen"]) == expected


@torch.no_grad()
def decoded(model: Any, context: list[int], continuation: list[int], **settings: Any) -> tuple[float, bool]:
    """A continuation's likelihood with single tokens only, after the context has been compressed."""
    cache = PagedEvictionCache(model.config, **settings)
    if context[:-1]:
        model(torch.tensor([context[:-1]]), **{CACHE_ARGUMENT: cache})
    total, greedy = 0.0, True
    for token, target in zip([context[-1], *continuation], continuation, strict=False):
        scores = model(torch.tensor([[token]]), **{CACHE_ARGUMENT: cache}).logits[0, -1].log_softmax(-1)
        total += float(scores[target])
        greedy &= int(scores.argmax()) == target
    return total, greedy


@pytest.mark.parametrize(("policy", "tasks"), [("value_norm", TASKS[1:]), ("h2o", TASKS[1:2])])
def test_likelihoods_are_those_of_decoding(folder: Path, policy: str, tasks: list[str]) -> None:
    lm = paged(3, **SMALL, policy=policy)
    likelihoods = run(lm, folder, tasks)
    # The first two documents: one within the budget, and the longest.
    for answers, document in zip(likelihoods["words_choice"][:2], documents()[:2], strict=True):
        for ((answer,)), choice in zip(answers, document["choices"], strict=True):
            context, continuation = lm._encode_pair(document["text"], choice)
            assert_same(answer, decoded(lm.model, context, continuation, **SMALL, policy=policy))
    for (((answer,),)), document in zip(likelihoods.get("words_rolling", []), documents(), strict=False):
        ids = lm.tok_encode(document["text"])
        expected, _ = decoded(lm.model, [lm.prefix_token_id], ids, **SMALL, policy=policy)
        assert_same(answer, expected)


def test_long_contexts_lose_their_oldest_tokens(folder: Path) -> None:
    likelihoods = run(paged(4, **FULL, max_length=50), folder, TASKS[1:])
    assert_same(likelihoods, run(plain(4, max_length=50), folder, TASKS[1:]))


def test_requests_asked_twice_and_without_context() -> None:
    lm, harness = paged(4, **FULL), plain(4)
    pairs = [("", "the tree"), ("a b c", " d"), ("a b c", " d"), ("a b c", " d e"), ("a b c ", "d"), ("a b c", " e")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    assert_same(lm.loglikelihood(requests), harness.loglikelihood(requests))
    assert lm.loglikelihood([]) == []


def test_automatic_batches(folder: Path) -> None:
    arguments = {**SMALL, "max_length": 48, "max_batch_size": 2}
    automatic, fixed = (run(paged(size, **arguments), folder, ["words_choice"]) for size in ("auto", 1))
    assert_same(automatic, fixed)


# ---- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "needs a budget"),
        ({"budget": 100}, r"nearest.*96.*112"),
        ({"budget": 16}, r"Smallest.*48"),
        ({"budget": "1G"}, "'1G'"),
        ({"budget": "1MiB", "allocator": "ada_kv"}, "arrives"),
        ({"budget": "25% of memory"}, "budget=64MiB.*budget=25%"),
        ({"budget": "150%"}, r"'150%'.*share"),
        ({**SMALL, "policy": "nonsense"}, "nonsense"),
        ({**SMALL, "allocator": "nobody"}, "nobody"),
        ({**SMALL, "policy": "h2o", "attn_implementation": "sdpa"}, "paged_eviction"),
        ({**SMALL, "prefill_chunk_size": 0}, "prefill_chunk_size=0"),
        ({**SMALL, "polcy": "keydiff"}, "'policy'"),
        ({"budgets": 64}, "'budget'"),
    ],
)
def test_wrong_arguments_are_refused_before_the_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(HFLM, "_create_model", lambda *args, **kwargs: pytest.fail("weights were read"))
    with pytest.raises(UserError, match=words):
        paged(**arguments)


def test_memory_is_the_budget_that_a_row_has_room_for() -> None:
    assert paged(budget="128KiB", policy="keydiff")._cache == paged(budget=64, policy="keydiff")._cache
    with pytest.raises(UserError, match="budget='9kB' is too small"):
        paged(budget="9000B")


def test_auto_spends_bytes_as_its_default_for_bytes_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(config: Any, budget: object = None, profile: object = None) -> tuple[Default, ...]:
        return (Default("keydiff", bits=8 if isinstance(budget, str) else None, sinks=4),)

    monkeypatch.setattr(defaults, "defaults", chosen)
    cache = paged(budget="128KiB")._cache
    assert (cache.policy.label, cache.bits, cache.sink_tokens) == ("keydiff", [8, 8], 4) and cache.budget > 64


@pytest.mark.parametrize(
    ("config", "words"), [(BartConfig(), "decoder-only"), (BloomConfig(), "ALiBi")], ids=["bart", "bloom"]
)
def test_models_it_cannot_serve_are_refused_by_their_config(tmp_path: Path, config: Any, words: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=words):
        PagedEvictionLM(pretrained=str(tmp_path), device="cpu", **SMALL)


def test_code_of_a_model_is_run_on_request_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n" * 9))
    classes = {"AutoConfig": "mystery.Config", "AutoModelForCausalLM": "mystery.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mystery", "auto_map": classes}))
    (tmp_path / "mystery.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'mark')!r}).touch()\n")
    for open_to_all in ({}, {"trust_remote_code": None}):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            PagedEvictionLM(pretrained=str(tmp_path), device="cpu", **SMALL, **open_to_all)
    assert not (tmp_path / "mark").exists()
    with pytest.raises(AttributeError, match="Config"):
        PagedEvictionLM(pretrained=str(tmp_path), device="cpu", **SMALL, trust_remote_code=True)
    assert (tmp_path / "mark").exists()


def test_pickled_weights_are_read_on_request_only(tmp_path: Path) -> None:
    shutil.copytree(embedded.path(), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        PagedEvictionLM(pretrained=str(tmp_path), device="cpu", **SMALL)
    lm = PagedEvictionLM(pretrained=str(tmp_path), device="cpu", **SMALL, use_safetensors=False)
    assert torch.equal(lm.model.lm_head.weight, weights["model.embed_tokens.weight"])


def test_a_ratio_of_no_prompt_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="budget=50%"):
        run(paged(budget="50%"), folder, ["words_rolling"])


# ---- the command line -------------------------------------------------------------------------------------------


def test_from_the_command_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["lm-eval", "--model", "hf-paged-eviction"]
    command += ["--model_args", "pretrained=embedded,budget=32,block_size=4,policy=hybrid(keydiff,recency)"]
    command += ["--include_path", str(folder), "--device", "cpu", "--tasks", "words_gen,words_choice"]
    command += ["--batch_size", "4", "--log_samples", "--output_path", str(folder / "out")]
    monkeypatch.setattr(sys, "argv", command)
    # The harness's own thousands of tasks take seconds to list.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(TaskManager, include_defaults=False))
    main.main()
    assert "hf-paged-eviction" in capsys.readouterr().out
    (path,) = (folder / "out").rglob("samples_words_gen*.jsonl")
    samples = sorted(map(json.loads, path.read_text("utf-8").splitlines()), key=lambda sample: sample["doc_id"])
    lm = paged(1, **SMALL, policy="hybrid(keydiff, recency)")
    assert [sample["resps"] for sample in samples] == run(lm, folder, ["words_gen"])["words_gen"]
    (path,) = (folder / "out").rglob("results_*.json")
    assert json.loads(path.read_text("utf-8"))["config"]["hf_paged_eviction"]["policy"] == "hybrid(keydiff, recency)"


def test_mistakes_on_the_command_line_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "cli_evaluate", lambda: paged(budget=100))
    with pytest.raises(SystemExit) as stopped:
        main.main()
    assert str(stopped.value).startswith("error: model arguments of hf-paged-eviction: budget=100 is not a multiple")
