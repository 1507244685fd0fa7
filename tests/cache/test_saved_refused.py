"""Files that are refused: of other models and texts, damaged, changed, or made to look right."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import models
import modes
from hf_paged_eviction import EvictionPolicy, PagedEvictionCache, ScoreContext
from hf_paged_eviction.cache import files
from hf_paged_eviction.naming import tensors
from hf_paged_eviction.precision.codec import FORMAT
from hf_paged_eviction.tensors.saved import take_apart

OURS = "paged_eviction"
FEW_BITS = {"bits": 4, "allocator": "heads:[[1.5, 0.5], [1, 1]]"}


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
    forge(path, lambda content: content["settings"].update(policy=label, profile="someone/model"))
    with pytest.raises(ValueError, match=r"profile|policy="):
        load(path)
    forge(path, lambda content: content.update(profile=["someone/model", "0"]))
    with pytest.raises(ValueError, match=r"'someone/model'.*profile="):
        load(path)


# ---- damaged and changed ---------------------------------------------------------------------------------------------


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a file, and write it as if it had always been so, digest included."""
    content = files.read(path)
    change(content)
    files.write(path, content)


def test_no_file(path: Path) -> None:
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
    save_file(tensors, path, {**metadata, "content": metadata["content"].replace('"held": 24', '"held": 20')})
    with pytest.raises(ValueError, match="digest"):
        load(path)


@pytest.mark.parametrize(
    "choices", [{}, {"bits": 4, "allocator": "heads:[[1.5, 0.5], [1, 1]]"}], ids=["plain", "few bits"]
)
def test_a_damaged_file_is_refused(choices: dict[str, Any], tmp_path: Path) -> None:
    """Of 200 drawn flips of a bit and truncations, in the header as in the tensors, none is taken for a context."""
    path, draw = tmp_path / "context.safetensors", Random(0)
    fed(policy="keydiff", **choices).save(path)
    whole = path.read_bytes()
    tensors = 8 + int.from_bytes(whole[:8], "little")
    for damage in range(200):
        start, stop = draw.choice([(0, 8), (8, tensors), (tensors, len(whole))])
        at = draw.randrange(start, stop)
        image = bytearray(whole)
        if damage % 4:
            image[at] ^= 1 << draw.randrange(8)
        else:
            del image[at:]
        path.write_bytes(image)
        with pytest.raises(ValueError, match=r"Cannot.*saved"):
            load(path)


#: Settings whose files have every kind of index.
INDICES: dict[str, dict[str, Any]] = {
    "observing": {"policy": "snapkv(window=8)", "allocator": "ada_kv"},
    "pads in few bits": {"bits": (4, 8), "policy": "keydiff"},
    "segments in few bits": {"policy": "keydiff", **FEW_BITS},
    "static in few bits": {"bits": 8, "policy": "keydiff", "static": True},
}
#: By the last part of their names: what says where something lies.
WHERE = {"slots", "lengths", "limits", "order", "block", "ahead", "left", "taken", "pads"}


@pytest.mark.parametrize("choices", INDICES.values(), ids=INDICES)
def test_no_index_leads_out_of_the_storage(choices: dict[str, Any], path: Path) -> None:
    """In a file that was made with the right digest: indices are refused, and other numbers do not end the process."""
    model, (ids, mask) = models.shared("llama", OURS), modes.batch("greedy", True)
    fed(**choices).save(path)
    whole, refused = files.read(path), set()
    take_apart(whole["state"]["layers"][1], tensors := {})
    for name, tensor in tensors.items():
        place, spot = name.rsplit(".", 1)[1], tensor.view(-1)
        if tensor.dtype != torch.int64:
            continue
        before = spot[-1].item()
        for wild in (-2, 10**6, 2**62, -(2**63)):
            spot[-1] = wild
            files.write(path, whole)
            if place in WHERE:
                with pytest.raises(ValueError, match=r"context\.safetensors.* has numbers outside"):
                    load(path)
                refused.add(place)
                continue
            with suppress(ValueError, IndexError, RuntimeError):
                cache = load(path)
                for at in (39, 40):
                    modes.forward(model, cache, torch.cat([ids, ids], 1), modes.extend(mask, 9), at, at + 1)
        spot[-1] = before
    assert refused >= {"block", "slots", "ahead", "left", "taken", "pads"}
    for wild in (10**12, 1) if "allocator" not in choices else ():
        whole["state"]["layers"][1]["paged"]["store"]["slots"] = wild
        files.write(path, whole)
        with pytest.raises(ValueError, match=r"context\.safetensors.*slots has numbers outside"):
            load(path)


def _paged(content: dict[str, Any], layer: int) -> dict[str, Any]:
    paged: dict[str, Any] = content["state"]["layers"][layer]["paged"]
    return paged


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["settings"].update(block_size=8),
        lambda c: c["settings"].update(static=True),
        lambda c: c["state"]["layers"].pop(),
        lambda c: _paged(c, 1).update(heads=[2, 2]),
        lambda c: _paged(c, 0).pop("observer"),
        lambda c: c.update(rows=6),
        lambda c: _paged(c, 0)["store"].pop("keys"),
        lambda c: _paged(c, 1)["store"].update(keys=_paged(c, 1)["store"]["keys"].flatten()),
        lambda c: _paged(c, 1)["table"]["tokens"].update(scores=torch.zeros(3, 1, 20)),
    ],
)
def test_parts_that_do_not_fit_together(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    forge(path, change)
    with pytest.raises(ValueError, match=r"Cannot use the saved context.*context\.safetensors"):
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
    forge(target, change)
    with pytest.raises(ValueError, match=r"context.safetensors"):
        load(target)


def test_a_sliding_window_of_another_size(tmp_path: Path) -> None:
    path, model = tmp_path / "context.safetensors", models.shared("gemma3", "eager")
    cache = models.paged(model.config, budget=24, block_size=4)
    modes.forward(model, cache, *models.left_pad(models.prompts([30])), 0, 30)
    cache.save(path)
    forge(path, lambda c: c["state"]["layers"][0]["other"].update(sliding_window=9))
    with pytest.raises(ValueError, match=r"'sliding_window': 9.*'sliding_window': 8"):
        PagedEvictionCache.load(path, model.config)


def test_what_is_in_the_file(path: Path) -> None:
    """Names and numbers that anybody can read, and the text is not among them."""
    content = files.read(path)
    assert content["model"]["model_type"] == "llama"
    assert (content["settings"]["budget"], content["settings"]["policy"]) == (24, "h2o")
    assert content["rows"] == 3
    names = load_file(path).keys()
    assert {f"state.layers.{name}" for name in ("0.paged.store.keys", "1.paged.table.tokens.positions")} <= names
    assert all(len(digest) == 64 for digest in content["text"])
    assert path.stat().st_mode & 0o077 == 0


def test_every_argument_is_saved_or_known_not_to_be() -> None:
    """Who adds an argument to the constructor says here what becomes of it in a file."""
    import inspect

    parameters = set(inspect.signature(PagedEvictionCache.__init__).parameters) - {"self"}
    assert set(fed()._options.settings()) == parameters - {"config", "attention_mask"}
