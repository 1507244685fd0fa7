"""What this package needs of transformers and is not its documented interface.

Each test fails with a sentence that says what changed and which file of ours to look at.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    cache_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, create_causal_mask, sdpa_mask

import models
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT, CACHE_NAMES

Calls = list[tuple[str, dict[str, Any]]]


def need(fact: bool, change: str, file: str) -> None:
    """Fail with what changed, and where that matters."""
    assert fact, f"transformers {transformers.__version__}: {change} Look at hf_paged_eviction/{file}."


class Recording(DynamicCache):
    """A cache that notes what it is asked, with the arguments by name."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.calls: Calls = []

    def _note(self, name: str, **arguments: Any) -> None:
        self.calls.append((name, arguments))

    @property
    def is_sliding(self) -> list[bool]:
        self._note("is_sliding")
        return [False] * len(self.layers)

    @property
    def is_croppable(self) -> bool:
        self._note("is_croppable")
        return True

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        self._note("get_mask_sizes", query_length=query_length, layer_idx=layer_idx)
        return super().get_mask_sizes(query_length, layer_idx)

    def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._note("update", layer_idx=layer_idx, keys=keys)
        return super().update(keys, values, layer_idx, *args, **kwargs)

    def activate_past_recording(self) -> None:
        self._note("activate_past_recording")

    def crop(self, tokens: int) -> None:
        self._note("crop", tokens=tokens)
        super().crop(tokens)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def model() -> Any:
    return models.build("llama")


def forward(model: Any, cache: Any, count: int = 5, **arguments: Any) -> Any:
    with torch.no_grad():
        return model(torch.ones(1, count, dtype=torch.long), **{CACHE_ARGUMENT: cache}, **arguments)


# ---- the argument -------------------------------------------------------------------------------------------------


def test_models_take_a_cache_by_a_known_name(model: Any) -> None:
    takes = inspect.signature(model.forward).parameters
    need(CACHE_ARGUMENT in takes, f"models take no {CACHE_ARGUMENT}= any more.", "integration/cache_argument.py")
    output = forward(model, DynamicCache(config=model.config), use_cache=True)
    need(hasattr(output, CACHE_ARGUMENT), f"outputs have no .{CACHE_ARGUMENT}.", "integration/cache_argument.py")


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_generate_takes_the_names_that_it_should(model: Any, name: str) -> None:
    """The new name on every release that has it; the old one as long as transformers takes it."""
    if name == "cache" != CACHE_ARGUMENT:
        pytest.skip("not there before transformers 5.24")
    cache = Recording(model.config)
    model.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=2, **{name: cache})
    need(
        "update" in cache.names, f"generate does not use what it is given as {name}=.", "integration/cache_argument.py"
    )


def test_generate_marks_a_cache_and_takes_off_what_it_has_seen(model: Any) -> None:
    if models.VERSION < (5, 19):
        pytest.skip("not there before transformers 5.19")
    events: list[str] = []

    class Seen(int):
        def __rsub__(self, length: int) -> int:
            events.append("subtracted")
            return length - int(self)

    class Marked(Recording):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "_is_user_defined":
                events.append("marked")
            super().__setattr__(name, value)

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return Seen(super().get_seq_length(layer_idx))

    ids = torch.ones(1, 5, dtype=torch.long)
    model.generate(ids, max_new_tokens=2, **{CACHE_ARGUMENT: Marked(model.config)})
    need(
        events[:2] == ["marked", "subtracted"],
        "generate no longer says that it begins (cache._is_user_defined) and then takes cache.get_seq_length() off the "
        "length of the text, so a text of others is not noticed.",
        "integration/turns.py and cache.py (_is_user_defined)",
    )


# ---- masks --------------------------------------------------------------------------------------------------------


def test_masks_are_asked_for_before_the_first_update(model: Any) -> None:
    cache = Recording(model.config)
    forward(model, cache)
    order = [name for name in dict.fromkeys(cache.names) if name != "is_croppable"]
    need(
        order[0] == "is_sliding",
        "building a mask no longer begins with cache.is_sliding.",
        "layer/forwards.py",
    )
    need(
        order[:3] == ["is_sliding", "get_mask_sizes", "update"],
        f"a forward asks its cache in another order: {order}.",
        "layer/forwards.py",
    )


def test_a_mask_of_the_callers_own_asks_for_no_sizes(model: Any) -> None:
    cache = Recording(model.config)
    forward(model, cache, attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool).tril())
    need(
        "is_sliding" in cache.names and "get_mask_sizes" not in cache.names,
        "a 4-D mask is no longer told apart from a 2-D one by what the cache is asked.",
        "layer/forwards.py (Forwards.begin)",
    )


def test_the_offset_of_a_mask_reaches_the_mask_function(model: Any) -> None:
    """An `int` of a class of our own, the object itself, together with the 2-D mask and the number of rows."""

    class Offset(int):
        pass

    class Telling(Recording):
        def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
            length, offset = super().get_mask_sizes(query_length, layer_idx)
            return length, Offset(offset)

    seen: dict[str, Any] = {}

    def build(*args: Any, **kwargs: Any) -> Any:
        seen.update(kwargs, positional=len(args))
        return sdpa_mask(*args, **kwargs)

    AttentionInterface.register("recorded", sdpa_attention_forward)
    AttentionMaskInterface.register("recorded", build)
    try:
        model.set_attn_implementation("recorded")
        forward(model, Telling(model.config), attention_mask=torch.ones(1, 5, dtype=torch.long))
    finally:
        del AttentionInterface._global_mapping["recorded"], AttentionMaskInterface._global_mapping["recorded"]
    where = "masks/channel.py"
    need(isinstance(seen.get("kv_offset"), Offset), "kv_offset= is not what get_mask_sizes returned.", where)
    need(seen.get("attention_mask") is not None, "mask functions no longer get the 2-D attention_mask=.", where)
    need(seen.get("batch_size") == 1, "mask functions no longer get batch_size=.", where)
    need("allow_is_causal_skip" in seen, "mask functions no longer get allow_is_causal_skip=.", where)
    need(seen.get("mask_function") is causal_mask_function, "a plain causal mask has another mask_function.", where)


def test_mask_functions_can_be_listed_and_replaced() -> None:
    masks = AttentionMaskInterface()
    need(
        {"sdpa", "eager"} <= set(masks),
        "mask functions cannot be listed.",
        "masks/channel.py (wrap_mask_functions)",
    )
    need(
        callable(masks["sdpa"]),
        "mask functions cannot be looked up by name.",
        "masks/channel.py (wrap_mask_functions)",
    )


# ---- layers -------------------------------------------------------------------------------------------------------


def test_update_gets_the_layer_by_number(model: Any) -> None:
    cache = Recording(model.config)
    forward(model, cache)
    layers = [call["layer_idx"] for name, call in cache.calls if name == "update"]
    need(layers == [0, 1], f"update is called for layers {layers} of two.", "cache.py (update)")
    keys = next(call["keys"] for name, call in cache.calls if name == "update")
    need(
        keys.shape == (1, 2, 5, 8), f"keys have the shape {tuple(keys.shape)}, not [rows, heads, new, dim].", "cache.py"
    )


def test_a_cache_is_made_of_given_layers() -> None:
    layers = DynamicCache(config=LlamaConfig(num_hidden_layers=3)).layers
    need(
        len(layers) == 3, "DynamicCache(config=...) no longer makes a layer each.", "integration/models.py (layer_plan)"
    )
    need(
        all(type(layer) is cache_utils.DynamicLayer for layer in layers),
        "layers of full attention are no longer DynamicLayer.",
        "integration/models.py (layer_plan)",
    )
    cache = cache_utils.Cache(layers=layers)
    need(cache.layers is layers or cache.layers == layers, "Cache(layers=...) keeps no layers.", "cache.py (__init__)")


def test_a_linear_state_beside_attention() -> None:
    hybrid = cache_utils.LinearAttentionAndFullAttentionLayer
    takes = inspect.signature(cache_utils.LinearAttentionLayer.__init__).parameters
    need("number_of_states" in takes, "linear layers have no number_of_states=.", "layer/hybrid.py and layer/states.py")
    layer = hybrid(number_of_states=1)
    for name in ("conv_states", "recurrent_states", "is_recurrent_states_initialized"):
        need(hasattr(layer, name), f"linear layers have no {name}.", "layer/hybrid.py and layer/states.py")


# ---- assisted decoding --------------------------------------------------------------------------------------------


def test_what_assisted_decoding_asks(model: Any) -> None:
    cache = Recording(model.config)
    ids = torch.arange(1, 9).repeat(1, 3)
    model.generate(ids, prompt_lookup_num_tokens=2, max_new_tokens=8, do_sample=False, **{CACHE_ARGUMENT: cache})
    need("crop" in cache.names, "assisted decoding takes tokens back without crop.", "cache.py (crop)")
    calls = [name for name in cache.names if name in ("activate_past_recording", "is_croppable", "update")]
    need(
        calls[0] == "activate_past_recording",
        f"assisted decoding asks for {calls[0]} before it says that tokens will be taken back.",
        "layer/paged.py (is_croppable)",
    )
    cropped = [call["tokens"] for name, call in cache.calls if name == "crop"]
    need(all(tokens <= 0 for tokens in cropped), "crop gets the tokens to keep again.", "table/rollback.py")


# ---- attention ----------------------------------------------------------------------------------------------------


def test_attention_functions_are_called_by_position() -> None:
    seen: dict[str, Any] = {}

    def attend(*args: Any, **kwargs: Any) -> Any:
        seen.update(positions=len(args), names=set(kwargs), module=args[0], key=args[2])
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("recorded", attend)
    AttentionMaskInterface.register("recorded", sdpa_mask)
    try:
        forward(models.build("llama", "recorded"), None, use_cache=False)
    finally:
        del AttentionInterface._global_mapping["recorded"], AttentionMaskInterface._global_mapping["recorded"]
    where = "queries/attention.py (paged_eviction_attention)"
    need(seen["positions"] == 5, f"attention gets {seen['positions']} arguments in order, not five.", where)
    need("scaling" in seen["names"], "attention no longer gets scaling=.", where)
    need(
        getattr(seen["module"], "layer_idx", None) == 1,
        "attention modules have no layer_idx.",
        f"{where}, for latent attention",
    )


def test_the_attention_implementation_stands_in_the_configuration(model: Any) -> None:
    model.set_attn_implementation("eager")
    name = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    need(name == "eager", "config._attn_implementation is gone.", "queries/attention.py (ModelAttention)")


def test_what_classes_say_of_their_attention() -> None:
    for name in ("_can_set_attn_implementation", "_supports_sdpa", "_supports_attention_backend"):
        need(hasattr(PreTrainedModel, name), f"PreTrainedModel.{name} is gone.", "integration/models.py (why_not_ours)")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(LlamaConfig, None)
    need(model_class is transformers.LlamaForCausalLM, "the table of model classes has moved.", "integration/models.py")


def test_soft_capping_and_sinks_have_an_eager_function() -> None:
    for family in ("gemma2", "gpt_oss"):
        if models.unavailable(family):
            continue
        module = inspect.getmodule(type(models.build(family)))
        need(
            hasattr(module, "eager_attention_forward"),
            f"{family} has no eager_attention_forward.",
            "queries/attention.py",
        )


def test_mask_creation_is_a_function_with_the_cache_as_an_argument() -> None:
    takes: Callable[..., Any] = create_causal_mask
    names = set(inspect.signature(takes).parameters)
    need(bool(names & set(CACHE_NAMES)), "create_causal_mask takes no cache.", "integration/cache_argument.py")
