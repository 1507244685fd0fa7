"""Calibrated scores: the fit against slow versions of it, the file, and what it is worth on the embedded model."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from hf_paged_eviction import PagedEvictionCache, ScoreContext, make_policy
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.integration.model_rotary import layer_rotaries
from hf_paged_eviction.learned import calibration as files
from hf_paged_eviction.learned.calibration import Calibration, load_calibration, save_calibration
from hf_paged_eviction.learned.moments import least_squares
from hf_paged_eviction.learned.score import SCALARS, LayerScore, bend, features, unit
from hf_paged_eviction.preparing.fitting import HELD_OUT, fit, fit_curve, spearman
from hf_paged_eviction.preparing.future import Seen, usable, watch
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import make_samples
from training import corpus
from training.calibrate import windows as embedded_windows

HEADS, KEY, VALUE = 2, 5, 3


@cache
def embedded_model() -> tuple[Any, Any]:
    return embedded.load(attn_implementation="paged_eviction")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def a_layer(seed: int = 0) -> LayerScore:
    mean_key, mean_value = unit(random(HEADS, KEY, seed=seed)), random(HEADS, VALUE, seed=seed + 1)
    weights, offset = random(HEADS, len(SCALARS) + KEY, seed=seed + 2), random(HEADS, seed=seed + 3)
    knots = random(2, HEADS, 16, seed=seed + 4).abs().cumsum(-1)
    return LayerScore(mean_key, mean_value, weights, offset, knots[0] - 6, knots[1])


def a_calibration() -> Calibration:
    return Calibration({0: a_layer(), 3: a_layer(9)}, {"model_type": "llama"}, {"tokens": "7"})


# ---- normal equations -----------------------------------------------------------------------------------------------


def stacked(samples: Tensor, target: Tensor, penalty: Tensor) -> Tensor:
    """Predictions of ridge regression, by stacking the penalty below the samples of one set."""
    mean, deviation = samples.mean(0), samples.std(0, unbiased=False)
    scaled = (samples - mean) / deviation
    rows = torch.cat([scaled, torch.diag((penalty * len(samples)).sqrt())])
    wanted = torch.cat([target - target.mean(), torch.zeros(len(penalty))]).to(rows)
    return scaled @ torch.linalg.lstsq(rows, wanted[:, None]).solution[:, 0] + target.mean()


@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_the_normal_equations_are_least_squares_on_everything(penalty: float) -> None:
    samples = random(HEADS, 200, 6).double() * torch.tensor([1, 1e3, 1e-3, 1, 5, 1]) + 40
    target = (samples @ random(6, 1, seed=1).double())[..., 0].sin()
    predictions = least_squares([(samples, target)], torch.full((6,), penalty))(samples)
    for head in range(HEADS):
        expected = stacked(samples[head], target[head], torch.full((6,), penalty, dtype=torch.float64))
        torch.testing.assert_close(predictions[head], expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 60), max_size=8))
def test_portions_do_not_matter(cuts: list[int]) -> None:
    samples, target = random(HEADS, 60, 4) + 3, random(HEADS, 60, seed=1)
    spans = zip([0, *sorted(cuts)], [*sorted(cuts), 60], strict=True)
    portions = [(samples[:, start:stop], target[:, start:stop]) for start, stop in spans]
    a, b = (least_squares(parts, torch.full((4,), 0.01)) for parts in ([(samples, target)], portions))
    torch.testing.assert_close(a.weights, b.weights, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(a.offset, b.offset, rtol=1e-9, atol=1e-12)


def test_a_feature_that_never_varies_gets_no_weight() -> None:
    samples = random(1, 50, 3)
    samples[..., 1] = 7.0
    line = least_squares([(samples, samples[..., 0] * 2)], torch.zeros(3))
    torch.testing.assert_close(line.weights, torch.tensor([[2.0, 0.0, 0.0]], dtype=torch.float64))


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to fit"):
        least_squares([], torch.zeros(3))


# ---- curve ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(0, 1)), min_size=2, max_size=200))
def test_the_curve_rises(points: list[tuple[float, float]]) -> None:
    scores, target = torch.tensor(points, dtype=torch.float64).T
    x, y = fit_curve(scores, target)
    assert (x.diff() >= 0).all()
    assert (y.diff() >= 0).all()
    at = torch.linspace(-80, 80, 999)[None, None]
    bent = bend(at, x[None].float(), y[None].float())
    assert bent.isfinite().all()
    assert (bent.diff() >= -1e-4 * bent.abs().amax()).all()


def test_the_curve_goes_through_a_rising_function() -> None:
    scores = torch.linspace(0, 3, 4000, dtype=torch.float64)
    x, y = fit_curve(scores, scores**2)
    bent = bend(torch.tensor([[[0.5, 1.0, 2.0, 2.9]]]), x[None].float(), y[None].float())
    torch.testing.assert_close(bent[0, 0], torch.tensor([0.25, 1.0, 4.0, 8.41]), rtol=0.06, atol=0.06)


def test_the_curve_is_straight_beyond_its_ends() -> None:
    x, y = torch.tensor([[0.0, 1.0, 3.0]]), torch.tensor([[0.0, 2.0, 3.0]])
    bent = bend(torch.tensor([[[-1.0, 0.5, 1.0, 2.0, 5.0]]]), x, y)
    torch.testing.assert_close(bent[0, 0], torch.tensor([-2.0, 1.0, 2.0, 2.5, 4.0]))


# ---- correlation ----------------------------------------------------------------------------------------------------


def test_correlations() -> None:
    a = torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(spearman(a, a**3), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(spearman(a, -a.exp()), torch.tensor(-1.0, dtype=torch.float64))
    assert spearman(a, torch.ones(4)) == 0
    tied = spearman(torch.tensor([1.0, 1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0, 3.0]))
    ranks = torch.tensor([[0.5, 0.5, 2, 3], [0.0, 1, 2.5, 2.5]], dtype=torch.float64)
    torch.testing.assert_close(tied, torch.corrcoef(ranks)[0, 1])


# ---- score ----------------------------------------------------------------------------------------------------------


def slow_score(layer: LayerScore, head: int, key: list[float], value: list[float], position: int) -> float:
    """Feature by feature."""

    def norm(vector: list[float]) -> float:
        return math.sqrt(sum(x * x for x in vector))

    direction = [x / norm(key) for x in key]
    mean_key, mean_value = layer.mean_key[head].tolist(), layer.mean_value[head].tolist()
    cosine = sum(a * b for a, b in zip(direction, mean_key, strict=True))
    deviation = norm([a - b for a, b in zip(value, mean_value, strict=True)])
    early = [float(position < below) for below in (1, 4, 64)]
    columns = [math.log(norm(key)), math.log(norm(value)), cosine, math.log(deviation), *early, *direction]
    score = sum(a * b for a, b in zip(columns, layer.weights[head].tolist(), strict=True)) + layer.offset[head].item()
    x, y = layer.x[head].tolist(), layer.y[head].tolist()
    at = next((number for number in range(1, len(x)) if x[number] > score), len(x) - 1)
    return y[at - 1] + (y[at] - y[at - 1]) * (score - x[at - 1]) / (x[at] - x[at - 1])


def a_context(dtype: torch.dtype = torch.float32, tokens: int = 90) -> ScoreContext:
    keys, values = random(2, HEADS, tokens, KEY).to(dtype), random(2, HEADS, tokens, VALUE, seed=1).to(dtype)
    positions = torch.arange(tokens).expand(2, HEADS, -1)
    return ScoreContext(keys, values, positions, torch.tensor([tokens, tokens]), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_a_plain_loop(dtype: torch.dtype, tmp_path: Path) -> None:
    calibration, context = a_calibration(), a_context(dtype)
    save_calibration(calibration, tmp_path / "c.safetensors")
    scores = make_policy("calibrated", str(tmp_path / "c.safetensors")).score(context)
    assert scores.dtype == torch.float32
    for row in range(2):
        for head in range(HEADS):
            for token in range(0, 90, 7):
                key, value = (states[row, head, token].tolist() for states in (context.keys, context.values))
                expected = slow_score(calibration.layers[3], head, key, value, token)
                assert scores[row, head, token].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_process_with_the_later_heads_takes_their_scores() -> None:
    calibration, context = a_calibration(), a_context()
    both = calibration.score(context.keys, context.values, context.positions, 3)
    one = calibration.score(context.keys[:, 1:], context.values[:, 1:], context.positions[:, 1:], 3, first_head=1)
    torch.testing.assert_close(one, both[:, 1:])


# ---- file -----------------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    before = a_calibration()
    save_calibration(before, tmp_path / "c.safetensors")
    after = load_calibration(tmp_path / "c.safetensors")
    assert (after.model, after.facts, list(after.layers)) == (before.model, before.facts, [0, 3])
    for index, layer in before.layers.items():
        for name, tensor in layer.tensors().items():
            assert torch.equal(tensor, after.layers[index].tensors()[name])
    save_calibration(Calibration({0: a_layer(5)}, {}), tmp_path / "c.safetensors")
    assert list(load_calibration(tmp_path / "c.safetensors").layers) == [0], "a file that was written anew is read anew"


def saved_with(**other: Any) -> Callable[[Path], None]:
    return lambda path: save_calibration(Calibration({0: replace(LAYER, **other)}, {}), path)


LAYER = a_layer()
SPOILT: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "empty": lambda path: path.write_bytes(b""),
    "of another kind": lambda path: save_file({"a": torch.zeros(3)}, path),
    "not finite": saved_with(offset=LAYER.offset * float("nan")),
    "of other keys": lambda path: files._FILES.save(path, {0: LAYER.tensors()}, {}, {}, keys="rotated twice"),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_spoiled_file_is_refused_by_name(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save_calibration(a_calibration(), path)
    spoil(path)
    with pytest.raises(ValueError, match=r"'.*c\.safetensors'"):
        make_policy("calibrated", str(path))


@pytest.mark.parametrize("name", ["", "nowhere.safetensors", "./a/b", "a/b/c"])
def test_a_missing_file_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="paged-eviction prepare"):
        make_policy("calibrated", name)


def test_another_model_is_refused() -> None:
    policy, config = make_policy("calibrated", str(embedded.calibration_path())), embedded_model()[0].config
    policy.check_model(config)
    changed = type(config)(**{**config.to_dict(), "num_hidden_layers": 7})
    with pytest.raises(ValueError, match=r"num_hidden_layers 7.*4"):
        policy.check_model(changed)


def test_other_shapes_are_refused() -> None:
    calibration, context = a_calibration(), a_context()
    with pytest.raises(ValueError, match="no layer 1"):
        calibration.score(context.keys, context.values, context.positions, 1)
    with pytest.raises(ValueError, match=r"2.*heads.*5"):
        calibration.score(context.keys[..., :3], context.values, context.positions, 3)
    with pytest.raises(ValueError, match="3 or more"):
        calibration.score(context.keys, context.values, context.positions, 3, first_head=1)


# ---- what the model attends to --------------------------------------------------------------------------------------


@cache
def all_windows() -> list[Tensor]:
    """Nine windows with questions, five of text, of some of the library: all of it would take seconds to encode."""
    texts = corpus.training_texts()[::6]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "training_texts", lambda: texts)
        return embedded_windows(embedded_model()[1], seed=77, questions=9, texts=5)


@cache
def some_windows() -> tuple[Tensor, ...]:
    """Five windows with questions, three of text, 512 tokens each."""
    windows = all_windows()
    return tuple(window[:, -512:] for window in (*windows[:5], *windows[9:12]))


def visits(window: Tensor) -> list[Seen]:
    layers: list[Seen] = []
    watch(embedded_model()[0], window, layers.append)
    return layers


def test_future_attention_is_that_of_eager_attention() -> None:
    tokens = some_windows()[0]
    model, _ = embedded.load(attn_implementation="eager")
    with torch.inference_mode():
        weights = model(input_ids=tokens, output_attentions=True).attentions
    late = torch.arange(512)[:, None] - torch.arange(512) >= 64
    for seen in visits(tokens):
        paid = weights[seen.layer_idx].unflatten(1, (2, 2)).mean(2) * late
        torch.testing.assert_close(seen.future, paid.amax(2), rtol=1e-3, atol=1e-5)
        assert torch.equal(usable(seen.positions), torch.arange(512 - 64).expand(2, -1))


def test_the_fit_does_not_depend_on_how_windows_are_put_together() -> None:
    windows = some_windows()
    train, check = ([one for at, one in enumerate(windows) if (at % HELD_OUT == 1) is out] for out in (False, True))
    one_by_one, batched = (fit(embedded_model()[0], parts) for parts in (windows, [torch.cat(train), check[0]]))
    assert batched.facts["tokens"] == str(512 * (len(train) + 1))
    for index, layer in one_by_one.layers.items():
        other = batched.layers[index]
        torch.testing.assert_close(layer.mean_key, other.mean_key, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.weights, other.weights, rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(layer.y, other.y, rtol=1e-2, atol=1e-4)


def test_held_out_correlation_beats_every_single_feature() -> None:
    windows = [*all_windows()[5:9], *all_windows()[12:]]
    calibration = fit(embedded_model()[0], windows)
    rotaries = layer_rotaries(embedded_model()[0].config, calibration.layers)
    fitted = json.loads(calibration.facts["held_out_spearman"])
    alone: dict[int, list[Tensor]] = {}
    for window in windows[1::HELD_OUT]:
        for seen in visits(window):
            layer, rotary = calibration.layers[seen.layer_idx], rotaries[seen.layer_idx]
            keys = rotary.unrotate(seen.keys, seen.positions)
            samples = usable(features(keys, seen.values, seen.positions, layer.mean_key, layer.mean_value))
            numbers = [spearman(samples[..., at], usable(seen.future)) for at in range(len(SCALARS))]
            alone.setdefault(seen.layer_idx, []).append(torch.stack(numbers))
    assert {*map(int, fitted)} == {*alone} == {*calibration.layers}
    for index, correlations in alone.items():
        assert (torch.tensor(fitted[str(index)]) > torch.stack(correlations).mean(0).abs()).all()


def test_the_model_is_left_as_it_was() -> None:
    model, _ = embedded.load()
    fit(model, some_windows()[:2])
    assert model.config._attn_implementation == "sdpa"


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="2 windows"):
        fit(embedded_model()[0], some_windows()[:1])
    short = [torch.ones(1, 20, dtype=torch.int64)] * 2
    with pytest.raises(ValueError, match="nothing to calibrate"):
        fit(embedded_model()[0], short)
    with_short = [*some_windows()[:3], short[0]]
    assert list(fit(embedded_model()[0], with_short).layers) == [0, 1, 2, 3]


# ---- worth ----------------------------------------------------------------------------------------------------------


def score_of(policy: str | Any, task: str = "span_copy", count: int = 8) -> float:
    """Mean score on prompts of 512 tokens of which 96 are kept, the question unknown when they are chosen."""
    model, tokenizer = embedded_model()
    samples = make_samples(task, tokenizer, 512, count, 4)
    contexts = tokenizer([sample.context for sample in samples], return_tensors="pt", padding=True)
    total = 0.0
    for number, sample in enumerate(samples):
        mask = contexts["attention_mask"][number : number + 1]
        context = contexts["input_ids"][number : number + 1][mask.bool()][None]
        question = tokenizer(sample.question, return_tensors="pt", add_special_tokens=False)["input_ids"]
        cache = PagedEvictionCache(model.config, budget=96, policy=policy)
        with torch.inference_mode():
            model(input_ids=context, **{CACHE_ARGUMENT: cache}, logits_to_keep=1)
        ids = torch.cat([context, question], dim=1)
        output = model.generate(ids, **{CACHE_ARGUMENT: cache}, max_new_tokens=sample.max_new_tokens, do_sample=False)
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        total += sample.score(text)
    return total / count


def test_the_file_of_the_embedded_model_loads_and_helps() -> None:
    assert embedded.calibration_path().stat().st_size < 200_000
    assert score_of(make_policy("calibrated", str(embedded.calibration_path()))) > score_of("paged_eviction") + 0.3
