"""Merging with Python lists: one row and one head at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from reference import Group, SlowLayer, Token, Vector


@dataclass
class Merged:
    """A token and what it took in."""

    key: Vector
    value: Vector
    mass: float = 1.0


@dataclass
class Head:
    """What is known of one KV head of a row."""

    tokens: dict[int, Merged] = field(default_factory=dict)  # by position
    threshold: float | None = None
    near_limits: bool = False  # a choice so close that rounding may decide


def cosine(one: Vector, other: Vector) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / math.hypot(*one) / math.hypot(*other)


class SlowMerge(SlowLayer):
    """A `SlowLayer` whose losers go into the nearest of those that stay."""

    def __init__(self, *args: Any, values_only: bool = False, threshold: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.values_only, self.fixed = values_only, threshold

    def heads(self, group: Group) -> dict[int, Head]:
        if "merged" not in vars(group):
            group.merged = {head: Head() for head in group.heads}  # type: ignore[attr-defined]
        return group.merged  # type: ignore[attr-defined, no-any-return]

    def _append(self, group: Group, new: list[Token | None]) -> None:
        super()._append(group, new)
        self._note(group, new)

    def _note(self, group: Group, new: list[Token | None]) -> None:
        for head, state in self.heads(group).items():
            for token in new:
                if token is not None:
                    state.tokens[token.position] = Merged(list(token.keys[head]), list(token.values[head]))

    def _overwrite(self, group: Group, new: Token | None, seen: int) -> None:
        count = len(group.left)
        super()._overwrite(group, new, seen)
        if len(group.left) == count:
            return
        assert group.victim is not None
        self._note(group, [new])
        size = self.block_size
        block = group.tokens[group.victim * size : (group.victim + 1) * size]
        self._merge(group, [group.left[-1][1]], [token for token in group.tokens if token not in block])

    def _trim(self, group: Group, new: list[Token | None], seen: int, following: int) -> None:
        count = len(group.left)
        super()._trim(group, new, seen, following)
        if len(group.left) > count:
            self._merge(group, [token for _, token in group.left[count:]], group.tokens)

    def _merge(self, group: Group, losers: list[Token], staying: list[Token]) -> None:
        for state in self.heads(group).values():
            if not staying:
                continue
            near = []
            for loser in losers:
                key = state.tokens[loser.position].key
                steps = {t.position: cosine(key, state.tokens[t.position].key) * 4096 for t in staying}
                best = max(steps, key=lambda position: (round(steps[position]), position))
                level = round(steps[best])
                for similarity in steps.values():
                    state.near_limits |= (
                        abs(similarity - math.floor(similarity) - 0.5) < 1e-2 and round(similarity + 0.01) >= level
                    )
                near.append((loser.position, best, level / 4096))
            limit = self.fixed
            if limit is None:
                mean = sum(cos for *_, cos in near) / len(near)
                limit = mean if state.threshold is None else 0.5 * state.threshold + 0.5 * mean
                state.near_limits |= any(0 < abs(cos - limit) < 1e-6 for *_, cos in near)
                state.threshold = limit
            self._take_in(state, [pair for pair in near if pair[2] > 0 and pair[2] >= limit])

    def _take_in(self, state: Head, taken: list[tuple[int, int, float]]) -> None:
        for target in {best for _, best, _ in taken}:
            token = state.tokens[target]
            own = [(state.tokens[loser], cos) for loser, best, cos in taken if best == target]
            shares = [other.mass * (1.0 if self.values_only else cos) for other, cos in own]
            total = token.mass + sum(shares)
            for name in ("value",) if self.values_only else ("key", "value"):
                sums = [x * token.mass for x in getattr(token, name)]
                for (other, _), share in zip(own, shares, strict=True):
                    sums = [x + share * y for x, y in zip(sums, getattr(other, name), strict=True)]
                setattr(token, name, [x / total for x in sums])
            token.mass = total

    def expected(self, row: int, head: int) -> dict[int, Merged]:
        """By position, of those held."""
        group = self.group(row, head)
        merged = self.heads(group)[head].tokens
        return {token.position: merged[token.position] for token in group.tokens}
