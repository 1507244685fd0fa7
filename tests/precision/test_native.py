"""The function in C says what attention to the decoded tokens says, and `missing` says why there is none."""

import functools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import modes
from closeness import assert_close
from coded_cases import EMPTY, Case
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction.cpu import library
from hf_paged_eviction.precision import few_bits, fused, native

compiled = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@compiled
@pytest.mark.parametrize("seed", [seed for seed in range(32) if seed % 8 not in (4, 5)])
def test_reading_is_decoding(seed: int) -> None:
    """Drawn shapes, bits, masks, lengths and types; the parts of the slots may be read by several threads."""
    case = Case(seed, "cpu")
    heads = case.heads * case.group
    query = torch.randn(case.rows, heads, 1, case.key_dim).to(case.dtype)
    sinks = torch.randn(heads) if case.draw.random() < 0.3 else None
    if sinks is not None and case.draw.random() < 0.5:
        sinks = scattered(sinks)
    logits = Logits(case.key_dim**-0.5, case.draw.choice([None, None, 5.0]), sinks)
    mask = case.mask()
    expected, held = case.expected(query, mask, logits), case.held()
    assert fused.obstacle(held, query) is None
    output = fused.read(held, query, mask, logits)
    assert output.dtype == case.dtype
    share = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[case.dtype]
    assert_close(output.float().transpose(1, 2), expected, case, share=share)


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with others in between, as a column of a larger tensor has them."""
    wide = torch.full((*tensor.shape, 3), 7).to(tensor.dtype)
    wide[..., 1] = tensor
    return wide[..., 1]


@compiled
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 6, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_are_not_contiguous(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the function gets an address of."""
    case = Case(seed, "cpu", dtype=dtype)
    heads = case.heads * case.group
    query, sinks, mask = torch.randn(case.rows, heads, 1, case.key_dim).to(dtype), torch.randn(heads), case.mask()
    expected, launch, given = fused.read(case.held(), query, mask, Logits(0.125, None, sinks)), native.launch, []

    def scatter(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            given.append(argument)
            return scattered(argument)
        return [scatter(part) for part in argument] if isinstance(argument, list) else argument

    monkeypatch.setattr(native, "launch", lambda *arguments: launch(*map(scatter, arguments)))
    assert torch.equal(fused.read(case.held(), query, mask, Logits(0.125, None, scattered(sinks))), expected)
    assert len(given) >= 14


@compiled
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 6, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prepared_call_reads_what_is_there_now(seed: int, dtype: torch.dtype) -> None:
    """Queries, codes, tokens that are not rounded, means and sizes have changed; another scale is prepared anew."""
    case = Case(seed, "cpu", dtype=dtype)
    case.columns["key_levels"].nan_to_num_(), case.columns["value_levels"].nan_to_num_()
    reader = fused.CodesReader(case.held())
    for scaling in (0.125, 0.125, 0.25, 0.125):
        query, logits = torch.randn(case.rows, case.heads * case.group, 1, case.key_dim).to(dtype), Logits(scaling)
        output = reader(query, None, logits)
        assert reader._prepared is not None
        assert torch.equal(output, fused.read(reader._held, query, None, logits))
        for name in ("key_codes", "value_codes"):
            case.columns[name].copy_(case.columns[name].flip(-1))
        exact = reader._held.exact
        exact.keys.mul_(0.5), exact.values.mul_(-1), exact.means.mul_(0.5), exact.sizes.mul_(1.5)


@compiled
def test_tensors_that_cannot_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case, launch = Case(0, "cpu", ragged=True), native.launch
    query = torch.zeros(case.rows, case.heads * case.group, 1, case.key_dim)
    with pytest.raises(ValueError, match="one sink for each"):
        fused.read(case.held(), query, None, Logits(0.125, None, torch.zeros(1)))

    def with_short_bounds(*arguments: Any) -> Any:
        return launch(*arguments[:5], [bound.int() for bound in arguments[5]], *arguments[6:])

    monkeypatch.setattr(native, "launch", with_short_bounds)
    with pytest.raises(TypeError, match=r"starts.*int32"):
        fused.read(case.held(), query, None, Logits(0.125))


@compiled
def test_many_tokens_that_are_not_rounded() -> None:
    """Three million of them, as blocks of such a size have, need more than there is on a stack."""
    chosen = {"rows": 1, "heads": 1, "group": 1, "key_dim": 16, "dim": 16, "ragged": False}
    case = Case(0, "cpu", **chosen, dtype=torch.float32, kind="none")
    query, mask, logits, more = torch.randn(1, 1, 1, 16), case.mask(), Logits(0.25), 3_000_000
    expected, exact, pad = case.expected(query, mask, logits), case.exact, torch.nn.functional.pad
    slots = pad(exact.slots, (0, more), value=EMPTY)
    keys, values = (pad(states, (0, 0, 0, more), value=float("nan")) for states in (exact.keys, exact.values))
    case.exact = replace(exact, newest=exact.newest + more, slots=slots, keys=keys, values=values)
    assert_close(fused.read(case.held(), query, mask, logits).transpose(1, 2), expected, case, share=1e-5)


@compiled
@pytest.mark.parametrize("ragged", [False, True])
def test_many_parts_are_joined_whoever_reads_them(ragged: bool) -> None:
    lengths = [1500, 700, 0, 40] if ragged else [1100] * 4
    case = Case(0, "cpu", rows=2, heads=2, ragged=ragged, lengths=lengths, dtype=torch.float32)
    query, mask, logits = torch.randn(2, 2 * case.group, 1, case.key_dim), case.mask(), Logits(0.125)
    outputs, threads = [], torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            outputs.append(fused.read(case.held(), query, mask, logits))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*outputs)
    assert_close(outputs[0].transpose(1, 2), case.expected(query, mask, logits), case, share=1e-5)


@compiled
@pytest.mark.parametrize("bits", [(4, None), (None, 2)])
def test_what_is_not_rounded_is_read_by_torch(bits: tuple[int | None, int | None]) -> None:
    case = Case(0, "cpu", bits=bits)
    query = torch.zeros(case.rows, case.heads * case.group, 1, case.key_dim)
    assert fused.obstacle(case.held(), query) == "keys or values are not in few bits"
    with pytest.raises(ValueError, match="reads keys and values in few bits"):
        fused.read(case.held(), query, None, Logits(0.125))


#: A prompt, a chunk that overflows smaller budgets, single tokens, a second turn, more tokens.
PLAN = [(0, 22), (22, 29), *((at, at + 1) for at in range(29, 40)), (40, 45), *((at, at + 1) for at in range(45, 52))]


@compiled
@pytest.mark.parametrize("budget", [24, 68])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"bits": 3, "policy": "h2o"}),
        ("gpt_oss", {"bits": (4, 2), "policy": "snapkv", "heads": "separate", "allocator": "ada_kv"}),
        ("gemma3", {"bits": 8, "policy": "keydiff", "heads": "separate"}),
    ],
)
def test_a_model_says_the_same(
    family: str, settings: dict[str, Any], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows, while the storage fills up (68) and when it is full, the scores of observers included."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model = models.shared(family, "paged_eviction")
    ids, mask = models.left_pad(models.prompts([60, 41], seed=1))
    logits, reads, call = [], [], native.Prepared.__call__
    monkeypatch.setattr(native.Prepared, "__call__", lambda *arguments: reads.append(1) or call(*arguments))
    for cold in (False, True):
        if cold:
            monkeypatch.setattr(fused, "_missing", lambda device: "not now")
        cache = PagedEvictionCache(model.config, budget=budget, block_size=4, **settings)
        logits.append(torch.stack([modes.forward(model, cache, ids, mask, *part)[:, -1] for part in PLAN]))
        assert len(reads) > 0
    assert_close(*logits)


@compiled
@pytest.mark.parametrize("seed", [0, 3, 6, 9])
def test_as_an_operator_it_is_what_compilers_expect(seed: int) -> None:
    """Schema, shapes and strides of the operator, with drawn shapes, masks and lengths."""
    case, given = Case(seed, "cpu"), []
    query = torch.randn(case.rows, case.heads * case.group, 1, case.key_dim).to(case.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "launch", lambda *arguments: given.extend(arguments[:14]) or query)
        fused.read(case.held(), query, case.mask(), Logits(0.125, 5.0, torch.randn(query.shape[1])))
    fused.register()
    checked = torch.library.opcheck(
        torch.ops.hf_paged_eviction.attend_to_codes.default, tuple(given), test_utils=("test_schema", "test_faketensor")
    )
    assert set(checked.values()) == {"SUCCESS"}


#: Its rows are padded, and its slots fill up in compiled steps or are full before.
_COMPILED = {
    "llama": {"bits": 4, "policy": "keydiff", "heads": "separate"},
    "gpt_oss": {"bits": (4, 2), "policy": "h2o"},
    "gemma2": {"bits": 8, "policy": "snapkv", "allocator": Heads.of([[0.5, 1.5]] * 2)},
}


@compiled
@pytest.mark.parametrize("budget", [24, 44])
@pytest.mark.parametrize("family", _COMPILED)
def test_compiled_steps_call_it(family: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer by one operator, in a graph without a break: what eager steps say by operators of torch."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    changes = {} if family == "llama" else {"layer_types": ["full_attention"] * 2}
    model = models.build(family, "paged_eviction", **changes)
    ids, mask = models.left_pad(models.prompts([36, 25], seed=1))
    settings = {"budget": budget, "block_size": 4, "attention_mask": mask, **_COMPILED[family]}
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        calls.append(sum("attend_to_codes" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    answer = functools.partial(modes.stepwise, model, ids, mask, steps=14)
    ours = answer(PagedEvictionCache(model.config, static=True, **settings), backend=backend)
    monkeypatch.setattr(fused, "_missing", lambda device: "not now")
    assert_close(ours, answer(PagedEvictionCache(model.config, **settings)))
    assert 0 < len(calls) <= 2 and set(calls) == {model.config.num_hidden_layers}  # with a mask, and without


@pytest.fixture
def _another_compiler() -> Iterator[None]:
    library._library.cache_clear(), fused._missing_on.cache_clear()
    yield
    library._library.cache_clear(), fused._missing_on.cache_clear()


@pytest.mark.usefixtures("_another_compiler")
def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert "there is no C compiler" in str(native.missing())


@pytest.mark.usefixtures("_another_compiler")
def test_a_compiler_that_refuses_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "sh -c 'echo no room left >&2; exit 1'")
    with pytest.warns(UserWarning, match="operators of torch do it, in more time: no room left"):
        assert "no room left" in str(native.missing())
    assert native.missing() is not None  # and no second warning


#: What a compiler does, as a script of which `$2` is where the library should be, and what is said of it.
_FAILING = {
    "writes no text": ("printf '\\377\\376 no room' >&2; exit 1", "no room"),
    "makes another library": (f"echo 'int other;' | {shutil.which('cc')} -shared -fPIC -x c -o $2 -", "scratch_size"),
    "makes a library that is none": ("echo none > $2", "attend.so"),
    "makes nothing": ("true", "attend.so"),
    "is ended": ("kill -9 $$", "in more time"),
}


def _a_compiler(name: str, folder: Path) -> str:
    """The value of `CC`."""
    if name == "has a name that cannot be read":
        return "cc 'none"
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n{_FAILING[name][0]}\n')
    path.chmod(0o700)
    return str(path)


@pytest.mark.usefixtures("_another_compiler")
@pytest.mark.parametrize("name", ["has a name that cannot be read", *_FAILING])
def test_whatever_goes_wrong_torch_reads_the_codes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    if name == "makes another library" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setattr(few_bits, "FEW", 0)
    model = models.shared("llama", "paged_eviction")
    ids = models.prompts([40], seed=1)[0][None]

    def answer() -> list[int]:
        cache = PagedEvictionCache(model.config, budget=24, block_size=4, policy="keydiff", bits=4)
        return modes.generate(model, cache, ids, torch.ones_like(ids), 6)[0].tolist()

    with monkeypatch.context() as patch:
        patch.setattr(fused, "_missing", lambda device: "not now")
        expected = answer()
    monkeypatch.setenv("CC", _a_compiler(name, tmp_path))
    assert answer() == expected
    (warning,) = [str(one.message) for one in recwarn if "operators of torch do it" in str(one.message)]
    assert _FAILING.get(name, ("", "No closing quotation"))[1] in warning
