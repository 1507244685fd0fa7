"""What other weights have read is never served, and the model is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

import driving
import models
from driving import CHUNK, alone, batching, greedy, pool, texts
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_serving import paged_batching

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

OPTIONS: dict[str, Any] = {"budget": 32, "block_size": 4, "policy": "keydiff"}
NEW = 6


def fresh() -> Any:
    """A model of its own, because it changes."""
    return models.build("llama").double()


def in_place(model: Any) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.3 * torch.randn_like(weight))


def optimizer(model: Any) -> None:
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    steps.step()


def loaded(model: Any) -> None:
    model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})


def replaced(model: Any) -> None:
    layer = model.model.layers[0].self_attn.v_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().flip(0))


def moved_to_the_same_address(model: Any) -> None:
    """As when a module is converted and converted back: the allocator has given away the memory, and gives it again."""
    weight = model.model.layers[0].self_attn.v_proj.weight
    other = torch.from_numpy(weight.detach().numpy())
    weight.data = other.copy_(other.flip(0))


@pytest.mark.parametrize("change", [in_place, optimizer, loaded, replaced, moved_to_the_same_address])
def test_beginnings_of_other_weights(change: Callable[[Any], None]) -> None:
    model, prompt = fresh(), texts([70])[0]
    with batching(model, pool(9, allow_block_sharing=True), **OPTIONS) as turned:
        turned.add("before", prompt, NEW)
        turned.run()
        turned.add("same", prompt, NEW)
        turned.run()
        shared = turned.bounded.prefixes.hits
        change(model)
        turned.add("after", prompt, NEW)
        turned.run()
        assert shared == turned.bounded.prefixes.hits == 64
        turned.add("again", prompt, NEW)
        turned.run()
        assert turned.bounded.prefixes.hits == 128
    driving._ANSWERS.clear()
    wanted = alone(model, prompt, NEW, **OPTIONS)
    assert turned.answers["after"] == turned.answers["again"] == wanted
    assert turned.answers["before"] == turned.answers["same"] != wanted


def test_a_change_while_a_prompt_is_read() -> None:
    """What was read in part by each of two weights is kept for nobody, also if the first come back."""
    model, prompt = fresh(), texts([70])[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with batching(model, pool(9, allow_block_sharing=True), **OPTIONS) as turned:
        turned.add("mixed", prompt, NEW)
        turned.step()
        turned.step()
        in_place(model)
        turned.run()
        turned.add("after", prompt, NEW)
        turned.run()
        assert turned.bounded.prefixes.hits == 0
    driving._ANSWERS.clear()
    assert turned.answers["after"] == alone(model, prompt, NEW, **OPTIONS)
    assert not all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_adapters() -> None:
    """Each has beginnings of its own, and finds them when it comes back."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base, prompt = fresh(), texts([70])[0]
    settings = peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, settings, adapter_name="one").double()
    model.add_adapter("other", settings)
    model.double()
    order = ["one", "other", "one", None, "other"]
    with batching(model, pool(9, allow_block_sharing=True), **OPTIONS) as turned:
        hits = []
        for at, adapter in enumerate(order):
            if adapter is not None:
                model.set_adapter(adapter)
                turned.add(str(at), prompt, NEW)
                turned.run()
            else:
                with model.disable_adapter():
                    turned.add(str(at), prompt, NEW)
                    turned.run()
            hits.append(turned.bounded.prefixes.hits)
    assert hits == [0, 0, 64, 64, 128]
    assert turned.answers["0"] == turned.answers["2"] and turned.answers["1"] == turned.answers["4"]
    for at, adapter in enumerate(order[:2]):
        model.set_adapter(adapter)
        driving._ANSWERS.clear()
        assert turned.answers[str(at)] == alone(base, prompt, NEW, **OPTIONS)
    with model.disable_adapter():
        driving._ANSWERS.clear()
        assert turned.answers["3"] == alone(base, prompt, NEW, **OPTIONS)


def adapted() -> tuple[Any, Any, list[Any]]:
    """A model, its wrapper and the layers with adapters."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = fresh()
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, settings).double()
    return base, model, [module for module in model.modules() if hasattr(module, "merged_adapters")]


def test_an_adapter_that_acts_in_other_layers() -> None:
    """In as many as before."""
    base, model, layers = adapted()
    prompt, answers = texts([70])[0], []
    with batching(model, pool(9, allow_block_sharing=True), **OPTIONS) as turned:
        for off in layers[1], layers[2], layers[1]:
            for layer in layers:
                layer.enable_adapters(layer is not off)
            turned.add(str(len(answers)), prompt, NEW)
            turned.run()
            answers.append(turned.answers[str(len(answers))])
        assert turned.bounded.prefixes.hits == 64
    driving._ANSWERS.clear()
    assert answers[0] == answers[2] == alone(base, prompt, NEW, **OPTIONS) != answers[1]


def test_an_adapter_that_was_merged() -> None:
    """Taken out of the weights with another scale than it was added with, it leaves them changed."""
    base, model, layers = adapted()
    prompt = texts([70])[0]
    with batching(model, pool(9, allow_block_sharing=True), **OPTIONS) as turned:
        for name, scale, change in [
            ("before", 1, None),
            ("merged", 1, model.merge_adapter),
            ("after", 9, model.unmerge_adapter),
        ]:
            for layer in layers:
                layer.scaling["default"] = scale
            if change is not None:
                change()
            for layer in layers:
                layer.scaling["default"] = 1
            turned.add(name, prompt, NEW)
            turned.run()
        assert turned.bounded.prefixes.hits == 0
    driving._ANSWERS.clear()
    assert turned.answers["after"] == alone(base, prompt, NEW, **OPTIONS) != turned.answers["before"]


def test_forget() -> None:
    """Also what torch does not count: a write by way of `data`."""
    model, prompt = fresh(), texts([70])[0]
    with paged_batching(model, prefill_chunk_size=CHUNK, **OPTIONS) as held:
        manager = model.init_continuous_batching(greedy(NEW), pool(9, allow_block_sharing=True))
        manager.start()

        def ask() -> Any:
            name = manager.add_request(prompt, max_new_tokens=NEW)
            return manager.get_result(request_id=name, timeout=60).generated_tokens

        first = ask()
        for weight in model.parameters():
            weight.data.mul_(1 + 0.3 * torch.randn_like(weight))
        held.forget()
        second = ask()
        manager.stop()
    driving._ANSWERS.clear()
    assert second == alone(model, prompt, NEW, **OPTIONS) != first


def test_a_context_of_other_weights_is_refused() -> None:
    model, text = fresh(), texts([40, 9])
    with paged_batching(model, prefill_chunk_size=CHUNK, **OPTIONS) as held:
        cache = PagedEvictionCache(model.config, **OPTIONS)
        driving.feed(model, cache, text[0])
        context = held.context(cache)
        in_place(model)
        manager = model.init_continuous_batching(greedy(NEW), pool(9))
        manager.start()
        name = manager.add_request(text[1], max_new_tokens=NEW, context=context)
        result = manager.get_result(request_id=name, timeout=60)
        manager.stop()
    assert "was read by others" in result.error


def test_wrappers() -> None:
    """Requests to a wrapper are bounded, and the model around a part that has no head is asked for."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base, prompt = fresh(), texts([70])[0]
    wanted = alone(base, prompt, NEW, **OPTIONS)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["v_proj"])).double()
    with paged_batching(model, prefill_chunk_size=CHUNK, **OPTIONS):
        (answer,) = model.generate_batch(
            [prompt], generation_config=greedy(NEW), continuous_batching_config=pool(9)
        ).values()
    assert answer.generated_tokens == wanted
    with pytest.raises(ValueError, match="no language-model head"), paged_batching(base.model, **OPTIONS):
        pass
    with pytest.raises(TypeError, match="a model of transformers"), paged_batching(torch.nn.Linear(2, 2), **OPTIONS):
        pass


def test_a_block_without_a_manager_says_so() -> None:
    with pytest.warns(UserWarning, match="No request of this paged_batching block"), paged_batching(fresh(), **OPTIONS):
        pass


def parts() -> Any:
    text = {
        **{"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None},
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    }
    vision = {"depth": 1, "hidden_size": 64, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2}
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision))
    model.set_attn_implementation({"text_config": "paged_eviction", "vision_config": "eager"})
    model.train()
    model.model.visual.eval()
    return model


def state(model: Any) -> Any:
    configs = model.config, model.config.text_config, model.config.vision_config
    return [config._attn_implementation for config in configs], [part.training for part in model.modules()]


@pytest.mark.parametrize("how", ["stops", "never starts", "raises", "cannot be made"])
def test_each_part_of_a_model_is_restored(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = parts()
    before, config = state(model), model.generation_config.to_dict()
    settings = greedy(2)
    if how == "cannot be made":
        settings.temperature = -1.0
        settings.do_sample = True

    def act() -> None:
        with paged_batching(model, budget=64, prefill_chunk_size=CHUNK, policy="keydiff"):
            if how == "stops":
                model.generate_batch([list(range(10, 90))], generation_config=settings)
                assert state(model) == before
            model.init_continuous_batching(None if how == "never starts" else settings)
            if how == "raises":
                raise ZeroDivisionError

    if how in ("raises", "cannot be made"):
        with pytest.raises((ZeroDivisionError, ValueError)):
            act()
    else:
        act()
    assert state(model) == before
    assert model.generation_config.to_dict() == config


def test_heads_of_two_sizes_are_refused() -> None:
    gemma = pytest.importorskip("transformers.models.gemma4", reason="this release has no Gemma 4")
    config = gemma.Gemma4TextConfig(
        **{"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 32, "num_kv_shared_layers": 0},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 200, "sliding_window": 32},
        layer_types=["sliding_attention", "full_attention"],
    )
    model = gemma.Gemma4ForCausalLM(config).eval()
    with (
        paged_batching(model, budget=64, prefill_chunk_size=CHUNK, policy="keydiff"),
        pytest.raises(ValueError, match="heads of 16 and 32 channels"),
    ):
        model.init_continuous_batching(greedy(2))
