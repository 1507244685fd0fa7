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
    lengths: Tensor = vectors.norm(dim=-1, keepdim=True)
    return vectors / lengths.clamp_min(torch.finfo(torch.float32).tiny)


def cluster(points: Tensor, count: int, seed: int = 0) -> Clusters:
    """Spherical k-means with the starts of k-means++ (the best of ten).

    Args:
        points: `[points, dim]`, at least one; only their directions count.
        count: clusters wanted. There are fewer where fewer different directions are.
        seed: decides the starts; the same on every machine.
    """
    points = unit(points).cpu().double()
    count = min(count, len(torch.unique(points.float(), dim=0)))
    generator = torch.Generator().manual_seed(seed)
    starts = (_start(points, count, generator) for _ in range(_STARTS))
    # The first of equals: the last bits of a sum must not decide.
    centroids, labels, _ = max(
        (_converged(points, start) for start in starts), key=lambda grouping: round(grouping[2], 9)
    )
    return _in_order(centroids.float(), labels)


def _start(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Points far from each other, drawn by their squared distance to the nearest so far."""
    chosen = [int(torch.randint(len(points), (1,), generator=generator))]
    while len(chosen) < count:
        distance = (1 - (points @ points[chosen].mT).amax(1)).clamp_min(0)
        distance[chosen] = 0
        if not distance.any():  # nothing but rounding between what is left
            left = [at for at in range(len(points)) if at not in chosen]
            chosen.append(left[0])
        else:
            chosen.append(int(torch.multinomial(distance, 1, generator=generator)))
    return points[chosen]


def _converged(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor, float]:
    labels = torch.full((len(points),), -1)
    for _ in range(_ROUNDS):
        likeness = points @ centroids.mT
        nearest = likeness.argmax(1)
        nearest = _fill_empty(nearest, likeness, len(centroids))
        if torch.equal(nearest, labels):
            break
        labels = nearest
        sums = torch.zeros_like(centroids).index_add_(0, labels, points)
        centroids = sums / sums.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return centroids, labels, float((points * centroids[labels]).sum())


def _fill_empty(labels: Tensor, likeness: Tensor, count: int) -> Tensor:
    """A cluster without points takes the worst placed point of a cluster that has more than one."""
    labels = labels.clone()
    for empty in range(count):
        sizes = torch.bincount(labels, minlength=count)
        if sizes[empty]:
            continue
        fit = likeness.gather(1, labels[:, None])[:, 0].masked_fill(sizes[labels] < 2, float("inf"))
        labels[fit.argmin()] = empty
    return labels


def _in_order(centroids: Tensor, labels: Tensor) -> Clusters:
    """Clusters numbered by their first point, so that the number of an episode says when it began."""
    order = list(dict.fromkeys(labels.tolist()))
    place = torch.tensor([order.index(label) for label in range(len(centroids))])
    return Clusters(centroids[order], place[labels])
