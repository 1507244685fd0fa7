"""Which segments belong together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_paged_eviction_lab.episodes import RareTokens
from hf_paged_eviction_lab.episodes.clusters import cluster, unit


def blobs(sizes: list[int], noise: float = 0.1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([number for number, size in enumerate(sizes) for _ in range(size)])
    directions = torch.eye(8)[: len(sizes)]
    return directions[labels] + noise * torch.randn(len(labels), 8, generator=generator), labels


def test_groups_are_found_whatever_their_size_and_length() -> None:
    points, labels = blobs([12, 3, 5])
    points[::2] *= 100  # only directions count
    clusters = cluster(points, 3)
    assert torch.equal(clusters.labels, labels), "numbered by where they begin"
    torch.testing.assert_close(clusters.centroids.norm(dim=1), torch.ones(3))


def test_a_loose_group_wins_its_own_questions() -> None:
    """With plain means the compact group's centroid is longer, and would win."""
    axes = torch.eye(4)
    loose = [axes[0] + side * 0.9 * axes[way] for way in (2, 3) for side in (1, -1)]
    points = torch.stack([*loose, *[axes[1]] * 4])
    clusters = cluster(points, 2)
    question = torch.tensor([0.75, 0.66, 0, 0])
    means = torch.stack([unit(points)[clusters.labels == number].mean(0) for number in (0, 1)])
    assert (means @ question).argmax() == 1, "the trap is there"
    assert (clusters.centroids @ question).argmax() == 0


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_there_are_no_more_groups_than_directions(count: int) -> None:
    points = torch.eye(4)[[0, 1, 1, 0, 2, 0]] * torch.tensor([1.0, 2, 3, 4, 5, 6])[:, None]
    clusters = cluster(points, count)
    assert len(clusters.centroids) == min(count, 3)
    assert set(clusters.labels.tolist()) == set(range(len(clusters.centroids)))


@pytest.mark.parametrize("value", [0.0, 1.0, 1e30, 1e-30])
def test_one_point_or_equal_ones_are_one_group(value: float) -> None:
    for points in (torch.full((1, 3), value), torch.full((4, 3), value)):
        clusters = cluster(points, 3)
        assert clusters.labels.tolist() == [0] * len(points)
        assert clusters.centroids.isfinite().all()


def test_a_seed_decides() -> None:
    points = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
    before = torch.random.get_rng_state()
    assert torch.equal(cluster(points, 5, seed=1).labels, cluster(points, 5, seed=1).labels)
    assert torch.equal(before, torch.random.get_rng_state())


def test_rare_tokens_find_where_they_were_said() -> None:
    turns = [torch.tensor(ids) for ids in ([1, 2, 3, 1], [1, 2, 9], [1, 2, 5, 5])]
    embed = RareTokens([*turns, torch.tensor([], dtype=torch.int64)])
    likeness = unit(embed(turns)) @ unit(embed([torch.tensor([2, 9, 77])]))[0]
    assert likeness.argmax() == 1
    assert not embed([torch.tensor([77])]).any()
