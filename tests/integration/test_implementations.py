"""The attention implementation of each part of a model comes back, whoever raises."""

import pytest
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from hf_paged_eviction.integration.implementations import using


def parts() -> Qwen2VLForConditionalGeneration:
    text = {
        **{"vocab_size": 200, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "pad_token_id": 0},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None},
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    }
    vision = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2}
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision))
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    return model


def of_parts(model: Qwen2VLForConditionalGeneration) -> list[str]:
    configs = model.config, model.config.text_config, model.config.vision_config
    return [config._attn_implementation for config in configs]


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_each_part_has_its_own_again(error: type[BaseException] | None) -> None:
    model = parts()
    before = of_parts(model)
    try:
        with using(model, "paged_eviction"):
            assert model.config.text_config._attn_implementation == "paged_eviction"
            if error is not None:
                raise error
    except (ZeroDivisionError, KeyboardInterrupt):
        pass
    assert of_parts(model) == before == ["sdpa", "sdpa", "eager"]


def test_a_name_that_is_refused_changes_nothing() -> None:
    model = parts()
    before = of_parts(model)
    with pytest.raises(ValueError, match="no_such"), using(model, "no_such"):
        pass
    assert of_parts(model) == before
