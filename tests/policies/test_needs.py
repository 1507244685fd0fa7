"""What policies say they need, and that it is said in one place."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor

import models
import modes
from hf_paged_eviction import EvictionPolicy, Needs, PagedEvictionCache, ScoreContext, make_policy
from hf_paged_eviction.queries.attention import PAGED_EVICTION


def test_the_simplest_policy_needs_nothing() -> None:
    @dataclass(frozen=True)
    class Newest(EvictionPolicy):
        def score(self, context: ScoreContext) -> Tensor:
            return context.positions.float()

    assert Newest().needs == Needs()
    assert not Needs().queries


@pytest.mark.parametrize(
    ("wrong", "error", "reason"),
    [
        ({"token_statistics": "used"}, TypeError, r"tuple.*names"),
        ({"row_statistics": ["newest"]}, TypeError, r"tuple.*names"),
        ({"token_statistics": ("a", "b"), "row_statistics": ("a",)}, ValueError, "names of their own"),
        ({"token_local": True, "row_statistics": ("a",)}, ValueError, "token_local"),
        ({"window": 0}, ValueError, "above 0"),
    ],
)
def test_needs_that_cannot_be(wrong: dict[str, Any], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        Needs(**wrong)


def test_what_nobody_reads_is_refused_where_the_class_is_made() -> None:
    """As a class attribute, annotated or not, and as a property."""
    with pytest.raises(TypeError, match=r"token_local.*Needs\(token_local="):
        type("Plain", (EvictionPolicy,), {"token_local": True})
    with pytest.raises(TypeError, match="Annotated says supports_mla"):

        class Annotated(EvictionPolicy):
            supports_mla: ClassVar[bool] = False

    with pytest.raises(TypeError, match="AttentionCall says token_statistics"):

        class AttentionCall(EvictionPolicy):
            @property
            def token_statistics(self) -> tuple[str, ...]:
                return ("hits",)

    for needs in (True, {"token_local": True}, Needs, lambda self: Needs()):
        with pytest.raises(TypeError, match=r"Odd\.needs"):
            type("Odd", (EvictionPolicy,), {"needs": needs})


def test_together() -> None:
    """What one part needs all have; what one cannot bear none can; and every part's numbers are told apart."""
    needs = Needs.together(
        [
            Needs(token_local=True, by_layer=False, supports_mla=False, reads_budget=True),
            Needs(token_statistics=("a",), row_statistics=("r",), window=8, reads_weights=False),
            Needs(token_statistics=("a",), window=32, decision_interval=48, observes_decode=False, rotary=True),
        ]
    )
    assert needs == Needs(
        supports_mla=False,
        rotary=True,
        reads_budget=True,
        decision_interval=48,
        token_statistics=("1.a", "2.a"),
        row_statistics=("1.r",),
        window=32,
    )
    assert Needs.together([needs, Needs(row_statistics=("r",))]).window is None
    assert Needs.together([Needs(token_local=True)]) == Needs()


def test_adaptive_looks_at_attention_in_decode_whatever_its_parts_do() -> None:
    """Its entropy is its own: with parts that observe nothing it stayed that of the prompt."""
    assert make_policy("adaptive(keydiff, paged_eviction)").needs.observes_decode
    model = models.shared("llama", PAGED_EVICTION)
    cache = PagedEvictionCache(model.config, budget=16, block_size=4, policy="adaptive(keydiff, paged_eviction)")
    ids, mask = models.left_pad(models.prompts([36]))
    modes.forward(model, cache, ids, mask, 0, 20)
    for at in range(20, 36):
        modes.forward(model, cache, ids, mask, at, at + 1)
    assert cache.layers[0].observed["newest"].tolist() == [35]
