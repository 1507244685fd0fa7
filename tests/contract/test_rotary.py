"""The rotation learned from a model's code is the one the model really uses."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

import models
from closeness import assert_close
from hf_paged_eviction import EvictionPolicy, Needs, PagedEvictionCache, ScoreContext
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.integration.model_rotary import UnknownRotaryError, layer_rotaries
from hf_paged_eviction.integration.models import why_not_ours
from hf_paged_eviction.integration.rotary import Rotary
from models import rope
from rotation_checks import look, look_at_rotation

pytestmark = pytest.mark.contract


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_HALF = {"partial_rotary_factor": 0.5}
_HEAD = {"head_dim": 8}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
#: name -> model type, settings, channels that turn in each full-attention layer
_KNOWN: dict[str, tuple[str, dict[str, Any], list[int | None]]] = {
    "linear": ("llama", rope("linear", factor=4.0), [8, 8]),
    "llama3": ("llama", rope("llama3", factor=8.0, **_LLAMA3), [8, 8]),
    "yarn": ("llama", rope("yarn", factor=8.0, original_max_position_embeddings=64), [8, 8]),
    "interleaved": ("cohere", {}, [8, 8]),
    "interleaved half": ("glm", _HEAD | _HALF, [4, 4]),
    "half, cut by the function": ("gpt_neox", {"num_key_value_heads": 4, "rotary_pct": 0.5}, [4, 4]),
    "half, cut by attention": ("stablelm", _HALF, [4, 4]),
    "half, queries and keys in one": ("persimmon", {"num_key_value_heads": 4, **_HALF}, [4, 4]),
    "two layers, one rotates": ("smollm3", {"no_rope_layers": [1, 0]}, [8, None]),
    "only sliding layers rotate": ("cohere2", _SLIDING, [None]),
    "only sliding layers rotate, if there are any": ("exaone4", _SLIDING, [None]),
    "no layer slides": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, [8, 8]),
    "a base per kind of layer": ("gemma3_text", _HEAD | {"query_pre_attn_scalar": 8} | _SLIDING, [8]),
    "waves of half the width": (
        "gpt_oss",
        _HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2, **models._PLAIN_ROPE, **_SLIDING},
        [8],
    ),
    "learned positions": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, [None, None]),
}
_UNKNOWN = {
    "dynamic": ("llama", rope("dynamic", factor=4.0), "length of the text"),
    "longrope": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 256,
            **rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4),
        },
        "length of the text",
    ),
    "mrope": ("llama", rope("default", mrope_section=[1, 1, 2]), "several positions"),
    "no class": (
        "gptj",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
        "0 classes|does not say its frequencies",
    ),
}


def config_of(model_type: str, settings: dict[str, Any]) -> Any:
    return AutoConfig.for_model(model_type, **{**models._COMMON, **settings})


def model_of(config: Any) -> Any:
    return models.randomise(AutoModelForCausalLM.from_config(config), 0)


@pytest.mark.parametrize("case", _KNOWN)
def test_unrotated_keys_of_equal_states_are_equal(case: str) -> None:
    model_type, settings, widths = _KNOWN[case]
    model = model_of(config_of(model_type, settings))
    seen = look_at_rotation(model)
    assert seen.ok and seen.error < 1e-5
    first = model.config.num_hidden_layers - len(widths)
    rotaries = layer_rotaries(model.config, range(first, model.config.num_hidden_layers))
    assert [rotary and rotary.width for rotary in rotaries.values()] == widths


@pytest.mark.parametrize("family", [family for family in models.FAMILIES if family not in ("deepseek_v3",)])
def test_every_family_is_known(family: str) -> None:
    if reason := models.unavailable(family):
        pytest.skip(reason)
    seen = look(models.shared(family))[0]
    assert seen.error is None if family == "mistral_sliding" else seen.error is not None and seen.error < 1e-5


@pytest.mark.parametrize("case", ["linear", "yarn", "interleaved half"])
def test_a_wrong_rotation_shows(case: str) -> None:
    model = model_of(config_of(*_KNOWN[case][:2]))
    plain = config_of("llama", {})
    for name in ("rope_parameters", "rope_scaling", "model_type"):
        if hasattr(plain, name):
            setattr(model.config, name, getattr(plain, name))
    model.config.__class__ = type(plain)
    seen = look_at_rotation(model)
    assert not seen.ok and seen.error > 0.05
    assert "WRONG" in seen.text


def test_latents_are_not_known() -> None:
    latent = look(models.shared("deepseek_v3"))[0]
    assert latent.ok and latent.error is None and "latents" in latent.text


@pytest.mark.filterwarnings("ignore:.*longrope")
@pytest.mark.parametrize("case", _UNKNOWN)
def test_what_cannot_be_undone_is_refused(case: str) -> None:
    model_type, settings, reason = _UNKNOWN[case]
    config = config_of(model_type, settings)
    with pytest.raises(UnknownRotaryError, match=reason):
        layer_rotaries(config, [0, 1])
    with pytest.raises(ValueError, match=rf'({reason}).*positions="text"'):
        PagedEvictionCache(config, budget=64, positions="cache")
    PagedEvictionCache(config, budget=64)
    if why_not_ours(config) is not None:
        return  # refused before anybody asks for its rotation
    config._attn_implementation = "paged_eviction"
    with pytest.raises(ValueError, match=f"'expected_attention'.*{reason}.*keydiff"):
        PagedEvictionCache(config, budget=64, policy="expected_attention")
    PagedEvictionCache(config, budget=64, policy="lagkv")


def test_latents_are_refused() -> None:
    with pytest.raises(UnknownRotaryError, match="latents"):
        layer_rotaries(models.family_config("deepseek_v3"), [0])


@dataclass(frozen=True)
class Looks(EvictionPolicy):
    """Notes what it is given."""

    by_heart: bool = False
    keys: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    queries: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def needs(self) -> Needs:
        return Needs(rotary=True, row_statistics=() if self.by_heart else ("nothing",))

    def observe(self, statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
        self.queries.append((attention.unrotated_queries, attention.query_positions))
        return {"nothing": torch.zeros(len(attention.queries))}

    def score(self, context: ScoreContext) -> Tensor:
        self.keys.append((context.layer_idx, context.unrotated_keys, context.positions))
        return context.unrotated_keys[..., 0].float()


def same(states: Tensor, counted: Tensor) -> bool:
    """Whether all that count `[B, tokens]` are the same `[B, heads, tokens, dim]` in all rows."""
    real_states = states.transpose(1, 2)[counted]
    return torch.allclose(real_states, real_states[:1].expand_as(real_states), atol=1e-4)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_left_pads_do_not_shift_positions(static: bool) -> None:
    """One token repeated, in rows of different lengths: unrotated queries and keys are the same everywhere."""
    model, policy = models.shared("llama", "paged_eviction"), Looks()
    ids, mask = models.left_pad([torch.full((length,), 9) for length in (40, 33)])
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, policy=policy, static=static)
    generated = model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, max_new_tokens=1, do_sample=False)
    nine = torch.full((2, 1), 9)
    for _ in range(9):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
        at = models.positions_of(mask)[:, -1:]
        model(nine, attention_mask=mask, position_ids=at, **{CACHE_ARGUMENT: cache})
    assert len(policy.keys) > 4
    assert len(policy.queries) > 4
    assert generated.shape == (2, 41)
    for _, keys, positions in policy.keys:
        assert same(keys, positions[:, 0] >= 0)
    for queries, positions in policy.queries:
        assert same(queries, positions >= 0)


def test_layers_that_rotate_differently_are_not_scored_in_one() -> None:
    """A score that knows no layers is asked once for several, unless they rotate differently."""

    class Local(Looks):
        needs = Needs(token_local=True, by_layer=False, rotary=True)

    model = model_of(config_of(*_KNOWN["two layers, one rotates"][:2]))
    ids = torch.cat(models.prompts([60]))[None]
    positions = []
    for policy in (Local(by_heart=True), Looks(by_heart=True)):
        cache = PagedEvictionCache(model.config, budget=24, block_size=4, policy=policy)
        with torch.no_grad():
            model(ids[:, :30], **{CACHE_ARGUMENT: cache})
            for at in range(30, 60):
                model(ids[:, at : at + 1], **{CACHE_ARGUMENT: cache})
        positions.append([layer.positions.tolist() for _, layer in cache.paged_layers])
    assert positions[0] == positions[1]


def learned(case: str = "yarn") -> tuple[Any, Rotary]:
    config = config_of(*_KNOWN[case][:2])
    rotary = layer_rotaries(config, [0])[0]
    assert rotary is not None
    return config, rotary


@pytest.mark.parametrize("case", ["yarn", "interleaved", "half, cut by attention"])
def test_rotations_are_undone_moved_and_averaged(case: str) -> None:
    _, rotary = learned(case)
    torch.manual_seed(0)
    states, positions = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randint(0, 400, (2, 3, 5))
    rotated = rotary.rotate(states, positions)
    assert not torch.allclose(rotated, states)
    assert_close(rotary.unrotate(rotated, positions), states, share=4e-6)
    moved = rotary.rotate_by(rotated, torch.tensor(-7))
    torch.testing.assert_close(moved, rotary.rotate(states, positions - 7), rtol=0, atol=1e-4)
    by_step = [rotary.rotate(states, positions + step) for step in range(6)]
    assert_close(rotary.rotate_mean(states, positions[..., None] + torch.arange(6)), sum(by_step) / 6, share=4e-6)
    assert torch.equal(rotated[..., rotary.width :], states[..., rotary.width :])


def test_lengths_change_only_where_the_model_stretches_states() -> None:
    """Not by what rounding leaves of a sine and a cosine."""
    for rotary, stretched in ((layer_rotaries(AutoConfig.for_model("llama"), [0])[0], False), (learned()[1], True)):
        assert rotary is not None
        (_, _, scaling), _ = rotary.of_channels(torch.device("cpu"))
        assert bool((scaling == 1).all()) != stretched


def test_pairs_that_stand_still_may_lie_between_others() -> None:
    """Halves of which only the first quarters turn."""
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no such model")
    config = AutoConfig.for_model("gemma4_text")
    rotary = layer_rotaries(config, range(config.num_hidden_layers))[config.num_hidden_layers - 1]
    assert rotary is not None
    (frequencies, _, _), layout = rotary.of_channels(torch.device("cpu"))
    assert layout == [256, 1, 256, 512] and (frequencies == 0).sum() == 384
    torch.manual_seed(0)
    query, state, positions = torch.randn(1, 2, 512), torch.randn(1, 1, 512), torch.randint(0, 400, (1, 1, 5))
    products = rotary.add_products(torch.zeros(1, 2, 5), query, state, positions)
    assert_close(products, query @ rotary.rotate(state.expand(1, 5, 512), positions[0]).mT)


def test_products_of_rotated_states_depend_on_the_distance() -> None:
    _, rotary = learned()
    query, key = torch.randn(8), torch.randn(8)

    def product(a: int, b: int) -> float:
        return float(rotary.rotate(query, torch.tensor(a)) @ rotary.rotate(key, torch.tensor(b)))

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-3)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


def test_positions_repeated_over_heads_give_the_same() -> None:
    _, rotary = learned()
    states, positions = torch.randn(2, 3, 5, 8), torch.arange(10).view(2, 1, 5).expand(-1, 3, -1)
    assert torch.equal(rotary.unrotate(states, positions), rotary.unrotate(states, positions.contiguous()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_worked_out_in_float32(dtype: torch.dtype) -> None:
    _, rotary = learned()
    states = torch.randn(4, 8).to(dtype)
    rotated = rotary.rotate(states, torch.arange(4))
    assert rotated.dtype == torch.float32
    assert torch.equal(rotated, rotary.rotate(states.float(), torch.arange(4)))


def test_heads_that_are_too_small() -> None:
    _, rotary = learned()
    with pytest.raises(ValueError, match=r"8 channels.*6"):
        rotary.rotate(torch.zeros(6), torch.tensor(0))


def test_layers_that_turn_alike_share_one_rotation() -> None:
    rotaries = layer_rotaries(config_of("llama", {}), range(2))
    assert rotaries[0] is rotaries[1]
