"""The guide to policies, made of the registry: a policy that is registered appears by itself."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import product
from math import hypot

import measured
import real_tables
from writing import call, docstring, first_paragraph, listed, paper_link, signature, table

from hf_paged_eviction import (
    EvictionPolicy,
    available_allocators,
    available_modifiers,
    available_policies,
    make_policy,
)
from hf_paged_eviction.options.checked import reads_profile
from hf_paged_eviction.policies import Modifier
from hf_paged_eviction_eval import embedded

GROUPS = ("keys-and-values", "attention", "modifiers")
#: Policies that read a profile.
FITTED = ("calibrated", "observed")


def sections(group: str) -> str:
    """A section for each policy of a group, "keys-and-values", "attention" or "modifiers", that beats `random`."""
    return "\n\n".join(_section(name, policy) for name, policy in members(group) if beats_random(name))


def calibrated(_: str) -> str:
    """A section for each policy that reads a profile; the results are those of the embedded model's."""
    return "\n\n".join(_section(name, _fitted(name)) for name in FITTED)


def _fitted(name: str) -> EvictionPolicy:
    return make_policy(name, str(embedded.calibration_path()))


def counts(_: str) -> str:
    """How many there are."""
    numbers = (len(available_policies()), len(available_modifiers()), len(available_allocators()))
    return "{} policies, {} modifiers and {} allocators.".format(*numbers)


def overview(_: str) -> str:
    """A line for each policy that beats `random` somewhere, the best first."""
    rows = []
    for name, policy in _all():
        if beats_random(name):
            scored = "once" if policy.needs.token_local else "at each decision"
            paper = paper_link(policy.paper, "")
            rows.append([f"[`{name}`](policies.md#{name})", _reads(policy), scored, paper, *_scores(name)])
    ranked = sorted(rows, key=lambda row: -float(row[4] or "-inf"))
    return table(("policy", "decides by", "scored", "paper", "unknown", "known"), ranked, numbers_from=4)


def others(_: str) -> str:
    """A line for each other policy, the best first; those that read a profile have sections."""
    rows = []
    for name, policy in _all():
        if not beats_random(name) and name not in FITTED:
            text = policy.label if isinstance(policy, Modifier) else call(type(policy), name)
            paper = paper_link(policy.paper, "")
            rows.append([f"`{text}`", first_paragraph(type(policy)), _reads(policy), paper, *_scores(name)])
    ranked = sorted(rows, key=lambda row: -float(row[4] or "-inf"))
    return table(("policy", "what it does", "decides by", "paper", "unknown", "known"), ranked, numbers_from=4)


def _all() -> list[tuple[str, EvictionPolicy]]:
    return [entry for group in GROUPS for entry in members(group)] + [(name, _fitted(name)) for name in FITTED]


def _scores(name: str) -> list[str]:
    """Of questions that are not known and known, at an eighth of the tokens."""
    values = [measured.score(name, question_known, "12.5%") for question_known in (False, True)]
    return [f"{value[0]:.0f}" if value else "" for value in values]


def beats_random(name: str) -> bool:
    """Whether a policy, or a modifier with some policy, was better than `random` by more than twice the error: on the
    embedded model at any budget, or in needles or text of a real model."""
    names = [one for one in measured.measured_names() if one == name or one.startswith(f"{name}(")]
    for question_known, budget, one in product((False, True), measured.BUDGETS, names):
        own, other = (measured.score(policy, question_known, budget) for policy in (one, "random"))
        if own and other and own[0] - other[0] > 2 * hypot(own[1], other[1]):
            return True
    return any(one == name or one.startswith(f"{name}(") for one in real_tables.better_than_random())


def members(group: str) -> list[tuple[str, EvictionPolicy]]:
    """Name and object (for a modifier: that of its example) of each policy of a group."""
    if group == "modifiers":
        return [(name, _example(name)) for name in available_modifiers()]
    policies = ((name, make_policy(name)) for name in available_policies() if not reads_profile(name))
    return [(name, policy) for name, policy in policies if policy.needs.queries == (group == "attention")]


def _example(name: str) -> EvictionPolicy:
    return make_policy(_class_of_modifier(name).example)


def _class_of_modifier(name: str) -> type[Modifier]:
    modifiers = {cls.name: cls for cls in _subclasses(Modifier)}
    return modifiers[name]


def _subclasses(cls: type[Modifier]) -> list[type[Modifier]]:
    return [subclass for direct in cls.__subclasses__() for subclass in (direct, *_subclasses(direct))]


def _section(name: str, policy: EvictionPolicy) -> str:
    cls = type(policy)
    parts = [f"### `{name}`", docstring(cls, without=("Raises",)), signature(cls, name), _facts(name, policy)]
    return "\n\n".join(part for part in parts if part)


def _facts(name: str, policy: EvictionPolicy) -> str:
    """A paragraph; what holds for all policies of a group, or stands in the overview, is not said again."""
    needs = policy.needs
    facts = [_schedule(policy), _memory(policy)]
    if isinstance(policy, Modifier):
        facts.insert(0, f"Example: `policy={policy.label!r}`")
    if not needs.supports_mla:
        facts.append("MLA is refused")
    if needs.rotary:
        facts.append("Rotary embedding is removed from the keys")
    if _can_be_probed(policy):
        facts.append("Works with `compress_by_probe`")
    if cost := measured.update_time(name):
        facts.append(f"`update` takes {cost:.0f} µs")
    return ". ".join(fact for fact in facts if fact) + "."


def _reads(policy: EvictionPolicy) -> str:
    """What the code of `score` and `observe` looks at."""
    cls = type(policy)
    scored = _attributes_of("context", cls)
    inputs = [name for name in ("keys", "values") if {name, f"unrotated_{name}"} & scored]
    if isinstance(policy, Modifier):
        return ", ".join(["the policies inside", *inputs])
    if policy.needs.queries:
        shown = _attributes_of("attention", cls)
        weighs = bool(shown & {"weights", "largest_weights"})
        inputs.insert(0, "queries" if {"queries", "unrotated_queries"} & shown and not weighs else "attention")
    return ", ".join(inputs) or "positions"


def _attributes_of(argument: str, cls: type) -> set[str]:
    """What a policy's classes ask of an argument of that name, as far as their code says it."""
    attributes: set[str] = set()
    for base in cls.__mro__[: cls.__mro__.index(EvictionPolicy)]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # made in an interactive session
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == argument:
                attributes.add(node.attr)
    return attributes


def _schedule(policy: EvictionPolicy) -> str:
    needs = policy.needs
    if needs.token_local:
        return ""
    often = f"once every {needs.decision_interval} decoded tokens" if needs.decision_interval > 1 else ""
    if not needs.queries:
        return often.capitalize()
    window = {None: "all queries", 1: "the last query"}.get(needs.window, f"the last {needs.window} queries")
    decode = "and those of each full block" if needs.observes_decode else "and none while decoding"
    return f"Observes {window} of a prompt or chunk, {decode}" + (f"; scores {often}" if often else "")


def _memory(policy: EvictionPolicy) -> str:
    tokens, rows = policy.needs.token_statistics, policy.needs.row_statistics
    parts = []
    if tokens:
        parts.append(f"{len(tokens)} float32 per held token and KV head")
    if rows:
        parts.append(f"{len(rows)} tensors per row ({', '.join(f'`{name}`' for name in rows)})")
    return f"Memory: {listed(parts)}" if parts else ""


def _can_be_probed(policy: EvictionPolicy) -> bool:
    needs = policy.needs
    return bool(needs.token_statistics) and not needs.row_statistics and needs.window is None
