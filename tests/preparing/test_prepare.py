"""One call makes the default as good as it can be for a model, and finds again what it measured."""

from __future__ import annotations

import copy
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from hf_paged_eviction import PagedEvictionCache, Profile, ask, prepare, weights_digest
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.learned.calibration import files, load_calibration, lookup, profile_path, save_calibration
from hf_paged_eviction.learned.measured import RANDOM, Measured, Row
from hf_paged_eviction.naming.by_object import ByObject
from hf_paged_eviction.preparing import candidates, search
from hf_paged_eviction.preparing import prepare as preparing

embedded = pytest.importorskip("hf_paged_eviction_eval.embedded")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Everything once, and little of it."""
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(home))
    for name, number in {"_WINDOW": 256, "_WINDOWS": 2, "_LENGTH": 200, "_GOING_ON": 16, "_FACTS": 1}.items():
        monkeypatch.setattr(preparing, name, number)
    monkeypatch.setattr(preparing, "_PASSAGES", 2)
    monkeypatch.setattr(candidates, "POWERS", {"observed": (1.0,), "tova": (2.0,)})
    monkeypatch.setattr(candidates, "BITS", (8, (4, 2)))
    monkeypatch.setattr(candidates, "EQUAL", ("keydiff",))
    monkeypatch.setattr(search, "STAY", 3)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return embedded.load()


@pytest.fixture
def prepared(pair: tuple[Any, Any]) -> Profile:
    return prepare(*pair, progress=False)


def test_the_default_is_what_diverged_least(pair: tuple[Any, Any], prepared: Profile) -> None:
    model, _ = pair
    assert prepared.path == str(profile_path(weights_digest(model)))
    for budget, unit in ((64, "tokens"), ("256KiB", "bytes")):
        best = prepared.best(unit)
        assert best is not None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache = PagedEvictionCache(model.config, budget)
        assert cache.policy.name == best.policy
        assert cache.allocator.name == best.allocator.partition("(")[0]
        assert f"bits={best.bits}" in repr(cache)
    shown = str(prepared)
    assert "budget in tokens" in shown and "budget in bytes" in shown and "random" in shown


def test_a_second_call_measures_nothing(pair: tuple[Any, Any], prepared: Profile) -> None:
    before = Path(prepared.path).stat().st_mtime_ns
    assert prepare(pair[0]).path == prepared.path  # no tokenizer
    assert Path(prepared.path).stat().st_mtime_ns == before


def test_copies_in_other_types_and_folders_find_it(pair: tuple[Any, Any], prepared: Profile, tmp_path: Path) -> None:
    model, _ = pair
    model.save_pretrained(tmp_path / "another-name")
    again = type(model).from_pretrained(tmp_path / "another-name", dtype=torch.bfloat16).eval()
    assert prepare(again).path == prepared.path
    assert PagedEvictionCache(again.config, 64).policy == PagedEvictionCache(model.config, 64).policy


def test_a_profile_is_given_and_another_models_is_refused(
    pair: tuple[Any, Any], prepared: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = tmp_path / "given.safetensors"
    copied.write_bytes(Path(prepared.path).read_bytes())
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path / "elsewhere"))
    model = copy.deepcopy(pair[0])
    assert prepare(model, profile=copied, use="text").use == "text"
    assert (
        str(copied)
        in PagedEvictionCache(model.config, 64).policy.label + PagedEvictionCache(model.config, 64).allocator.label
    )
    other = models.randomise(copy.deepcopy(pair[0]), seed=7)
    with pytest.raises(ValueError, match="model: weights"):
        prepare(other, profile=copied)
    with pytest.raises(ValueError, match=r"prepare\(model, tokenizer\)"):
        prepare(other)


def test_what_cannot_be_prepared_says_why(pair: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"use.*chat"):
        prepare(*pair, use="chat")  # type: ignore[arg-type]
    if models.caches_latents():
        with pytest.raises(ValueError, match=r"latents \(MLA\)"):
            prepare(models.shared("deepseek_v3"))
    with pytest.raises(ValueError, match="too few tokens"):
        prepare(models.randomise(copy.deepcopy(pair[0]), seed=9), pair[1], text="A few words.", progress=False)


def test_numbers_are_those_of_a_cache_that_reads(pair: tuple[Any, Any], prepared: Profile) -> None:
    """What is said of a cache in a passage, against the model reading it into one."""
    from itertools import islice

    from hf_paged_eviction.integration.feeding import feed
    from hf_paged_eviction.preparing.measuring import ANSWER, Trials
    from hf_paged_eviction.preparing.passages import passages

    model, tokenizer = pair
    (passage,) = islice(passages(tokenizer, preparing.documentation(), 200, 16, 1), 1)
    (_, question) = passage.context, passage.questions[0]

    def made(tokens: int) -> PagedEvictionCache:
        return PagedEvictionCache(model.config, 64, policy="snapkv", sink_tokens=4)

    with torch.no_grad():
        divergences = dict(Trials(model, passage).divergences(made))
        full, cache = None, made(0)
        prompt = torch.cat([passage.context, question], dim=1)
        from transformers import DynamicCache

        full = DynamicCache(config=model.config)
        logits = [feed(model, prompt, None, full)[:, -1]]
        for _ in range(ANSWER):
            logits.append(feed(model, logits[-1].argmax(-1)[:, None], None, full)[:, -1])
        answer = torch.cat([step.argmax(-1)[:, None] for step in logits[:-1]], dim=1)
        feed(model, prompt, None, cache)
        ours = feed(model, answer, None, cache, keep=0)[0].float().log_softmax(-1)
        expected = torch.cat(logits[1:]).float().log_softmax(-1)
    divergence = float((expected.exp() * (expected - ours)).sum(-1).mean())
    assert divergences["asked before"] == pytest.approx(divergence, rel=1e-3, abs=1e-5)


def test_questions_side_by_side_are_those_asked_one_by_one(pair: tuple[Any, Any], prepared: Profile) -> None:
    """Shorter ones are padded behind their end, in rows of one cache."""
    from itertools import islice

    from hf_paged_eviction.integration.feeding import feed
    from hf_paged_eviction.preparing.measuring import Trials
    from hf_paged_eviction.preparing.passages import passages

    model, tokenizer = pair
    (passage,) = islice(passages(tokenizer, preparing.documentation(), 200, 16, 5), 1)
    with torch.no_grad():
        (later,) = (trial for trial in Trials(model, passage).trials if trial.aspect == "asked later")
        assert len({rest.shape[1] for rest in later.rests}) > 1

        def made(**options: Any) -> PagedEvictionCache:
            cache = PagedEvictionCache(model.config, 64, sink_tokens=4, **options)
            later.prompt.play(cache)
            return cache

        for options in (
            {},
            {"policy": "snapkv"},
            {"policy": "keydiff", "bits": 4},
            {"policy": "tova", "allocator": "first_prompt"},
        ):
            cache = made(**options)
            divergences = list(later.divergences(model, copy.deepcopy(cache)))
            for number, (rest, full) in enumerate(zip(later.rests, later.full, strict=True)):
                logits = feed(model, rest, None, copy.deepcopy(cache), keep=0)[0, -len(full) :].float().log_softmax(-1)
                alone = float((full.exp() * (full - logits)).sum(-1).mean())
                assert divergences[number] == pytest.approx(alone, rel=1e-3, abs=1e-5), options


def test_bits_of_keys_and_of_values_are_kept() -> None:
    rows = tuple(Row("tova", "heads", bits, "bytes", 0.25, {"text": [0.5]}) for bits in (None, 4, (4, 2)))
    measured = Measured((*rows, replace(rows[0], policy=RANDOM, allocator="uniform")))
    assert Measured.of(measured.text) == measured
    assert rows[2].label == "tova@heads, (4, 2) bits"
    for bits in ((4, 5), (4,), 16):
        with pytest.raises(ValueError, match=re.escape(str(bits))):
            Measured((replace(rows[0], bits=bits),))


ROW = {
    "policy": "tova",
    "allocator": "heads",
    "bits": None,
    "unit": "tokens",
    "share": 0.25,
    "divergences": {"text": [1.0]},
}
BASELINE = ROW | {"policy": RANDOM, "allocator": "uniform"}
WRONG: dict[str, list[Any]] = {
    "policy": ["a", ["tova"], None, "calibrated:a/b", "calibrated:../../etc/passwd", "observed:x",
               "hybrid(gate:a/b, tova)"],
    "allocator": ["b", ["heads"], "heads:a/b", "heads(power=1e9)", "heads(power=-1)", "heads(file=x)"],
    "bits": [7, "4", [4], [4, 5], True, 1.5],
    "unit": ["bits", None, ["tokens"]],
    "share": [0, 2, 1e-300, -0.5, "0.25", None, True, float("nan"), 10**400],
    "divergences": [{}, [], None, {"text": []}, {"text": 1.0}, {"text": [None]}, {"text": ["1"]},
                    {"text": [float("nan")]},
                    {"text": [1e300]}, {"text": [-1.0]}, {"no such": [1.0]}, {"text": [True]}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_rows_are_no_profile(
    name: str, value: Any, prepared: Profile, pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither written nor read; a cache is made without it, and nothing is looked for on the Hub."""

    class Written(Measured):
        text = json.dumps([ROW | {name: value}, BASELINE])  # type: ignore[assignment]

    refuse_writing_and_reading(Written(()), prepared, pair, monkeypatch)


@pytest.mark.parametrize(
    "rows", [[ROW], [ROW, ROW, BASELINE], [BASELINE, BASELINE], [{}], {}, 5, [[]], [ROW | {"more": 1}]]
)
def test_rows_that_do_not_belong_together_are_no_profile(
    rows: Any, prepared: Profile, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Written(Measured):
        text = json.dumps(rows)  # type: ignore[assignment]

    refuse_writing_and_reading(Written(()), prepared, pair, monkeypatch)


def refuse_writing_and_reading(
    measured: Measured, prepared: Profile, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration, (model, _) = load_calibration(prepared.path), pair
    wrong = replace(calibration, measured=measured)
    file = profile_path(weights_digest(model))
    before = file.read_bytes()
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        save_calibration(wrong, file)
    assert file.read_bytes() == before
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("asked the Hub"))
    monkeypatch.setattr(lookup, "_CHOSEN", ByObject())
    try:
        with monkeypatch.context() as patch:
            patch.setattr(files.Measured, "of", lambda text: measured)
            save_calibration(wrong, file)
        with pytest.raises(ValueError, match="Cannot use"):
            load_calibration(file)
        with pytest.warns(UserWarning, match="is skipped"):
            PagedEvictionCache(model.config, 64)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("kind", ["a file", "not UTF-8"])
def test_a_home_that_takes_no_profile_is_refused_before_the_measurement(
    kind: str, pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / ("home" if kind == "a file" else "\udcff")
    if kind == "a file":
        home.touch()
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(home))
    monkeypatch.setattr(lookup, "_published", dict)
    monkeypatch.setattr(lookup, "_CHOSEN", ByObject())
    monkeypatch.setattr(preparing, "fit", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match=r"cannot be stored in .*HF_PAGED_EVICTION_HOME"):
        prepare(*pair, progress=False)


def test_a_model_that_is_wrapped_for_several_devices(pair: tuple[Any, Any], prepared: Profile) -> None:
    model, tokenizer = pair
    wrapped = torch.nn.DataParallel(model)
    assert prepare(wrapped, tokenizer, progress=False).path == prepared.path
    asked = {"budget": 64, "max_new_tokens": 4}
    text = preparing.documentation()[:2000]
    assert ask(wrapped, tokenizer, text, ["Why?"], **asked) == ask(model, tokenizer, text, ["Why?"], **asked)


def test_it_is_used_by_the_model(pair: tuple[Any, Any], prepared: Profile) -> None:
    model, tokenizer = pair
    ids = tokenizer(preparing.documentation()[:4000], return_tensors="pt").input_ids[:, :400]
    cache = PagedEvictionCache(model.config, 96)
    out = model.generate(ids, **{CACHE_ARGUMENT: cache}, max_new_tokens=20, do_sample=False)
    assert out.shape[1] > 400 and cache.stats().mean_held <= 96
