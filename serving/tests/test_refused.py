"""What cannot be right is refused with a reason, and leaving restores what was before."""

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

import driving
from driving import greedy, model_of, pool, texts
from hf_paged_eviction.integration import contract as releases
from hf_paged_eviction_serving import TESTED, UnsupportedTransformersError, contract, paged_batching
from hf_paged_eviction_serving.attention import attention_in_pages
from witness import Witness

served = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)
OPTIONS: dict[str, Any] = {"budget": 32, "block_size": 4}


def test_releases_where_something_moved_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract.transformers, "__version__", "9.9.9")
    monkeypatch.setattr(contract, "USED", {f"cache.NoSuchCache{number}": "" for number in range(5)})
    with pytest.raises(UnsupportedTransformersError, match=r"9\.9\.9.*NoSuchCache0.*2"):
        paged_batching(None, 32).__enter__()


@served
def test_untested_releases_are_served_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert contract.moved() == []
    assert transformers.__version__ in TESTED
    contract.check_transformers()
    monkeypatch.setattr(contract.transformers, "__version__", "9.9.9")
    contract._warn_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with paged_batching(model_of(), **OPTIONS):
                pass
    contract._warn_untested.cache_clear()
    assert [words[:60] for warning in caught if not (words := str(warning.message)).startswith("No request")] == [
        "Serving has not been tested with transformers 9.9.9. Tested "
    ]


@served
def test_nothing_is_looked_up_in_source_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments and formatting of transformers may change, and its source may be missing."""
    monkeypatch.setattr("inspect.getsource", None)
    assert contract.moved() == []


@served
def test_what_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a class, a method, a parameter and an attribute that are not there."""
    used = {
        "cache.NoSuchCache": "",
        "no_such_module.Cache": "",
        "scheduler.Scheduler": "no_such_method add_waiting_request(request)",
        "requests.RequestState": "request_id no_such_field",
    }
    monkeypatch.setattr(contract, "USED", used)
    messages = contract.moved()
    assert len(messages) == 5
    assert "NoSuchCache is gone" in messages[0]
    assert "no_such_module" in messages[1]
    assert "Scheduler.no_such_method is gone" in messages[2]
    assert "Scheduler.add_waiting_request" in messages[3] and "not (request)" in messages[3]
    assert "RequestState.no_such_field is gone" in messages[4]
    with pytest.raises(UnsupportedTransformersError, match=r"Scheduler\.no_such_attribute is gone"):
        contract.check_attributes(FIFOScheduler.__new__(FIFOScheduler), "__class__.__name__ no_such_attribute")


@pytest.mark.parametrize(
    ("method", "takes"),
    [
        (lambda self, first, second: None, True),
        (lambda self, first, second, third=None: None, True),
        (lambda self, first, second, *rest, **more: None, True),
        (lambda self, first, second, third: None, False),
        (lambda self, second, first: None, False),
        (lambda self, first: None, False),
    ],
)
def test_parameters_that_may_be_added(method: Any, takes: bool) -> None:
    assert releases.takes(method, ["first", "second"]) is takes
    assert releases.takes(method, ["second", "first", "..."]) is ("second" in inspect.signature(method).parameters)


@served
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_cuda_graph": True}, "CUDA graphs"),
        ({"use_cuda_graph": (False, True)}, "CUDA graphs"),
        ({"q_padding_interval_size": 64}, "CUDA graphs"),
        ({"default_compile_level": 1}, "Compiled steps"),
        ({"use_async_batching": True}, "Asynchronous batching"),
        ({"max_blocks_per_request": 8}, "max_blocks_per_request"),
        ({"cpu_offload_space": 1.0}, "cpu_offload_space"),
        ({"scheduler_type": "prefill_first"}, r"depend.*other requests"),
        ({"num_blocks": 1}, r"num_blocks=1.*16"),
        ({"max_batch_tokens": 8}, r"max_batch_tokens=8.*prefill_chunk_size=16"),
    ],
)
def test_options_of_transformers(changes: dict[str, Any], reason: str) -> None:
    model, config = model_of(), pool(8)
    for name, value in changes.items():
        setattr(config, name, value)
    with paged_batching(model, prefill_chunk_size=16, **OPTIONS), pytest.raises(ValueError, match=reason):
        model.init_continuous_batching(greedy(5), config)


@served
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy": "lazy_eviction"}, "'lazy_eviction'"),
        ({"policy": "keydiff", "allocator": "ada_kv"}, "'ada_kv' decides by each prompt"),
        ({"policy": "keydiff", "allocator": "first_prompt"}, "'first_prompt' decides by each prompt"),
        ({"policy": "keydiff", "allocator": "heads:[[1.0]]"}, "shares for 1 layers"),
        ({"policy": "no_such"}, "no_such"),
        ({"positions": "cache"}, r"pages.*rotated"),
        ({"positions": "none"}, "positions="),
        ({"disposal": Witness()}, r"evicted.*overwritten"),
        ({"budget": "1GiB"}, "budget="),
        ({"budget": "25%"}, "reserved"),
        ({"budget": "25% of memory"}, "plan` says how many"),
        ({"budget": 30}, "budget=30"),
        ({"budget": None}, "is needed"),
        ({"prefill_chunk_size": 0}, r"prefill_chunk_size.*1"),
        ({"sink_tokens": 100}, "sink_tokens=100"),
    ],
)
def test_options_of_ours(changes: dict[str, Any], reason: str) -> None:
    model = model_of()
    with pytest.raises(ValueError, match=reason), paged_batching(model, **(OPTIONS | changes)):
        pass
    assert "init_continuous_batching" not in vars(model)


@served
def test_what_is_no_option() -> None:
    with pytest.raises(TypeError, match="'bitts'"):
        paged_batching(model_of(), **OPTIONS, bitts=4).__enter__()


@served
def test_models() -> None:
    with pytest.raises(ValueError, match=r"mistral.*evict"):
        paged_batching(model_of("mistral_sliding"), **OPTIONS).__enter__()
    with pytest.raises(ValueError, match="ALiBi"):
        paged_batching(_bloom(), **OPTIONS).__enter__()
    model = model_of()
    model._device_mesh = SimpleNamespace(size=lambda: 2)
    try:
        with pytest.raises(ValueError, match="2 processes"):
            paged_batching(model, **OPTIONS).__enter__()
    finally:
        del model._device_mesh


@served
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_whose_attention_does_not_use_pages(attention: str) -> None:
    """GPT-NeoX of transformers 5.24 calls the cache without the arguments that continuous batching needs."""
    model = model_of("gpt_neox")
    model.set_attn_implementation(attention)
    try:
        with paged_batching(model, prefill_chunk_size=16, **OPTIONS):
            if transformers.__version__ in ("5.24.0",):
                with pytest.raises(ValueError, match=r"GPTNeoXForCausalLM.*5\.24\.0"):
                    model.init_continuous_batching(greedy(5), pool(8))
            else:
                model.init_continuous_batching(greedy(5), pool(8))
        assert model.config._attn_implementation == attention
    finally:
        model.set_attn_implementation("sdpa")


@served
@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, **inputs: None, r"asks.*pages"),
        (lambda self, cache, **inputs: cache.get_conv_state(0), "'get_conv_state'"),
    ],
)
def test_models_that_do_something_else(monkeypatch: pytest.MonkeyPatch, forward: Any, reason: str) -> None:
    model = model_of()
    monkeypatch.setattr(type(model), "forward", forward)
    with paged_batching(model, prefill_chunk_size=16, **OPTIONS), pytest.raises(ValueError, match=reason):
        model.init_continuous_batching(greedy(5), pool(8))


def _bloom() -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2))


@served
@pytest.mark.parametrize(
    ("budget", "more", "error", "message"),
    [
        (36, {}, ValueError, r"budget=36 is more than 32.*at most"),
        (30, {}, ValueError, "not a multiple of block_size=4; nearest legal: 28 or 32"),
        (8, {}, ValueError, "Smallest legal budget: 12"),
        (0, {}, ValueError, "at least 1"),
        (-4, {}, ValueError, "at least 1"),
        (True, {}, TypeError, "whole number"),
        (16.0, {}, TypeError, "whole number"),
        ("50%", {}, TypeError, "whole number"),
        (16, {"protect": [(0, 12)]}, ValueError, "Smallest legal budget: 20"),
    ],
)
def test_budgets_of_requests(budget: Any, more: dict[str, Any], error: type[Exception], message: str) -> None:
    model = model_of()
    with paged_batching(model, prefill_chunk_size=16, **OPTIONS):
        manager = model.init_continuous_batching(greedy(5), pool(8))
        with pytest.raises(error, match=message):
            manager.add_request([1, 2], budget=budget, **more)
        assert manager.input_queue.empty()


@served
def test_leaving_restores() -> None:
    model, prompts = model_of(), texts([40, 50])
    plain = model.generate_batch(prompts, generation_config=greedy(6), continuous_batching_config=pool(16, tokens=128))
    implementation = model.config._attn_implementation
    with paged_batching(model, prefill_chunk_size=16, **OPTIONS) as running:
        with pytest.raises(ValueError, match="paged_batching"):
            paged_batching(model, **OPTIONS).__enter__()
        bounded = model.generate_batch(
            prompts, generation_config=greedy(6), continuous_batching_config=pool(8), persistent_manager=True
        )
        assert model._cached_continuous_batching_manager.options is running.options
    assert "init_continuous_batching" not in vars(model)
    assert getattr(model, "_cached_continuous_batching_manager", None) is None
    assert model.config._attn_implementation == implementation
    after = model.generate_batch(prompts, generation_config=greedy(6), continuous_batching_config=pool(16, tokens=128))
    tokens = [[output.generated_tokens for output in outputs.values()] for outputs in (plain, bounded, after)]
    assert tokens[0] == tokens[2] != tokens[1]


@served
def test_a_manager_made_in_inference_mode() -> None:
    """Its tensors can be written to later, outside that mode."""
    model, prompts, answers = model_of(), texts([40, 50]), []
    with paged_batching(model, prefill_chunk_size=16, **OPTIONS):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                outputs = model.generate_batch(
                    prompts, generation_config=greedy(6), continuous_batching_config=pool(8), persistent_manager=True
                )
            answers.append([output.error or output.generated_tokens for output in outputs.values()])
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == 6


@served
def test_an_exception_ends_what_runs() -> None:
    model = model_of()
    with pytest.raises(KeyError), paged_batching(model, prefill_chunk_size=16, **OPTIONS):
        manager = model.init_continuous_batching(greedy(5), pool(8))
        manager.start()
        manager.add_request(texts([40])[0], max_new_tokens=10_000)
        raise KeyError
    assert not manager.is_running()
    assert manager.batch_processor is None
    assert "init_continuous_batching" not in vars(model)


@served
def test_a_manager_from_before() -> None:
    model = model_of()
    model.generate_batch(
        texts([5]), generation_config=greedy(2), continuous_batching_config=pool(8), persistent_manager=True
    )
    try:
        with pytest.raises(ValueError, match="destroy_cached_continuous_batching_manager"):
            paged_batching(model, **OPTIONS).__enter__()
    finally:
        model.destroy_cached_continuous_batching_manager()


@served
def test_memory_on_a_cpu_is_bounded() -> None:
    """transformers takes 60 % of the memory where nothing is said."""
    model = model_of()
    with paged_batching(model, prefill_chunk_size=16, **OPTIONS):
        config = model.init_continuous_batching(greedy(5)).continuous_batching_config
    assert (config.num_blocks, config.max_batch_tokens) == (16, 32)


def test_dropout_in_pages_is_refused() -> None:
    """Attention to pages would leave it out."""
    states, ends = torch.zeros(1, 2, 3, 8), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"no dropout.*model.eval"):
        attention_in_pages(torch.nn.Module(), states, states, states, None, dropout=0.1, cu_seq_lens_q=ends)
