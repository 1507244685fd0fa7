"""One call makes the default as good as it can be for a model, and finds again what it measured."""

import copy
import json
import re
import warnings
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import models
from hf_paged_eviction import PagedEvictionCache, Profile, ask, prepare, weights_digest
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.integration.feeding import feed
from hf_paged_eviction.learned import lookup
from hf_paged_eviction.learned.calibration import load_calibration, save_calibration
from hf_paged_eviction.learned.lookup import profile_path
from hf_paged_eviction.learned.measured import RANDOM, Measured, Row
from hf_paged_eviction.naming.by_object import ByObject
from hf_paged_eviction.preparing import difference, progress, readings, search
from hf_paged_eviction.preparing import prepare as preparing
from hf_paged_eviction.preparing.candidates import Candidate
from hf_paged_eviction.preparing.effort import NORMAL, QUICK, Effort
from hf_paged_eviction.preparing.measuring import ANSWER, Trials
from hf_paged_eviction.preparing.passages import passages
from hf_paged_eviction.preparing.recording import Recording

embedded = pytest.importorskip("hf_paged_eviction_eval.embedded")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Everything once, and little of it."""
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(home))
    for name, number in {"_WINDOW": 256, "_LENGTH": 200, "_GOING_ON": 16, "_FACTS": 1}.items():
        monkeypatch.setattr(preparing, name, number)
    tried = (Candidate("observed", "heads"), Candidate("tova", "heads(power=2.0)"), Candidate("keydiff"))
    monkeypatch.setattr(preparing, "NORMAL", Effort(2, 2, tried, 3.0, 2, (8, (4, 2))))


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


def test_the_table_fits_a_terminal_and_says_its_unit(prepared: Profile) -> None:
    _, *lines = str(prepared).split("\n")  # the first line is a path
    assert max(map(len, lines)) <= 80
    shown = "\n".join(lines)
    for words in ("budget in tokens", "1/16 of the bytes in 16 bits", "text unknown   known", "float32", "random"):
        assert words in shown, words
    calibration = prepared.calibration
    assert calibration.measured is not None
    long = tuple(
        replace(row, policy="hybrid(keydiff, expected_attention)", allocator=f"heads(power=1.5{row.policy})")
        if row.policy != RANDOM
        else row
        for row in calibration.measured.rows
    )
    wide = replace(calibration, measured=replace(calibration.measured, rows=long))
    assert max(map(len, str(Profile("p", wide, "both")).split("\n")[1:])) <= 80


def test_the_dtype_of_the_model_changes_no_size(pair: tuple[Any, Any], prepared: Profile) -> None:
    """A cache for a share of 16-bit bytes holds as many tokens in float32 as in bfloat16."""
    model, _ = pair
    wide = copy.deepcopy(model).float()
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    ids = torch.arange(1, 301)[None]
    budgets = {}
    with torch.no_grad():
        for one in (wide, narrow):
            token = Recording(one, ids).token
            for bits in (None, 8, 4, (4, 2)):
                candidate = Candidate("keydiff", bits=bits)
                cache = candidate.make(one.config, Path(prepared.path), 1 / 2, 300, token)
                budgets.setdefault(bits, set()).add(cache.budget)
    assert all(len(sizes) == 1 for sizes in budgets.values()), budgets
    few, exact = budgets[4].pop(), budgets[None].pop()
    assert few is not None and exact is not None and few > 1.5 * exact


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
    assert PagedEvictionCache(model.config, 64).profile == str(copied)
    other = models.randomise(copy.deepcopy(pair[0]), seed=7)
    with pytest.raises(ValueError, match="model: weights"):
        prepare(other, profile=copied)
    with pytest.raises(ValueError, match=r"prepare\(model, tokenizer\)"):
        prepare(other)


def test_what_cannot_be_prepared_says_why(pair: tuple[Any, Any]) -> None:
    model, tokenizer = pair
    random, windows = models.randomise(copy.deepcopy(model), seed=9), models.build("mistral", sliding_window=16)
    refused: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        (pair, {"use": "chat"}, ValueError, "use.*chat"),
        ((random, tokenizer), {"text": "A few words.", "progress": False}, ValueError, "too few tokens"),
        ((windows,), {}, ValueError, "no layer of this mistral model evicts.*sliding window"),
        ((tokenizer, model), {}, TypeError, r"tokenizer in place of the model.*prepare\(model, tokenizer\)"),
        (("some/model", tokenizer), {}, TypeError, "not the name 'some/model'.*from_pretrained"),
        ((model, "some/model"), {}, TypeError, "tokenizer must be.*got str"),
        ((3, tokenizer), {}, TypeError, "got int"),
    ]
    refused.append((pair, {"text": ["a", "b"]}, TypeError, r"text must be one text, got a list.*join"))
    if models.caches_latents():
        refused.append(((models.shared("deepseek_v3"),), {}, ValueError, r"latents \(MLA\)"))
    for arguments_, options, kind, message in refused:
        with pytest.raises(kind, match=message):
            prepare(*arguments_, **options)


def test_weights_without_a_difference_store_nothing(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(pair[0])
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()  # attention counts for nothing
    with pytest.raises(ValueError, match="These weights show no difference"):
        prepare(model, pair[1], progress=False)
    assert not [*profile_path(weights_digest(model)).parent.glob(f"{weights_digest(model)}*")]


def test_a_profile_may_name_every_cache_that_is_tried() -> None:
    assert {*QUICK.candidates} < {*NORMAL.candidates}
    for candidate in NORMAL.candidates:
        rows = [replace(one.row("tokens", 0.25), divergences={"text": [0.5]}) for one in (candidate, Candidate(RANDOM))]
        measured = Measured(tuple(rows), "float32")
        assert Measured.of(measured.text) == measured


@pytest.mark.parametrize(
    ("best", "by_chance", "matters"),
    [
        ([0.1, 0.2, 0.1], [0.9, 1.1, 1.0], True),
        ([1.0, 0.5, 1.4], [1.1, 0.4, 1.5], False),
        ([1e-6, 2e-6, 1e-6], [1e-4, 2e-4, 1e-4], False),
    ],
)
def test_chance_has_to_be_worse(best: list[float], by_chance: list[float], matters: bool) -> None:
    rows = [
        Row(name, "uniform", None, "tokens", 0.25, {"text": numbers})
        for name, numbers in (("tova", best), (RANDOM, by_chance))
    ]
    assert difference.matters(rows[:1], rows[1:]) is matters


def test_killed_it_goes_on_where_it_was(pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path))
    model, measured, fits = copy.deepcopy(pair[0]), [], []
    read, fit = search.Search._read, preparing.fit

    class Killed(BaseException):
        pass

    def one(self: Any, candidate: Any, reading: readings.Reading) -> Any:
        if len(measured) == 7:
            raise Killed
        measured.append(reading)
        return read(self, candidate, reading)

    def fitted(*args: Any, **kwargs: Any) -> Any:
        fits.append(args)
        return fit(*args, **kwargs)

    monkeypatch.setattr(search.Search, "_read", one)
    monkeypatch.setattr(preparing, "fit", fitted)
    with pytest.raises(Killed):
        prepare(model, pair[1], progress=False)
    (unfinished,) = tmp_path.rglob("*.jsonl")
    with unfinished.open("a") as file:
        file.write('[["tova", 0.2')  # killed while it wrote
    first = list(measured)
    monkeypatch.setattr(
        search.Search,
        "_read",
        lambda self, candidate, reading: (measured.append(reading), read(self, candidate, reading))[1],
    )
    again = prepare(model, pair[1], progress=False)
    assert len(fits) == 1 and len(measured) == len(set(measured)) > len(first) == 7
    assert not [path for path in tmp_path.rglob("*") if "unfinished" in path.name or path.suffix == ".part"]
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path / "whole"))
    assert prepare(copy.deepcopy(model), pair[1], progress=False).calibration.measured == again.calibration.measured


def test_another_measurement_begins_anew(tmp_path: Path) -> None:
    path, reading = tmp_path / "a.jsonl", readings.Reading("tova", 0.25, 0)
    readings.Readings(path, {"use": "text"}).get(reading, lambda: {"text": [0.5]})
    again = readings.Readings(path, {"use": "text"})
    assert again.goes_on and again.known(reading) == {"text": [0.5]}
    other = readings.Readings(path, {"use": "both"})
    assert not other.goes_on and other.known(reading) == {}


def test_a_profile_of_text_alone_is_measured_again_for_questions(
    pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path))
    model = copy.deepcopy(pair[0])
    text = prepare(model, pair[1], use="text", progress=False).calibration.measured
    assert text is not None and {aspect for row in text.rows for aspect in row.divergences} == {"text"}
    both = prepare(model, pair[1], progress=False).calibration.measured
    assert both is not None and both.serves("both") and prepare(model, use="text").calibration.measured == both


def test_a_long_measurement_names_cheaper_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.0, 60.0, 120.0, 180.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with closing(progress.Progress(True)) as bar:
        bar.begin(100, {"quick=True": 20})
        for _ in range(3):
            bar.advance(2)
    (line,) = (line for line in capsys.readouterr().err.split("\n") if "minutes are left" in line)
    assert "about 49 minutes are left" in line and "quick=True 10" in line


def test_a_log_has_a_line_every_quarter_of_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.0, 1.0, 16.0, 20.0, 40.0, 40.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with closing(progress.Progress(True)) as bar:
        bar.begin(100, {})
        for work in (0.5, 0.5, 20, 19):
            bar.advance(work)
    begun, early, later, _ = capsys.readouterr().err.split("\n")
    assert begun == "prepare: measuring this model" and early == "prepare: 1% measured, 16 s"
    assert later == "prepare: 40% measured, 40 s, about 1 min left"
    with closing(progress.Progress(False)) as bar:
        monkeypatch.setattr(progress.time, "monotonic", lambda: 1e6)
        bar.begin(100, {})
        bar.advance(50)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("use", "facts", "goes_on"),
    [("both", [3, 1, 3], [False, True, False]), ("questions", [3, 1, 3], [False] * 3), ("text", [0] * 3, [True] * 3)],
)
def test_a_fact_among_others_and_one_alone(
    pair: tuple[Any, Any], use: str, facts: list[int], goes_on: list[bool]
) -> None:
    _, tokenizer = pair
    text = preparing.documentation()
    found = list(islice(passages(tokenizer, text, 200, 16, 3, use), 3))
    assert [len(passage.questions) for passage in found] == facts
    assert [passage.continuation is not None for passage in found] == goes_on
    for at, passage in enumerate(found):
        read = tokenizer.decode(passage.context[0], skip_special_tokens=True)
        said = [line for line in read.split("\n") if re.search("^The (access code|serial number) of the", line)]
        assert len(said) == facts[at]
        if passage.continuation is not None:
            last, rest = (" ".join(part.split()) for part in (read[-40:], tokenizer.decode(passage.continuation[0])))
            assert f"{last} {rest[:20]}".replace(" ", "") in "".join(text.split())


def test_numbers_are_those_of_a_cache_that_reads(pair: tuple[Any, Any], prepared: Profile) -> None:
    """What is said of a cache in a passage, against the model reading it into one."""
    model, tokenizer = pair
    (passage,) = islice(passages(tokenizer, preparing.documentation(), 200, 16, 1), 1)
    (_, question) = passage.context, passage.questions[0]

    def made(tokens: int) -> PagedEvictionCache:
        return PagedEvictionCache(model.config, 64, policy="snapkv", sink_tokens=4)

    with torch.no_grad():
        divergences = dict(Trials(model, passage).divergences(made))
        full, cache = DynamicCache(config=model.config), made(0)
        prompt = torch.cat([passage.context, question], dim=1)
        logits = [feed(model, prompt, None, full)[:, -1]]
        for _ in range(ANSWER):
            logits.append(feed(model, logits[-1].argmax(-1)[:, None], None, full)[:, -1])
        answer = torch.cat([step.argmax(-1)[:, None] for step in logits[:-1]], dim=1)
        feed(model, prompt, None, cache)
        ours = feed(model, answer, None, cache, keep=0)[0].float().log_softmax(-1)
        expected = torch.cat(logits[1:]).float().log_softmax(-1)
    divergence = float((expected.exp() * (expected - ours)).sum(-1).mean())
    assert divergences["known"] == pytest.approx(divergence, rel=1e-3, abs=1e-5)


def test_questions_side_by_side_are_those_asked_one_by_one(pair: tuple[Any, Any], prepared: Profile) -> None:
    """They are rows of one cache, whose tokens stay pending."""
    model, tokenizer = pair
    (passage,) = islice(passages(tokenizer, preparing.documentation(), 200, 16, 5), 1)
    with torch.no_grad():
        (later,) = (trial for trial in Trials(model, passage).trials if trial.aspect == "unknown")
        assert len(later.rests) == 4  # of five facts

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
                logits = (
                    feed(model, rest[None], None, copy.deepcopy(cache), keep=0)[0, -len(full) :].float().log_softmax(-1)
                )
                alone = float((full.exp() * (full - logits)).sum(-1).mean())
                assert divergences[number] == pytest.approx(alone, rel=1e-3, abs=1e-5), options


def test_bits_of_keys_and_of_values_are_kept() -> None:
    rows = tuple(Row("tova", "heads", bits, "bytes", 0.25, {"text": [0.5]}) for bits in (None, 4, (4, 2)))
    measured = Measured((*rows, replace(rows[0], policy=RANDOM, allocator="uniform")), "float32")
    assert Measured.of(measured.text) == measured
    assert rows[2].label == "tova@heads, (4, 2) bits"


ROW = {
    "policy": "tova",
    "allocator": "heads",
    "bits": None,
    "unit": "tokens",
    "share": 0.25,
    "divergences": {"text": [1]},
}
#: What would lead to other files, or to code of others.
ELSEWHERE = [
    *({"policy": policy} for policy in ("a", "calibrated:../../etc/passwd", "hybrid(gate:a/b, tova)")),
    *({"allocator": allocator} for allocator in ("b", "heads:a/b", "heads(file=x)")),
]


def table(rows: Any, **other: Any) -> str:
    return json.dumps({"full_bits": 16, "dtype": "float32", "rows": rows} | other)


def test_rows_in_another_unit_are_no_profile() -> None:
    assert Measured.of(table([ROW])).dtype == "float32"
    for text in (json.dumps([ROW]), table([ROW], full_bits=32)):
        with pytest.raises(ValueError, match="16-bit keys and values"):
            Measured.of(text)


@pytest.mark.parametrize("other", ELSEWHERE)
def test_a_profile_leads_nowhere_else(
    other: dict[str, str], prepared: Profile, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows name what `prepare` tries; a cache is made without the others, and nothing is looked for on the Hub."""
    calibration, (model, _) = load_calibration(prepared.path), pair
    wrong = replace(calibration, measured=Measured((Row(**{**ROW, **other}),), "float32"))
    file = profile_path(weights_digest(model))
    before = file.read_bytes()
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("asked the Hub"))
    monkeypatch.setattr(lookup, "_CHOSEN", ByObject())
    try:
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


def test_uses_live_side_by_side(pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path))
    model = copy.deepcopy(pair[0])
    questions, text = (prepare(model, pair[1], use=use, progress=False) for use in ("questions", "text"))
    assert questions.path != text.path
    for profile in (questions, text):
        measured = load_calibration(profile.path).measured
        assert measured is not None and measured.serves(profile.use)
        assert prepare(model, use=profile.use).path == profile.path
        assert PagedEvictionCache(model.config, 64).profile == profile.path


@pytest.mark.parametrize("spoil", ["empty", "of another model", "a folder"])
def test_what_is_no_profile_is_set_aside_and_measured_anew(
    spoil: str, pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path))
    model = copy.deepcopy(pair[0])
    place = profile_path(weights_digest(model))
    place.parent.mkdir(parents=True)
    other = next(lookup._PUBLISHED.glob("*.safetensors")).read_bytes()
    place.mkdir() if spoil == "a folder" else place.write_bytes(b"" if spoil == "empty" else other)
    with pytest.warns(UserWarning, match=rf"{re.escape(str(place))}.*set aside"):
        profile = prepare(model, pair[1], use="text", progress=False)
    assert load_calibration(profile.path).model["weights"] == weights_digest(model)
    aside = place.with_name(f"{place.name}.unusable")
    assert not place.exists() and (aside.is_dir() if spoil == "a folder" else aside.read_bytes() in (b"", other))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepare(model, use="text").path == profile.path


@pytest.mark.parametrize("which", ["*.jsonl", "*.unfinished.safetensors"])
def test_a_damaged_unfinished_measurement_is_set_aside(
    which: str, pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path))
    model, get, count = copy.deepcopy(pair[0]), readings.Readings.get, []

    def stop(self: Any, reading: Any, measure: Any) -> Any:
        count.append(reading)
        if len(count) > 4:
            raise KeyboardInterrupt
        return get(self, reading, measure)

    monkeypatch.setattr(readings.Readings, "get", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(model, pair[1], use="text", progress=False)
    monkeypatch.setattr(readings.Readings, "get", get)
    (unfinished,) = tmp_path.rglob(which)
    content = bytearray(unfinished.read_bytes())
    content[-9] ^= 1
    unfinished.write_bytes(content)
    with pytest.warns(UserWarning, match=rf"{re.escape(str(unfinished))}.*set aside"):
        profile = prepare(model, pair[1], use="text", progress=False)
    assert profile.best() is not None
    assert unfinished.with_name(f"{unfinished.name}.unusable").read_bytes() == content


def test_a_digit_that_changed_in_a_reading_is_noticed(tmp_path: Path) -> None:
    path, reading = tmp_path / "r.jsonl", readings.Reading("tova", 0.5, 0)
    first = readings.Readings(path, {"use": "text"})
    first.get(reading, lambda: {"text": [0.5]})
    first.get(replace(reading, passage=1), lambda: {"text": [0.25]})
    path.write_text(path.read_text().replace("0.25]", "0.35]"))
    with pytest.warns(UserWarning, match="damaged"):
        again = readings.Readings(path, {"use": "text"})
    assert again.goes_on and again.known(reading) == {"text": [0.5]}
    assert not again.known(replace(reading, passage=1))
