"""What cannot be served is refused when the server starts, with the way out."""

from types import SimpleNamespace
from typing import Any

import pytest

from hf_paged_eviction_vllm import settings
from hf_paged_eviction_vllm.contract import moved
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
        ([64], "table of settings"),
    ],
)
def test_settings(setting: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        Settings(tiny("llama")[1].config, setting)


class Server(SimpleNamespace):
    """A namespace that can be referred to weakly."""


def _server(**changes: Any) -> Any:
    """What `settings_of` reads of a `VllmConfig`."""
    parts: dict[str, Any] = {
        "parallel_config": {
            "tensor_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "enable_dbo": False,
        },
        "cache_config": {"cache_dtype": "auto", "kv_sharing_fast_prefill": False},
        "model_config": {
            "use_mla": False,
            "is_encoder_decoder": False,
            "runner_type": "generate",
            "is_mm_prefix_lm": False,
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
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype"),
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
    settings._latest = None


def test_nothing_that_is_used_is_missing() -> None:
    assert moved() == []
