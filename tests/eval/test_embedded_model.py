"""The embedded model: loads, round-trips text, and really uses its context."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.data import library
from hf_paged_eviction_eval.tasks import NeedleTask, available_tasks, get_task, held_out_texts
from training import measure
from training.corpus import training_files
from training.tokenizer import task_words

NEEDLE_TASKS = [name for name in available_tasks() if isinstance(get_task(name), NeedleTask)]
MODEL, TOKENIZER = embedded.load()


@settings(max_examples=80)
@given(st.text())
def test_the_tokenizer_keeps_any_text(text: str) -> None:
    plain = text.replace("<", "(")  # the names of special tokens are not text
    ids = TOKENIZER(plain, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == plain


def test_task_words_and_digits_are_single_tokens() -> None:
    for word in task_words():
        assert len(TOKENIZER(f" {word}", add_special_tokens=False)["input_ids"]) == 1
    assert len(TOKENIZER("48213", add_special_tokens=False)["input_ids"]) == 5


def test_the_chat_template_gives_the_form_it_was_trained_on() -> None:
    messages = [
        {"role": "system", "content": "Register maple = coral reef"},
        {"role": "user", "content": "What is in register maple? Register maple ="},
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"{TOKENIZER.bos_token}{messages[0]['content']}\n{messages[1]['content']}"
    answered = TOKENIZER.apply_chat_template(
        [*messages, {"role": "assistant", "content": " coral reef"}], tokenize=False
    )
    assert answered == f"{text} coral reef{TOKENIZER.eos_token}"


def test_the_files_are_small_and_suit_old_and_new_transformers() -> None:
    files = {path.name: path for path in embedded.path().iterdir()}
    assert files["model.safetensors"].stat().st_size < 16_000_000
    config = json.loads(files["config.json"].read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["max_position_embeddings"] >= 4096
    assert config["num_key_value_heads"] < config["num_attention_heads"]


def test_the_model_never_saw_the_held_out_modules() -> None:
    seen = {path.relative_to(library.root()).as_posix() for path in training_files()}
    assert not seen & {f"{name}.py" for name in library.HELD_OUT}
    assert len(seen) > 100


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_load_as_asked(attention: str) -> None:
    model, _ = embedded.load(dtype=torch.bfloat16, attn_implementation=attention)
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == attention
    assert not model.training


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_it_answers_with_the_full_cache(name: str) -> None:
    assert measure.accuracy(MODEL, TOKENIZER, name, length=384, count=10, seed=77) >= 0.9


def test_it_answers_long_prompts() -> None:
    assert measure.accuracy(MODEL, TOKENIZER, "passkey", length=2048, count=2, seed=77, batch=2) == 1


def test_tova_keeps_what_its_newest_query_attends_to() -> None:
    """Its attention is peaky: next to the largest weight nearly all others are tiny, and their order counts too."""
    ids = TOKENIZER(held_out_texts()["statistics"], return_tensors="pt").input_ids[:, :640]
    eager, ours = (embedded.load(attn_implementation=how)[0] for how in ("eager", "paged_eviction"))
    cache = PagedEvictionCache(ours.config, budget=160, block_size=1, sink_tokens=0, policy="tova")
    with torch.no_grad():
        attended = eager(ids, output_attentions=True, use_cache=False).attentions
        ours(ids, **{CACHE_ARGUMENT: cache})
    for index, layer in cache.paged_layers:
        best = attended[index][0, :, -1].mean(0).topk(160).indices.tolist()
        assert len(set(best) & set(layer.positions[0, 0].tolist())) >= 0.98 * 160, f"layer {index}"


def test_answers_end_with_the_end_token() -> None:
    inputs = TOKENIZER("Register maple = coral reef\nWhat is in register maple? Register maple =", return_tensors="pt")
    output = MODEL.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert TOKENIZER.decode(output[0, inputs["input_ids"].shape[1] :]) == f" coral reef{TOKENIZER.eos_token}"
