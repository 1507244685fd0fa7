"""Requests over HTTP that go on from a saved cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import driving
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("typer", reason="the extra `eval` is not installed")
pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

if not driving.UNSERVED:
    import talking

    from driving import greedy


def test_over_http(tmp_path: Path) -> None:
    """A file that a request names; others begin with what was read before."""
    model, tokenizer = talking.embedded()
    text = tokenizer(talking.PLACES * 3)["input_ids"]
    options: dict[str, Any] = {"budget": 64, "block_size": 4, "policy": "keydiff", "sink_tokens": 32}
    cache = PagedEvictionCache(model.config, **options)
    for start in range(0, len(text), 16):
        with torch.no_grad():
            model(torch.tensor([text[start : start + 16]]), **{CACHE_ARGUMENT: cache})
    file = tmp_path / "places.safetensors"
    cache.save(file, model=model)
    question = tokenizer("Where is the key? The key is", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        inputs = cache.follow_up(torch.tensor([question]))
        out = model.generate(**inputs, **{CACHE_ARGUMENT: cache}, generation_config=greedy(8))
    wanted = tokenizer.decode(out[0, -8:], skip_special_tokens=True)
    with talking.serving(**options, pages=16, context=[f"places={file}"]) as served:
        arguments: dict[str, Any] = {"model": "embedded", "prompt": question, "max_tokens": 8}
        for prompt in (question, "Where is the key? The key is"):
            answer = served.client.completions.create(
                **arguments | {"prompt": prompt}, extra_body={"context": "places"}
            )
            assert answer.choices[0].text == wanted
        assert served.client.completions.create(**arguments).choices[0].text != wanted
        with pytest.raises(served.openai.BadRequestError, match="'other'"):
            served.client.completions.create(**arguments, extra_body={"context": "other"})
        with pytest.raises(served.openai.BadRequestError, match=r"48, but the context.* 64 tokens") as refused:
            served.client.completions.create(**arguments, extra_body={"context": "places", "kv_budget": 48})
        assert refused.value.param == "kv_budget"
        before = talking.wait_until_free(served)["tokens_shared_total"]
        long = {"model": "embedded", "prompt": talking.prompt(2), "max_tokens": 6}
        first, second = (served.client.completions.create(**long).choices[0].text for _ in range(2))
        after = talking.wait_until_free(served)
        assert first == second
        assert after["tokens_shared_total"] - before == 112  # 7 cuts
        assert after["kept_bytes"] > 0
