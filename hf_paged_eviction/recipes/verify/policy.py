"""Does a policy keep the rules that the cache relies on? `check_policy(policy)` scores made-up tokens and says so."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ...policies import EvictionPolicy, make_policy
from ...table.ranking import rank_keys
from .policy_text import PolicyText

#: How far scores may be apart that ought to be equal: relative, and in mean sizes of the scores.
_RELATIVE, _OF_SCALE = 1e-3, 1e-4
#: Of states of size 1, what rounding may leave of a difference.
_NOISE = 1e-4
#: Sentences of one rule: what is wrong.
Findings = Iterator[str]
#: Makes texts, see `PolicyText.random`.
Make = Callable[..., PolicyText]


def check_policy(policy: str | EvictionPolicy, *, head_dim: int = 8, value_dim: int = 6) -> None:
    """Score made-up tokens with a policy, and say what in it is wrong. Takes well under a second; no model is needed.

    Looked at: shape, dtype and nan of the scores; that a row gets in a batch, and with pads, what it gets alone; that
    the slots of the tokens and the pieces of the queries do not matter; that rounding does not decide between equal
    tokens; half precision and other devices; one token of one head; that what `needs` says is so, and that statistics
    are filled; that nothing is changed in place and no state of a run is kept. What it cannot know is whether the
    formula is the one you mean: compare it with a loop over numbers.

    Args:
        policy: an object, or its text.
        head_dim, value_dim: of the keys and values, for a policy that was made for a model's.

    Raises:
        ValueError: with a sentence for everything that was found; or `make_policy` knows no such policy.
        TypeError: neither a text nor a policy.
    """
    policy = make_policy(policy)
    label = policy.label  # as it was before
    found = list(_findings(policy, partial(PolicyText.random, (head_dim, value_dim))))
    if found:
        listed = "\n".join(f"- {each}" for each in found)
        raise ValueError(f"The policy {label!r} breaks {len(found)} of the rules for policies:\n{listed}")


def _findings(policy: EvictionPolicy, make: Make) -> Findings:
    found = list(_heard(policy, make, _statistics)) or list(_heard(policy, make, _shape))
    yield from found
    if not found:  # where nothing fits, nothing else can be compared
        for rule in _RULES:
            yield from _heard(policy, make, rule)


def _heard(policy: EvictionPolicy, make: Make, rule: Callable[[EvictionPolicy, Make], Findings]) -> Findings:
    try:
        yield from rule(policy, make)
    except Exception as error:
        about = (rule.__doc__ or "").partition(":")[0]
        yield f"{about}: it raised {type(error).__name__}: {error}"


# ---- what comes back ------------------------------------------------------------------------------------------------


def _statistics(policy: EvictionPolicy, make: Make) -> Findings:
    """Observing queries: all that is named is there, of the right shape and dtype."""
    needs, text = policy.needs, make()
    after = text.observed(policy, [text.columns(policy)])
    named, missing = {*needs.token_statistics, *needs.row_statistics}, "Needs names the statistic"
    for name in sorted(named - after.keys()):
        yield f"{missing} {name!r}, and observe does not return it."
    for name in sorted(after.keys() - named):
        yield f"observe returns the statistic {name!r}, which Needs does not name: the cache would drop it."
    for name in sorted(named & after.keys()):
        value, of_tokens = after[name], name in needs.token_statistics
        shape = tuple(text.positions.shape) if of_tokens else (len(text.positions), ...)
        if value.dtype != torch.float32:
            yield f"The statistic {name!r} is {value.dtype}, and statistics are float32."
        elif (of_tokens and value.shape != shape) or value.shape[:1] != shape[:1]:
            like = "[batch, kv_heads, tokens]" if of_tokens else "[batch, ...]"
            yield f"The statistic {name!r} has the shape {tuple(value.shape)}, and must have {like} = {shape}."


def _shape(policy: EvictionPolicy, make: Make) -> Findings:
    """Scoring a batch: shape, dtype and nan."""
    text = make()
    scores = text.scores(policy)
    shape = tuple(text.positions.shape)
    if not isinstance(scores, Tensor) or scores.shape != shape:
        given = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        yield f"score must return [batch, kv_heads, tokens] = {shape}, and returns {given}."
        return
    if scores.dtype != torch.float32:
        yield f"Scores must be float32, and are {scores.dtype}."
    real = text.positions >= 0
    if count := int(scores.isnan()[real].sum()):
        yield f"The score of {count} of {int(real.sum())} real tokens is nan, which counts as lowest."
    elif scores[real].isinf().all():
        yield "The score of every token is infinite, so that none is better than another."


# ---- what must not matter -------------------------------------------------------------------------------------------


def _rows(policy: EvictionPolicy, make: Make) -> Findings:
    """A row alone: what it gets in a batch, with pads before it."""
    text = make()
    scores = text.scores(policy)
    for row, pads in enumerate((text.positions[:, 0] < 0).sum(-1).tolist()):
        alone = text.row(row).scores(policy)
        if not _same(scores[row : row + 1, :, pads:], alone):
            what = f"{pads} pads before it" if pads else "other rows beside it"
            hint = ": pads hold anything, mask them by context.valid" if pads else ": reduce over tokens, not over rows"
            yield f"A row scores otherwise in a batch, with {what}, than alone{hint}."


def _empty_row(policy: EvictionPolicy, make: Make) -> Findings:
    """A row of pads alone: it harms no other."""
    text = make(pads=(0, 40, 8))
    scores = text.scores(policy)
    if not _same(scores[::2, :, 8:], make(pads=(0, 3, 8)).scores(policy)[::2, :, 8:]):
        yield "A row that holds nothing but pads changes the scores of the other rows."


def _slots(policy: EvictionPolicy, make: Make) -> Findings:
    """Tokens in other slots: the same scores."""
    text = make()
    mixed = text.shuffled()
    if not _same_real(text, text.in_order(text.scores(policy)), mixed.in_order(mixed.scores(policy))):
        yield (
            "Scores depend on the slots in which tokens lie, which are in no order and differ between heads: "
            "context.positions says where in the text a token is."
        )


def _pieces(policy: EvictionPolicy, make: Make) -> Findings:
    """Queries in pieces: the same scores."""
    text = make()
    columns = text.columns(policy)
    if not policy.needs.queries or len(columns) < 2:
        return
    pieces = [columns[start : start + 7] for start in range(0, len(columns), 7)]
    whole = text.scores(policy)
    if not _same_real(text, whole, text.scores(policy, pieces)):
        yield "Scores depend on the pieces in which observe is shown the queries of a prompt."
    elif not _same_real(text, whole, text.scores(policy, [piece[3:] + piece[:3] for piece in pieces])):
        yield "Scores depend on the order of the queries within a piece: attention.query_positions says which is which."


def _ties(policy: EvictionPolicy, make: Make) -> Findings:
    """Tokens that repeat: rounding does not decide between them."""
    text = make(kinds=3)
    batch, batch_levels = _compared(policy, text)
    for row in range(len(text.positions)):
        alone = text.row(row)
        scores, levels = _compared(policy, alone)
        mixed, mixed_levels = _compared(policy, alone.shuffled())
        newest = slice(-scores.shape[-1], None)  # without the pads
        ways = {
            "in other slots": (mixed[0], mixed_levels[0]),
            "in a batch": (batch[row, :, newest], batch_levels[row, :, newest]),
        }
        for how, (others, other_levels) in ways.items():
            # What differs by more is no rounding, and another rule has found it.
            noise = float((others - scores[0]).nan_to_num(0.0, 0.0, 0.0).abs().amax()) < _NOISE
            if noise and int((other_levels - levels[0]).abs().amax()) > 1:
                yield (
                    f"Of tokens that repeat, rounding decides which is better: {how} their order is not that of the "
                    "row alone. Where scores are differences, say Needs(absolute_noise=True), or set to 0 what is next "
                    "to nothing."
                )
                return


def _compared(policy: EvictionPolicy, text: PolicyText) -> tuple[Tensor, Tensor]:
    """The scores, and the same as the cache compares them, both in the order of the text."""
    scores, positions = text.in_order(text.scores(policy)), text.in_order(text.positions)
    return scores, rank_keys(scores, positions, positions >= 0, policy.needs.absolute_noise) >> 32


# ---- other inputs ---------------------------------------------------------------------------------------------------


def _half(policy: EvictionPolicy, make: Make) -> Findings:
    """Half precision: float32 scores, worked out in float32."""
    for dtype in (torch.bfloat16, torch.float16):
        text = make(pads=(0, 0), size=100.0).to(dtype)  # squares of such numbers do not fit into half precision
        scores = text.scores(policy)
        if scores.dtype != torch.float32:
            yield f"Of {dtype} keys and values the scores are {scores.dtype}, and must be float32."
        elif scores[text.positions >= 0].isnan().any():
            yield f"Of {dtype} keys and values some scores are nan."
        elif not policy.needs.queries and not _same_real(text, scores, text.to(torch.float32).scores(policy)):
            yield f"{dtype} keys and values are not brought to float32 before they are reckoned with: use .float()."


def _device(policy: EvictionPolicy, make: Make) -> Findings:
    """On another device: every tensor is made there, and none is read on the host."""
    scores = make().to("meta").scores(policy)
    if scores.device.type != "meta":
        yield f"Scores of tokens on another device are on {scores.device}."


def _least(policy: EvictionPolicy, make: Make) -> Findings:
    """One token of one head: a score."""
    for pads, tokens in (((0,), 1), ((0, 2), 3)):
        text = make(pads=pads, heads=1, tokens=tokens)
        scores = text.scores(policy)
        if scores.shape != text.positions.shape or scores[text.positions >= 0].isnan().any():
            yield f"Of a single token in a row and a single head the score is {scores.tolist()}."
            return


def _unobserved(policy: EvictionPolicy, make: Make) -> Findings:
    """Before anything was observed: a score for each token."""
    text = make()
    scores = policy.score(text.context(policy, text.no_statistics(policy), observed=False))
    if scores.shape != text.positions.shape or scores[text.positions >= 0].isnan().any():
        yield "Before anything was observed scores are nan or of another shape; row statistics are not there yet."


# ---- what it says of itself -----------------------------------------------------------------------------------------


def _promises(policy: EvictionPolicy, make: Make) -> Findings:
    """What Needs says: it is so."""
    needs, text = policy.needs, make()
    scores = text.scores(policy)
    for name in sorted(text.asked):
        if name == "rotary" and not needs.rotary:
            yield "It asks for unrotated states, and gets rotated ones: say Needs(rotary=True)."
        elif name == "weights" and not needs.reads_weights:
            yield "It asks for attention.weights, and Needs says reads_weights=False."
    if not needs.reads_budget and not _same_real(text, scores, replace(text, budget=text.budget // 2).scores(policy)):
        yield "Scores depend on context.budget: say Needs(reads_budget=True)."
    if not needs.token_local:
        return
    few = text.newest(28)
    context = few.context(policy, {})
    if not _same_real(few, scores[..., 12:], few.scores(policy)):
        yield "Needs says token_local, and the score of a token depends on what other tokens there are."
    elif not _same_real(few, scores[..., 12:], policy.score(replace(context, seen=context.seen + 9))):
        yield "Needs says token_local, and the score of a token changes with context.seen."
    if not needs.by_layer and not _same_real(text, scores, replace(text, layer_idx=0).scores(policy)):
        yield "Needs says by_layer=False, and scores depend on context.layer_idx."


def _untouched(policy: EvictionPolicy, make: Make) -> Findings:
    """What it is given: nothing is changed in place, and nothing is kept."""
    text, before = make(), _state(policy)
    columns = text.columns(policy)
    statistics = text.observed(policy, [columns])
    context = text.context(policy, statistics)
    given: dict[str, Any] = {
        f"context.{name}": getattr(context, name) for name in ("keys", "values", "positions", "seen")
    }
    given |= {"attention.queries": text.queries}
    given |= {f"statistics[{name!r}]": value for name, value in statistics.items()}
    copies = {name: value.clone() for name, value in given.items()}
    first = policy.score(context)
    if policy.needs.queries:
        policy.observe(dict(statistics), text.attention(columns[:3], policy.needs.rotary))
    for name, value in given.items():
        if not torch.equal(value, copies[name]):
            yield f"{name} is changed in place; make new tensors."
    again = make().scores(policy)
    if not torch.equal(first.nan_to_num(), again.nan_to_num()):
        yield "The same tokens get other scores the second time."
    changed = sorted(name for name, value in _state(policy).items() if name not in before or before[name] != value)
    if changed:
        yield (
            f"It keeps something from one call to the next ({', '.join(changed)}): one object serves many caches and "
            "layers. What is to be remembered are statistics, see Needs."
        )


def _state(policy: EvictionPolicy) -> dict[str, Any]:
    """The object's attributes, such that a change shows."""
    cls = type(policy)
    own = getattr(policy, "__dict__", {})
    return {
        name: _shown(value) for name, value in own.items() if not isinstance(getattr(cls, name, 0), cached_property)
    }


def _shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (id(value), value.detach().clone().flatten().tolist())
    if isinstance(value, dict):
        return {key: _shown(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_shown(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else id(value)


# ---- comparing ------------------------------------------------------------------------------------------------------


def _same_real(text: PolicyText, one: Tensor, other: Tensor) -> bool:
    """Whether the real tokens have the same scores; both in the order of the text."""
    real = text.positions >= 0
    return _same(one[real], other[real])


def _same(one: Tensor, other: Tensor) -> bool:
    one, other = one.double(), other.double()
    usable = one.isfinite() & other.isfinite()
    scale = float(other.abs()[usable].mean()) if usable.any() else 0.0
    close = torch.isclose(one, other, rtol=_RELATIVE, atol=_OF_SCALE * scale, equal_nan=True)
    return bool(close.all())


_RULES = (
    *(_rows, _empty_row, _slots, _pieces, _ties),
    *(_half, _device, _least, _unobserved),
    *(_promises, _untouched),
)
