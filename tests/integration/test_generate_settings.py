"""What a call of `generate` runs with, from the arguments, `generation_config=` and the model."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from hf_paged_eviction.integration.generation import ANSWERS_AS_TOKENS, check_names, generate_settings


def settings(own: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    return generate_settings(SimpleNamespace(generation_config=GenerationConfig(**own)), arguments, "a test")


def test_what_the_caller_sets_wins_over_the_checkpoint() -> None:
    made = settings(
        {"use_cache": False, "prompt_lookup_num_tokens": 3, "num_beams": 2, "cache_implementation": "static"}
    )
    assert made["use_cache"] is True and made["num_return_sequences"] == 1
    assert {"prompt_lookup_num_tokens", "assistant_early_exit", "cache_implementation"} <= made.keys()
    assert made["prompt_lookup_num_tokens"] is made["assistant_early_exit"] is made["cache_implementation"] is None
    assert "num_beams" not in made and "assistant_model" not in made  # that is no setting


def test_arguments_before_generation_config() -> None:
    config = GenerationConfig(max_new_tokens=7, top_k=3, temperature=0.5)
    made = settings({"top_k": 9}, generation_config=config, temperature=0.25, top_k=None)
    assert made["max_new_tokens"] == 7 and made["temperature"] == 0.25 and made["top_k"] == 3
    assert "generation_config" not in made and "transformers_version" not in made


def test_a_copy_of_the_checkpoints_configuration_asks_for_nothing() -> None:
    own = {"prompt_lookup_num_tokens": 3, "return_dict_in_generate": True}
    made = settings(own, generation_config=GenerationConfig(**own, top_k=3))
    assert made["top_k"] == 3 and made["prompt_lookup_num_tokens"] is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("use_cache", False), ("prompt_lookup_num_tokens", 2), ("assistant_early_exit", 1), ("use_mtp", True)],
        *[("cache_implementation", "static"), ("num_return_sequences", 2), ("prefill_chunk_size", 8)],
        *[("return_dict_in_generate", True), ("output_attentions", True)],
    ],
)
def test_another_value_is_refused_by_name_wherever_it_stands(name: str, value: Any) -> None:
    if name not in vars(GenerationConfig()):
        pytest.skip(f"this transformers has no {name}")
    config = GenerationConfig()
    setattr(config, name, value)
    for arguments in ({name: value}, {"generation_config": config}):
        with pytest.raises(ValueError, match=f"{name}=.*a test sets"):
            settings({}, **arguments)
    assert settings({}, **{name: ANSWERS_AS_TOKENS[name]})[name] is ANSWERS_AS_TOKENS[name]


def test_what_cannot_be_followed_is_refused_from_the_checkpoint_too() -> None:
    with pytest.raises(ValueError, match="token_healing=True"):
        settings({"token_healing": True})
    assert settings({"token_healing": True}, token_healing=False)["token_healing"] is False


def test_names_are_checked_with_the_one_that_was_meant() -> None:
    class Model:
        def generate(self, inputs: Any, **kwargs: Any) -> None: ...

        def forward(self, pixels: Any) -> None: ...

        prepare_inputs_for_generation = forward

    check_names(Model(), ["pixels", "top_k", "streamer", "stopping_criteria", "tokenizer"], "ask", ["policy"])
    with pytest.raises(TypeError, match=r"'polcy'.*'policy'"):
        check_names(Model(), ["polcy"], "ask", ["policy"])
