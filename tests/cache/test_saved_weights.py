"""A context goes on only with the weights, and the files, that it was made with."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import modes
from calibrations import drawn_score
from hf_paged_eviction import PagedEvictionCache, register_weights, weights_digest
from hf_paged_eviction.cache import files
from hf_paged_eviction.learned.calibration import Calibration, fingerprint, save_calibration
from hf_paged_eviction.learned.lookup import profile_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "context.safetensors"


def fed(model: Any, **choices: Any) -> PagedEvictionCache:
    cache = models.paged(model.config, **{"budget": 24, "block_size": 4, "policy": "keydiff", **choices})
    modes.forward(model, cache, *models.left_pad(models.prompts([30])), 0, 30)
    return cache


def others(model: Any) -> Any:
    """The same shape, and one number that differs."""
    other = copy.deepcopy(model)
    other.model.layers[1].self_attn.k_proj.weight.data[0, 0] += 0.5
    return other


def test_other_weights_of_the_same_shape_are_refused(path: Path) -> None:
    model = models.build("llama")
    fed(model).save(path, model=model)
    assert files.read(path)["weights"] == weights_digest(model)
    assert PagedEvictionCache.load(path, model).get_seq_length() == 30
    other = others(model)
    with pytest.raises(ValueError, match=rf"weights.*{weights_digest(model)}.*{weights_digest(other)}"):
        PagedEvictionCache.load(path, other)
    assert PagedEvictionCache.load(path, other.config), "nobody knows what they are"
    register_weights(other)
    with pytest.raises(ValueError, match=r"weights.*shape"):
        PagedEvictionCache.load(path, other.config)
    register_weights(model)
    assert PagedEvictionCache.load(path, model.config).get_seq_length() == 30


def test_other_precision_is_no_other_model(path: Path) -> None:
    model = models.build("llama").bfloat16().float()
    fed(model).save(path, model=model)
    assert PagedEvictionCache.load(path, copy.deepcopy(model).bfloat16()).get_seq_length() == 30


def test_a_file_that_names_no_weights_is_refused_where_they_are_asked_for(path: Path) -> None:
    model = models.build("llama")
    fed(model).save(path)
    with pytest.raises(ValueError, match=r"model=.*model\.config"):
        PagedEvictionCache.load(path, model)
    assert PagedEvictionCache.load(path, model.config)


def test_registered_weights_go_along(path: Path) -> None:
    """Into the file without being named, through copies, and from one file to the next."""
    model = models.build("llama")
    register_weights(model)
    copy.deepcopy(fed(model)).save(path)
    PagedEvictionCache.load(path, model.config).save(path)
    PagedEvictionCache.load(path, model)
    with pytest.raises(ValueError, match="other weights"):
        PagedEvictionCache.load(path, others(model))


def test_another_model_is_not_named(path: Path) -> None:
    cache = fed(models.build("llama"))
    with pytest.raises(ValueError, match=r"num_hidden_layers.*2.*3.*model="):
        cache.save(path, model=models.build("llama", num_hidden_layers=3))
    assert not path.exists()


@pytest.mark.parametrize("policy", ["calibrated", "hybrid(recency, calibrated)", "observed"])
def test_a_calibration_that_was_rewritten_is_refused(policy: str, path: Path, tmp_path: Path) -> None:
    model, file = models.build("llama", "paged_eviction"), tmp_path / "c.safetensors"

    def write(seed: int, target: Path = file) -> None:
        draw = torch.Generator().manual_seed(seed)
        save_calibration(Calibration({at: drawn_score(2, 8, draw) for at in range(2)}, {}), target)

    write(0)
    fed(model, policy=policy, profile=file).save(path)
    assert PagedEvictionCache.load(path, model.config)
    write(1)
    with pytest.raises(ValueError, match="changed since"):
        PagedEvictionCache.load(path, model.config)
    write(0, tmp_path / "elsewhere.safetensors")
    elsewhere = str(tmp_path / "elsewhere.safetensors")
    loaded = PagedEvictionCache.load(path, model.config, profile=elsewhere)
    assert (loaded.policy.label, loaded.profile) == (policy, elsewhere)
    with pytest.raises(ValueError, match="digest"):
        PagedEvictionCache.load(path, model.config, profile=file)
    file.unlink()
    with pytest.raises(ValueError, match="not here"):
        PagedEvictionCache.load(path, model.config)


@pytest.mark.usefixtures("own_profiles")
def test_a_profile_that_moved_is_found_by_the_weights(path: Path, tmp_path: Path) -> None:
    model, file = models.build("llama", "paged_eviction"), tmp_path / "c.safetensors"
    digest = register_weights(model)
    scores = {at: drawn_score(2, 8, torch.Generator().manual_seed(at)) for at in range(2)}
    save_calibration(Calibration(scores, fingerprint(model.config)), file)
    fed(model, policy="calibrated", profile=file).save(path)
    place = profile_path(digest)
    place.parent.mkdir(parents=True, exist_ok=True)
    file.rename(place)
    assert PagedEvictionCache.load(path, model.config).profile == str(place)
