"""Delayed attention by lists: one token, one head, one number after the other."""

from __future__ import annotations

import math

from torch import Tensor, zeros


def delayed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chunk: int,
    queries: int,
    keys: int,
    evict: str,
    real: Tensor | None = None,
) -> Tensor:
    """As `recipes.delayed.delayed_attention`, row by row and KV head by KV head."""
    output = zeros(query.shape)
    group = query.shape[1] // key.shape[1]
    for row in range(len(query)):
        columns = [at for at in range(query.shape[2]) if real is None or real[row, at]]
        for head in range(key.shape[1]):
            heads = range(head * group, (head + 1) * group)
            held: list[dict[str, int]] = []
            waiting: list[int] = []
            for start in range(0, len(columns), chunk):
                new = list(range(start, min(start + chunk, len(columns))))
                held += [{"at": at, "last": at + 1, "hits": 0, "asked": 0} for at in new]
                waiting += new
                ends = new[-1] + 1 == len(columns)
                while waiting and (ends or new[-1] + 1 - waiting[0] > queries):
                    at = waiting.pop(0)
                    hit: set[int] = set()
                    for query_head in heads:
                        logits = [
                            float(query[row, query_head, columns[at]] @ key[row, head, columns[one["at"]]])
                            / math.sqrt(query.shape[-1])
                            for one in held
                        ]
                        most = max(logits)
                        weights = [math.exp(logit - most) for logit in logits]
                        weights = [weight / sum(weights) for weight in weights]
                        hit |= {place for place, weight in enumerate(weights) if weight * len(held) > 1 + 1e-5}
                        for one, weight in zip(held, weights, strict=True):
                            output[row, query_head, columns[at]] += weight * value[row, head, columns[one["at"]]]
                    for place, one in enumerate(held):
                        one["asked"] += 1
                        if place in hit:
                            one["hits"] += 1
                            one["last"] = max(one["last"], at + 1)
                while len(held) > keys:
                    held.remove(min(held, key=lambda one: (worth(one, evict), one["at"])))
    return output


def worth(one: dict[str, int], evict: str) -> float:
    if evict == "fifo":
        return one["at"]
    return one["last"] if evict == "lra" else (one["hits"] + 1) / (one["asked"] + 1)
