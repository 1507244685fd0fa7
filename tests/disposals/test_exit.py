"""Every token that leaves a layer does so through its action, once; tests/fuzz plays this with drawn calls."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import models
import modes
from hf_paged_eviction import available_disposals, make_disposal
from hf_paged_eviction.disposals import Disposal, Drop, EvictionAction, Site, register_disposal
from witness import Witness


@pytest.mark.parametrize("settings", [{"bits": 4}, {"static": True}], ids=str)
@pytest.mark.parametrize("says", ["acts", "reads"])
def test_an_action_that_does_something_is_refused(says: str, settings: dict[str, Any]) -> None:
    class Another(Disposal):
        def action(self, site: Site) -> EvictionAction:
            action = EvictionAction()
            setattr(action, says, True)
            return action

    (name,) = settings
    with pytest.raises(ValueError, match=f"{name}=.*disposal 'Another'.*disposal='drop'"):
        models.paged(models.family_config("llama"), 24, 4, disposal=Another(), **settings)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_block_is_planned_before_its_tokens_leave(padded: bool) -> None:
    """While one token at a time comes, and once each."""
    model = models.shared("llama")
    cache = models.paged(model.config, budget=24, block_size=4, disposal=Witness())
    ids, mask = models.left_pad(models.prompts([20, 13, 9] if padded else [20] * 3))
    more = torch.stack(models.prompts([40] * 3, seed=5))
    ids, mask = torch.cat([ids, more], dim=1), modes.extend(mask, 40)
    modes.forward(model, cache, ids, mask, 0, 20)
    for at in range(20, 60):
        modes.forward(model, cache, ids, mask, at, at + 1)
        for _, layer in cache.paged_layers:
            log = layer.action.log
            if log is not None:
                assert log.planned[..., :-1].max() <= 1
                assert (log.planned >= log.times)[..., :-1].all()
                gap = (log.planned - log.times)[..., :-1].sum(-1)
                assert (gap < 4).all(), "a block leaves before the next one is chosen"


def test_an_action_that_does_not_say_what_it_keeps_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.shared("llama")
    cache = models.paged(model.config, budget=24, block_size=4, disposal=Witness())
    modes.forward(model, cache, *modes.batch("greedy", True), 0, 40)
    cache.save(tmp_path / "context.safetensors")
    monkeypatch.setattr(type(cache.layers[0].action), "STATE", ())
    with pytest.raises(ValueError, match=r"layer 0: WitnessAction\.STATE"):
        cache.save(tmp_path / "context.safetensors")


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operator.overloadpacket.__name__] += 1
        return operator(*args, **(kwargs or {}))


class Untouched(EvictionAction):
    """Fails if it is told of anything."""

    def plan(self, *_: Any) -> None:
        raise AssertionError("plan")

    def evict_token(self, *_: Any) -> None:
        raise AssertionError("evict_token")

    overflow = evict_token  # type: ignore[assignment]


def test_dropping_costs_no_operator() -> None:
    model = models.shared("llama")
    counted = []
    for patched in (False, True):
        cache = models.paged(model.config, budget=24, block_size=4)
        ids, mask = modes.batch("greedy", True)
        more = modes.extend(mask, 20)
        text = torch.cat([ids, torch.stack(models.prompts([20] * 3, seed=5))], dim=1)
        if patched:
            for _, layer in cache.paged_layers:
                layer.action = Untouched()
        with Operators() as watch:
            for start, stop in [(0, 40), *((at, at + 1) for at in range(40, 60))]:
                modes.forward(model, cache, text, more, start, stop)
        counted.append(watch.counts)
        assert not watch.counts["scatter_add"]  # what losers are found by
    assert counted[0] == counted[1]


def test_by_name() -> None:
    assert "drop" in available_disposals()
    assert make_disposal(" drop ") == make_disposal("drop()") == Drop()
    given_object = Drop()
    assert make_disposal(given_object) is given_object
    assert Drop().label == "drop"
    model = models.shared("llama")
    assert models.paged(model.config, budget=64).disposal == Drop()
    for wrong, message in [
        ("dorp", "Unknown disposal 'dorp'. Did you mean 'drop'"),
        ("drop(bits=2)", r"'drop\(bits=2\)'"),
        ("drop(2)", "character 6"),
    ]:
        with pytest.raises(ValueError, match=message):
            models.paged(model.config, budget=64, disposal=wrong)
    for wrong_type in (Drop, None, 3):
        with pytest.raises(TypeError, match=r"disposal.*object"):
            models.paged(model.config, budget=64, disposal=wrong_type)
    with pytest.raises(ValueError, match="'drop'"):
        register_disposal("drop")(Witness)
    with pytest.raises(TypeError, match="'other'"):
        register_disposal("other")(EvictionAction)


def test_a_copy_has_an_action_of_its_own() -> None:
    model = models.shared("llama")
    cache = models.paged(model.config, budget=24, block_size=4, disposal=Witness())
    ids, mask = modes.batch("greedy", False)
    modes.generate(model, cache, ids, mask, 3)
    twin = copy.deepcopy(cache)
    before = [layer.action.left(0, 0) for _, layer in twin.paged_layers]
    modes.forward(model, cache, torch.full((3, 60), 5), torch.ones(3, 60, dtype=torch.long), 42, 60)
    assert [layer.action.left(0, 0) for _, layer in twin.paged_layers] == before
    assert [layer.action.left(0, 0) for _, layer in cache.paged_layers] != before
    cache.reset()
    assert all(layer.action.log is None for _, layer in cache.paged_layers)
