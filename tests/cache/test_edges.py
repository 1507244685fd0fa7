"""Calls that are legal and rare, and mistakes that are made once."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from hf_paged_eviction import EvictionPolicy, Needs, PagedEvictionCache, ScoreContext, make_policy
from hf_paged_eviction.integration.heads import LocalHeads
from hf_paged_eviction.learned.calibration import load_calibration
from hf_paged_eviction.masks.of_attention import additive
from hf_paged_eviction.preparing.fitting import fit
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction.recipes.probe import compress_by_probe
from policy_inputs import text


def make(family: str = "llama", attention: str = "sdpa", **settings: Any) -> PagedEvictionCache:
    return PagedEvictionCache(
        models.shared(family, attention).config, **{"budget": 24, "block_size": 4, "sink_tokens": 4, **settings}
    )


@pytest.mark.parametrize("policy", ["keydiff", "paged_eviction"])
@pytest.mark.parametrize("seen", [10, 40])
def test_no_tokens_at_all(policy: str, seen: int) -> None:
    """An empty forward returns what is held and changes nothing."""
    cache = make(policy=policy)
    ids, mask = models.left_pad(models.prompts([40, 30]))
    modes.forward(models.shared("llama"), cache, ids, mask, 0, seen)
    before, positions = cache.layers[0].keys.clone(), cache.layers[0].positions
    held = cache.layers[0].held
    nothing = torch.zeros(2, 2, 0, 8)
    cache.get_mask_sizes(0)
    keys, values = cache.update(nothing, nothing, 0)
    assert torch.equal(keys, before[:, :, :held])
    assert values.shape == keys.shape
    assert cache.get_seq_length() == seen
    assert torch.equal(cache.layers[0].positions, positions)


@pytest.mark.parametrize("heads", ["shared", "separate"])
def test_values_of_another_width_follow_their_keys(heads: str) -> None:
    """While slots are overwritten as well: the first number of a key and of a value is that of its token."""
    cache = make(policy="keydiff", heads=heads, attention_mask=torch.ones(2, 60))
    keys, values = torch.randn(2, 2, 60, 8), torch.randn(2, 2, 60, 3)
    keys[..., 0] = values[..., 0] = torch.arange(60.0)
    for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 60))]:
        cache.update(keys[:, :, start:stop], values[:, :, start:stop], 0)
    layer = cache.layers[0]
    assert layer.values.shape == (2, 2, 24, 3)
    assert torch.equal(layer.keys[..., 0], layer.values[..., 0])
    assert torch.equal(layer.keys[..., 0], layer.positions.expand(-1, 2, -1).float())


def test_prefetch_goes_to_the_layers_own_device() -> None:
    cache = make()
    ids, mask = models.left_pad(models.prompts([30]))
    modes.forward(models.shared("llama"), cache, ids, mask, 0, 30)
    layer = cache.layers[0]
    layer.prefetch()
    assert layer.keys.device.type == layer.values.device.type == "cpu"
    layer.store.device = torch.device("meta")
    layer.prefetch()
    assert layer.keys.device.type == layer.values.device.type == "meta"


@pytest.mark.parametrize(
    ("attribute", "reason"), [("relative_attention_num_buckets", "relative position bias"), ("alibi", "ALiBi")]
)
def test_positions_that_are_slots_are_known_by_attribute(attribute: str, reason: str) -> None:
    """Also in models whose type is unknown."""
    config = models.family_config("llama")
    setattr(config, attribute, 32)
    with pytest.raises(ValueError, match=reason):
        PagedEvictionCache(config, budget=64)


def test_heads_of_layers_that_differ() -> None:
    """From the configuration of the layer where there is one; unknown where only the numbers are there."""

    def share(layer: int, **values: Any) -> int | None:
        config = SimpleNamespace(**values)
        config.get_text_config = lambda decoder: config
        return LocalHeads.of_layers(config, [layer])[layer].total

    per_layer = [SimpleNamespace(num_key_value_heads=2), SimpleNamespace(num_key_value_heads=4)]
    assert [share(layer, per_layer_config=per_layer, num_key_value_heads=8) for layer in range(3)] == [2, 4, 8]
    assert share(0, num_global_key_value_heads=1, num_key_value_heads=2) is None
    assert share(0, num_attention_heads=6) == 6
    assert share(0, num_key_value_heads=[2, 4]) is None
    assert share(0) is None


def by_position(layer: Any, name: str) -> list[dict[int, float]]:
    """Per row, from the position of a token to its number in the first head."""
    rows = zip(layer.positions[:, 0].tolist(), layer.observed[name][:, 0].tolist(), strict=True)
    return [{p: x for p, x in zip(positions, numbers, strict=True) if p >= 0} for positions, numbers in rows]


def test_statistics_move_back_with_their_tokens() -> None:
    """New tokens took slots of pads; when they are taken back the others are put in order, with what they earned."""
    model = models.shared("llama", PAGED_EVICTION)
    cache = make(attention=PAGED_EVICTION, policy="h2o")
    ids, mask = models.left_pad(models.prompts([20, 16]), 24)
    more = torch.stack(models.prompts([2, 2], seed=3))
    modes.forward(model, cache, ids, mask, 0, 24)
    before = [by_position(layer, "attention") for _, layer in cache.paged_layers]
    longer, its_mask = torch.cat([ids, more], dim=1), modes.extend(mask, 2)
    for at in (24, 25):
        modes.forward(model, cache, longer, its_mask, at, at + 1)
    slots = [layer.positions.clone() for _, layer in cache.paged_layers]
    cache.crop(-2)
    for (_, layer), earned, moved in zip(cache.paged_layers, before, slots, strict=True):
        assert not torch.equal(layer.positions, moved[:, :, : layer.held])
        assert by_position(layer, "attention") == earned
        assert layer.positions[0, 0].tolist() == [-1, -1, *range(20)]


def test_an_additive_mask_stays() -> None:
    query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    own = torch.randn(1, 1, 3, 5)
    assert additive(own, query, key, True) is own
    assert additive(None, query[:, :, :1], key, True) is None
    assert additive(None, query, key, False) is None, "attention over an encoder's text"
    hidden = additive(torch.tensor([[[[True, False, True, True, True]]]]), query, key, True)
    assert hidden is not None
    assert hidden.tolist() == [[[[0.0, torch.finfo(torch.float32).min, 0.0, 0.0, 0.0]]]]
    causal = additive(None, query, key[:, :, :3], True)
    assert causal is not None
    assert (causal[0, 0] == 0).tolist() == torch.ones(3, 3, dtype=torch.bool).tril().tolist()


def test_a_forward_of_several_is_scored_after_its_attention() -> None:
    recorder = make(attention=PAGED_EVICTION, policy="h2o").layers[0].recorder
    with pytest.raises(RuntimeError, match="scored"):
        recorder.observe_overflow(torch.zeros(1, 1, 30, dtype=torch.int64), 0)


class Curious(EvictionPolicy):
    """Keeps what it was told."""

    def __init__(self, local: bool) -> None:
        self.local = local
        self.contexts: list[ScoreContext] = []

    @property
    def needs(self) -> Needs:
        return Needs(token_local=self.local)

    def score(self, context: ScoreContext) -> Tensor:
        self.contexts.append(context)
        return context.positions.float()


@pytest.mark.parametrize("local", [False, True])
def test_policies_are_told_how_much_was_seen(local: bool) -> None:
    """Real tokens of each row, before a decision while decoding and at a forward of several."""
    policy = Curious(local)
    cache = make(policy=policy)
    ids, mask = models.left_pad(models.prompts([60, 47, 39]))
    real = torch.tensor([60, 47, 39])
    for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 50)), (50, 60)]:
        policy.contexts.clear()
        modes.forward(models.shared("llama"), cache, ids, mask, start, stop)
        for context in policy.contexts:
            counts = [(real - 60 + at).clamp_min(0).tolist() for at in (stop, start)]
            assert any({*context.seen.tolist()} <= {*of_rows} for of_rows in counts)
            assert len(context.seen) == 3 or not local  # else perhaps of those alone that may choose a victim
            assert context.valid.equal(context.positions >= 0)
            assert (context.positions < context.seen[:, None, None]).all()
            assert context.layer_idx in (0, 1)
        assert policy.contexts or stop - start == 1


def test_caote_of_a_policy_with_statistics_of_its_own() -> None:
    """RoCo counts squares too; what CAOTE asks of it is its mean attention alone."""
    inputs = text(seed=1)
    roco, mean = make_policy("caote(roco)"), make_policy("caote(attention_mean)")
    scores, expected = (policy.score(inputs.context(policy, inputs.all_pieces(policy))) for policy in (roco, mean))
    valid = inputs.positions >= 0
    torch.testing.assert_close(scores[valid], expected[valid])


@pytest.fixture
def calibration_file() -> Path:
    from hf_paged_eviction_eval import embedded

    return Path(embedded.calibration_path())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, metadata: metadata.update(feature_version="0"), "of version '0', this package reads version"),
        (lambda tensors, metadata: metadata.update(format="x"), "another kind of safetensors file"),
    ],
)
def test_files_that_are_no_calibration(
    change: Callable[[dict[str, Tensor], dict[str, str]], Any], message: str, calibration_file: Path, tmp_path: Path
) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(calibration_file, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    change(tensors, metadata)
    path = tmp_path / "changed.safetensors"
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=f"{message}"):
        load_calibration(path)


def test_a_cache_names_its_profile_once(calibration_file: Path) -> None:
    from hf_paged_eviction_eval import embedded

    model, _ = embedded.load()
    policy = "hybrid(calibrated, keydiff)"
    cache = PagedEvictionCache(model.config, budget=64, policy=policy, profile=str(calibration_file))
    assert repr(cache).count(calibration_file.name) == 1
    assert "profile=" not in repr(make(policy=policy.replace("calibrated", "value_norm")))


def test_latents_cannot_be_calibrated() -> None:
    with pytest.raises(ValueError, match="latents instead"):
        fit(models.shared("deepseek_v3"), [torch.zeros(1, 300, dtype=torch.int64)] * 2)


def test_a_probe_without_a_mask_is_one_with_all_tokens() -> None:
    model = models.shared("llama", PAGED_EVICTION)
    ids = torch.stack(models.prompts([40, 40]))
    held = []
    for mask in (None, torch.ones_like(ids)):
        cache = make(attention=PAGED_EVICTION, policy="kvzip", budget=40)
        compress_by_probe(model, cache, 20, ids, mask, probe_ids=[3, 4])
        held.append([layer.positions for _, layer in cache.paged_layers])
    assert all(torch.equal(*pair) for pair in zip(*held, strict=True))


@pytest.mark.parametrize("settings", [{}, {"bits": 4}, {"static": True}], ids=str)
def test_after_a_reset_the_model_may_have_another_type(settings: dict[str, Any]) -> None:
    model = models.build("llama", "paged_eviction")
    cache = PagedEvictionCache(model.config, budget=16, block_size=4, policy="keydiff", **settings)
    inputs = modes.batch("greedy", padded=True)
    modes.run(model, cache, "greedy", *inputs)
    model.to(torch.bfloat16)
    cache.reset()
    fresh = PagedEvictionCache(model.config, budget=16, block_size=4, policy="keydiff", **settings)
    sequences = [modes.run(model, one, "greedy", *inputs) for one in (cache, fresh)]
    assert torch.equal(*sequences)
    assert cache.paged_layers[0][1].dtype == torch.bfloat16
