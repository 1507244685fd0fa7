"""Metrics of the `evaluate` library: `evaluate:NAME`, a name on the Hub or the folder or file of a script."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import UserError, reason

PREFIX = "evaluate:"


def is_library_metric(name: str | None) -> bool:
    """Whether `evaluate` computes it."""
    return name is not None and name.startswith(PREFIX)


def check_library_metric(name: str, trusted: bool) -> None:
    """Load the metric, before a run depends on it.

    Args:
        name: "evaluate:NAME", or "evaluate:NAME#KEY" where it returns several numbers.
        trusted: whether code from the Hub may run.

    Raises:
        UserError: it cannot be loaded, or its code would come from the Hub and nobody said that it may run.
    """
    place, _, _ = name.removeprefix(PREFIX).partition("#")
    if not Path(place).exists() and not trusted:
        raise UserError(
            f"--metric {name}: there is no such file, and a metric on the Hub is code that runs here: say "
            "--trust-remote-code, or give the folder of a metric script"
        )
    _load(place)


def library_score(name: str, prediction: str, answers: Sequence[str]) -> float:
    """The score of one prediction, 0 to 1, the best over the answers unless the metric takes them together.

    Raises:
        UserError: the metric fails, or returns no number from 0 to 1.
    """
    place, _, key = name.removeprefix(PREFIX).partition("#")
    metric = _load(place)
    features = metric.features[0] if isinstance(metric.features, list) else metric.features
    reference = features["references"]
    together = isinstance(reference, list) or type(reference).__name__ in ("List", "Sequence", "LargeList")
    try:
        pairs = [(prediction, list(answers))] if together else [(prediction, answer) for answer in answers]
        scores = [_one(metric, features, *pair) for pair in pairs]
    except Exception as error:  # whatever the metric raises
        raise UserError(f"{name} fails: {type(error).__name__}: {error}") from error
    return max(_number(name, key, results) for results in scores)


@lru_cache
def _load(place: str) -> Any:
    if not Path(place).exists():
        from ..hub import is_offline, require_network

        if not is_offline():
            require_network(f"the metric {place}")
    import evaluate

    try:
        return evaluate.load(place)
    except Exception as error:  # it raises a dozen classes
        raise UserError(f"cannot load the metric {place!r} of the evaluate library: {reason(error)}") from error


def _one(metric: Any, features: Any, prediction: str, reference: Any) -> dict[str, Any]:
    dtype = getattr(features["predictions"], "dtype", "string")
    cast = int if dtype.startswith("int") else float if dtype.startswith("float") else str
    target = reference if isinstance(reference, list) else cast(reference)
    results: dict[str, Any] = metric.compute(predictions=[cast(prediction)], references=[target])
    return results


def _number(name: str, key: str, results: dict[str, Any]) -> float:
    numbers = {key_name: float(value) for key_name, value in results.items() if isinstance(value, (int, float))}
    wanted = key or (Path(name.removeprefix(PREFIX)).stem if len(numbers) > 1 else next(iter(numbers), ""))
    if wanted not in numbers:
        raise UserError(
            f"{name} returns {', '.join(results)}: say which, as in {name.partition('#')[0]}#{next(iter(results))}"
        )
    if not 0 <= numbers[wanted] <= 1:
        raise UserError(f"{name} returns {numbers[wanted]:g} as {wanted}; a score is from 0 to 1")
    return numbers[wanted]
