"""Models that this cache, or the attention implementation "paged_eviction", would serve wrongly are refused."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, cache_utils

import models
import modes
from closeness import assert_close
from evicting import exact
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.queries import arguments
from hf_paged_eviction.queries.attention import paged_eviction_attention

pytestmark = pytest.mark.contract

TOKENS = {"vocab_size": models.VOCABULARY, "pad_token_id": models.PAD, "bos_token_id": 1, "eos_token_id": None}
_WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
#: How this release calls layers that keep an index beside keys and values.
INDEXED = next(
    (
        name
        for name, layer in getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {}).items()
        if layer.__name__ == "DynamicIndexedLayer"
    ),
    "indexed_attention",
)
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4}
#: Models with eager attention of their own, which know nothing of other implementations.
OF_THEIR_OWN: dict[str, dict[str, Any]] = {
    "big_bird": {**_WIDE, "is_decoder": True, "attention_type": "original_full"},
    "codegen": {**_GPT, "rotary_dim": 4},
    "gpt_neox_japanese": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "megatron-bert": {**_WIDE, "is_decoder": True},
    "rembert": {**_WIDE, "is_decoder": True},
    "roformer": {**_WIDE, "is_decoder": True},
    "trocr": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
}


if models.VERSION >= (5, 24):
    del OF_THEIR_OWN["codegen"]  # computes attention by an interface since


def config_of(family: str, **settings: Any) -> Any:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return AutoConfig.for_model(family, **{**TOKENS, **settings})


def refusal(config: Any, **settings: Any) -> str:
    with pytest.raises(ValueError) as caught:
        PagedEvictionCache(config, **{"budget": 64, **settings})
    return str(caught.value)


# ---- attention that depends on slots ------------------------------------------------------------------------------


def test_gpt_neo_with_local_layers() -> None:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4}
    assert "local layers" in refusal(config_of("gpt_neo", **sizes, attention_types=[[["global", "local"], 1]]))


@pytest.mark.parametrize("mode", ["greedy", "direct"])
def test_gpt_neo_without_local_layers_is_exact(mode: str) -> None:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
    config = config_of("gpt_neo", **sizes, max_position_embeddings=256)
    model = models.randomise(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), 0)
    ids, mask = modes.batch(mode, padded=True)
    cache = PagedEvictionCache(model.config, budget=24, block_size=4)
    sequences = modes.run(model, cache, mode, ids, mask)
    assert cache.stats().evicted_tokens > 0
    whole = PagedEvictionCache(model.config, budget=128, block_size=4)
    expected = modes.run(model, modes.dynamic(model), mode, ids, mask)
    assert (modes.run(model, whole, mode, ids, mask) == expected).all()
    assert sequences.shape == expected.shape


def test_prophetnet() -> None:
    config = config_of("prophetnet")
    assert "relative position bias" in refusal(config)
    config.is_encoder_decoder = False
    assert "relative position bias" in refusal(config)


@pytest.mark.parametrize("family", ["inkling_text", "inkling2_text", "inkling2_loop_text"])
def test_the_text_part_alone_is_refused_too(family: str) -> None:
    assert "relative position bias" in refusal(config_of(family))


@pytest.mark.parametrize("family", ["diffusion_gemma_text", "dory"])
def test_models_that_read_the_layers_of_a_cache(family: str) -> None:
    assert "by itself" in refusal(config_of(family))


# ---- heads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["diffllama", "doge"])
def test_heads_that_are_mixed_cannot_evict_on_their_own(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = models.family_config(family) if family == "diffllama" else config_of(family, **_WIDE)
    assert "heads='shared'" in refusal(config, heads="separate")
    assert PagedEvictionCache(config, budget=64).paged_layers


# ---- the attention implementation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["key_norm", "h2o"])
@pytest.mark.parametrize("family", OF_THEIR_OWN)
def test_models_with_attention_of_their_own(family: str, policy: str) -> None:
    config = config_of(family, **OF_THEIR_OWN[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="paged_eviction")
    assert "code of its own" in refusal(model.config, policy=policy)
    # Without it the cache serves the model, and says so where a policy needs queries.
    model.config._attn_implementation = "eager"
    if policy == "h2o":
        message = refusal(model.config, policy=policy)
        assert "code of its own" in message
        assert "set_attn_implementation" not in message
    else:
        PagedEvictionCache(model.config, budget=64, policy=policy)


@pytest.mark.parametrize("family", ["falcon", "gptj"])
def test_no_advice_that_cannot_be_followed(family: str) -> None:
    """transformers raises a bare KeyError when these are loaded with the name of another implementation."""
    if family == "gptj" and models.VERSION >= (5, 24):
        pytest.skip("computes attention by an interface since transformers 5.24")
    config = config_of(family)
    config._attn_implementation = "eager"
    assert "set_attn_implementation" not in refusal(config, policy="h2o")


def test_models_that_transformers_knows_to_need_eager_attention() -> None:
    config = config_of("git")
    config._attn_implementation = "paged_eviction"
    assert "cannot be computed by other implementations" in refusal(config)


def test_compressed_keys_beside_those_of_the_cache() -> None:
    module = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = module.DeepseekV4Config()
    config._attn_implementation = "paged_eviction"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no layer evicts
        assert "compressed keys" in refusal(config, policy="keydiff")


ENCODERS = "bert roberta electra modernbert distilbert deberta-v2 vit clip wav2vec2 dinov2".split()
#: Of these transformers' tables do not name the text part.
ENCODERS += "siglip altclip owlvit clap clipseg align".split()


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_never_use_a_cache(name: str) -> None:
    config = AutoConfig.for_model(name)
    assert "is an encoder" in refusal(config, policy="keydiff")
    if name in ("bert", "roberta", "electra"):
        assert "is_decoder = True" in refusal(config, policy="keydiff")
        config.is_decoder = True
        assert PagedEvictionCache(config, 64, policy="keydiff").budget == 64


class Attention(nn.Module):
    """As transformers calls it."""

    layer_idx = 0
    is_causal = True
    num_key_value_groups = 1


def test_arguments_that_change_nothing() -> None:
    states = torch.randn(1, 2, 5, 8)
    arguments = {
        "position_ids": torch.arange(5)[None],
        "sliding_window": 4,
        "use_cache": True,
        "output_attentions": False,
        "output_of_a_new_kind": True,
        "num_items_in_batch": torch.tensor(3.0),
        "tokenizer": object(),
        "assistant_tokenizer": object(),
        "streamer": print,
        "stop_strings": ["."],
        "logit_cap": 0.0,
        "use_bias": False,
    }
    plain, _ = paged_eviction_attention(Attention(), states, states, states, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same, _ = paged_eviction_attention(Attention(), states, states, states, None, **arguments)
    assert torch.equal(plain, same)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, torch.ones(2)) for name in ("sinks", "position_bias", "indices", "block_indices", "anything")),
        ("logit_cap", 30.0),
        ("attn_logit_softcapping", 50),
        ("attention_dropout", 0.1),
        ("head_mask", torch.ones(2, dtype=torch.bool)),
        ("topk_indices", torch.arange(2)),
        ("score_mod", max),
        ("use_alibi", True),
        ("window_size", (4, 0)),
        ("more_keys", [torch.ones(1, 2, 3, 8)]),
        ("more_values", torch.ones(1, 2, 3, 8, dtype=torch.bfloat16)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_change_attention_by_their_name_or_kind(name: str, value: Any) -> None:
    states = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=f"Attention hands {name}="):
        paged_eviction_attention(Attention(), states, states, states, None, **{name: value})
    output, _ = paged_eviction_attention(Attention(), states, states, states, None, **{name: None})
    assert output.shape == (1, 5, 2, 8)


@pytest.mark.parametrize("value", [object(), "left", 3, True, torch.ones(1, 5, dtype=torch.long)], ids=type)
def test_arguments_that_nobody_knows_are_warned_of_once(value: Any) -> None:
    arguments._warn_of_unknown.cache_clear()
    states = torch.randn(1, 2, 5, 8)
    plain, _ = paged_eviction_attention(Attention(), states, states, states, None)
    with pytest.warns(UserWarning, match="Attention hands anything=.*'paged_eviction' does not know"):
        same, _ = paged_eviction_attention(Attention(), states, states, states, None, anything=value)
    assert torch.equal(plain, same)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paged_eviction_attention(Attention(), states, states, states, None, anything=value)


class Letters:
    """A tokenizer of ids as letters, as far as `stop_strings` need one."""

    def get_vocab(self) -> dict[str, int]:
        return {chr(0x4E00 + token): token for token in range(models.VOCABULARY)}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def _convert_id_to_token(self, token: int) -> str:
        return chr(token)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


@pytest.mark.parametrize("kind", ["none", "dynamic", "paged"])
def test_generate_stops_at_strings(kind: str) -> None:
    """For which it needs the tokenizer, and hands that to the model."""
    answers = []
    for attention in ("sdpa", "paged_eviction"):
        model = models.shared("llama", attention)
        ids = models.prompts([12])[0][None]
        settings: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        whole = model.generate(ids, max_new_tokens=8, **settings)[0].tolist()
        cache = {"dynamic": modes.dynamic(model), "paged": PagedEvictionCache(model.config, 64, policy="keydiff")}
        settings |= {CACHE_ARGUMENT: cache[kind]} if kind in cache else {}
        stop = [chr(0x4E00 + whole[15])]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            answer = model.generate(ids, max_new_tokens=8, stop_strings=stop, tokenizer=Letters(), **settings)
        assert answer[0].tolist() == whole[: 1 + whole.index(whole[15], 12)]
        answers.append(answer.tolist())
    assert answers[0] == answers[1]


def test_the_last_queries_of_a_prompt_are_aligned_with_the_last_keys() -> None:
    states = torch.randn(1, 2, 7, 8)
    whole, _ = paged_eviction_attention(Attention(), states, states, states, None)
    last, _ = paged_eviction_attention(Attention(), states[:, :, -3:], states, states, None)
    assert_close(last, whole[:, -3:])


def test_a_model_that_never_calls_attention_is_noticed() -> None:
    """Code of somebody's own, which transformers cannot know."""
    model = models.build("llama", "paged_eviction")
    cache = PagedEvictionCache(model.config, budget=64)
    ids, mask = modes.batch("direct", padded=False)

    def of_its_own(*args: Any, hidden_states: Any = None, **kwargs: Any) -> Any:
        states = torch.zeros(len(ids), 2, hidden_states.shape[1], 8)
        cache.update(states, states, 0)
        return hidden_states, None

    model.model.layers[0].self_attn.forward = of_its_own
    model.model.layers = model.model.layers[:1]
    modes.forward(model, cache, ids, mask, 0, 20)
    with pytest.raises(RuntimeError, match="no attention followed"):
        modes.forward(model, cache, ids, mask, 20, 21)
    cache.reset()
    modes.forward(model, cache, ids, mask, 0, 20)


# ---- looped layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("settings", [{}, {"policy": "h2o"}, {"allocator": "cake"}], ids=str)
def test_looped_layers_are_exact(settings: dict[str, Any], padded: bool) -> None:
    """hrm_text runs its few layers several times, each time with a cache layer of its own."""
    if reason := models.unavailable("hrm_text"):
        pytest.skip(reason)
    model = models.build("hrm_text", "paged_eviction")
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, **settings)
    assert len(cache.paged_layers) == 4
    ids, mask = modes.batch("direct", padded)
    with exact(model, cache):
        modes.run(model, cache, "direct", ids, mask, steps=8)


# ---- what is said of layers that are not paged --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("mistral", {"sliding_window": 8}, "'sliding_attention' hold a fixed number"),
        ("mamba", {}, "'linear_attention' hold a fixed number"),
        ("deepseek_v32", {}, f"{INDEXED!r} are not paged: they grow with the text without limit"),
    ],
)
def test_the_warning_says_what_happens(family: str, settings: dict[str, Any], says: str) -> None:
    with pytest.warns(UserWarning, match="layer") as caught:
        PagedEvictionCache(config_of(family, **settings), budget=64, policy="keydiff")
    assert says in str(caught[0].message)
    if INDEXED in says:  # beside layers that are paged, too
        config = config_of("llama", **_WIDE)
        config.layer_types = ["full_attention", INDEXED]
        with pytest.warns(UserWarning, match=f"{INDEXED!r}"):
            PagedEvictionCache(config, budget=64)
