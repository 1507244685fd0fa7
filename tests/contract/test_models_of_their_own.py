"""Models that built their masks by themselves before transformers 5.14: exact."""

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from reference import Recorder, assert_evicted, assert_exact

pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore:A batch of several rows arrived")]

SIZES: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "stablelm": {"intermediate_size": 48, "num_key_value_heads": 2},
    "falcon": {"alibi": False},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
}


def build(family: str) -> Any:
    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
    tokens = {"vocab_size": models.VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": models.PAD}
    own = {**SIZES[family], **tokens, **({} if family == "gptj" else common)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **own), attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return models.randomise(model, 0)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", ["greedy", "direct"])
@pytest.mark.parametrize("family", SIZES)
def test_exact_by_themselves(family: str, mode: str, padded: bool) -> None:
    model = build(family)
    ids, mask = modes.batch(mode, padded)
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, attention_mask=mask)
    with Recorder(model, cache) as recorder:
        modes.run(model, cache, mode, ids, mask)
    assert_evicted(recorder)
    assert_exact(model, recorder)


@pytest.mark.parametrize("family", SIZES)
def test_whole_in_the_budget_is_dynamic_cache(family: str) -> None:
    model = build(family)
    ids, mask = modes.batch("greedy", padded=True)
    cache = PagedEvictionCache(model.config, budget=128)
    expected = modes.run(model, modes.dynamic(model), "greedy", ids, mask)
    assert (modes.run(model, cache, "greedy", ids, mask) == expected).all()
