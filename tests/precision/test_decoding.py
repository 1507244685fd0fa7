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


@compiled
def test_cosines_are_those_of_the_angle_up_to_far_positions() -> None:
    """Levels of zero leave the mean key, turned to its position: the angle is rounded as the model rounds it, and its
    cosine and sine are precise in every quarter of a turn."""
    cases = (Case(seed, "cpu", dtype=torch.float32) for seed in range(40) if seed % 8 not in (4, 5))
    case = next(case for case in cases if case.codecs[0].rotary is not None and not case.ragged)
    codec, exact, columns = case.codecs[0], case.exact, case.columns
    codes, levels, positions = (columns[name] for name in ("key_codes", "key_levels", "positions"))
    (frequencies, _, scalings), (pairs, step, offset, _) = codec.rotary.of_channels(codes.device)
    statistics, like, slots = exact.row_statistics()[0], exact.keys, codes.shape[2]
    decoder = Decoder(codec, codes, levels.zero_(), positions, statistics, None, like)
    one = torch.arange(pairs) * step
    for first in (0, 700, 131_000):
        places = first + torch.arange(slots)
        positions.copy_(places[:, None].expand_as(positions))
        angle = (places[:, None].float() * frequencies[one]).double()
        mean, factor = statistics.mean.double(), scalings[one].double()
        keys = mean.expand(-1, -1, slots, -1).clone()
        low, high = mean[..., one], mean[..., one + offset]
        keys[..., one] = (low * angle.cos() - high * angle.sin()) * factor
        keys[..., one + offset] = (high * angle.cos() + low * angle.sin()) * factor
        torch.testing.assert_close(decoder(slots).double(), keys, atol=3e-7 * mean.abs().max().item(), rtol=3e-7)
