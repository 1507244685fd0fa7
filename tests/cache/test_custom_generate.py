"""`generate(custom_generate=<folder>)`: the cache is made by the code that can be uploaded to the Hub."""

import importlib.metadata
import re
import shutil
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
    dynamic_module_utils,
)

import models
import modes
from hf_paged_eviction import CacheOptions, PagedEvictionCache, paged_encoder_decoder_cache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "custom_generate"
PAGED: dict[str, Any] = {"custom_generate": str(FOLDER), "trust_remote_code": True}
SMALL: dict[str, Any] = {"budget": 24, "block_size": 4}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beam": {"num_beams": 3},
    "return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "chunked_prefill": {"prefill_chunk_size": 7},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1, "eos_token_id": models.VOCABULARY},
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the code before it runs it: not into the user's cache."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def say(model: Any, mode: str = "greedy", padded: bool = True, **settings: Any) -> Any:
    """Tokens and cache of `generate`."""
    ids, mask = modes.batch(mode, padded)
    torch.manual_seed(0)
    plain = {"do_sample": False, "max_new_tokens": modes.STEPS, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=mask, **{**plain, **MODES.get(mode, {}), **settings})


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", MODES)
def test_same_as_with_the_cache(mode: str, padded: bool) -> None:
    model = models.shared("llama")
    flag = models.NEEDS_RECORDING_FLAG and mode in modes.SPECULATIVE
    with_cache = say(model, mode, padded, **{CACHE_ARGUMENT: models.paged(model.config, **SMALL, record_past=flag)})
    custom = say(model, mode, padded, **PAGED, **SMALL)
    assert custom.sequences.tolist() == with_cache.sequences.tolist()
    assert custom[CACHE_ARGUMENT].stats() == with_cache[CACHE_ARGUMENT].stats()
    assert custom[CACHE_ARGUMENT].stats().evicted_tokens > 0


def test_assistant() -> None:
    model = models.shared("llama")
    flag = models.NEEDS_RECORDING_FLAG
    cache = models.paged(model.config, **SMALL, record_past=flag)
    with_cache, custom = (
        say(model, "assisted", assistant_model=modes.spoiled(model), **settings)
        for settings in ({CACHE_ARGUMENT: cache}, {**PAGED, **SMALL})
    )
    assert custom.sequences.tolist() == with_cache.sequences.tolist()


def test_every_setting_arrives() -> None:
    model = models.build("llama", "paged_eviction")
    settings = {"policy": "snapkv(window=2)", "heads": "separate", "sink_tokens": 5, "recent_tokens": 7}
    settings |= {"allocator": "pyramid", **SMALL}
    with_cache = say(model, **{CACHE_ARGUMENT: models.paged(model.config, **settings)})
    custom = say(model, **PAGED, **settings)
    assert custom.sequences.tolist() == with_cache.sequences.tolist()
    assert repr(custom[CACHE_ARGUMENT]) == repr(with_cache[CACHE_ARGUMENT])
    for ours, expected in zip(custom[CACHE_ARGUMENT].layers, with_cache[CACHE_ARGUMENT].layers, strict=True):
        assert ours.budget == expected.budget
        assert ours.positions.tolist() == expected.positions.tolist()


def test_the_conversation_goes_on() -> None:
    model = models.shared("llama")
    cache = models.paged(model.config, **SMALL)
    expected = modes.turns(model, cache, *modes.batch("greedy", True), 2, 6)
    first = say(model, max_new_tokens=6, **PAGED, **SMALL)
    ids, mask = modes.batch("greedy", True)
    text = torch.cat([first.sequences, torch.stack(models.prompts([6] * len(ids), seed=1))], dim=1)
    past = first[CACHE_ARGUMENT]
    second = model.generate(
        text,
        attention_mask=modes.extend(mask, 12),
        **{CACHE_ARGUMENT: past},
        do_sample=False,
        max_new_tokens=6,
        return_dict_in_generate=True,
        **PAGED,
    )
    assert second[CACHE_ARGUMENT] is past
    answers = torch.cat([first.sequences[:, ids.shape[1] :], second.sequences[:, text.shape[1] :]], dim=1)
    assert answers.tolist() == expected.tolist()
    assert past.stats() == cache.stats()


_SPEECH_AND_TEXT = {
    "vocab_size": models.VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": models.PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def test_encoder_decoder() -> None:
    config = BartConfig(**_SPEECH_AND_TEXT, forced_eos_token_id=None)
    model = models.randomise(BartForConditionalGeneration._from_config(config, attn_implementation="sdpa"), 0)
    with_cache, custom = (
        say(model, min_new_tokens=40, max_new_tokens=40, num_beams=2, **settings)
        for settings in ({CACHE_ARGUMENT: paged_encoder_decoder_cache(config, **SMALL)}, {**PAGED, **SMALL})
    )
    assert custom.sequences.tolist() == with_cache.sequences.tolist()
    assert isinstance(custom[CACHE_ARGUMENT], EncoderDecoderCache)
    assert (
        custom[CACHE_ARGUMENT].self_attention_cache.stats() == with_cache[CACHE_ARGUMENT].self_attention_cache.stats()
    )
    assert custom[CACHE_ARGUMENT].self_attention_cache.stats().largest_held == 24


def test_long_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whisper has a `generate` of its own, which calls the common one for every piece: each gets a new cache."""
    config = WhisperConfig(
        **_SPEECH_AND_TEXT,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=100,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    model = models.randomise(WhisperForConditionalGeneration(config), 0)
    for name in ("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "max_length"):
        setattr(model.generation_config, name, None)
    model.generation_config.no_timestamps_token_id = 60
    pieces = []
    update = PagedEvictionCache.update
    monkeypatch.setattr(
        PagedEvictionCache, "update", lambda cache, *args, **more: pieces.append(cache) or update(cache, *args, **more)
    )
    sound = torch.randn(1, 8, 250, generator=torch.Generator().manual_seed(0))
    settings = {"attention_mask": torch.ones(1, 250, dtype=torch.int64), "return_timestamps": True}
    settings |= {"max_new_tokens": 36, "do_sample": False}
    expected = model.generate(sound, **settings)
    assert model.generate(sound, **settings, **PAGED, budget=96, block_size=4).tolist() == expected.tolist()
    pieces.clear()
    model.generate(sound, **settings, **PAGED, **SMALL)
    assert len({id(cache) for cache in pieces}) >= 3
    assert all(cache.stats().largest_held <= 24 < cache.stats().seen for cache in pieces)


def test_a_model_that_brings_it_along(tmp_path: Path) -> None:
    """`from_pretrained` puts it in place of the model's own `generate`; the arguments may then be positional."""
    folder = tmp_path / "llama"
    models.shared("llama").save_pretrained(folder)
    shutil.copytree(FOLDER / "custom_generate", folder / "custom_generate")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids, mask = modes.batch("greedy", True)
    settings = {"attention_mask": mask, "max_new_tokens": modes.STEPS, "do_sample": False}
    custom = model.generate(ids, **settings, **SMALL)
    plain = models.shared("llama")
    with_cache = plain.generate(ids, **settings, **{CACHE_ARGUMENT: models.paged(plain.config, **SMALL)})
    assert custom.tolist() == with_cache.tolist()


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({}, ValueError, "budget="),
        ({**SMALL, "policy": "snapkv"}, ValueError, r"set_attn_implementation\(.paged_eviction.\)"),
        ({CACHE_ARGUMENT: True, "budget": 32, "policy": "keydiff"}, ValueError, "budget, policy"),
        ({CACHE_ARGUMENT: DynamicCache()}, TypeError, "DynamicCache"),
    ],
    ids=["neither budget nor cache", "attention", "settings beside a cache", "another cache"],
)
def test_what_is_refused(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    model = models.shared("llama")
    if settings.get(CACHE_ARGUMENT) is True:
        settings = settings | {CACHE_ARGUMENT: models.paged(model.config, **SMALL)}
    with pytest.raises(error, match=says):
        say(model, **PAGED, **settings)


def test_without_use_of_the_cache() -> None:
    model = models.build("llama")
    with pytest.raises(ValueError, match="use_cache=False"):
        say(model, **PAGED, **SMALL, use_cache=False)
    model.generation_config.use_cache = False
    with pytest.raises(ValueError, match=r"generation_config\.use_cache = True"):
        say(model, **PAGED, **SMALL)
    with pytest.raises(ValueError, match=r"generation_config\.use_cache = True"):
        say(model, **PAGED, **SMALL, generation_config=GenerationConfig(use_cache=None))
    assert say(model, **PAGED, **SMALL, use_cache=True)[CACHE_ARGUMENT].layers[0].held == 24


@pytest.mark.parametrize("implementation", ["static", "dynamic", "paged"])
def test_another_implementation(implementation: str) -> None:
    """Asked for, it is refused ("paged" would leave this cache aside without a word); a model's default gives way."""
    model = models.build("llama")
    with pytest.raises(ValueError, match="cache_implementation="):
        say(model, **PAGED, **SMALL, cache_implementation=implementation)
    expected = say(model, **PAGED, **SMALL)
    model.generation_config.cache_implementation = implementation
    output = say(model, **PAGED, **SMALL)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert output[CACHE_ARGUMENT].stats() == expected[CACHE_ARGUMENT].stats()


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = importlib.import_module

    def missing(name: str, *args: Any) -> Any:
        if name == "hf_paged_eviction":
            raise ModuleNotFoundError("No module named 'hf_paged_eviction'")
        return import_module(name, *args)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match="pip install hf_paged_eviction"):
        say(models.shared("llama"), **PAGED, **SMALL)


def test_the_package_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.0.1" if name == "hf_paged_eviction" else installed(name)
    )
    with pytest.raises(ImportError, match=r"hf_paged_eviction>=.*installed: 0\.0\.1"):
        say(models.shared("llama"), **PAGED, **SMALL)


def test_trust_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    if models.VERSION < (5, 14):
        pytest.skip("earlier versions trust every local folder")
    monkeypatch.setattr(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        say(models.shared("llama"), custom_generate=str(FOLDER), **SMALL)


def test_the_card_tells_every_argument() -> None:
    card = ModelCard.load(FOLDER / "README.md")
    assert "custom_generate" in card.data.tags
    assert card.data.library_name == "transformers"
    named = set(re.findall(r"^- `(\w+)`", card.text, flags=re.M))
    assert named == {field.name for field in fields(CacheOptions)} - {"static"} | {"cache", "past_key_values"}


def test_the_requirement_is_this_package() -> None:
    requirement = (FOLDER / "custom_generate" / "requirements.txt").read_text().strip()
    name, _, lowest = requirement.partition(">=")
    assert f'name = "{name}"' in (ROOT / "pyproject.toml").read_text()
    assert tuple(map(int, lowest.split("."))) <= tuple(map(int, version(name).split(".")))
