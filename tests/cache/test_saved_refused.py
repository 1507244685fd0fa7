"""Files that are refused: of other models and texts, damaged, changed, or made to look right."""

import json
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import models
import modes
from hf_paged_eviction import EvictionPolicy, PagedEvictionCache, ScoreContext
from hf_paged_eviction.cache import files
from hf_paged_eviction.naming import tensors
from hf_paged_eviction.precision.codec import FORMAT

OURS = "paged_eviction"


def fed(**choices: Any) -> PagedEvictionCache:
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, **{"budget": 24, "block_size": 4, "policy": "h2o", **choices})
    ids, mask = modes.batch("greedy", True)
    modes.forward(model, cache, ids, mask, 0, 38)
    modes.forward(model, cache, ids, mask, 38, 39)
    return cache


def load(path: Path, **how: Any) -> PagedEvictionCache:
    return PagedEvictionCache.load(path, models.shared("llama", OURS).config, **how)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "context.safetensors"
    fed().save(target, input_ids=modes.batch("greedy", True)[0])
    return target


# ---- what cannot be saved --------------------------------------------------------------------------------------------


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    model, target = models.shared("llama", OURS), tmp_path / "context.safetensors"
    with pytest.raises(ValueError, match="nothing to save"):
        models.paged(model.config, budget=64).save(target)
    waiting = fed(record_past=True)
    with pytest.raises(ValueError, match=r"0.*1.*crop\(\).*cache.crop\(0\)"):
        waiting.save(target)
    waiting.crop(0)
    waiting.save(target)
    ids = modes.batch("greedy", True)[0]
    for wrong in (ids[:2], ids[:, :38]):
        with pytest.raises(ValueError, match=r"seen 39.*3"):
            fed().save(target, input_ids=wrong)
    with pytest.raises(TypeError, match=r"tensor.*token"):
        fed().save(target, input_ids=ids.float())
    with pytest.raises(OSError, match=r"no_such_folder"):
        fed().save(tmp_path / "no_such_folder" / "context.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["context.safetensors"]


def test_a_layer_that_holds_something_without_a_name(tmp_path: Path) -> None:
    model = models.shared("gemma3", "eager")
    cache = models.paged(model.config, budget=24, block_size=4)
    modes.forward(model, cache, *models.left_pad(models.prompts([30])), 0, 30)
    cache.layers[0].secret = object()
    with pytest.raises(ValueError, match=r"0.*DynamicSlidingWindowLayer"):
        cache.save(tmp_path / "context.safetensors")


def test_a_failed_write_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    monkeypatch.setattr(tensors, "save_file", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        fed(budget=48).save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


# ---- other models, texts and policies --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"num_hidden_layers": 3}, "num_hidden_layers: 2 in the file, 3 here"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads: 2 in the file, 4 here"),
        ("llama", {"hidden_size": 64}, "hidden_size: 32 in the file, 64 here"),
        ("llama", {"vocab_size": 121}, "vocab_size"),
        ("qwen2", {}, "model_type: 'llama' in the file, 'qwen2' here"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            "rope rope_theta: 10000.0 in the file, 500.0 here",
        ),
    ],
)
def test_other_models(path: Path, family: str, changes: dict[str, Any], words: str) -> None:
    config = models.build(family, OURS, **changes).config
    with pytest.raises(ValueError, match=f"context.safetensors.*another model.*{words}"):
        PagedEvictionCache.load(path, config)


def test_other_precision(tmp_path: Path) -> None:
    path, config = tmp_path / "context.safetensors", models.build("llama", OURS).config
    model = models.build("llama", OURS)
    model.config.dtype = torch.float32
    cache = models.paged(model.config, budget=24, block_size=4)
    modes.forward(model, cache, *models.left_pad(models.prompts([30])), 0, 30)
    cache.save(path)
    config.dtype = torch.bfloat16
    with pytest.raises(ValueError, match=r"'float32'.*'bfloat16'"):
        PagedEvictionCache.load(path, config)


def test_the_text(path: Path) -> None:
    ids = modes.batch("greedy", True)[0]
    assert load(path, input_ids=ids).get_seq_length() == 39
    twice = ids.repeat_interleave(2, dim=0)
    assert load(path, input_ids=torch.cat([twice, twice], dim=1)).get_seq_length() == 39
    other = twice.clone()
    other[3, 20] += 1
    for wrong in (ids.flip(0), other, ids.repeat(2, 1)):
        with pytest.raises(ValueError, match=r"begin.*context"):
            load(path, input_ids=wrong)
    for wrong in (ids[:2], ids[:, :38]):
        with pytest.raises(ValueError, match=r"39.*3 rows"):
            load(path, input_ids=wrong)
    fed().save(path)
    with pytest.raises(ValueError, match="saved without input_ids="):
        load(path, input_ids=ids)


def test_policies_that_cannot_be_made_here(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'h2o'.*policy=.*'snapkv"):
        load(path, policy="snapkv")
    assert load(path, policy="h2o").policy.label == "h2o"

    class Mine(EvictionPolicy):
        def score(self, context: ScoreContext) -> torch.Tensor:
            return context.keys.float().sum(-1)

    fed(policy=Mine()).save(path)
    with pytest.raises(ValueError, match=r"'Mine'.*policy="):
        load(path)
    assert load(path, policy=Mine()).budget == 24


@pytest.mark.parametrize("label", ["calibrated", "calibrated:someone/model", "calibrated(profile='someone/model')"])
def test_no_file_makes_us_read_another(path: Path, label: str) -> None:
    forge(path, lambda content, tensors: content["settings"].update(policy=label, profile="someone/model"))
    with pytest.raises(ValueError, match=r"profile|policy="):
        load(path)
    forge(path, lambda content, tensors: content.update(profile={"file": "someone/model", "digest": "0"}))
    with pytest.raises(ValueError, match=r"'someone/model'.*profile="):
        load(path)


# ---- damaged and changed ---------------------------------------------------------------------------------------------


def forge(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """Change a file, and write it as if it had always been so, digest included."""
    content, tensors = files.read(path)
    change(content, tensors)
    files.write(path, content, tensors)


def test_truncated(path: Path) -> None:
    whole = path.read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"Cannot.*saved"):
            load(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"no saved context '.*context\.safetensors'.*save"):
        load(path)


def test_other_files(path: Path) -> None:
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"kind.*safetensors"):
        load(path)


def test_other_versions(path: Path) -> None:
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, {**metadata, "version": str(files.VERSION + 1)})
    with pytest.raises(ValueError, match=rf"'{files.VERSION + 1}'.* {files.VERSION}"):
        load(path)
    save_file(tensors, path, {**metadata, "more": "x"})
    with pytest.raises(ValueError, match=r"lacks.*should"):
        load(path)
    save_file(tensors, path, {**metadata, "content": metadata["content"].replace('"held": 24', '"held": 20')})
    with pytest.raises(ValueError, match="digest"):
        load(path)


@once
def _image() -> bytes:
    path = Path(__file__).with_name(".context")
    try:
        fed().save(path)
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)


@settings(max_examples=60)
@given(data=st.data())
def test_every_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """In the header as in the tensors: no file that differs is taken for another one."""
    image = bytearray(_image())
    header = 8 + int.from_bytes(image[:8], "little")
    part = data.draw(st.sampled_from([(0, 8), (8, header), (header, len(image))]))
    for _ in range(data.draw(st.integers(1, 3))):
        image[data.draw(st.integers(part[0], part[1] - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    path.write_bytes(bytes(image))
    if bytes(image) == _image():  # two flips of one bit
        load(path)
    else:
        with pytest.raises(ValueError, match=r"Cannot.*saved"):
            load(path)


# ---- made to look right ----------------------------------------------------------------------------------------------

TABLE = "layers.1.table"


def _set(name: str, place: tuple[int, ...], value: int) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(content: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[name][place] = value

    return change


def _shaped(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any], Any], None]:
    return lambda content, tensors: tensors.update({name: change(tensors[name])})


def _layer(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda content, tensors: content["state"]["layers"][1].update({name: value})


def _counter(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda content, tensors: content["state"]["layers"][1]["table"].update({name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set(f"{TABLE}.slots", (0, 0, 0), 24), "slots has numbers outside 0 .. 23"),
        (_set(f"{TABLE}.positions", (0, 0, 5), 39), "positions lie in the future"),
        (_set(f"{TABLE}.positions", (0, 0, 5), 0), "a position is held twice"),
        (_set(f"{TABLE}.pads", (0,), 40), "pads has numbers outside 0 .. 39"),
        (_set(f"{TABLE}.full_at", (0, 0), 25), "full_at has values that are not counted"),
        (_set(f"{TABLE}.order", (0, 0, 0), 7), "order is no order"),
        (_layer("held", 25), r"layers.1.held is 25, outside 1 .. 24"),
        (_counter("overwriting", False), "goes on growing"),
        (_counter("chosen_at", 77), "chosen_at is 77, outside -1 .. 39"),
        (_counter("full_at_values", [-1]), "full_at_values has numbers outside"),
        (_layer("held", "24"), "held is not what it has to be"),
        (_counter("more", 1), "should not have more"),
        (lambda c, t: c["state"]["layers"][0]["store"].update(slots=10**12), "slots is 1000000000000, outside"),
        (lambda c, t: c["state"]["layers"][0].update(processes=2), "one of 2; this one"),
        (lambda c, t: c["state"]["layers"][0].update(kind="Nothing"), "layers.0 should not have kind"),
        (lambda c, t: c["state"]["layers"].__setitem__(0, c["state"]["padding"]), "layers.0 lacks table"),
        (lambda c, t: c["state"]["layers"][0].pop("observer"), "layers.0 lacks observer"),
        (lambda c, t: c["state"]["layers"].pop(), "it has 1 layers, and the model 2"),
        (lambda c, t: c["state"]["padding"].pop("columns"), "padding.columns' belongs nowhere"),
        (lambda c, t: c["state"].update(padding=7), "padding is not what it has to be"),
        (lambda c, t: c["text"].update(rows=0), "text.rows is 0, outside"),
        (lambda c, t: c["settings"].update(static=True), "layers.0 lacks ring"),
        (_shaped(f"{TABLE}.positions", lambda t: t.flatten()[0].clone()), "positions is"),
        (_shaped(f"{TABLE}.ahead", lambda t: t.repeat(1, 1, 2)), "2 victims are chosen together"),
        (_shaped("layers.1.store.keys", lambda t: t[..., :4]), "kept is .* 4. belongs"),
        (lambda c, t: c.update(seen=38), "layers.0.seen is 39, outside 38 .. 38"),
        (lambda c, t: c.update(rows=6), "not those of 6 rows"),
        (lambda c, t: c.pop("rows"), "lacks rows"),
        (lambda c, t: c["settings"].update(block_size=8), "slots is .* 8. belongs"),
        (lambda c, t: c["settings"].update(budget=48), "the settings make it 48"),
        (lambda c, t: c["settings"].update(policy="keydiff"), "layers.0 should not have observer"),
        (lambda c, t: c["settings"].update(allocator="pyramid"), "its layers share a budget"),
        (lambda c, t: t.pop("layers.0.store.keys"), "layers.0.store.keys is not what it has to be"),
        (lambda c, t: t.update(more=torch.zeros(1)), "'more' belongs nowhere"),
        (lambda c, t: t.update({"layers.0.store.keys": torch.zeros(3, 2, 24, 8, dtype=torch.int64)}), "keys are"),
        (lambda c, t: t.update({"padding.columns": torch.ones(2, 39, dtype=torch.uint8)}), "columns of the padding"),
    ],
)
def test_made_to_look_right(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any], words: str) -> None:
    forge(path, change)
    with pytest.raises(ValueError, match=words):
        load(path)


def test_keys_of_another_width(tmp_path: Path) -> None:
    path = tmp_path / "context.safetensors"
    fed(policy="keydiff").save(path)
    forge(path, _shaped("layers.1.store.keys", lambda t: t[..., :4]))
    with pytest.raises(ValueError, match=r"\b4\b.*model.* 8"):
        load(path)


@pytest.mark.parametrize(
    "change",
    [lambda c: c.pop("codes"), lambda c: c.update(codes=FORMAT - 1), lambda c: c.update(codes=FORMAT + 1)],
    ids=["before codes had a number", "earlier", "later"],
)
def test_codes_of_another_version(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """What they would be read as is not what was rounded."""
    target = tmp_path / "context.safetensors"
    fed(bits=(4, 8)).save(target)
    load(target)
    forge(target, lambda content, tensors: change(content))
    with pytest.raises(ValueError, match=r"context.safetensors"):
        load(target)


def test_sliding_layers_that_look_right(tmp_path: Path) -> None:
    path, model = tmp_path / "context.safetensors", models.shared("gemma3", "eager")
    cache = models.paged(model.config, budget=24, block_size=4)
    modes.forward(model, cache, *models.left_pad(models.prompts([30])), 0, 30)
    cases: list[tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = [
        (lambda c, t: c["state"]["layers"][0]["plain"].update(update=True), "layers.0.plain should not have update"),
        (lambda c, t: c["state"]["layers"][0]["plain"].update(sliding_window=9), "sliding_window is 8 here and 9"),
        (lambda c, t: c["state"]["layers"][0]["plain"].update(cumulative_length="x"), "cumulative_length is 'x'"),
        (lambda c, t: c["state"]["layers"][0]["plain"].update(cumulative_length=-1), "cumulative_length is -1"),
        (lambda c, t: c["state"]["layers"][0]["plain"].update(dtype="nn"), "dtype is 'nn'"),
        (lambda c, t: c["state"]["layers"][0].update(layer="DynamicLayer"), "a DynamicLayer in the file"),
        (lambda c, t: t.update({"layers.0.tensors.keys": torch.zeros(2, 2, 7, 8)}), "there are 1 rows"),
    ]
    for change, words in cases:
        cache.save(path)
        forge(path, change)
        with pytest.raises(ValueError, match=words):
            PagedEvictionCache.load(path, model.config)


def test_what_is_in_the_file(path: Path) -> None:
    """Names and numbers that anybody can read, and the text is not among them."""
    content, _ = files.read(path)
    assert content["model"]["model_type"] == "llama"
    assert (content["settings"]["budget"], content["settings"]["policy"]) == (24, "h2o")
    assert (content["seen"], content["rows"]) == (39, 3)
    names = load_file(path).keys()
    assert {"layers.0.store.keys", "layers.1.table.positions", "padding.columns"} <= names
    assert json.dumps(content["text"]).count("[") == 0
    assert path.stat().st_mode & 0o077 == 0


def test_every_argument_is_saved_or_known_not_to_be() -> None:
    """Who adds an argument to the constructor says here what becomes of it in a file."""
    import inspect

    parameters = set(inspect.signature(PagedEvictionCache.__init__).parameters) - {"self"}
    assert set(fed()._options.settings()) == parameters - {"config", "attention_mask"}
