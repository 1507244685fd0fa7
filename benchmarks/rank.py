"""What a low rank is worth on the embedded model at the same device bytes: `python benchmarks/rank.py --help`.

The basis is fitted to texts like those of the model's training, of another seed. Dropping in 16, 4 and 2 bits stands
beside coefficients in 16 and in 4 bits. See `same_bytes.py`; steps are CPU time behind a long text, every variant in
turn.
"""

from functools import partial
from typing import Any

import torch
from same_bytes import Fit, empty, measure, most_tokens, parser

from hf_paged_eviction.lab.low_rank.basis import Basis
from hf_paged_eviction.lab.low_rank.fit import add_windows, solve
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded
from training.calibrate import windows

POLICIES = ("keydiff",)
SHARES = (0.0625, 0.125)
#: By name, arguments of the cache. A head of this model has 32 channels.
WAYS: dict[str, dict[str, Any]] = {
    "drop": {},
    "bits=4": {"bits": 4},
    "bits=2": {"bits": 2},
    "rank=24": {"rank": 24},
    "rank=16": {"rank": 16},
    "rank=8": {"rank": 8},
    "rank=24, bits=4": {"rank": 24, "bits": 4},
    "rank=16, bits=4": {"rank": 16, "bits": 4},
    "rank=(16, 24), bits=4": {"rank": (16, 24), "bits": 4},
}


def fitting(config: Any, basis: Basis, way: str, most: float, block_size: int) -> Fit | None:
    """See `same_bytes.Fitting`."""
    options = WAYS[way] | ({"basis": basis} if "rank" in WAYS[way] else {})

    def taken(tokens: int) -> int:
        found: int = empty(config, tokens, block_size, torch.bfloat16, options).stats().storage_bytes
        return found

    tokens = most_tokens(taken, most, block_size)
    return None if tokens is None else Fit(tokens, 0, taken(tokens), options)


def main() -> None:
    options = parser(__doc__, "rank").parse_args()
    torch.set_num_threads(1)
    model, tokenizer = embedded.load(attn_implementation=PAGED_EVICTION)
    sums: dict[int, Any] = {}
    add_windows(model, windows(tokenizer, seed=2000), sums)
    basis, worth = solve(sums, model.config)
    shares = {
        index: {name: [round(float(share), 4) for share in found[7::8]] for name, found in vars(of).items()}
        for index, of in worth.items()
    }
    kinds = (POLICIES, list(WAYS), SHARES)
    more = {"shares_at": [8, 16, 24, 32], "shares": shares, "tokens": basis.facts["tokens"]}
    measure("rank", model, tokenizer, kinds, partial(fitting, model.config, basis), options, **more)


if __name__ == "__main__":
    main()
