"""Calibrations of keys before rotary embedding, and what is observed besides: the tokens stay that the scores say."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import models
import modes
from calibrations import drawn_score
from closeness import assert_close
from hf_paged_eviction import EvictionPolicy, Needs, PagedEvictionCache, ScoreContext, make_policy
from hf_paged_eviction.integration import model_rotary
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.integration.implementations import using
from hf_paged_eviction.integration.model_rotary import UnknownRotaryError
from hf_paged_eviction.learned.calibration import Calibration, fingerprint, load_calibration, save_calibration
from hf_paged_eviction.learned.score import unit
from hf_paged_eviction.policies.attention.window_attention import WindowAttention
from hf_paged_eviction.preparing.fitting import fit
from hf_paged_eviction.preparing.future import watch

HEADS, WIDTH, COLUMNS, STEPS = 2, 8, 60, 9
LENGTHS = [57, 34]


@dataclass(frozen=True)
class Known(EvictionPolicy):
    """Says what it was told of each position."""

    name: ClassVar[str] = "known"
    scores: Tensor = field(compare=False)  # [rows, heads, positions]
    needs = Needs(heads="separate", token_local=True, absolute_noise=True)

    def score(self, context: ScoreContext) -> Tensor:
        return self.scores.gather(-1, context.positions.clamp_min(0))


@dataclass(frozen=True)
class KnownObserved(WindowAttention):
    """The same, and four times the mean attention of the newest 32 queries."""

    name: ClassVar[str] = "known_observed"
    scores: Tensor = field(compare=False)
    window: int = 32

    @property
    def needs(self) -> Needs:
        return replace(super().needs, heads="separate", absolute_noise=True)

    def attention(self, context: ScoreContext) -> Tensor:
        return self.scores.gather(-1, context.positions.clamp_min(0)) + 4 * self.mean(context)


def turned_back(keys: Tensor, width: int) -> Tensor:
    """`[rows, heads, tokens, dim]` at positions 0, 1, ... before Llama's rotation of the first `width` channels."""
    half = width // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(keys.shape[2], dtype=torch.float64)[:, None] * frequencies
    a, b, rest = keys[..., :half].double(), keys[..., half:width].double(), keys[..., width:].double()
    back = a * angles.cos() + b * angles.sin(), b * angles.cos() - a * angles.sin()
    return torch.cat([*back, rest], dim=-1).float()


def a_calibration(config: Any, heads: int = HEADS) -> Calibration:
    score = drawn_score(heads, WIDTH, torch.Generator().manual_seed(3))
    return Calibration({0: score}, fingerprint(config), {}, True)


def truth(model: Any, ids: Tensor, calibration: Calibration, width: int) -> Tensor:
    """`[rows, heads, positions]`: each row read alone and whole. In the first layer keys depend on nothing else."""
    scores = torch.zeros(len(ids), calibration.layers[0].kv_heads, ids.shape[1])
    for row, length in enumerate(LENGTHS):
        cache = DynamicCache(config=model.config)
        read = ids[row : row + 1, COLUMNS - length :]
        model(read, **{CACHE_ARGUMENT: cache})
        places = torch.arange(read.shape[1])[None, None]
        keys = turned_back(cache.layers[0].keys, width)
        scored = calibration.score(keys, cache.layers[0].values, places.expand(*keys.shape[:3]), 0)
        scores[row, :, : read.shape[1]] = scored[0]
    return scores


def drive(model: Any, cache: PagedEvictionCache, ids: Tensor, mask: Tensor, chunk: int) -> Tensor:
    """Read in chunks, then token by token."""
    ends = [*range(chunk, COLUMNS, chunk), *range(COLUMNS, ids.shape[1] + 1)]
    chunks = [modes.forward(model, cache, ids, mask, *part) for part in zip([0, *ends], ends, strict=False)]
    return torch.cat(chunks, dim=1)[:, COLUMNS:]


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("chunk", [60, 13])
@pytest.mark.parametrize("policy", ["calibrated", "observed"])
@pytest.mark.parametrize(
    "options",
    [
        {"heads": "separate"},
        {"heads": "shared", "bits": 8},
        {"heads": "shared", "positions": "cache"},
        {"heads": "separate", "static": True},
        {"allocator": "ada_kv"},
        {"allocator": "ada_kv", "positions": "cache"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_scores_are_those_of_keys_turned_back(
    family: str, chunk: int, policy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if policy == "observed":  # scores what is held anew, after codes have rounded it
        options = {name: value for name, value in options.items() if name != "bits"}
    kv_heads, width = {"llama": (HEADS, 8), "gpt_neox": (4, 4)}[family]
    model = models.build(family, "paged_eviction", num_hidden_layers=1)
    calibration = a_calibration(model.config, kv_heads)
    save_calibration(calibration, tmp_path / "c.safetensors")
    ids, mask = models.left_pad(models.prompts(LENGTHS), COLUMNS)
    ids = torch.cat([ids, torch.randint(2, models.VOCABULARY, (len(ids), STEPS))], dim=1)
    mask = torch.cat([mask, torch.ones(len(ids), STEPS, dtype=mask.dtype)], dim=1)
    stand_in = (Known if policy == "calibrated" else KnownObserved)(truth(model, ids, calibration, width))
    policies = make_policy(policy, str(tmp_path / "c.safetensors")), stand_in
    caches = [PagedEvictionCache(model.config, 24, 4, policy=one, **options) for one in policies]
    logits, expected = (drive(model, cache, ids, mask, chunk) for cache in caches)
    assert_close(logits, expected)
    assert torch.equal(*(cache.layers[0].positions for cache in caches))
    assert caches[0].stats().evicted_tokens > 0


def windows() -> list[Tensor]:
    return [ids[None] for ids in models.prompts([160] * 4)]


def test_it_is_fitted_to_keys_turned_back(tmp_path: Path) -> None:
    model = models.build("llama", num_hidden_layers=1)
    fitted = fit(model, windows())
    keys = []
    for window in (windows()[index] for index in (0, 2, 3)):  # the second is for checking
        cache = DynamicCache(config=model.config)
        model(window, **{CACHE_ARGUMENT: cache})
        keys.append(unit(turned_back(cache.layers[0].keys, WIDTH))[0, :, :-64])
    torch.testing.assert_close(fitted.layers[0].mean_key, unit(torch.cat(keys, dim=1).mean(1)))
    save_calibration(fitted, tmp_path / "c.safetensors")
    assert load_calibration(tmp_path / "c.safetensors").unrotated
    assert make_policy("calibrated", str(tmp_path / "c.safetensors")).needs.rotary


def test_keys_are_taken_as_cached_where_the_rotation_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise UnknownRotaryError("it is made so here")

    monkeypatch.setattr(model_rotary, "layer_rotaries", unknown)
    model = models.build("llama", num_hidden_layers=1)
    fitted = fit(model, windows())
    seen: list[Tensor] = []
    with using(model, "paged_eviction"):
        for window in (windows()[index] for index in (0, 2, 3)):
            watch(model, window, lambda seen_layer: seen.append(unit(seen_layer.keys)[0, :, :-64]))
    torch.testing.assert_close(fitted.layers[0].mean_key, unit(torch.cat(seen, dim=1).mean(1)))
    save_calibration(fitted, tmp_path / "c.safetensors")
    assert not load_calibration(tmp_path / "c.safetensors").unrotated
    assert not make_policy("calibrated", str(tmp_path / "c.safetensors")).needs.rotary
