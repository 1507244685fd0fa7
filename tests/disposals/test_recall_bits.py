"""Recall with `bits=`: blocks travel as codes, which are made once, from what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_recall import RecallRecorder
from torch import Tensor

import models
import modes
import rows
from evicting import binding
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.disposals import Disposal, Outlet
from reference import assert_evicted
from rounded import RoundedRecorder, assert_rounded

OURS = "paged_eviction"
BLOCK = 4
ONE: dict[str, Any] = {"budget": 24, "block_size": BLOCK, "policy": "keydiff", "disposal": "recall(blocks=2)"}


class RoundedRecall(RecallRecorder, RoundedRecorder):
    """As `RecallRecorder`, of rounded tokens. Also sees that only what came is ever encoded, and that the codes of a
    token are the same bits wherever it is: in the slots, in host memory, and when it has come back."""

    def __init__(self, model: Any, cache: Any, bits: Any) -> None:
        pair = bits if isinstance(bits, tuple) else (bits, bits)
        RoundedRecorder.__init__(self, model, cache, pair, latent=False)
        self.blocks, self.summary, self.checked = cache.disposal.blocks, cache.disposal.summary, 0
        self.codes: dict[Any, bytes] = {}
        self.again = 0  # how often codes were compared with those of before

    def __enter__(self) -> RoundedRecall:
        super().__enter__()
        for index, layer in self.cache.paged_layers:
            self._replace(layer.store, "_encode", self._only_what_came(index, layer.store._encode))
        return self

    def _only_what_came(self, index: int, encode: Any) -> Any:
        def watched(keys: Tensor, values: Tensor, positions: Tensor) -> Any:
            for states, came in zip((keys, values), self.came(index), strict=True):
                known = (states[:, :, :, None] == came[:, :, None]).all(-1).any(-1)
                assert (known | (states == 0).all(-1)).all(), "something is encoded that is not what came"
            return encode(keys, values, positions)

        return watched

    def keys_of(self, index: int, columns: list[Any]) -> Tensor:
        at = [at for at, column in enumerate(self.columns) if any(column is one for one in columns)]
        return self.round(index)[0][:, :, at]

    def _check_slots(self, layer: Any, index: int) -> None:
        self._compare_codes(layer, index)  # before those of pads are spoilt
        super()._check_slots(layer, index)

    def _compare_codes(self, layer: Any, index: int) -> None:
        keys, own = self.came(index)[0], self._column_of()
        coded = layer.store.exact.coded.tolist()
        for row, heads in enumerate(layer.positions.tolist()):
            stored = 0 if layer.outlet.archive is None else int(layer.outlet.archive.stored[row])
            for head, slots in enumerate(heads):
                (mean,), tokens = _bytes(layer.store.exact.means[row, head][None]), _bytes(keys[row, head])
                places = list(zip(_bytes(*(part[row, head] for part in layer.store.form)), slots, strict=False))
                if stored:
                    host = layer.outlet.archive.host
                    kept = host.parts(host.states[row, head, :stored].flatten(0, 1))
                    places += zip(_bytes(*kept), range(stored * BLOCK), strict=True)
                for form, position in places:
                    if 0 <= position < coded[row]:
                        self._same((index, position, tokens[own[row][position]] + mean), form)

    def _same(self, token: tuple[int, int, bytes], found: bytes) -> None:
        known = self.codes.setdefault(token, found)
        assert found == known, f"layer {token[0]}, position {token[1]}: other codes than before"
        self.again += 1


def _bytes(*parts: Tensor) -> list[bytes]:
    """Of each first index, those of all parts."""
    flat = [part.reshape(len(part), -1).contiguous().view(torch.uint8) for part in parts]
    return [row.tobytes() for row in torch.cat(flat, dim=1).numpy()]


def played(mode: str, padded: bool, bits: Any, **settings: Any) -> RoundedRecall:
    model = models.build("llama", OURS).double()
    cache = binding(model, mode, bits=bits, **{**ONE, **settings})
    with RoundedRecall(model, cache, bits) as recorder:
        modes.run(model, cache, mode, *modes.batch(mode, padded))
    assert_rounded(model, recorder)
    assert cache.stats().evicted_tokens > 0
    assert recorder.again > 0
    return recorder


CASES: dict[str, tuple[str, bool, Any, dict[str, Any]]] = {
    "steps": ("direct", True, 4, {}),
    "beams": ("beam", True, (4, 2), {"heads": "separate"}),
    "chunks": ("chunked_prefill", True, 3, {"disposal": "recall(blocks=2, summary=vector, replacement=lfu)"}),
    "turns": ("three_turns", True, 2, {"disposal": "recall(blocks=1, prefetch=2)", "heads": "separate"}),
    "all": ("two_turns", True, (None, 4), {"budget": 16, "disposal": "recall(blocks=all, round=1)"}),
    "taken back": ("assisted", False, 4, {"heads": "separate"}),
    "proposals": ("prompt_lookup", True, (8, None), {"disposal": "recall(blocks=all, round=3)"}),
    "recording": ("direct", False, 2, {"record_past": True, "disposal": "recall(blocks=2, replacement=mark_predict)"}),
    "score of a token": ("direct", True, (3, 4), {"policy": "paged_eviction", "heads": "separate"}),
    "nothing exact at the start": ("three_turns", True, 4, {"sink_tokens": 0, "recent_tokens": 0}),
}


@pytest.mark.parametrize("case", CASES)
def test_exact(case: str) -> None:
    """Equal to a slow cache that rounds each token once; what a query needs was visible."""
    mode, padded, bits, settings = CASES[case]
    recorder = played(mode, padded, bits, **settings)
    if recorder.blocks != "all" and mode not in modes.SPECULATIVE:
        assert recorder.cache.stats().faults > 0 and recorder.checked > 0
        assert_evicted(recorder)


@pytest.mark.parametrize("turns", [None, [10, 2, 6]], ids=str)
def test_a_row_is_what_it_is_alone(turns: list[int] | None) -> None:
    model = models.build("llama", OURS).double()
    assert rows.compare(model, [40, 33, 9], turns, **{**ONE, "bits": 2, "heads": "separate"}) > 0


def test_host_memory_has_four_times_the_tokens() -> None:
    """Heads of 64 in bfloat16: 128 bytes of a key or a value are 32 and 2."""
    model = models.build("llama", OURS, hidden_size=256, num_attention_heads=4, head_dim=64).bfloat16()
    ids, mask = torch.stack(models.prompts([90], seed=3)), torch.ones(1, 90, dtype=torch.long)
    found = []
    for bits in (None, 4):
        cache = PagedEvictionCache(model.config, **ONE, bits=bits)
        for start, stop in [(0, 60), *((at, at + 1) for at in range(60, 90))]:
            modes.forward(model, cache, ids, mask, start, stop)
        found.append(cache.stats().host_bytes)
    assert 3.7 < found[0] / found[1] < 3.8


def test_an_outlet_that_knows_no_codes_is_refused() -> None:
    class Planning(Outlet):
        plans = True

    class Another(Disposal):
        def outlet(self, site: Any) -> Outlet:
            return Planning()

    with pytest.raises(ValueError, match="bits= keeps tokens in few bits, and the disposal 'Another'"):
        PagedEvictionCache(models.shared("llama", OURS).config, **{**ONE, "disposal": Another()}, bits=4)
