"""What cannot be served is refused when the server starts, with the way out."""

import gc
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hf_paged_eviction.internals import register_checkpoint
from hf_paged_eviction_vllm import contract, settings
from hf_paged_eviction_vllm.contract import moved
from hf_paged_eviction_vllm.group import spec_of, summary
from hf_paged_eviction_vllm.processor import RequestOptionsProcessor
from hf_paged_eviction_vllm.requests import RequestOptions
from hf_paged_eviction_vllm.settings import Settings, settings_of
from tiny_models import tiny


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"budget": 60}, "nearest legal: 48 or 64"),
        ({"budget": "25%"}, "reserved by tokens"),
        ({"budget": "25% of memory"}, "reserved by tokens"),
        ({"budget": 64, "bits": 4}, "vLLM does not support bits=4"),
        ({"budget": 64, "polcy": "keydiff"}, "polcy"),
        ({"policy": "keydiff"}, "is needed"),
        ({"budget": 64, "policy": "kvzip"}, "does not"),
        ({"budget": 64, "policy": "keydiff", "allocator": "cake"}, "decides by each prompt"),
        ({"budget": 16}, "Smallest legal budget"),
        ({"budget": 64, "reserve": "no"}, "true or false"),
        ({"budget": 64, "snapshots": 1}, "true or false"),
        ([64], "table of settings"),
    ],
)
def test_settings(setting: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        Settings(tiny("llama")[1].config, setting)


EMBEDDED = Path(__file__).parents[2] / "eval" / "embedded" / "model"
PYRAMID = {"budget": 64, "allocator": "pyramid"}


class Server(SimpleNamespace):
    """A namespace that can be referred to weakly."""


def _server(**changes: Any) -> Any:
    """What `settings_of` reads of a `VllmConfig`."""
    parts: dict[str, Any] = {
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "enable_dbo": False,
        },
        "cache_config": {
            "cache_dtype": "auto",
            "kv_cache_dtype_skip_layers": [],
            "kv_sharing_fast_prefill": False,
            "enable_prefix_caching": True,
        },
        "load_config": {"load_format": "auto"},
        "model_config": {
            "model": "nobody/has-this-model",
            "revision": None,
            "use_mla": False,
            "is_encoder_decoder": False,
            "runner_type": "generate",
            "is_mm_prefix_lm": False,
            "dtype": torch.float32,
            "get_total_num_hidden_layers": lambda: 2,
            "hf_config": tiny("llama")[1].config,
            "hf_text_config": tiny("gemma2")[1].config,
        },
        "scheduler_config": {"disable_hybrid_kv_cache_manager": False},
    }
    top = {
        "speculative_config": None,
        "kv_transfer_config": None,
        "additional_config": {"paged_eviction": {"budget": 64}},
    }
    for name, value in changes.items():
        part = next((part for part in parts.values() if name in part), top)
        part[name] = value
    return Server(**{name: Server(**part) for name, part in parts.items()}, **top)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"speculative_config": object()}, "--speculative-config"),
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
        ({"cache_dtype": "fp8_per_token_head"}, "--kv-cache-dtype"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "--kv-cache-dtype-skip-layers"),
        ({"cache_dtype": "bfloat16"}, "--kv-cache-dtype"),
        (
            {"pipeline_parallel_size": 2, "additional_config": {"paged_eviction": PYRAMID}},
            "pipeline parallelism divides them",
        ),
        ({"use_mla": True}, "MLA"),
        ({"is_encoder_decoder": True}, "Cross attention"),
        ({"runner_type": "pooling"}, "Nothing is generated"),
        ({"is_mm_prefix_lm": True}, "Images"),
        ({"decode_context_parallel_size": 2}, "--tensor-parallel-size"),
        ({"tensor_parallel_size": 2}, "separate"),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
    ],
)
def test_features(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        settings_of(_server(**change))


def test_a_server_without_the_setting() -> None:
    assert settings_of(_server(additional_config={}, speculative_config=object())) is None
    assert settings_of(_server()) is not None
    settings._servers.clear()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"cache_dtype": "float32"}, None),
        ({"cache_dtype": "fp8"}, None),
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"get_total_num_hidden_layers": lambda: 4}, "slide"),
        ({"additional_config": {"paged_eviction": {"budget": 64, "snapshots": False}}}, '"snapshots": false'),
        ({"additional_config": {"paged_eviction": {"budget": 64, "policy": "snapkv"}}}, "watches queries"),
    ],
)
def test_snapshots_are_on_or_a_reason_is_known(change: dict[str, Any], says: str | None) -> None:
    change = {"additional_config": {"paged_eviction": {"budget": 64, "policy": "keydiff"}}} | change
    server = settings_of(_server(**change))
    assert server is not None
    assert server.no_snapshots is says if says is None else says in str(server.no_snapshots)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"get_total_num_hidden_layers": lambda: 4}, "layers that slide are vLLM's own"),
        ({"additional_config": {"paged_eviction": {"budget": 64, "policy": "h2o"}}}, "h2o watches queries"),
    ],
)
def test_the_line_at_start_says_that_prompts_are_read_anew(change: dict[str, Any], says: str) -> None:
    config = _server(**{"additional_config": {"paged_eviction": {"budget": 64, "policy": "keydiff"}}} | change)
    config.model_config.max_model_len, config.max_in_flight_tokens = 256, 64
    config.model_config.get_total_num_kv_heads = lambda: 2
    server = settings_of(config)
    assert server is not None
    stock = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    line = summary(spec_of(stock, config, server), config, server)
    assert says in line and "prompts are read anew" in line


def test_the_profile_of_a_checkpoint_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the weights in its files, where they lie on this machine."""
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path))
    config = AutoConfig.from_pretrained(EMBEDDED)
    profile = tmp_path / "calibrations" / f"{register_checkpoint(config, EMBEDDED)}.safetensors"
    profile.parent.mkdir()
    shutil.copy(EMBEDDED / "calibration.safetensors", profile)
    config = AutoConfig.from_pretrained(EMBEDDED)
    here = _server(hf_config=config, hf_text_config=config, model=str(EMBEDDED))
    server = settings_of(here)
    assert server is not None and server.profile == str(profile)
    elsewhere = AutoConfig.from_pretrained(EMBEDDED)
    server = settings_of(_server(hf_config=elsewhere, hf_text_config=elsewhere))
    assert server is not None and server.profile is None
    with pytest.raises(ValueError, match="profile=FILE"):
        setting = {"paged_eviction": {"budget": 64, "policy": "calibrated"}}
        settings_of(_server(hf_config=elsewhere, hf_text_config=elsewhere, additional_config=setting))


def test_without_names_of_vllm_there_are_no_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract.USED_BY_SNAPSHOTS, "v1.core.block_pool.BlockPool", "touch _gone")
    contract.without_snapshots.cache_clear()
    try:
        server = settings_of(_server(additional_config={"paged_eviction": {"budget": 64, "policy": "keydiff"}}))
    finally:
        monkeypatch.undo()
        contract.without_snapshots.cache_clear()
    assert server is not None and "BlockPool._gone is gone" in str(server.no_snapshots)


@pytest.mark.parametrize("budget", [True, 1, "64", 6.5, 0])
def test_budgets_of_requests_that_are_none(budget: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="paged_eviction_budget"):
        RequestOptions.of({"paged_eviction_budget": budget})


def test_a_request_is_refused_if_every_server_refuses_it() -> None:
    """Two servers in one process: vLLM does not say which one is asked."""
    servers = [_server(additional_config={"paged_eviction": {"budget": budget}}) for budget in (128, 64)]
    assert all(settings_of(server) for server in servers)

    def asks(budget: int) -> None:
        RequestOptionsProcessor.validate_params(SimpleNamespace(extra_args={"paged_eviction_budget": budget}))

    asks(96)
    with pytest.raises(ValueError, match="the budget of this server"):
        asks(256)
    del servers[0]
    gc.collect()
    with pytest.raises(ValueError, match="the budget of this server"):
        asks(96)


def test_nothing_that_is_used_is_missing() -> None:
    assert moved() == []
