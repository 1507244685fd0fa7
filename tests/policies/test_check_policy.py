"""`check_policy` finds nothing in the policies of the package, and every mistake in those that were made wrong."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_paged_eviction import EvictionPolicy, Needs, ScoreContext, available_modifiers, make_policy
from hf_paged_eviction.policies.registry import POLICIES
from hf_paged_eviction.testing import check_policy
from hf_paged_eviction_eval import embedded
from policy_kinds import NAMES

EXAMPLES = [POLICIES.classes[name].example for name in available_modifiers()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", [*NAMES, *EXAMPLES, "graphkv(keydiff)", "hybrid(r_kv, recency)"])
def test_nothing_is_wrong_with_a_policy_of_the_package(policy: str) -> None:
    assert check_policy(policy) is None  # type: ignore[func-returns-value]


def test_a_policy_that_was_made_for_a_model() -> None:
    policy = make_policy("calibrated", str(embedded.calibration_path()))
    check_policy(policy, head_dim=32, value_dim=32)
    with pytest.raises(ValueError, match="ValueError"):
        check_policy(policy)


def norms(context: ScoreContext) -> Tensor:
    return context.values.float().norm(dim=-1)


def scored(name: str, score: Callable[[ScoreContext], Any], needs: Needs | None = None) -> EvictionPolicy:
    """A policy that scores like this."""
    parts: dict[str, Any] = {"score": lambda self, context: score(context)}
    return type(name, (EvictionPolicy,), parts | ({} if needs is None else {"needs": needs}))()


class Watching(EvictionPolicy):
    """Adds up attention, rightly."""

    needs = Needs(token_statistics=("sum",))

    def observe(self, statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
        return {"sum": statistics["sum"] + attention.weights.sum((2, 3))}

    def score(self, context: ScoreContext) -> Tensor:
        return context.statistics["sum"]


def observed(name: str, observe: Callable[[dict[str, Tensor], Any], Any]) -> EvictionPolicy:
    """A policy that watches like this."""
    return type(name, (Watching,), {"observe": lambda self, statistics, attention: observe(statistics, attention)})()


def over_rows(context: ScoreContext) -> Tensor:
    """A pad is zero, but the largest of all rows is the measure."""
    scores = norms(context) * context.valid
    return scores / scores.max()


def by_slot(context: ScoreContext) -> Tensor:
    """As if slots were in the order of the text."""
    return norms(context) + torch.arange(-context.positions.shape[-1], 0, device=context.keys.device)


def rounding(context: ScoreContext) -> Tensor:
    """Two ways to the same number, less each other: all noise, and said to be exact."""
    keys = context.keys.float() * context.valid[..., None]
    count = context.valid.sum(2)[..., None, None]
    mean = keys.sum(2, keepdim=True) / count
    return ((keys @ keys.mT).sum(-1, keepdim=True) / count - keys @ mean.mT)[..., 0]


def two_tokens(context: ScoreContext) -> Tensor:
    """Of one token alone there is no deviation."""
    valid = context.valid
    scores = norms(context).where(valid, 0.0)
    mean = scores.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True)
    spread = ((scores - mean).square() * valid).sum(-1, keepdim=True) / (valid.sum(-1, keepdim=True) - 1)
    return scores / spread.sqrt()


def promises_too_much(context: ScoreContext) -> Tensor:
    scores = norms(context).where(context.valid, 0.0)
    return scores / scores.amax(-1, keepdim=True)


def in_place(context: ScoreContext) -> Tensor:
    context.values.masked_fill_(~context.valid[..., None], 0.0)
    return norms(context)


def on_the_host(context: ScoreContext) -> Tensor:
    return norms(context) * (2.0 if context.seen.max().item() > 10 else 1.0)


@dataclass(frozen=True)
class Remembers(EvictionPolicy):
    told: list[int] = field(default_factory=list)

    def score(self, context: ScoreContext) -> Tensor:
        self.told.append(context.layer_idx)
        return norms(context) + len(self.told)


class NotFilled(Watching):
    needs = Needs(token_statistics=("sum", "squares"))


class DeniesWeights(Watching):
    needs = Needs(token_statistics=("sum",), reads_weights=False)


class NeedsRows(Watching):
    needs = Needs(token_statistics=("sum",), row_statistics=("newest",))

    def observe(self, statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
        newest = attention.query_positions.amax(-1).float()
        before = statistics.get("newest", newest)
        return super().observe(statistics, attention) | {"newest": torch.maximum(newest, before)}

    def score(self, context: ScoreContext) -> Tensor:
        return context.statistics["sum"] * (1 + context.statistics["newest"][:, None, None])


def last_in_piece(statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
    """The last place of a piece is taken for the newest query, of which each piece adds its own."""
    paid = attention.weights.mean(2)
    place = torch.arange(paid.shape[2], device=paid.device)[:, None] % 2
    return {"sum": torch.maximum(statistics["sum"], (paid * place).amax(2))}


def unrotates_queries(statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
    lengths = attention.unrotated_queries.norm(dim=-1).unflatten(1, (attention.weights.shape[1], -1))
    return {"sum": statistics["sum"] + (attention.weights * lengths[..., None]).sum((2, 3))}


LOCAL = Needs(token_local=True)
WRONG: list[tuple[EvictionPolicy, str]] = [
    (scored("Flat", lambda c: norms(c)[:, 0]), r"3, 2.*torch\.Size\(\[3"),
    (scored("Nothing", lambda c: None), "NoneType"),
    (scored("Double", lambda c: norms(c).double()), r"torch.float64"),
    (
        scored("NotANumber", lambda c: (c.values[..., 0].float() - 0.5).sqrt()),
        r"In a batch: the score of \d+ of 218 real tokens is nan",
    ),
    (scored("PinsAll", lambda c: torch.full_like(norms(c), torch.inf)), "infinite"),
    (
        scored(
            "ForgetsPads",
            lambda c: (c.keys.float() - c.keys.float().mean(2, keepdim=True)).norm(dim=-1),
            Needs(absolute_noise=True),
        ),
        r"3.*scores",
    ),
    (scored("OverRows", over_rows), r"0.*scores"),
    (scored("BySlot", by_slot), "Tokens"),
    (scored("Rounding", rounding), "absolute_noise=True"),
    (scored("Half", lambda c: c.values.square().sum(-1).sqrt().float()), r"torch.float16"),
    (scored("Unconverted", lambda c: c.values.norm(dim=-1)), r"torch.bfloat16.*torch.bfloat16"),
    (scored("OnTheCpu", lambda c: norms(c) * torch.ones(c.positions.shape[-1])), r"device.*raises"),
    (scored("ReadsOnTheHost", on_the_host), r"device.*raises"),
    (scored("TwoTokens", two_tokens), r"single.*head"),
    (scored("PromisesTooMuch", promises_too_much, LOCAL), r"Needs\(token_local=True\)"),
    (
        scored("Ages", lambda c: norms(c) / (1 + c.seen[:, None, None] - c.positions), LOCAL),
        r"Needs\(token_local=True\)",
    ),
    (
        scored(
            "Layered", lambda c: norms(c) + 9.0 * c.layer_idx * c.positions, Needs(token_local=True, by_layer=False)
        ),
        "layer_idx",
    ),
    (scored("Budgeted", lambda c: norms(c).masked_fill(c.positions < c.budget / 4, torch.inf)), r"budget.*scores"),
    (scored("Unrotates", lambda c: c.unrotated_keys.norm(dim=-1)), r"rotary.*scores"),
    (observed("UnrotatesQueries", unrotates_queries), r"rotary.*scores"),
    (scored("ReadsValues", norms, Needs(reads=("keys",))), r"values without channels.*scores"),
    (scored("ReadsKeys", lambda c: c.keys.float().norm(dim=-1), Needs(reads=())), r"keys without channels.*scores"),
    (scored("InPlace", in_place), "'values'"),
    (Remembers(), "It keeps 'told'"),
    (scored("Dice", lambda c: torch.rand(c.positions.shape, device=c.positions.device)), "second time"),
    (NotFilled(), r"In a batch: it raises ValueError: .*'squares'.*, and returns \{'sum'"),
    (observed("NotNamed", lambda s, a: {"sum": s["sum"], "last": a.weights.sum((2, 3))}), r"ValueError.*'last'"),
    (observed("WrongShape", lambda s, a: {"sum": a.weights.sum(3)}), r"ValueError.*3, 2"),
    (observed("WrongDtype", lambda s, a: {"sum": (a.weights.amax((2, 3)) > 0.1).long()}), r"ValueError:.*'sum'"),
    (scored("NoObserver", lambda c: c.statistics["sum"], Needs(token_statistics=("sum",))), "NotImplementedError"),
    (observed("LastPieceOnly", lambda s, a: {"sum": a.weights.sum((2, 3))}), "Queries in pieces"),
    (observed("LastInPiece", last_in_piece), "Queries in pieces"),
    (observed("AddsInPlace", lambda s, a: {"sum": s["sum"].add_(a.weights.sum((2, 3)))}), "'sum'"),
    (NeedsRows(), "KeyError: 'newest'"),
    (DeniesWeights(), "At another weights, "),
]


@pytest.mark.parametrize(("policy", "fault"), WRONG, ids=[type(policy).__name__ for policy, _ in WRONG])
def test_every_mistake_is_found(policy: EvictionPolicy, fault: str) -> None:
    with pytest.raises(ValueError, match=fault) as caught:
        check_policy(policy)
    assert str(caught.value).startswith(f"The policy '{type(policy).__name__}")


def test_a_right_one_that_watches_has_no_mistake() -> None:
    assert check_policy(Watching()) is None  # type: ignore[func-returns-value]


def test_all_mistakes_are_told_at_once() -> None:
    class Careless(EvictionPolicy):
        def score(self, context: ScoreContext) -> Tensor:
            context.values.mul_(1.0001)
            return (context.values - context.values.mean(2, keepdim=True)).float().norm(dim=-1)

    with pytest.raises(ValueError, match=r"breaks \d+") as caught:
        check_policy(Careless())
    for part in ("without its 8 pads", "changed in place", "torch.bfloat16 keys and values"):
        assert part in str(caught.value)


def test_texts_and_what_is_no_policy() -> None:
    check_policy(make_policy("caote(h2o(recent=0))"))
    with pytest.raises(ValueError, match="'h3o'"):
        check_policy("h3o")
    with pytest.raises(TypeError, match="not a class"):
        check_policy(Watching)  # type: ignore[arg-type]
