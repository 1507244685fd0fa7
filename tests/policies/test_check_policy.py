"""`check_policy` finds nothing in the policies of the package, and every mistake in those that were made wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_paged_eviction import (
    EvictionPolicy,
    Needs,
    ScoreContext,
    available_modifiers,
    available_policies,
    make_policy,
)
from hf_paged_eviction.policies.registry import POLICIES
from hf_paged_eviction.testing import check_policy
from hf_paged_eviction_eval import embedded  # noqa: F401 (it names the calibration of the embedded model)

EXAMPLES = [POLICIES.classes[name].example for name in available_modifiers()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", [*available_policies(), *EXAMPLES, "graphkv(keydiff)", "hybrid(r_kv, recency)"])
def test_nothing_is_wrong_with_a_policy_of_the_package(policy: str) -> None:
    assert check_policy(policy) is None  # type: ignore[func-returns-value]


def test_a_policy_that_was_made_for_a_model() -> None:
    check_policy("calibrated:embedded", head_dim=32, value_dim=32)
    with pytest.raises(ValueError, match="ValueError"):
        check_policy("calibrated:embedded")


# ---- made wrong ---------------------------------------------------------------------------------------------------


def norms(context: ScoreContext) -> Tensor:
    return context.values.float().norm(dim=-1)


class Flat(EvictionPolicy):
    def score(self, context: ScoreContext) -> Tensor:
        return norms(context)[:, 0]


class Nothing(EvictionPolicy):
    def score(self, context: ScoreContext) -> Tensor:
        return None  # type: ignore[return-value]


class Double(EvictionPolicy):
    def score(self, context: ScoreContext) -> Tensor:
        return norms(context).double()


class NotANumber(EvictionPolicy):
    def score(self, context: ScoreContext) -> Tensor:
        return (context.values[..., 0].float() - 0.5).sqrt()


class PinsAll(EvictionPolicy):
    def score(self, context: ScoreContext) -> Tensor:
        return torch.full(context.positions.shape, torch.inf, device=context.positions.device)


class ForgetsPads(EvictionPolicy):
    needs = Needs(absolute_noise=True)

    def score(self, context: ScoreContext) -> Tensor:
        keys = context.keys.float()
        return (keys - keys.mean(2, keepdim=True)).norm(dim=-1)


class OverRows(EvictionPolicy):
    """A pad is zero, but the largest of all rows is the measure."""

    def score(self, context: ScoreContext) -> Tensor:
        scores = norms(context) * context.valid
        return scores / scores.max()


class BySlot(EvictionPolicy):
    """As if slots were in the order of the text."""

    def score(self, context: ScoreContext) -> Tensor:
        tokens = context.positions.shape[-1]
        return norms(context) + torch.arange(-tokens, 0, device=context.keys.device)


class Rounding(EvictionPolicy):
    """Two ways to the same number, less each other: all noise, and said to be exact."""

    def score(self, context: ScoreContext) -> Tensor:
        keys = context.keys.float() * context.valid[..., None]
        count = context.valid.sum(2)[..., None, None]
        mean = keys.sum(2, keepdim=True) / count
        return ((keys @ keys.mT).sum(-1, keepdim=True) / count - keys @ mean.mT)[..., 0]


class Half(EvictionPolicy):
    def score(self, context: ScoreContext) -> Tensor:
        return context.values.square().sum(-1).sqrt().float()


class Unconverted(EvictionPolicy):
    def score(self, context: ScoreContext) -> Tensor:
        return context.values.norm(dim=-1)


class OnTheCpu(EvictionPolicy):
    def score(self, context: ScoreContext) -> Tensor:
        return norms(context) * torch.ones(context.positions.shape[-1])


class ReadsOnTheHost(EvictionPolicy):
    def score(self, context: ScoreContext) -> Tensor:
        return norms(context) * (2.0 if context.seen.max().item() > 10 else 1.0)


class TwoTokens(EvictionPolicy):
    """Of one token alone there is no deviation."""

    def score(self, context: ScoreContext) -> Tensor:
        valid = context.valid
        scores = norms(context).where(valid, 0.0)
        mean = scores.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True)
        spread = ((scores - mean).square() * valid).sum(-1, keepdim=True) / (valid.sum(-1, keepdim=True) - 1)
        return scores / spread.sqrt()


class PromisesTooMuch(EvictionPolicy):
    needs = Needs(token_local=True)

    def score(self, context: ScoreContext) -> Tensor:
        scores = norms(context).where(context.valid, 0.0)
        return scores / scores.amax(-1, keepdim=True)


class Ages(EvictionPolicy):
    needs = Needs(token_local=True)

    def score(self, context: ScoreContext) -> Tensor:
        return norms(context) / (1 + context.seen[:, None, None] - context.positions)


class Layered(EvictionPolicy):
    needs = Needs(token_local=True, by_layer=False)

    def score(self, context: ScoreContext) -> Tensor:
        return norms(context) + 9.0 * context.layer_idx * context.positions


class Budgeted(EvictionPolicy):
    def score(self, context: ScoreContext) -> Tensor:
        return norms(context).masked_fill(context.positions < context.budget / 4, torch.inf)


class Unrotates(EvictionPolicy):
    def score(self, context: ScoreContext) -> Tensor:
        return context.unrotated_keys.norm(dim=-1)


class InPlace(EvictionPolicy):
    def score(self, context: ScoreContext) -> Tensor:
        context.values.masked_fill_(~context.valid[..., None], 0.0)
        return norms(context)


@dataclass(frozen=True)
class Remembers(EvictionPolicy):
    told: list[int] = field(default_factory=list)

    def score(self, context: ScoreContext) -> Tensor:
        self.told.append(context.layer_idx)
        return norms(context) + len(self.told)


class Dice(EvictionPolicy):
    def score(self, context: ScoreContext) -> Tensor:
        return torch.rand(context.positions.shape, device=context.positions.device)


class Watching(EvictionPolicy):
    """Adds up attention, rightly."""

    needs = Needs(token_statistics=("sum",))

    def observe(self, statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
        return {"sum": statistics["sum"] + attention.weights.sum((2, 3))}

    def score(self, context: ScoreContext) -> Tensor:
        return context.statistics["sum"]


class NotFilled(Watching):
    needs = Needs(token_statistics=("sum", "squares"))


class NotNamed(Watching):
    def observe(self, statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
        return super().observe(statistics, attention) | {"last": attention.weights.sum((2, 3))}


class WrongShape(Watching):
    def observe(self, statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
        return {"sum": attention.weights.sum(3)}


class WrongDtype(Watching):
    def observe(self, statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
        return {"sum": (attention.weights.amax((2, 3)) > 0.1).long()}


class NoObserver(EvictionPolicy):
    needs = Needs(token_statistics=("sum",))

    def score(self, context: ScoreContext) -> Tensor:
        return context.statistics["sum"]


class LastPieceOnly(Watching):
    def observe(self, statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
        return {"sum": attention.weights.sum((2, 3))}


class LastInPiece(Watching):
    """The last place of a piece is taken for the newest query, of which each piece adds its own."""

    def observe(self, statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
        paid = attention.weights.mean(2)
        place = torch.arange(paid.shape[2], device=paid.device)[:, None] % 2
        return {"sum": torch.maximum(statistics["sum"], (paid * place).amax(2))}


class AddsInPlace(Watching):
    def observe(self, statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
        return {"sum": statistics["sum"].add_(attention.weights.sum((2, 3)))}


class NeedsRows(Watching):
    needs = Needs(token_statistics=("sum",), row_statistics=("newest",))

    def observe(self, statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
        newest = attention.query_positions.amax(-1).float()
        before = statistics.get("newest", newest)
        return super().observe(statistics, attention) | {"newest": torch.maximum(newest, before)}

    def score(self, context: ScoreContext) -> Tensor:
        return context.statistics["sum"] * (1 + context.statistics["newest"][:, None, None])


class UnrotatesQueries(Watching):
    def observe(self, statistics: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
        lengths = attention.unrotated_queries.norm(dim=-1).unflatten(1, (attention.weights.shape[1], -1))
        return {"sum": statistics["sum"] + (attention.weights * lengths[..., None]).sum((2, 3))}


class DeniesWeights(Watching):
    needs = Needs(token_statistics=("sum",), reads_weights=False)


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        (Flat(), r"3, 2.*torch\.Size\(\[3"),
        (Nothing(), "NoneType"),
        (Double(), r"torch.float64"),
        (NotANumber(), r"In a batch: the score of \d+ of 218 real tokens is nan"),
        (PinsAll(), "infinite"),
        (ForgetsPads(), r"3.*scores"),
        (OverRows(), r"0.*scores"),
        (BySlot(), "Tokens"),
        (Rounding(), "absolute_noise=True"),
        (Half(), r"torch.float16"),
        (Unconverted(), r"torch.bfloat16.*torch.bfloat16"),
        (OnTheCpu(), r"device.*raises"),
        (ReadsOnTheHost(), r"device.*raises"),
        (TwoTokens(), r"single.*head"),
        (PromisesTooMuch(), r"Needs\(token_local=True\)"),
        (Ages(), r"Needs\(token_local=True\)"),
        (Layered(), "layer_idx"),
        (Budgeted(), r"budget.*scores"),
        (Unrotates(), r"rotary.*scores"),
        (UnrotatesQueries(), r"rotary.*scores"),
        (InPlace(), "'values'"),
        (Remembers(), "It keeps 'told'"),
        (Dice(), "second time"),
        (NotFilled(), r"In a batch: it raises ValueError: .*'squares'.*, and returns \{'sum'"),
        (NotNamed(), r"ValueError.*'last'"),
        (WrongShape(), r"ValueError.*3, 2"),
        (WrongDtype(), r"ValueError:.*'sum'"),
        (NoObserver(), "NotImplementedError"),
        (LastPieceOnly(), "Queries in pieces"),
        (LastInPiece(), "Queries in pieces"),
        (AddsInPlace(), "'sum'"),
        (NeedsRows(), "KeyError: 'newest'"),
        (DeniesWeights(), "At another weights, "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, EvictionPolicy) else "",
)
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
    with pytest.raises(ValueError, match="Unknown policy"):
        check_policy("h3o")
    with pytest.raises(TypeError, match="not a class"):
        check_policy(Watching)  # type: ignore[arg-type]
