"""A folder of episodes is complete, or there are none in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import models
from hf_paged_eviction_lab.episodes import Episodes, read_episodes

SIZES: dict[str, Any] = {"block_size": 4, "chunk_size": 16, "turns_per_segment": 1, "episodes": 2}


def by_topic(texts: Any) -> Tensor:
    return torch.stack([torch.stack([(ids == 100 + topic).sum() for topic in range(2)]) for ids in texts]).float()


def turns(seed: int) -> list[Tensor]:
    return [torch.cat([torch.full((3,), 100 + at % 2), ids]) for at, ids in enumerate(models.prompts([9] * 4, seed))]


def test_old_and_new_are_not_mixed(tmp_path: Path) -> None:
    model = models.shared("llama", "paged_eviction")
    read_episodes(model, turns(0), 48, embed=by_topic, folder=tmp_path, **SIZES)

    def stop(done: int, total: int) -> None:
        if (tmp_path / "episode_0.safetensors").stat().st_mtime_ns > before and done > total // 2:
            raise KeyboardInterrupt

    before = (tmp_path / "episode_0.safetensors").stat().st_mtime_ns
    with pytest.raises(KeyboardInterrupt):
        read_episodes(model, turns(1), 48, embed=by_topic, folder=tmp_path, progress=stop, **SIZES)
    with pytest.raises(FileNotFoundError):
        Episodes.load(tmp_path, model, embed=by_topic)
    read_episodes(model, turns(1), 48, embed=by_topic, folder=tmp_path, **SIZES)
    whole = read_episodes(model, turns(1), 48, embed=by_topic, **SIZES)
    loaded = Episodes.load(tmp_path, model, embed=by_topic)
    assert torch.equal(loaded.open(1).block_table(1), whole.open(1).block_table(1))
