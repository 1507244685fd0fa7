"""What demoting is worth on the embedded model at the same device bytes: `python benchmarks/demote.py --help`.

Dropping in 16, 4 and 2 bits stands beside two tiers. All bytes count: levels, positions, scores, scales, and the tokens
that `bits=` leaves as they came. See `same_bytes.py`; steps are CPU time behind a long text, every variant in turn.
"""

from functools import partial
from typing import Any

import torch
from same_bytes import Fit, empty, measure, most_tokens, parser

from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded

POLICIES = ("keydiff", "paged_eviction")
SHARES = (0.0625, 0.125)
#: By name: bits of all tokens, or bits, share and balance of those that are demoted.
WAYS: dict[str, tuple[Any, ...]] = {
    "drop": (None,),
    "bits=4": (4,),
    "bits=2": (2,),
    "demote(bits=2)": (2, 0.5, "rotation"),
    "demote(bits=2, balance=queries)": (2, 0.5, "queries"),
    "demote(bits=2, balance=none)": (2, 0.5, "none"),
    "demote(bits=2, share=0.75)": (2, 0.75, "rotation"),
    "demote(bits=4)": (4, 0.5, "rotation"),
}


def held(config: Any, tokens: int, block_size: int, dtype: torch.dtype, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes of a cache of so many slots, one row, as it says itself; and its places for demoted tokens."""
    made, places = empty(config, tokens, block_size, dtype, options), 0
    total = made.stats().storage_bytes
    for _, layer in made.paged_layers if "disposal" in options else ():
        layer.outlet.start(1, config.num_key_value_heads, 1, tokens, torch.device("cpu"))
        total += layer.outlet.snapshot().bytes
        places = layer.outlet.places
    return total, places


def fitting(config: Any, way: str, most: float, block_size: int) -> Fit | None:
    """See `same_bytes.Fitting`."""
    bits, *demoted = WAYS[way]
    options: dict[str, Any] = {} if bits is None else {"bits": bits}
    if demoted:
        share, balance = demoted
        options = {"disposal": f"demote(bits={bits}, share={share}, balance={balance})"}
    tokens = most_tokens(lambda count: held(config, count, block_size, torch.bfloat16, options)[0], most, block_size)
    if tokens is None:
        return None
    total, places = held(config, tokens, block_size, torch.bfloat16, options)
    if demoted:
        options = {"disposal": _as_many(config, tokens, block_size, places, bits, balance)}
    return Fit(tokens, places, total, options)


def _as_many(config: Any, tokens: int, block_size: int, places: int, bits: int, balance: str) -> str:
    """The disposal that has so many places where slots are of 32 bits."""
    low, high = 0.0, 1.0
    while True:
        share = (low + high) / 2
        text = f"demote(bits={bits}, share={share!r}, balance={balance})"
        try:
            found = held(config, tokens, block_size, torch.float32, {"disposal": text})[1]
        except ValueError:  # no room for a token
            found = 0
        if found == places:
            return text
        low, high = (share, high) if found < places else (low, share)


def main() -> None:
    options = parser(__doc__, "demote").parse_args()
    torch.set_num_threads(1)
    model, tokenizer = embedded.load(attn_implementation=PAGED_EVICTION)
    kinds = (POLICIES, list(WAYS), SHARES)
    measure("demote", model, tokenizer, kinds, partial(fitting, model.config), options)


if __name__ == "__main__":
    main()
