"""Every policy that serving takes gives what it gives alone, with the heads that it was published with and others."""

from __future__ import annotations

from typing import Any

import pytest

import driving
from driving import alone, batching, model_of, pool, texts
from hf_paged_eviction.policies import available_policies, make_policy
from hf_paged_eviction.serving.options import ServingOptions

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

OPTIONS: dict[str, Any] = {"budget": 32, "block_size": 4}
#: Prompts that fit, that overflow in one chunk and in several; answers that overwrite several blocks.
REQUESTS = tuple(zip(texts((5, 33, 70, 1, 48)), (40, 9, 14, 40, 21), strict=True))


def served() -> list[str]:
    """Names of all policies that serving does not refuse, as the registry knows them."""
    names = []
    for name in available_policies():
        try:
            ServingOptions.check(model_of().config, policy=name, **OPTIONS)
        except ValueError:
            assert make_policy(name).needs.queries or make_policy(name).needs.marks, name
        else:
            names.append(name)
    return names


@pytest.mark.parametrize("heads", [None, "separate", "shared"])
@pytest.mark.parametrize("policy", [*served(), "auto"])
def test_as_alone(policy: str, heads: str | None) -> None:
    options = OPTIONS | {"policy": policy, "heads": heads}
    model = model_of()
    with batching(model, pool(12), **options) as turned:
        turned.run({3 * at: [adding(str(at), *request)] for at, request in enumerate(REQUESTS)})
    expected = [alone(model, prompt, new, **options) for prompt, new in REQUESTS]
    assert [turned.answers[str(at)] for at in range(len(REQUESTS))] == expected


def adding(name: str, prompt: list[int], new: int) -> Any:
    return lambda turned: turned.add(name, prompt, new)


def test_policies_of_both_kinds_are_served() -> None:
    assert {make_policy(name).needs.heads for name in served()} == {"shared", "separate"}


def test_separate_heads_are_not_without_effect() -> None:
    """The control."""
    model, (prompt, new) = model_of(), REQUESTS[2]
    answers = [alone(model, prompt, new, **OPTIONS, policy="value_norm", heads=heads) for heads in ("shared", None)]
    assert answers[0] != answers[1]
