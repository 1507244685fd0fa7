"""`prepare`, `ask` and the digest of a model that several processes hold, whole or in parts (real processes, gloo)."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("pydantic", reason="the extra `eval` is not installed")

from hf_paged_eviction import ask, prepare, weights_digest
from hf_paged_eviction_eval import embedded
from processes import in_processes

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
)

TEXT = "The key of Ann is 4711. The key of Ben is 1147. " * 20
CALLS = {
    "digest": lambda model, tokenizer: weights_digest(model),
    "prepare": lambda model, tokenizer: prepare(model, tokenizer, use="text", quick=True, progress=False).path,
    "ask": lambda model, tokenizer: ask(model, tokenizer, TEXT, ["Who?"], budget=64, max_new_tokens=4),
}


def wrapped(model: Any, kind: str) -> Any:
    if kind == "DistributedDataParallel":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind == "FullyShardedDataParallel":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def outcomes(rank: int, kind: str, folder: Path) -> dict[str, Any]:
    """What each call returns in this process, or why it refuses."""
    torch.set_num_threads(1)
    os.environ["HF_PAGED_EVICTION_HOME"] = str(folder)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    model, tokenizer = embedded.load()
    model, got = wrapped(model, kind), {}
    for name, call in CALLS.items():
        try:
            got[name] = call(model, tokenizer)
        except ValueError as error:
            got[name] = str(error)
    dist.destroy_process_group()
    return got


@pytest.mark.parametrize("kind", ["DistributedDataParallel", pytest.param("fully_shard", marks=pytest.mark.all_cases)])
def test_all_processes_have_the_same_profile(kind: str, tmp_path: Path) -> None:
    """They begin at once, and none of them loses what another one has written."""
    first, second = in_processes(2, outcomes, kind, tmp_path)
    assert first == second
    model, tokenizer = embedded.load()
    assert first["digest"] == weights_digest(model)
    path = Path(first["prepare"])
    assert path.parent.parent == tmp_path and not list(path.parent.glob("*unfinished*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path))
        prepare(model, tokenizer, progress=False, use="text")
        assert first["ask"] == CALLS["ask"](model, tokenizer)


def test_weights_without_names_are_refused(tmp_path: Path) -> None:
    for outcome in in_processes(2, outcomes, "FullyShardedDataParallel", tmp_path):
        assert all("fully_shard" in reason for reason in outcome.values())
