"""K-means over directions: which segments of a conversation belong together."""

from dataclasses import dataclass

import torch
from torch import Tensor

#: Starts from which the best is taken, and rounds of each at most.
_STARTS, _ROUNDS = 10, 100


@dataclass(frozen=True)
class Clusters:
    """Points in groups.

    Attributes:
        centroids: `[clusters, dim]` float32, of length 1.
        labels: `[points]` int64, the cluster of each point; every cluster has one at least.
    """

    centroids: Tensor
    labels: Tensor


def unit(vectors: Tensor) -> Tensor:
    """`[..., dim]` float32 of length 1; a vector of zeros stays one."""
    vectors = vectors.detach().float()
    # By the largest entry first: squares of large numbers would be infinite, those of small ones zero.
    vectors = vectors / vectors.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.nn.functional.normalize(vectors, dim=-1)


def cluster(points: Tensor, count: int, seed: int = 0) -> Clusters:
    """Spherical k-means with the starts of k-means++ (the best of ten).

    Clusters are numbered by their first point, so that the number of an episode says when it began.

    Args:
        points: `[points, dim]`, at least one; only their directions count.
        count: clusters wanted. There are fewer where fewer different directions are.
        seed: decides the starts; the same on every machine.
    """
    points = unit(points).cpu().double()
    count = min(count, len(torch.unique(points.float(), dim=0)))
    generator = torch.Generator().manual_seed(seed)
    groupings = [_converged(points, _start(points, count, generator)) for _ in range(_STARTS)]
    # The first of equals: the last bits of a sum must not decide.
    centroids, labels, _ = max(groupings, key=lambda grouping: round(grouping[2], 9))
    order = list(dict.fromkeys(labels.tolist()))
    return Clusters(centroids[order].float(), torch.tensor([order.index(label) for label in labels.tolist()]))


def _start(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Points far from each other, drawn by their squared distance to the nearest so far."""
    chosen = [int(torch.randint(len(points), (1,), generator=generator))]
    while len(chosen) < count:
        distance = (1 - (points @ points[chosen].mT).amax(1)).clamp_min(1e-12)
        distance[chosen] = 0
        chosen.append(int(torch.multinomial(distance, 1, generator=generator)))
    return points[chosen]


def _converged(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor, float]:
    """Centroids, labels, and how like the points are to their centroids. A cluster may have lost its points."""
    labels = torch.full((len(points),), -1)
    for _ in range(_ROUNDS):
        nearest = (points @ centroids.mT).argmax(1)
        if torch.equal(nearest, labels):
            break
        labels = nearest
        centroids = torch.nn.functional.normalize(torch.zeros_like(centroids).index_add_(0, labels, points), dim=1)
    return centroids, labels, float((points * centroids[labels]).sum())
