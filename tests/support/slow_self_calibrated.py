"""`self_calibrated` as a plain loop, for the tests that compare every policy with one."""

import math

import torch

from policy_inputs import Head, Vector

DISTANCE, SHRINKAGE = 2, 0.5
#: As `make_policy` spells it; texts in tests are short.
SPELLED = f"self_calibrated(distance={DISTANCE}, least_tokens=2, shrinkage={SHRINKAGE})"


def self_calibrated(head: Head, first: int) -> Vector:
    """Least squares with the penalty as further rows below the tokens."""
    length = head.length
    usable = range(length - DISTANCE)
    target = [_largest(head, token) for token in usable]
    norms = [math.sqrt(sum(x * x for x in key)) for key in head.keys]
    units = [[x / norm for x in key] for key, norm in zip(head.keys, norms, strict=True)]
    middle = [sum(units[token][d] for token in usable) for d in range(len(units[0]))]
    size = math.sqrt(sum(x * x for x in middle))
    samples = [
        [sum(a * b for a, b in zip(unit, middle, strict=True)) / size, math.log(norm), *unit]
        + [float(token < below) for below in (1, 4)]
        for token, (unit, norm) in enumerate(zip(units, norms, strict=True))
    ]
    penalty = torch.tensor([1e-3, 1e-3, *[SHRINKAGE] * len(units[0]), 1e-3, 1e-3], dtype=torch.float64)
    table = torch.tensor(samples, dtype=torch.float64)
    usable_rows, wanted = table[: len(usable)], torch.tensor(target, dtype=torch.float64)
    mean, deviation = usable_rows.mean(0), usable_rows.std(0, unbiased=False)
    rows = torch.cat([(usable_rows - mean) / deviation, torch.diag((penalty * len(usable)).sqrt())])
    right = torch.cat([wanted - wanted.mean(), torch.zeros(len(penalty), dtype=torch.float64)])
    weights = torch.linalg.lstsq(rows, right[:, None]).solution[:, 0]
    predictions: Vector = ((table - mean) / deviation @ weights + wanted.mean()).tolist()
    return predictions


def _largest(head: Head, token: int) -> float:
    """By a query far enough away, mean of the query heads."""
    groups = len(head.weights)
    return max(sum(w[q][token] for w in head.weights) / groups for q in range(token + DISTANCE, head.length))
