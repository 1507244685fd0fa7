"""Running out of memory loses nothing but what does not fit alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from batches import IdTokenizer, all_rows, make_batch, without_costs
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval.errors import RowsFailed
from hf_paged_eviction_eval.models.device import is_out_of_memory
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.runner import run_batch
from hf_paged_eviction_eval.running.variants import batch_keys
from hf_paged_eviction_eval.store.checks import row_key

SETTINGS = TaskSettings(
    policies=("paged_eviction", "recency"), budgets=("20%", "full"), block_size=4, tasks=("passkey",)
)
LENGTHS = (80, 70, 60, 50, 40)
NEW_TOKENS = (3, 5, 7)


@contextmanager
def little_memory(model: Any, fits: Any, error: Exception | None = None) -> Iterator[None]:
    """Forwards for which `fits(rows, tokens, cache)` is false run out of memory."""
    forward = model.forward

    def limited(*args: Any, **kwargs: Any) -> Any:
        rows, tokens = kwargs["input_ids"].shape
        if not fits(rows, tokens, kwargs[CACHE_ARGUMENT]):
            raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(*args, **kwargs)

    model.forward = limited
    try:
        yield
    finally:
        del model.forward


def collect(model: Any, settings: TaskSettings, batch: Any) -> tuple[list[dict[str, Any]], RowsFailed | None]:
    rows: list[dict[str, Any]] = []
    try:
        for new_rows in run_batch(model, IdTokenizer(), settings, batch, frozenset()):
            rows += new_rows
    except RowsFailed as failure:
        return rows, failure
    return rows, None


@pytest.mark.each_value_once
@pytest.mark.parametrize("question", [0, 12])
@pytest.mark.parametrize("agreement", [False, True])
@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_batch_is_halved_until_it_fits(model: Any, question: int, agreement: bool, most: int) -> None:
    settings = SETTINGS.but(question_aware=not question, agreement=agreement)
    batch = make_batch(LENGTHS, question, NEW_TOKENS, length=80)
    expected = without_costs(all_rows(model, settings, batch))
    with little_memory(model, lambda rows, tokens, cache: rows <= most):
        rows, failure = collect(model, settings, batch)
    assert failure is None
    for ours, expected_row in zip(without_costs(rows), expected, strict=True):
        assert ours.pop("agreement") == pytest.approx(expected_row.pop("agreement"), abs=1e-5)
        assert ours == expected_row
    assert max(row["efficiency"]["batch_rows"] for row in rows) <= most


def test_memory_that_ends_in_the_middle_loses_no_row(model: Any) -> None:
    batch = make_batch(LENGTHS, new_tokens=NEW_TOKENS, length=80)
    expected = without_costs(all_rows(model, SETTINGS, batch))
    for step in (1, 2, 7, 12):
        count = 0

        def once(rows: int, tokens: int, cache: Any, step: int = step) -> bool:
            nonlocal count
            count += 1
            return count != step

        with little_memory(model, once):
            rows, failure = collect(model, SETTINGS, batch)
        assert failure is None
        assert without_costs(rows) == expected


def test_what_does_not_fit_alone_is_named_and_the_rest_is_there(model: Any) -> None:
    batch = make_batch(LENGTHS, new_tokens=NEW_TOKENS, length=80)
    expected = without_costs(all_rows(model, SETTINGS, batch))
    too_long = 65  # prompts of 80 and 70 tokens cannot even be read
    with little_memory(model, lambda rows, tokens, cache: tokens < too_long):
        rows, failure = collect(model, SETTINGS, batch)
    assert failure is not None and "2.00 GiB" in failure.reason and "6 rows" in str(failure)
    assert set(failure.keys) == {key for key in batch_keys(SETTINGS, batch) if key.id in "01"}
    assert len(failure.keys) == 6
    assert without_costs(rows) == [row for row in expected if row["id"] not in "01"]


def test_a_small_cache_may_fit_where_the_full_one_does_not(model: Any) -> None:
    def fits(rows: int, tokens: int, cache: Any) -> bool:
        return tokens > 1 or isinstance(cache, PagedEvictionCache) or cache.get_seq_length() < 60

    batch = make_batch(LENGTHS, new_tokens=NEW_TOKENS, length=80)
    with little_memory(model, fits):
        rows, failure = collect(model, SETTINGS, batch)
    assert failure is not None
    assert {(key.policy, key.id) for key in failure.keys} == {("full", row) for row in "012"}
    every = {key for key in batch_keys(SETTINGS, batch)}
    assert {row_key(row) for row in rows} == every - set(failure.keys) and len(rows) == 12
    # Agreement cannot do without the full cache's answer.
    with little_memory(model, fits):
        rows, failure = collect(model, SETTINGS.but(agreement=True), batch)
    assert failure is not None and {key.id for key in failure.keys} == set("012") and len(failure.keys) == 9
    assert {row["id"] for row in rows} == set("34")


def test_other_errors_pass(model: Any) -> None:
    error = RuntimeError("shape mismatch")
    with little_memory(model, lambda *_: False, error), pytest.raises(RuntimeError, match="shape mismatch"):
        all_rows(model, SETTINGS, make_batch((40,)))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("x"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried to allocate"),
        RuntimeError("MPS backend out of memory (MPS allocated: 17.5 GB)"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_words_of_allocators(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("index out of range"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_cpu_allocator_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
