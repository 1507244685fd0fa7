"""What the author of a policy runs: `check_policy(policy)` scores made-up tokens and says what is wrong."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .attention.weights import Attention, Logits
from .integration.rotary import Rotary
from .policies import EvictionPolicy, QueryCount, ScoreContext, Statistics, make_policy
from .ranking import rank_keys

Tokens = dict[str, Tensor]
_PADS, _COUNT, _NOISE = (0, 3, 8), 40, 1e-4
#: Of the channels of a key, 0 turns with 2 and 1 with 3, and they grow; the others stay.
_ROTARY = Rotary(torch.tensor([0.7, 0.05]), torch.tensor([1.2] * 2))


def check_policy(policy: str | EvictionPolicy, *, head_dim: int = 8, value_dim: int = 6) -> None:
    """Check a policy on made-up tokens. Takes well under a second and needs no model.

    It checks shape, dtype and nan of the scores; that pads, other rows, the slots of tokens and the pieces of queries
    change nothing; rounding, half precision, other devices, a single token; what `needs` says; and that nothing is
    changed in place or kept. It cannot check that the formula is the one you mean: compare that with a loop over
    numbers.

    Args:
        policy: a policy, or its text.
        head_dim, value_dim: widths of keys and values, for a policy that was made for a certain model.

    Raises:
        ValueError: a check fails (one line for each), or `make_policy` knows no such policy.
        TypeError: `policy` is neither text nor a policy.
    """
    policy = make_policy(policy)
    label, tokens, check = policy.label, _random((head_dim, value_dim)), _Check(policy)  # the label as it was before
    check.scores("In a batch", tokens)
    if not check.faults:  # where nothing fits, nothing else can be compared
        check.guises(tokens)
        check.guises(_random((head_dim, value_dim), kinds=3))
        check.others(tokens)
        check.untouched(tokens)
    if faults := list(dict.fromkeys(check.faults)):
        title = f"The policy {label!r} breaks {len(faults)} of the rules for policies:"
        raise ValueError("\n- ".join([title, *faults]))


def _random(dims: tuple[int, int], kinds: int = 0) -> Tokens:
    """Two heads, of so many kinds of tokens again and again (0 = no two alike); pads first, with large states."""
    generator = torch.Generator().manual_seed(0)
    which = torch.randint(kinds, (_COUNT,), generator=generator) if kinds else torch.arange(_COUNT)
    sizes = (2, dims[0]), (2, dims[1]), (4, dims[0])
    states = [torch.randn(len(_PADS), *size, _COUNT, generator=generator)[..., which].mT for size in sizes]
    positions = (torch.arange(_COUNT) - torch.tensor(_PADS)[:, None]).clamp_min(-1)[:, None].repeat(1, 2, 1)
    keys, values = (part.masked_fill((positions < 0)[..., None], 1e4) for part in (states[0] + 0.5, states[1]))
    return {"keys": keys, "values": -values, "queries": states[2] * 2, "positions": positions}


class _Check:
    """One policy, and the faults that were found in it."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy, self.needs, self.rotary = policy, policy.needs, _ROTARY if policy.needs.rotary else None
        self.faults: list[str] = []

    def guises(self, tokens: Tokens) -> None:
        """The same tokens otherwise: the same scores."""
        expected = self._score(tokens)
        for row, pads in enumerate(_PADS):
            alone = {name: part[[row], :, pads:] for name, part in tokens.items()}
            self.scores(f"A row alone without its {pads} pads", alone, expected[[row], :, pads:], "see context.valid")
        order = torch.rand(expected.shape, generator=torch.Generator().manual_seed(1)).argsort(-1)
        states = {name: tokens[name].gather(2, order[..., None].expand_as(tokens[name])) for name in ("keys", "values")}
        moved = {**tokens, **states, "positions": tokens["positions"].gather(2, order)}
        self.scores("Tokens in other slots of each row and head", moved, expected, "see context.positions")

    def others(self, tokens: Tokens) -> None:
        """Other tokens, and what Needs says of them."""
        needs, scores = self.needs, self._score(tokens)
        empty = tokens["positions"].where(torch.tensor([True, False, True])[:, None, None], -1)
        self.scores("Beside a row of nothing but pads", {**tokens, "positions": empty}, scores)
        self.scores("The same a second time", tokens, scores)
        self.scores("Before any query was observed", tokens, piece=0)
        self.scores("Queries in pieces, each from its end", tokens, scores, "see attention.query_positions", piece=7)
        for dtype in (torch.bfloat16, torch.float16):  # in which the squares of such numbers have no place
            by = {"keys": 100, "values": 100, "queries": 1}
            half = {"positions": tokens["positions"][:1]}
            half |= {name: (tokens[name][:1] * by[name]).to(dtype) for name in by}
            exact = None if needs.queries else self._score(half | {name: half[name].float() for name in by})
            self.scores(f"{dtype} keys and values", half, exact, "use .float()")
        self.scores("On another device", {name: part.to("meta") for name, part in tokens.items()})
        self.scores("A single token of one head", {name: part[1:, :1, :9] for name, part in tokens.items()})
        if needs.token_local:
            some = {name: part[:, :, 12:28] for name, part in tokens.items()}
            self.scores("Needs(token_local=True), without other tokens", some, scores[..., 12:28])
        changes: dict[str, Any] = {"rotary": _ROTARY, "budget": 12, "weights": torch.tensor(torch.nan), "layer_idx": 0}
        declared = [needs.rotary, needs.reads_budget, needs.reads_weights, needs.by_layer]
        changes |= {f"{name} without channels": tokens[name][..., :0] for name in ("keys", "values")}
        declared += [name in needs.reads for name in ("keys", "values")]
        for name in [name for name, needed in zip(changes, declared, strict=True) if not needed]:
            what = name.partition(" ")[0]
            self.scores(
                f"{'With' if ' ' in name else 'At another'} {name}, which Needs does not name",
                tokens,
                scores,
                **{what: changes[name]},
            )

    def untouched(self, tokens: Tokens) -> None:
        """Nothing is changed in place, and nothing kept."""
        statistics, state = self._observed(tokens), self._state()
        context, attention = self._context(tokens, statistics), self._attention(tokens, range(30))
        tensors = {name: getattr(context, name) for name in ("keys", "values", "positions", "seen")} | statistics
        copies = {name: part.clone() for name, part in tensors.items()}
        self.policy.score(context)
        if self.needs.queries:
            self.policy.observe(dict(statistics), attention)
        self.faults += [
            f"{name!r} is changed in place" for name in tensors if not torch.equal(tensors[name], copies[name])
        ]
        changed = [name for name, value in self._state().items() if value != state.get(name)]
        self.faults += [f"It keeps {name!r} from call to call, and one object serves many caches" for name in changed]

    def _state(self) -> dict[str, str]:
        own, cls = getattr(self.policy, "__dict__", {}), type(self.policy)
        return {name: repr(own[name]) for name in own if not isinstance(getattr(cls, name, 0), cached_property)}

    def scores(self, case: str, tokens: Tokens, expected: Tensor | None = None, hint: str = "", **how: Any) -> None:
        """Note what is wrong with the scores of these tokens; `expected` in the order of the text."""
        try:
            fault = self._fault(self._score(tokens, **how), tokens["positions"], expected, hint)
        except Exception as error:
            fault = f"it raises {type(error).__name__}: {error}"
        self.faults += [f"{case}: {fault}"] if fault else []

    def _fault(self, scores: Tensor, positions: Tensor, expected: Tensor | None, hint: str) -> str:
        real, shape, got = positions >= 0, tuple(positions.shape), getattr(scores, "shape", type(scores).__name__)
        if got != shape:
            return f"scores must be [batch, kv_heads, tokens] = {shape}, and are {got}"
        if (scores.dtype, scores.device) != (torch.float32, positions.device):
            return f"scores must be float32 on {positions.device}, and are {scores.dtype} on {scores.device}"
        if scores.is_meta:
            return ""
        if count := int(scores.isnan()[real].sum()):
            return f"the score of {count} of {int(real.sum())} real tokens is nan, which counts as lowest"
        infinite = shape[-1] == _COUNT and scores[real].isinf().all()
        if infinite or expected is None:
            return "the score of every token is infinite, so that none is better than another" if infinite else ""
        order = positions.argsort(dim=-1, stable=True)
        scores, positions, real = (part.gather(-1, order) for part in (scores, positions, real))
        one, other = (
            rank_keys(tensor, positions, real, self.needs.absolute_noise) >> 32 for tensor in (scores, expected)
        )
        if float((scores - expected)[real].nan_to_num(0.0, 0.0, 0.0).abs().max()) < _NOISE:
            hint = "by rounding alone: if scores are differences, say Needs(absolute_noise=True)"
        steps = int((one - other).abs().max())  # of what the cache tells apart
        return f"other scores{hint and f', {hint}'}" if steps > 1 else ""

    def _attention(self, tokens: Tokens, columns: range, **changed: Any) -> Attention:
        at, keys, positions = torch.tensor(columns, device=tokens["keys"].device), tokens["keys"], tokens["positions"]
        queries, places = tokens["queries"][:, :, at], positions[:, 0].sort(dim=-1).values[:, at]
        attention = Attention(queries, keys, places, positions, Logits(0.4), rotary=changed.get("rotary", self.rotary))
        attention._weights = changed.get("weights")
        return attention

    def _observed(self, tokens: Tokens, piece: int = _COUNT, **changed: Any) -> Statistics:
        """After its queries were shown, so many at once; fewer than all of them from the last to the first."""
        needs, shape = self.needs, (torch.float32, *tokens["positions"].shape)
        wanted = dict.fromkeys(needs.token_statistics, shape) | dict.fromkeys(needs.row_statistics, shape[:2])
        columns = range(shape[-1])[-(needs.window or _COUNT) :] if needs.queries and piece else range(0)
        statistics = {name: tokens["positions"] * 0.0 for name in needs.token_statistics}
        for start in range(0, len(columns), piece or 1):
            some = columns[start : start + piece][:: 1 if piece == _COUNT else -1]
            statistics = self.policy.observe(statistics, self._attention(tokens, some, **changed))
            ends = dict.fromkeys(needs.row_statistics, 2)  # of them only [batch, ...] is known
            got = {name: (part.dtype, *part.shape)[: ends.get(name)] for name, part in statistics.items()}
            if got != wanted:
                raise ValueError(f"observe must return, for all names in Needs, {wanted}, and returns {got}")
        return statistics

    def _context(self, tokens: Tokens, statistics: Statistics, piece: int = _COUNT, **changed: Any) -> ScoreContext:
        changed = {name: value for name, value in changed.items() if name != "weights"}
        keys, values = (changed.pop(name, tokens[name]).clone() for name in ("keys", "values"))
        positions = tokens["positions"].clone()
        seen = positions[:, 0].amax(-1) + 1
        count = QueryCount(seen * bool(piece), seen * 0, seen * 0) if self.needs.queries else None
        settings = {"layer_idx": 1, "budget": 24, "observed": count, "rotary": self.rotary} | changed
        return ScoreContext(keys, values, positions, seen, statistics=statistics, **settings)

    def _score(self, tokens: Tokens, piece: int = _COUNT, **changed: Any) -> Tensor:
        return self.policy.score(self._context(tokens, self._observed(tokens, piece, **changed), piece, **changed))
