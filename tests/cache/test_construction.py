"""What cannot be right is refused at once, with the reason and the way out; what may surprise warns once."""

import inspect
import re
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig, BartConfig, T5Config

import models
import modes
from closeness import assert_close
from hf_paged_eviction import CacheOptions, PagedEvictionCache, make_policy
from hf_paged_eviction.allocators import make_allocator
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.options.checked import chosen_heads
from hf_paged_eviction.queries.attention import PAGED_EVICTION


def make(**settings: Any) -> PagedEvictionCache:
    return PagedEvictionCache(models.family_config("llama"), **settings)


def refused(kind: type[Exception], **settings: Any) -> str:
    with pytest.raises(kind) as caught:
        make(**settings)
    return str(caught.value)


# ---- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "nearest"),
    [(100, {96, 112}), (97, {96, 112}), (50, {48, 64}), *((few, {48}) for few in (1, 20, 40, 47))],
)
def test_budgets_that_are_named_are_the_nearest_and_legal(budget: int, nearest: set[int]) -> None:
    """Below the smallest legal budget the message must not send the user into the next error."""
    message = refused(ValueError, budget=budget)
    named = {int(word) for word in re.findall(r"\d+", message.partition("egal")[2] or message)} - {budget, 16}
    assert named >= nearest
    for size in named & {48, 64, 96, 112} | nearest:
        make(budget=size)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"budget": 0}, ValueError, "budget"),
        ({"budget": 64.0}, TypeError, "budget"),
        ({"budget": torch.tensor(64)}, TypeError, r"tensor\(64\)"),
        ({"budget": [64, 96]}, TypeError, r"budget.*\[64, 96\]"),
        ({"budget": 64, "static": "yes"}, TypeError, "'yes'"),
        ({"budget": 64, "policy": None}, TypeError, r"policy.*name"),
        ({"budget": 64, "block_size": 0}, ValueError, "block_size"),
        ({"budget": 64, "block_size": 4.5}, TypeError, "block_size"),
        ({"budget": 64, "sink_tokens": -1}, ValueError, "sink_tokens"),
        ({}, ValueError, "budget="),
        ({"budget": "0%"}, ValueError, r"above 0%.*100%"),
        ({"budget": "-50%"}, ValueError, "'-50%'"),
        ({"budget": "lots"}, ValueError, "'lots'"),
        ({"budget": 0.5}, TypeError, r"0\.5"),
        ({"budget": "2G"}, ValueError, r"'2G'.*2GiB"),
        *(({"budget": text}, ValueError, r"number.*bytes") for text in ("GiB", "-1GiB", "\u0663GiB")),
        *(({"budget": text}, ValueError, "at least one byte") for text in ("0B", "0.1B")),
        *(({"budget": f"25{text}"}, ValueError, r"written '25% of memory'.*tokens '25%'")
          for text in ("% memory", "% of the memory", "%mem", "% of prompt", "% of tokens")),
        *(({"budget": f"{share}% of memory"}, ValueError, "is not a share") for share in (0, 120, "x")),
        *(({"budget": 64, "bits": bits}, (TypeError, ValueError), "bits=")
          for bits in (5, 16, "5", True, 4.0, (4,), (4, 5), (4, 2, 8))),
        *(({"budget": 64, "protect": spans}, TypeError, "pairs")
          for spans in ([(1, 2, 3)], [3], [[(1, 2)], "x"], [(True, 2)])),
        ({"budget": 64, "protect": "system"}, TypeError, "spans_of_roles"),
        ({"budget": 64, "protect": [(3, 2)]}, ValueError, "after its last"),
        ({"budget": 64, "protect": [(-1, 2)]}, ValueError, "counted from 0"),
        ({"budget": 64, "heads": "both"}, ValueError, '"shared", "separate"'),
        *(({"budget": 64, "positions": value}, ValueError, '"text".*"cache"')
          for value in ("Cache", "consecutive", None, 1)),
        ({"budget": 64, "attention_mask": [[1, 1]]}, TypeError, "attention_mask"),
        ({"budget": 64, "attention_mask": torch.ones(2, 1, 4, 4)}, ValueError, r"\[rows, length\]"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_right(settings: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make(**settings)


def test_numbers_of_other_libraries_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert make(budget=numpy.int64(64)).layers[0].budget.tokens == 64
    assert make(budget=" 50 % ").layers[0].budget.keep_ratio == 0.5


def test_blanks_around_a_name_do_not_matter() -> None:
    assert make(budget=64, policy=" key_norm\n", allocator=" uniform ").policy.label == "key_norm"
    assert make_policy(" graphkv( key_norm ) ").label == "graphkv(key_norm)"


def test_a_configuration_is_what_is_asked_for() -> None:
    for wrong, words in ((None, "got None"), ({"num_hidden_layers": 2}, "got a dict"), ("llama", "got a str")):
        with pytest.raises(TypeError, match=rf"model\.config; {words}"):
            PagedEvictionCache(wrong, budget=64)
    with pytest.raises(TypeError, match=r"\(LlamaForCausalLM\).*model\.config"):
        PagedEvictionCache(models.shared("llama"), budget=64)


def test_the_model_has_more_layers_than_the_cache() -> None:
    model = models.build("llama", num_hidden_layers=3)
    ids, mask = models.left_pad(models.prompts([9]))
    with pytest.raises(ValueError, match=r"2 layers.*3"):
        modes.forward(model, make(budget=64), ids, mask, 0, 9)


@pytest.mark.parametrize("layer_idx", [-1, 2, "0", True, None])
@pytest.mark.parametrize("read", ["block_table", "block_scores"])
def test_layers_that_do_not_exist(read: str, layer_idx: Any) -> None:
    with pytest.raises(ValueError, match=rf"layer_idx.*0.*1.*{layer_idx!r}"):
        getattr(make(budget=64), read)(layer_idx)


# ---- 4-D masks ----------------------------------------------------------------------------------------------------


def four_dimensional(mask: torch.Tensor) -> torch.Tensor:
    """What transformers would build of this mask: additive, `[rows, 1, length, length]`."""
    visible = mask[:, None, None].bool() & torch.ones(mask.shape[1], mask.shape[1]).tril().bool()
    visible = visible | torch.eye(mask.shape[1]).bool()
    return torch.where(visible, 0.0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "paged_eviction"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_padded_batch_with_a_4d_mask(family: str, attention: str) -> None:
    """The cache sees no mask then, and would take pads for tokens, unless it is told."""
    model = models.shared(family, attention)
    ids, mask = models.left_pad(models.prompts([40, 29]))
    inputs = {"attention_mask": four_dimensional(mask), "position_ids": models.positions_of(mask)}
    equal = {"budget": 24, "block_size": 4, "policy": "keydiff"}
    cache = PagedEvictionCache(model.config, **equal)
    with torch.no_grad(), pytest.raises(ValueError, match=r"2.*4-D.*attention_mask="):
        model(ids, **{CACHE_ARGUMENT: cache}, **inputs)
    if family == "gemma3":
        return  # one mask for sliding and other layers: not what the model would build
    masked = PagedEvictionCache(model.config, **equal, attention_mask=mask)
    plain = PagedEvictionCache(model.config, **equal)
    with torch.no_grad():
        logits = model(ids, **{CACHE_ARGUMENT: masked}, **inputs).logits
    expected = modes.forward(model, plain, ids, mask, 0, 40)
    assert_close(logits[mask.bool()], expected[mask.bool()])
    assert torch.equal(masked.block_table(1), plain.block_table(1))


def test_a_later_4d_mask_is_seen_too() -> None:
    """Also where earlier forwards of this cache said what was a pad, and after a reset."""
    model = models.shared("llama")
    ids, mask = models.left_pad(models.prompts([40, 29]))
    cache = PagedEvictionCache(model.config, budget=48, block_size=4)
    whole, positions = four_dimensional(mask), models.positions_of(mask)
    for start in (20, 0):
        if start:
            modes.forward(model, cache, ids, mask, 0, start)
        later = {"attention_mask": whole[:, :, start:], "position_ids": positions[:, start:]}
        with torch.no_grad(), pytest.raises(ValueError, match="4-D"):
            model(ids[:, start:], **{CACHE_ARGUMENT: cache}, **later)
        cache.reset()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_row_may_bring_its_own_mask(attention: str) -> None:
    """Without pads there is nothing to be told of: no error and no warning."""
    model = models.shared("llama", attention)
    ids, mask = models.left_pad(models.prompts([40]))
    cache, plain = (PagedEvictionCache(model.config, budget=24, block_size=4) for _ in range(2))
    with torch.no_grad():
        assert caught(lambda: model(ids, attention_mask=four_dimensional(mask), **{CACHE_ARGUMENT: cache})) == []
    modes.forward(model, plain, ids, mask, 0, 40)
    assert torch.equal(cache.block_table(), plain.block_table())


@pytest.mark.filterwarnings("ignore:Attention now reaches further")
@pytest.mark.parametrize(
    ("ratio", "length", "expected"), [(0.5, 100, 64), (0.25, 256, 64), (0.01, 100, 48), (1.0, 33, 48), (0.26, 256, 80)]
)
def test_a_share_meets_its_prompt(ratio: float, length: int, expected: int) -> None:
    """Rounded up to a block, and never below what is legal."""
    model = models.shared("llama")
    cache = PagedEvictionCache(model.config, budget=f"{100 * ratio}%")
    assert cache.stats().budget is None
    assert "%" in repr(cache)
    ids, mask = models.left_pad(models.prompts([length]))
    modes.generate(model, cache, ids, mask, 3)
    assert cache.stats().budget == expected
    assert cache.layers[0].keys.shape[2] == expected
    cache.reset()
    ids, mask = models.left_pad(models.prompts([2 * length]))
    modes.generate(model, cache, ids, mask, 3)
    again = PagedEvictionCache(model.config, budget=f"{100 * ratio}%")
    modes.generate(model, again, ids, mask, 3)
    assert cache.stats().budget == again.stats().budget


# ---- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("bloom", {}, "ALiBi"),
        ("mpt", {}, "ALiBi"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("t5", {}, "relative position bias"),
        ("switch_transformers", {}, "relative position bias"),
    ],
)
def test_scores_that_depend_on_the_slot(model_type: str, settings: dict[str, Any], reason: str) -> None:
    config = AutoConfig.for_model(model_type, **settings)
    with pytest.raises(ValueError, match=reason) as caught:
        PagedEvictionCache(config, budget=64)
    assert "DynamicCache" in str(caught.value)


def test_falcon_without_alibi_is_welcome() -> None:
    config = AutoConfig.for_model("falcon", alibi=False)
    assert len(PagedEvictionCache(config, budget=64).paged_layers) == config.num_hidden_layers


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [*((name, f"{name} (keeps|reads)") for name in ("rwkv", "xlstm", "openai-gpt")), ("blt", "DynamicCache")],
)
def test_a_model_that_keeps_another_state_is_refused(model_type: str, reason: str) -> None:
    """A byte latent transformer has several stacks of layers, and none that its configuration counts."""
    with pytest.raises(ValueError, match=reason):
        PagedEvictionCache(AutoConfig.for_model(model_type), budget=64)


def test_a_model_that_transformers_does_not_show_is_welcome() -> None:
    """Its tables name the class of the text part, and the package does not export it."""
    with pytest.warns(UserWarning, match="voxtral_realtime_text"):
        PagedEvictionCache(AutoConfig.for_model("voxtral_realtime"), budget=64)


def test_encoder_decoders_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="transformers' EncoderDecoderCache") as caught:
        PagedEvictionCache(BartConfig(), budget=64)
    assert "\n" not in str(caught.value) and T5Config().is_encoder_decoder


@pytest.mark.parametrize("policy", ["paged_eviction", "key_norm", "value_norm"])
def test_norms_mean_nothing_for_latents(policy: str) -> None:
    config = models.family_config("deepseek_v3")
    with pytest.raises(ValueError, match="MLA") as caught:
        PagedEvictionCache(config, budget=64, policy=policy)
    assert "keydiff" in str(caught.value)
    for other in ("keydiff", "streaming_llm", "recency", "random"):
        assert len(PagedEvictionCache(config, budget=64, policy=other).paged_layers) == 2


def test_multimodal_configs_hide_a_text_config() -> None:
    """Their own layer count is not that of the text model."""
    config = AutoConfig.for_model("gemma3")
    text = config.get_text_config()
    text.num_hidden_layers, text.layer_types = 3, ["sliding_attention", "full_attention", "full_attention"]
    cache = PagedEvictionCache(config, budget=64)
    assert [index for index, _ in cache.paged_layers] == [1, 2]
    assert len(cache.layers) == 3


def test_cross_attention_layers_stay_whole() -> None:
    config = AutoConfig.for_model("mllama").get_text_config()
    config.num_hidden_layers, config.cross_attention_layers = 4, [1, 3]
    if hasattr(config, "layer_types") and config.layer_types:
        config.layer_types = ["full_attention"] * 4
    cache = PagedEvictionCache(config, budget=64)
    assert [index for index, _ in cache.paged_layers] == [0, 2]


@pytest.mark.parametrize("family", models.HYBRID)
def test_recurrent_layers_are_untouched(family: str) -> None:
    config = models.family_config(family)
    cache = PagedEvictionCache(config, budget=64)
    assert [index for index, _ in cache.paged_layers] == [1]
    assert type(cache.layers[0]).__name__ == "LinearAttentionLayer"


# ---- warnings -----------------------------------------------------------------------------------------------------


def caught(action: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        action()
    return [str(one.message) for one in warned if issubclass(one.category, UserWarning)]


def test_nothing_that_can_evict_warns_once_of_the_users_line() -> None:
    with pytest.warns(UserWarning, match="No layer of this mistral model can evict") as warned:
        PagedEvictionCache(models.family_config("mistral_sliding"), budget=64)
    assert [one.filename for one in warned] == [__file__]
    assert caught(lambda: PagedEvictionCache(models.family_config("gemma3"), budget=64, policy="keydiff")) == []


def test_longrope_warns_once() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", **factors}
    changes: dict[str, Any] = {
        "rope_parameters": {"rope_theta": 10000.0, "original_max_position_embeddings": 64, **rope}
    }
    config = models.family_config("phi3", original_max_position_embeddings=64, **changes)
    messages = caught(lambda: PagedEvictionCache(config, budget=64, policy="keydiff"))
    assert len(messages) == 1
    assert "longrope" in messages[0]
    assert "64" in messages[0]


def test_unknown_padding_in_a_batch_warns_once() -> None:
    """Keys that arrive without any word from a model."""
    cache = make(budget=48)
    states = torch.randn(2, 2, 5, 8)

    def feed() -> None:
        for _ in range(3):
            for layer in range(2):
                cache.update(states, states, layer)

    messages = caught(feed)
    assert len(messages) == 1
    assert "attention_mask=" in messages[0]


@pytest.mark.parametrize("how", ["one row", "given mask", "model"])
def test_known_padding_does_not_warn(how: str) -> None:
    states = torch.randn(1 if how == "one row" else 2, 2, 5, 8)
    if how == "model":
        model = models.shared("llama")
        ids, mask = modes.batch("greedy", padded=True)
        cache = PagedEvictionCache(model.config, budget=48)
        assert caught(lambda: modes.generate(model, cache, ids, mask, 3)) == []
        return
    cache = make(budget=48, attention_mask=torch.ones(2, 5) if how == "given mask" else None)
    assert caught(lambda: cache.update(states, states, 0)) == []


def test_a_mask_of_the_wrong_batch_is_refused() -> None:
    model = models.shared("llama")
    cache = PagedEvictionCache(model.config, budget=48, attention_mask=torch.ones(2, 40))
    ids, mask = models.left_pad(models.prompts([40, 30, 20]))
    with pytest.raises(ValueError, match=r"divide.*3"):
        modes.generate(model, cache, ids, mask, 3)


def test_another_batch_needs_a_reset() -> None:
    model = models.shared("llama")
    cache = PagedEvictionCache(model.config, budget=48)
    ids, mask = models.left_pad(models.prompts([20, 20]))
    modes.forward(model, cache, ids, mask, 0, 20)
    one = torch.cat([ids, ids[:, :1]], dim=1)[:1]
    with pytest.raises(ValueError, match=r"2 rows.*1"):
        modes.forward(model, cache, one, torch.ones_like(one), 20, 21)


def test_heads_are_the_policys_unless_the_user_or_the_model_says_otherwise() -> None:
    def heads(family: str, policy: str, **options: Any) -> str:
        config = models.build(family, PAGED_EVICTION).config
        return PagedEvictionCache(config, budget=64, policy=policy, **options).paged_layers[0][1].heads

    assert heads("llama", "paged_eviction") == heads("llama", "keydiff") == "shared"
    assert heads("llama", "value_norm") == heads("llama", "hybrid(compactor, tova)") == "separate"
    assert heads("llama", "value_norm", heads="shared") == "shared"
    assert heads("llama", "keydiff", heads="separate") == heads("llama", "keydiff", allocator="ada_kv") == "separate"
    mixing = models.build("llama", PAGED_EVICTION).config
    mixing.model_type = "doge"
    assert chosen_heads(None, make_policy("value_norm"), make_allocator("uniform"), mixing) == "shared"


@pytest.mark.parametrize(("bits", "warns"), [(2, True), ((2, 4), True), ((4, 2), False), (3, False)], ids=str)
def test_what_is_known_to_be_bad_is_said(bits: Any, warns: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PagedEvictionCache(models.shared("llama").config, budget=64, bits=bits, policy="keydiff")
    assert [(str(warning.message)[:14], warning.filename) for warning in caught] == [
        ("Keys in 2 bits", __file__)
    ] * warns


def test_the_constructor_takes_the_options_one_by_one() -> None:
    """Written out, so that editors and type checkers see them; `CacheOptions` says what they mean."""
    takes = inspect.signature(PagedEvictionCache).parameters
    options = inspect.signature(CacheOptions).parameters
    assert list(takes) == ["config", *options, "attention_mask"]
    for name, option in options.items():
        assert (takes[name].default, takes[name].kind) == (option.default, option.kind), name


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("max_cache_len", "budget="),
        ("window_length", "streaming_llm"),
        ("num_sink_tokens", "sink_tokens="),
        ("compression_ratio", "budget='25%'"),
    ],
)
def test_names_of_other_caches_are_answered_with_ours(name: str, instead: str) -> None:
    with pytest.raises(TypeError, match=rf"no argument '{name}'.*{instead}.*docs/comparison\.md"):
        PagedEvictionCache(models.shared("llama").config, 64, **{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("huge", [10**20, 10**400, 10**5000], ids=["20", "400", "5000"])
def test_numbers_that_nobody_means_are_refused_in_few_words(huge: int) -> None:
    options: list[dict[str, Any]] = [{"budget": huge}, {"budget": 64, "protect": [(0, huge)]}]
    options += [{"budget": 64, name: huge} for name in ("recent_tokens", "sink_tokens", "block_size")]
    options += [{"budget": huge, "policy": "auto"}]  # whose newest tokens are a share of the budget
    for wrong in options:
        with pytest.raises(ValueError, match=r"digits|at most|span|budget") as error:
            PagedEvictionCache(models.shared("llama", "paged_eviction").config, **{"policy": "keydiff", **wrong})
        assert len(str(error.value)) < 400
