"""The function in C decodes what `Codec.decode` decodes."""

import pytest
import torch

from closeness import assert_close
from coded_cases import Case
from hf_paged_eviction.cpu.library import missing
from hf_paged_eviction.precision.codec import Codes
from hf_paged_eviction.precision.decoding import Decoder

compiled = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@compiled
@pytest.mark.parametrize("seed", [seed for seed in range(40) if seed % 8 not in (4, 5)])
def test_it_decodes_what_the_codec_decodes(seed: int) -> None:
    """Drawn shapes, bits, rotations and lengths; again after codes and statistics have changed, and of fewer slots."""
    case = Case(seed, "cpu", dtype=torch.float32)
    if 0 in case.lengths:  # a layer holds a token of each head
        lengths = [max(length, 1) for length in case.lengths]
        case = Case(seed, "cpu", dtype=torch.float32, ragged=True, lengths=lengths)
    exact, columns = case.exact, case.columns
    for part, codec, like, statistics in zip(
        ("key", "value"), case.codecs, (exact.keys, exact.values), exact.row_statistics(), strict=True
    ):
        codes, levels, positions = (columns[name] for name in (f"{part}_codes", f"{part}_levels", "positions"))
        levels.nan_to_num_(0.0)  # slots of no token
        positions.clamp_(max=5000)
        decoder = Decoder(codec, codes, levels, positions, statistics, columns.layout.bounds, like)
        for held in (max(case.lengths), max(case.lengths), max(max(case.lengths) // 2, 1)):
            output, first = decoder(held), columns.first(held)
            assert output.shape == (case.rows, case.heads, held, like.shape[-1])
            states = Codes(first[f"{part}_codes"], first[f"{part}_levels"])
            expected = codec.decode(states, like.shape[-1], torch.float32, statistics, first["positions"])
            for at, length in enumerate(case.lengths):
                row, head = divmod(at, case.heads)
                count = min(length, held) if case.ragged else held
                assert_close(output[row, head, :count], expected[row, head, :count], case, share=1e-5)
                assert not output[row, head, count:].any()
            codes.copy_(codes.roll(1, -2 if case.ragged else 2))
            statistics.mean.mul_(0.5)
