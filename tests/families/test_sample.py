"""One family for each kind of layer, and for each reason to refuse one; all of them: `make test-families`."""

import pytest

from families.building import build
from families.listing import families
from families.outcomes import outcome_of
from hf_paged_eviction import verify

BY_NAME = {str(family): family for family in families()}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gemma2", id="soft caps and a window"),
        pytest.param("llama4_text", id="chunked attention"),
        pytest.param("lfm2", id="convolutions"),
        pytest.param("gemma4_text-shared", id="layers that share keys"),
        pytest.param("gemma4_unified", id="blocks that see all of themselves"),
        pytest.param("opt", id="learned positions"),
        pytest.param("mllama-image", id="layers for an image alone"),
        pytest.param("jetmoe", id="heads in another order"),
        pytest.param("codegen", id="attention in code of its own"),
        pytest.param("qwen2_5_vl-image", id="positions in three axes"),
    ],
)
def test_exact(name: str, pytestconfig: pytest.Config) -> None:
    """By the few checks that find most; static and unequal caches of such layers are in tests/contract."""
    report = verify(build(BY_NAME[name]), thorough=pytestconfig.getoption("--all-cases"))
    outcome = outcome_of(name, report)
    assert outcome.word == "exact", str(report)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("falcon-alibi", "ALiBi"),
        ("gpt_neo", "local layers"),
        ("t5-seq2seq", "relative position bias"),
        ("marian-seq2seq", "encoder-decoder"),
        ("blt", "cannot make a DynamicCache"),
        ("rwkv", "state="),
    ],
)
def test_refused(name: str, reason: str) -> None:
    report = verify(build(BY_NAME[name]), thorough=False)
    assert outcome_of(name, report).word == "refused", str(report)
    assert any(reason in check.reason for check in report.of("refused"))


@pytest.mark.parametrize("name", ["deepseek_v32", "ministral"])
def test_nothing_evicts(name: str) -> None:
    report = verify(build(BY_NAME[name]), thorough=False)
    assert outcome_of(name, report).word == "nothing evicts", str(report)
