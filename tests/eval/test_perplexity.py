"""Perplexity against one plain forward, and by position."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GPT2Config, LlamaConfig

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval.errors import RowsFailed, UserError
from hf_paged_eviction_eval.options.settings import TextSettings
from hf_paged_eviction_eval.progress import LISTENER, Reading
from hf_paged_eviction_eval.report.frame import text_frame
from hf_paged_eviction_eval.report.means import curves
from hf_paged_eviction_eval.running.perplexity import losses_of, make_text_jobs, run_texts, stream_logits, text_variants
from hf_paged_eviction_eval.running.plans import long_texts
from hf_paged_eviction_eval.running.variants import check_caches, variants


@torch.no_grad()
def plain_losses(model: Any, tokens: list[int]) -> list[float]:
    """One token after the other, each from a forward over everything before it."""
    losses = []
    for position in range(1, len(tokens)):
        logits = model(torch.tensor([tokens[:position]]), use_cache=False).logits[0, -1]
        losses.append(-float(logits.log_softmax(-1)[tokens[position]]))
    return losses


def token_losses(model: Any, ids: torch.Tensor, cache: DynamicCache, chunk: int) -> torch.Tensor:
    """Negative log-likelihood of every token but the first, `[rows, tokens - 1]`."""
    return torch.cat(
        [losses_of(logits, tokens_fed) for _, logits, tokens_fed in stream_logits(model, ids, cache, chunk)], dim=1
    )


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_losses_equal_a_plain_loop(model: Any, chunk: int) -> None:
    tokens = torch.randint(2, 600, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = torch.tensor(plain_losses(model, tokens))
    for cache in (DynamicCache(config=model.config), PagedEvictionCache(model.config, budget=48, block_size=4)):
        losses = token_losses(model, torch.tensor([tokens]), cache, chunk)
        torch.testing.assert_close(losses[0], expected, atol=1e-5, rtol=1e-5)


def text_settings(files: tuple[str, ...], **changes: Any) -> TextSettings:
    defaults: dict[str, Any] = {
        "policies": ("paged_eviction", "recency"),
        "budgets": ("25%", "full"),
        "block_size": 4,
        "length": 160,
        "chunk": 16,
        "limit": 4,
    }
    return TextSettings(files=files, **defaults | changes)


def all_rows(model: Any, tokenizer: Any, settings: TextSettings) -> list[dict[str, Any]]:
    jobs = make_text_jobs(settings, tokenizer)
    return [row for job in jobs for row in rows_of(run_texts(model, tokenizer, settings, job, set()))]


def rows_of(events: Iterable[Any]) -> list[dict[str, Any]]:
    return [row for event in events if isinstance(event, list) for row in event]


def test_a_text_does_not_depend_on_its_batch(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    source = Path(torch.__file__).read_text("utf-8")
    records = [{"context": source[:900]}, {"text": source[2000:2300]}, {"text": "short"}]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n", "utf-8")
    together = all_rows(model, tokenizer, text_settings((str(path),)))
    alone = all_rows(model, tokenizer, text_settings((str(path),), batch_size=1))
    assert {row["text"] for row in together} == {f"{path}:1", f"{path}:2"}
    by_key = {(row["text"], row["policy"], row["budget"]): row for row in alone}
    for row in together:
        other = by_key[row["text"], row["policy"], row["budget"]]
        assert row["count"] == other["count"] and sum(row["count"]) == row["tokens"] - 1
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-4)
    full = [curve for curve in curves(text_frame(together)).itertuples() if curve.policy == "full"]
    small = [curve for curve in curves(text_frame(together)).itertuples() if curve.policy != "full"]
    assert len(full) == 1 and len(small) == 2
    assert all(curve.perplexity.value != full[0].perplexity.value and curve.tokens == 40 for curve in small)


def test_texts_that_do_not_fit_together_run_apart(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    source = Path(torch.__file__).read_text("utf-8")
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": source[at : at + 900]}) + "\n" for at in range(0, 3600, 900)), "utf-8")
    settings = text_settings((str(path),), budgets=("full",), policies=())
    (job,) = make_text_jobs(settings, tokenizer)
    expected = rows_of(run_texts(model, tokenizer, settings, job, set()))
    forward = model.forward
    model.forward = lambda **kwargs: forward(**kwargs) if len(kwargs["input_ids"]) < 2 else out_of_memory()
    try:
        rows = rows_of(run_texts(model, tokenizer, settings, job, {job.keys()[1]}))
        model.forward = lambda **kwargs: out_of_memory()
        with pytest.raises(RowsFailed, match="no room") as caught:
            rows_of(run_texts(model, tokenizer, settings, job, {job.keys()[1]}))
    finally:
        del model.forward
    assert [row["text"] for row in rows] == [row["text"] for index, row in enumerate(expected) if index != 1]
    for row in rows:
        (other,) = [row_ for row_ in expected if row_["text"] == row["text"]]
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-4)
    assert caught.value.keys == (job.keys()[0], *job.keys()[2:])
    assert list(run_texts(model, tokenizer, settings, job, set(job.keys()))) == []


def test_divergence_from_the_full_cache_along_a_text(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    source = Path(torch.__file__).read_text("utf-8")
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in (source[:900], source[900:1400])), "utf-8")
    settings = text_settings((str(path),), agreement=True)
    rows = all_rows(model, tokenizer, settings)
    assert all(sum(row["kl"]) == 0 for row in rows if row["policy"] == "full")
    (row,) = [row for row in rows if row["policy"] == "recency" and row["text"] == f"{path}:1"]
    ids = torch.tensor([make_text_jobs(settings, tokenizer)[0].tokens[0]])
    with torch.no_grad():
        full = model(ids).logits[0, :-1].log_softmax(-1)
        cache = PagedEvictionCache(model.config, budget=row["budget_tokens"], block_size=4, policy="recency")
        parts = [model(ids[:, at : at + 16], **{CACHE_ARGUMENT: cache}).logits[0] for at in range(0, ids.shape[1], 16)]
    ours = torch.cat(parts)[:-1].log_softmax(-1)
    expected = (full.exp() * (full - ours)).sum(-1)
    assert sum(row["kl"]) == pytest.approx(float(expected.sum()), abs=1e-4) and expected.sum() > 1
    # Whatever runs together, and whatever is there already.
    together = all_rows(model, tokenizer, settings.but(batch_size=2))
    key = lambda row: (row["text"], row["policy"], row["budget"])  # noqa: E731
    for ours, other_row in zip(sorted(rows, key=key), sorted(together, key=key), strict=True):
        assert ours["kl"] == pytest.approx(other_row["kl"], abs=1e-4)
    job = make_text_jobs(settings, tokenizer)[0]
    (again,) = rows_of(run_texts(model, tokenizer, settings, job, set(job.keys()) - {tuple(key(row))}))
    assert again["kl"] == pytest.approx(row["kl"], abs=1e-6)


def out_of_memory() -> Any:
    raise torch.OutOfMemoryError("no room")


def test_policies_run_at_both_places_in_one_run(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Names, and that the caches really differ: each row is that of a cache of its own."""
    path = tmp_path / "a.txt"
    path.write_text(Path(torch.__file__).read_text("utf-8")[:900], "utf-8")
    settings = text_settings((str(path),), policies=("keydiff",), positions="text,cache")
    rows = {row["policy"]: row for row in all_rows(model, tokenizer, settings)}
    assert list(rows) == ["full", "keydiff", "keydiff, positions=cache"]
    ids = torch.tensor([make_text_jobs(settings, tokenizer)[0].tokens[0]])
    for name, positions in (("keydiff", "text"), ("keydiff, positions=cache", "cache")):
        cache = PagedEvictionCache(model.config, 40, 4, "keydiff", positions=positions)
        expected = token_losses(model, ids, cache, 16).sum()
        assert sum(rows[name]["loss"]) == pytest.approx(float(expected), abs=1e-3)
    assert abs(sum(rows["keydiff"]["loss"]) - sum(rows["keydiff, positions=cache"]["loss"])) > 1e-2
    alone = all_rows(model, tokenizer, text_settings((str(path),), policies=("keydiff",), positions="cache"))
    assert [row for row in alone if row["policy"] != "full"] == [rows["keydiff, positions=cache"]]


def test_a_stream_gives_the_model_nothing_that_grows(model: Any) -> None:
    """Whatever came before: tokens of a chunk, places of a chunk, a cache of its budget, and no mask of the text."""
    seen: list[int] = []
    forward = model.forward

    def watched(**arguments: Any) -> Any:
        seen.extend(value.numel() for value in arguments.values() if isinstance(value, torch.Tensor))
        seen.append(max(layer.keys.shape[-2] for layer in cache.layers) if cache.get_seq_length() else 0)
        return forward(**arguments)

    cache = PagedEvictionCache(model.config, budget=32, block_size=4, positions="cache")
    ids = torch.randint(2, 600, (2, 400), generator=torch.Generator().manual_seed(0))
    model.forward = watched
    try:
        parts = [(start, tokens_fed.shape) for start, _, tokens_fed in stream_logits(model, ids, cache, 16)]
    finally:
        del model.forward
    assert max(seen) <= 32 + 16
    assert parts[0] == (1, (2, 16)) and parts[-1] == (385, (2, 15)) and cache.get_seq_length() == 399


def test_a_long_text_says_how_far_it_is(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_paged_eviction_eval.running.perplexity._TELL_SECONDS", -1)
    path = tmp_path / "a.txt"
    path.write_text(Path(torch.__file__).read_text("utf-8")[:900], "utf-8")
    settings = text_settings((str(path),), policies=("recency",), budgets=("48",))
    (job,) = make_text_jobs(settings, tokenizer)
    readings: list[Reading] = []
    token = LISTENER.set(readings.append)
    (rows,) = run_texts(model, tokenizer, settings, job, set())
    LISTENER.reset(token)
    assert [reading.done for reading in readings] == [*range(17, 160, 16), 160] and len(rows) == 1
    assert {(reading.total, reading.label, reading.keys) for reading in readings} == {
        (160, "recency 48", tuple(job.keys()))
    }


def test_a_text_may_be_longer_than_the_window() -> None:
    settings = text_settings(())
    assert long_texts(settings, 2048, 2048) == [] == long_texts(settings, 9000, None)
    assert "--positions text,cache" in long_texts(settings, 9000, 2048)[0]
    assert "exceeds the budget" in long_texts(settings.but(positions="text,cache"), 9000, 2048)[0]


def test_models_whose_tokens_cannot_be_moved_are_refused_before_a_run() -> None:
    settings = text_settings((), positions="text,cache", policies=("recency",), budgets=("full", "32"))
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8)
    with pytest.raises(UserError, match='32: positions="cache"'):
        check_caches(config, settings, text_variants(settings))
    for fine, model_config in ((settings.but(positions="text"), config), (settings, LlamaConfig())):
        check_caches(model_config, fine, text_variants(fine))


@pytest.mark.parametrize(
    ("policy", "budget", "reason"),
    [("snapkv@cake", "2MiB", "bytes become tokens"), ("keydiff@ada_kv", "2MiB", "bytes become tokens")],
)
def test_caches_that_cannot_be_are_refused_before_a_run(policy: str, budget: str, reason: str) -> None:
    settings = text_settings((), policies=("recency", policy), budgets=("full", budget)).but(
        attn_implementation="paged_eviction"
    )
    with pytest.raises(UserError, match=f"{policy} at .*{reason}"):
        check_caches(LlamaConfig(), settings, variants(settings))
