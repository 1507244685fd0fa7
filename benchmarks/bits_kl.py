"""What few bits change in the predictions of a real model: `python benchmarks/bits_kl.py --help`.

The text is Python's own documentation, which comes with the interpreter (`pydoc_data.topics`). It is read in chunks,
once with transformers' `DynamicCache` and once with a cache that holds every token in few bits; compared are the
predictions of every token from the second chunk on, by the Kullback-Leibler divergence in nats. Every passage begins
as the model's texts do: without the token that marks the beginning Gemma's predictions differ several times as much.

`--without sizes` and the like leave out a part of how tokens are rounded, to see what it is worth.
"""

import argparse
from dataclasses import dataclass
from pydoc_data.topics import topics
from statistics import mean, stdev
from typing import Any

import torch
from common import save
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.precision.base import Codecs, Rounded
from hf_paged_eviction.precision.codec import Codec, check_bits

#: Bits of keys and values that are measured unless `--bits` says otherwise.
BITS = ("8", "4", "3", "4,2", "2")


def passages(tokenizer: Any, count: int, tokens: int) -> list[Tensor]:
    """The first pieces of the documentation, topics in the order of their names."""
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
    begin = torch.tensor(tokenizer("").input_ids, dtype=torch.long)
    new = tokens - len(begin)
    return [torch.cat([begin, ids[at * new : (at + 1) * new]])[None] for at in range(count)]


class Alike(Codec):
    """Channels are not divided by their sizes."""

    def sizes(self, states: Tensor, offset: Tensor | None, real: Tensor | None) -> Tensor:
        """1 for all."""
        return torch.ones_like(states[:, :, :1])


@dataclass(frozen=True)
class Without(Rounded):
    """Every number in so many bits, by a codec that lacks something.

    Attributes:
        part: what is left out, see `--without`.
    """

    part: str

    def codecs(self, index: int, plain: Codecs, local_heads: Any) -> Codecs:
        """See `Precision.codecs`."""
        keys, values = plain
        if self.part == "sizes":
            return Alike(keys.bits, True, True, keys.rotary), values
        if self.part == "mean":
            return Codec(keys.bits, True), values
        if self.part == "turning":  # the mean is that of the keys as they are cached
            return Codec(keys.bits, True, True), values
        return Codec(keys.bits, False, True, keys.rotary), Codec(values.bits)


def says(model: Any, cache: Any, ids: Tensor, chunk: int) -> Tensor:
    """Log-probabilities after every token from the second chunk on, `[tokens, vocabulary]`."""
    found = []
    for start in range(0, ids.shape[1], chunk):
        logits = model(ids[:, start : start + chunk], past_key_values=cache).logits[0]
        if start:
            found.append(logits.float().log_softmax(-1))
    return torch.cat(found)


def divergence(expected: Tensor, found: Tensor) -> float:
    """Mean over tokens."""
    return (expected.exp() * (expected - found)).sum(-1).mean().item()


def pair(bits: str) -> int | tuple[int, ...]:
    """What `bits=` is told: "4" or "4,2"."""
    both = tuple(map(int, bits.split(",")))
    return both[0] if len(both) == 1 else both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--name", help="of the model, in the results")
    parser.add_argument("--bits", nargs="*", default=BITS, help='such as 4, or "4,2" for keys and values')
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=832, help="of each passage")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--without", choices=("sizes", "mean", "turning", "mixing"), help="a part of rounding")
    parser.add_argument("--first", type=int, default=0, help="passage, of those that are counted")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    found: dict[str, list[float]] = {bits: [] for bits in options.bits}
    with torch.inference_mode():
        texts = passages(tokenizer, options.first + options.passages, options.tokens)[options.first :]
        for number, ids in enumerate(texts, options.first):
            full = says(model, DynamicCache(config=model.config), ids, options.chunk)
            for bits, values in found.items():
                precision = pair(bits) if options.without is None else Without(*check_bits(pair(bits)), options.without)
                cache = PagedEvictionCache(model.config, budget=options.tokens, bits=precision)
                values.append(divergence(full, says(model, cache, ids, options.chunk)))
                print(f"passage {number}, {bits} bits: {values[-1]:.5f}", flush=True)
    rows = {
        bits: {
            "kl": round(mean(values), 6),
            "error": round(stdev(values) / len(values) ** 0.5, 6) if len(values) > 1 else None,
        }
        for bits, values in found.items()
    }
    settings = {name: value for name, value in vars(options).items() if name not in ("model", "name")}
    save(f"bits_kl_{options.name or 'model'}", {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
