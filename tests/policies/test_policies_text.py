"""Policies as text: what `make_policy` reads, what `label` writes, and what it says of mistakes."""

import pickle
import re
from dataclasses import dataclass, is_dataclass
from typing import Any

import pytest
from torch import Tensor

from hf_paged_eviction import EvictionPolicy, ScoreContext, available_policies, make_policy, register_policy
from hf_paged_eviction.policies import available_modifiers, registry
from hf_paged_eviction.policies.attention.h2o import H2O
from hf_paged_eviction.policies.attention.snapkv import SnapKV
from hf_paged_eviction.policies.fitted.calibrated import Calibrated
from hf_paged_eviction.policies.keys.paged_eviction import PagedEviction
from hf_paged_eviction.policies.keys.recency import Recency
from hf_paged_eviction.policies.keys.streaming_llm import StreamingLLM
from hf_paged_eviction.policies.modifiers.adaptive import Adaptive
from hf_paged_eviction.policies.modifiers.caote import Caote
from hf_paged_eviction.policies.modifiers.graphkv import GraphKV
from hf_paged_eviction.policies.modifiers.hybrid import Hybrid
from hf_paged_eviction.policies.modifiers.vase import Vase
from hf_paged_eviction_eval import embedded
from registries import forget_after

WRITTEN: list[tuple[str, EvictionPolicy]] = [
    ("h2o", H2O()),
    ("h2o(normalised=True, recent=0)", H2O(normalised=True, recent=0)),
    ("snapkv(window=16)", SnapKV(window=16)),
    ("snapkv(window=16, pooling=max)", SnapKV(window=16, pooling="max")),
    ("streaming_llm(n_sink=8)", StreamingLLM(n_sink=8)),
    ("caote(h2o)", Caote(H2O())),
    ("graphkv(paged_eviction)", GraphKV(PagedEviction())),
    ("graphkv(snapkv(window=16), sources=0.2)", GraphKV(SnapKV(window=16), sources=0.2)),
    ("hybrid(h2o, recency)", Hybrid(H2O(), Recency())),
    ("hybrid(h2o, recency, weights=(2, 1))", Hybrid(H2O(), Recency(), weights=(2, 1))),
    ("adaptive(h2o, paged_eviction, threshold=0.4)", Adaptive(H2O(), PagedEviction(), threshold=0.4)),
    ("graphkv(hybrid(caote(h2o), recency), neighbours=2)", GraphKV(Hybrid(Caote(H2O()), Recency()), neighbours=2)),
]


@pytest.mark.parametrize(("text", "policy"), WRITTEN, ids=[text for text, _ in WRITTEN])
def test_text_and_object_are_the_same(text: str, policy: EvictionPolicy) -> None:
    assert make_policy(text) == policy
    assert policy.label == str(policy) == text
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(policy) == hash(make_policy(text))


@pytest.mark.parametrize("name", available_policies())
def test_a_name_alone_is_its_own_label(name: str) -> None:
    assert make_policy(name).label == make_policy(f" {name}( ) ").label == name


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("  caote( h2o( normalised = False ) )", "caote(h2o)"),
        ("snapkv(pooling='max')", "snapkv(pooling=max)"),
        ("snapkv(window=32, kernel=5)", "snapkv"),
        ("graphkv(keydiff,sources=.25,)", "graphkv(keydiff, sources=0.25)"),
        ("random(seed=-3)", "random(seed=-3)"),
        ("hybrid(h2o,\n  recency)", "hybrid(h2o, recency)"),
        ("hybrid(h2o, recency, weights=[1, 2])", "hybrid(h2o, recency, weights=(1, 2))"),
    ],
)
def test_ways_of_writing(text: str, label: str) -> None:
    policy = make_policy(text)
    assert policy.label == label
    assert make_policy(label) == policy


#: Each with one parameter that cannot be meant, and is named.
BEYOND = """
    cake(window=1) cake(gamma=-1) snapkv(window=0) snapkv(kernel=4) snapkv(pooling=sum) r_kv(balance=1.1)
    roco(safe=-0.1) scissorhands(percentile=0) lru(top=0) lazy_eviction(threshold=2) lazy_eviction(lag=-1)
    expected_attention(horizon=0) expected_attention(covariance=0) expected_attention(value_norm=1)
    expected_attention(future=0) expected_attention(n_sink=-1) lagkv(lag=0) lagkv(value_weight=-1) lagkv(scope=row)
    compactor(chunk=0) compactor(kernel=2) compactor(blending=-1) graphkv(h2o,sources=1.5)
    graphkv(h2o,neighbours=0) vase(h2o,protected=2) vase(h2o,stochastic=1) vase(h2o,seed=x)
    adaptive(h2o,recency,threshold=7) streaming_llm(n_sink=many) streaming_llm(n_sink=-1)
""".split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h3o(h2o)", r"'h3o'.*'h2o'\?.*attention_mean"),
        ("caote(h3o)", "Unknown policy 'h3o'"),
        ("", "Unknown policy ''"),
        ("caote", r"'caote'.*'caote\(h2o\)'"),
        ("graphkv(sources=0.3)", "does not work alone"),
        ("caote(h2o", r"character 6: '\('"),
        ("caote(h2o, recency)", r"1.*'caote\(h2o\)'"),
        ("caote(keydiff)", "'keydiff'"),
        ("hybrid(h2o)", "two or more policies"),
        ("hybrid(h2o, recency, weights=(1,))", r"weights.*2.*0"),
        ("h2o(recency)", r"5: h2o.*adaptive"),
        ("snapkv(16)", "character 8"),
        ("snapkv(windw=16)", r"'snapkv\(windw=16\)'"),
        ("tova(window=1)", r"'tova\(window=1\)'"),
        ("caote(host=h2o)", "does not work alone"),
        ("snapkv(window=16, window=8)", r"26.*twice"),
        ("snapkv(window=1 + 1)", r"15.*parameter"),
        ("snapkv(window=open('x'))", r"15.*parameter"),
        ("__import__('os').system('true')", r"1.*parentheses"),
        ("snapkv(window=\0)", "null bytes"),
        ("(" * 500, "too many nested"),
        ("caote(" * 500, "1000 characters"),
        ("snapkv(window=abc)", r"1.*'abc'"),
        ("caote(größe(ä=1), 3)", "character 19"),
        ("h2o(normalised=1)", "True or False"),
        ("leverage(ridge=0)", "above 0"),
        ("compactor(ridge=0)", "above 0"),
        ("hybrid(calibrated:nowhere, tova)", "character 18.*profile=FILE"),
        ("hybrid(tova, calibrated(sources=2))", r"14.*sources"),
        ("calibrated(profile=nowhere)", "no parameter profile"),
        ("calibrated:", "profile=FILE"),
        ("keydiff:[[1, 2]]", "keydiff takes no table"),
        ("caote(observed, weights=(1, 2)))", "character 32: unmatched"),
        ("SnapKV", "Did you mean 'snapkv'"),
        *((text, re.findall(r"(\w+)=", text)[-1]) for text in BEYOND),
    ],
)
def test_mistakes_are_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(text)


@pytest.mark.parametrize(
    "make", [Caote, GraphKV, Vase, lambda part: Hybrid(H2O(), part), lambda part: Adaptive(part, H2O())]
)
@pytest.mark.parametrize("wrong", ["h2o", H2O, None])
def test_modifiers_take_objects(make: Any, wrong: Any) -> None:
    with pytest.raises(TypeError, match="policy objects"):
        make(wrong)


def test_modifiers_are_listed_apart() -> None:
    assert available_modifiers() == ("adaptive", "caote", "graphkv", "hybrid", "vase")
    assert not set(available_modifiers()) & set(available_policies())
    for name in available_modifiers():
        example = registry.POLICIES.classes[name].example  # type: ignore[attr-defined]
        assert make_policy(example).label == example


def test_a_policy_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_after(monkeypatch, registry.POLICIES)

    @register_policy("by_name")
    @dataclass(frozen=True)
    class Mine(EvictionPolicy):
        word: str = "a b"
        needed: int = 1

        def score(self, context: ScoreContext) -> Tensor:
            return context.positions.float()

    assert make_policy("graphkv(by_name(needed=2))").label == "graphkv(by_name(needed=2))"
    spaced = make_policy("by_name(word='c d')")
    assert spaced.label == "by_name(word='c d')"
    assert make_policy(spaced.label) == spaced

    class Plain(EvictionPolicy):
        def score(self, context: ScoreContext) -> Tensor:
            return context.positions.float()

    assert not is_dataclass(Plain)
    assert GraphKV(Plain()).label == "graphkv(Plain)"


def profile_of_embedded() -> str:
    return str(embedded.calibration_path())


@pytest.mark.parametrize(
    "around",
    [
        lambda part: part,
        lambda part: Hybrid(part, H2O()),
        lambda part: Hybrid(H2O(), GraphKV(part, sources=0.2), part, weights=(1, 2, 3)),
        lambda part: Adaptive(Hybrid(part, Recency()), part, threshold=0.4),
    ],
)
def test_a_profile_reaches_every_policy_inside(around: Any) -> None:
    profile = profile_of_embedded()
    policy = around(Calibrated(profile))
    assert profile not in policy.label
    parsed = make_policy(policy.label, profile)
    assert parsed == policy and parsed.label == policy.label
    assert [*parsed.profile_digests] == [profile]
    assert make_policy(policy.label) == around(Calibrated()) != policy


def test_without_a_profile_a_policy_says_what_it_needs_and_does_not_score() -> None:
    for text in ("calibrated", "observed(window=8)", "hybrid(observed, h2o)"):
        policy = make_policy(text)
        assert not policy.profile_digests and registry.POLICIES.reads_profile(text)
        assert policy.needs.queries == (text != "calibrated")
        with pytest.raises(ValueError, match="profile=FILE"):
            policy.check_model(None)
    assert not registry.POLICIES.reads_profile("hybrid(h2o, tova)") and not registry.POLICIES.reads_profile("no such")


def test_statistics_of_parts_cannot_clash() -> None:
    both = Hybrid(H2O(), Caote(H2O()), SnapKV(window=4), SnapKV(window=8))
    names = [*both.needs.token_statistics, *both.needs.row_statistics]
    assert len(names) == len(set(names)) == 1 + 1 + 5 + 5
    assert "1.0.attention" in names


@pytest.mark.parametrize(
    ("text", "window", "needs"),
    [
        ("graphkv(keydiff)", None, False),
        ("graphkv(tova)", 1, True),
        ("hybrid(tova, snapkv(window=9), recency)", 9, True),
        ("hybrid(snapkv, h2o)", None, True),
        ("adaptive(recency, paged_eviction, horizon=10)", 40, True),
        ("adaptive(snapkv(window=50), recency, horizon=10)", 50, True),
        ("adaptive(h2o, recency)", None, True),
    ],
)
def test_windows_are_joined(text: str, window: int | None, needs: bool) -> None:
    policy = make_policy(text)
    assert policy.needs.window == window
    assert policy.needs.queries is needs
    assert not policy.needs.token_local


@pytest.mark.parametrize(
    ("text", "supported"),
    [
        ("h2o", True),
        ("leverage", True),
        ("compactor", False),
        ("r_kv", True),
        ("expected_attention", False),
        ("lagkv", False),
        ("caote(h2o)", False),
        ("graphkv(keydiff)", True),
        ("graphkv(paged_eviction)", False),
        ("hybrid(h2o, recency)", True),
        ("hybrid(h2o, key_norm)", False),
        ("adaptive(tova, value_norm)", False),
    ],
)
def test_latent_attention_is_supported_where_all_parts_do(text: str, supported: bool) -> None:
    assert make_policy(text).needs.supports_mla is supported
