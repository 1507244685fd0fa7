"""Probing the embedded model: what it needs to repeat a context is what questions ask for later."""

import copy
from pathlib import Path
from typing import Any

import pytest

from batches import all_rows, without_costs
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.data.prompting.chat_template import end_of_turn, wrap
from hf_paged_eviction_eval.data.prompting.prompts import Batch, encode
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running import start
from hf_paged_eviction_eval.running.evaluation import evaluate
from hf_paged_eviction_eval.running.generation import Generator
from hf_paged_eviction_eval.running.requests import Request
from hf_paged_eviction_eval.running.start import Reader
from hf_paged_eviction_eval.store.checks import row_key
from hf_paged_eviction_eval.store.results import read_folder
from hf_paged_eviction_eval.tasks import make_samples

MODEL, TOKENIZER = embedded.load(attn_implementation="paged_eviction")
BUDGET = 64


@pytest.mark.parametrize("aware", [False, True])
def test_an_evaluation_probes_by_itself(tmp_path: Path, aware: bool) -> None:
    """Where there is something to evict; then no prefill is shared."""
    settings = TaskSettings(
        policies=("kvzip", "random"),
        budgets=("64", "512"),
        tasks=("passkey",),
        lengths=(256,),
        limit=4,
        batch_size=4,
        question_aware=aware,
        heads="separate",
        attn_implementation=PAGED_EVICTION,
    )
    evaluate(Request(settings, tmp_path), lambda progress: None)
    scores: dict[tuple[str, str], float] = {}
    for row in read_folder(tmp_path, row_key)[0].values():
        key = row["policy"], row["budget"]
        scores[key] = scores.get(key, 0) + row["score"]
        assert row["efficiency"]["shared_prefill"] is (key != ("kvzip", "64"))
    assert scores["kvzip", "64"] >= 3
    assert scores["random", "64"] <= 2
    assert scores["kvzip", "512"] == 4


def test_instruct_models_are_asked_in_the_users_turn() -> None:
    """The template's end of turn stands between the probe and what is repeated, where prompts are wrapped."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "{% for m in messages %}The user: {{ m.content }}{% endfor %}\n\nThe answer: "
    between = end_of_turn(tokenizer)
    wrapped = wrap("What a day.", " Which?", tokenizer)
    assert between and "".join(wrapped).endswith(f" Which?{between}")
    probes: list[Any] = []
    for template in ("always", "never"):
        settings = TaskSettings(
            policies=("kvzip",), budgets=("64",), tasks=("passkey",), chat_template=template, question_aware=False
        )
        prompts = [
            encode(sample, tokenizer, question_aware=False, max_length=None, chat_template=template)
            for sample in make_samples("passkey", tokenizer, 128, 1)
        ]
        reader = Reader(MODEL, settings, Generator(MODEL, tokenizer))
        inputs = reader.inputs(prompts)
        cache = PagedEvictionCache(MODEL.config, budget=256, policy="kvzip")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(start, "probe_context", lambda *arguments, **named: probes.append(named["probe_ids"]))
            reader.probe(inputs, cache, BUDGET)
    texts = [tokenizer.decode(ids) for ids in probes]
    ends = tokenizer.decode(tokenizer.encode(between, add_special_tokens=False))
    assert texts[0].endswith(ends) and not texts[1].endswith(ends)


def test_all_budgets_of_a_policy_share_one_probe() -> None:
    """With the rows, but for times, that each budget has from a probe of its own."""
    settings = TaskSettings(
        policies=("kvzip", "kvzip@d2o"),
        budgets=("12", "24", "25%", "full"),
        block_size=4,
        tasks=("passkey",),
        question_aware=False,
        heads="separate",
        agreement=True,
        teacher_forced=True,
        attn_implementation=PAGED_EVICTION,
    )
    samples = make_samples("passkey", TOKENIZER, 192, 2)
    prompts = [
        encode(sample, TOKENIZER, question_aware=False, max_length=None, chat_template="auto") for sample in samples
    ]
    batch, probes, whole = Batch("passkey", 192, tuple(prompts)), [], start.probe_context
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            start, "probe_context", lambda *arguments, **named: (probes.append(1), whole(*arguments, **named))
        )
        rows = [all_rows(MODEL, settings.but(share_prefill=share), batch, (), TOKENIZER) for share in (True, False)]
        assert len(probes) == 2 + 6
    shared, apart = map(without_costs, rows)
    losses = {row["agreement"]["kl"] for row in shared if row["policy"] != "full"}
    for ours, expected in zip(shared, apart, strict=True):
        assert ours.pop("agreement") == pytest.approx(expected.pop("agreement"), abs=1e-5)
        assert ours == expected
    assert len(losses) > 5 and max(losses) > 1
    assert all(row["efficiency"]["prefill_seconds"] > 0 for row in rows[0])
