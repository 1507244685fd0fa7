"""Long texts, read in chunks, then asked: rows of real models, in one resumable command.

    python benchmarks/long_rows.py run --model results/models/SmolLM2-135M-Instruct.Q4_1 --name smollm2
    python benchmarks/long_rows.py run --model FOLDER --name qwen --length 8192 --documents 6 --caches prepared@1/8,int4
    python benchmarks/long_rows.py run --model FOLDER --name qwen --answers 4 --caches prepared@1/4,prepared@1/8,int4
    python benchmarks/long_rows.py table

A document holds facts of every kind (`long_documents.py`). Each cache reads it once, in chunks, and every question is
put to a copy of that cache, so nothing is known of a question while tokens are evicted. Caches other than the full one
are asked only what the full cache answers. The words of an answer are given; each token of its number, and of the name
where two facts have to be joined, must be the cache's first choice.

Caches, of which shares are of the bytes of 16-bit keys and values:
  prepared@1/8     the default for this share, with the profile of `prepare` (measured first, if there is none)
  unprepared@1/8   the default for this share, without a profile
  POLICY@1/8       any policy of this package, in 16 bits, so that its share of tokens is the same
  oracle@1/8       prepared@1/8 which is told where the facts are, and does not evict them
  bits4, bits2     all tokens, in so many bits: what evicting none loses
  int4, int2       `QuantizedCache` of transformers with optimum-quanto, which has the size that it has

Rows are written when a cache is done with a document; a run that was stopped goes on with the next one. The file has
one row for each document, cache and question, one for the text that follows, and one for reading: seconds of the CPU,
the bytes of all tensors of the cache, most while it read and at the end, and of these the keys and values; the others
are positions, scores, and statistics of queries. `table` counts documents as the sample.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from common import timed_on
from long_answers import ANSWER, measure_answers
from long_documents import Document
from long_reader import FILE, FULL, Reader, add_options, append, facts_of_run, measure, read_rows
from transformers import DynamicCache, QuantizedCache

from hf_paged_eviction import PagedEvictionCache, prepare

PREPARED, UNPREPARED, ORACLE = "prepared", "unprepared", "oracle"
#: Caches that have the size that they have, and the bits of those that hold all tokens.
_SIZED = (FULL, "int4", "int2", "bits8", "bits4", "bits3", "bits2")
#: Tokens of a question with its answer, or of the text that follows; and of a block.
_BEHIND, _BLOCK = 256, 16


@dataclass(frozen=True)
class Held:
    """A cache that is measured, and its share of the bytes of 16-bit keys and values; "" = the size that it has."""

    name: str
    share: str = ""

    @classmethod
    def of(cls, text: str) -> Held:
        """Read `prepared@1/8`.

        Raises:
            ValueError: the share is missing, or none.
        """
        name, _, share = text.strip().partition("@")
        if name in _SIZED:
            if share:
                raise ValueError(f"{text!r}: {name} has no share, write {name!r}")
        elif not share or not 0 < Fraction(share) <= 1:
            raise ValueError(f"{text!r}: expected a share of the bytes, such as {name}@1/8")
        return cls(name, share)

    def reading(self, _: Any) -> AbstractContextManager[None]:
        """The model reads as it is."""
        return nullcontext()

    def make(self, config: Any, one: Document) -> Any:
        """An empty cache for a document."""
        tokens = one.ids.shape[1]
        if self.name == FULL:
            return DynamicCache(config=config)
        if self.name.startswith("int"):
            sizes = {"axis_key": 0, "axis_value": 0, "q_group_size": 64, "residual_length": 128}
            return QuantizedCache("quanto", config, nbits=int(self.name.removeprefix("int")), **sizes)
        if not self.share:
            room = -(-(tokens + _BEHIND) // _BLOCK) * _BLOCK
            return PagedEvictionCache(config, room, policy="keydiff", bits=int(self.name[-1]))
        if self.name not in (PREPARED, UNPREPARED, ORACLE):
            room = int(tokens * Fraction(self.share)) // _BLOCK * _BLOCK
            return PagedEvictionCache(config, room, policy=self.name)
        budget = f"{float(100 * Fraction(self.share))}% of memory of {tokens} tokens"
        facts = one.facts if self.name == ORACLE else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no profile is what is measured
            # Profiles are found by the configuration object: a copy has none.
            return PagedEvictionCache(
                copy.deepcopy(config) if self.name == UNPREPARED else config, budget, protect=facts
            )


def _run(options: argparse.Namespace) -> None:
    kinds = [Held.of(text) for text in options.caches.split(",")]
    if options.answers and any(kind.name == ORACLE for kind in kinds):
        raise SystemExit(f"--answers: documents are one batch, and {ORACLE} knows the facts of one alone; leave it out")
    reader = Reader.of(options.model, options.chunk)
    if any(kind.name in (PREPARED, ORACLE) for kind in kinds):
        print(f"profile: {prepare(reader.model, reader.tokenizer).path}", flush=True)
    reader.model.set_attn_implementation("paged_eviction")
    append(options.output, [facts_of_run(options, timed_on())])
    if options.answers:
        measure_answers(options, reader, Held(FULL), kinds)
    else:
        measure(options, reader, [Held(FULL), *kinds])


def _table(options: argparse.Namespace) -> None:
    from long_summary import ways
    from long_tables import answers, tables

    rows = read_rows(options.output)
    print(tables(rows), ways(rows), answers(rows), sep="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure what is missing")
    add_options(run, "prepared@1/4,prepared@1/8,unprepared@1/8,keydiff@1/4,keydiff@1/8,int4")
    run.add_argument("--chunk", type=int, default=512, help="tokens read at once; 0 = all (default: %(default)s)")
    run.add_argument(
        "--answers",
        type=int,
        default=0,
        metavar="N",
        help=f"instead of questions: the full cache's own {ANSWER} next tokens on N documents",
    )
    run.set_defaults(go=_run)
    table = commands.add_parser("table", help="print what there is")
    table.add_argument("--output", type=Path, default=FILE, help="the rows (default: %(default)s)")
    table.set_defaults(go=_table)
    options = parser.parse_args()
    options.go(options)


if __name__ == "__main__":
    main()
