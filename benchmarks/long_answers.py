"""How far caches are from the full one while a long answer is written: `long_rows.py run --answers N`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from long_documents import Document, document
from long_reader import Kind, Reader, Row, append, is_there, key_of, read_rows
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from hf_paged_eviction.integration.feeding import feed
from hf_paged_eviction_eval.running.prefill import pad_left

#: Tokens of a long answer, and of a part of it that has a row of its own.
ANSWER, PART = 1000, 250


class Answers:
    """How far the predictions of caches are from the full cache's, while its own answers are fed to them.

    Documents are rows of one left-padded batch, so that each token reads the weights once for all of them. Shares are
    of the longest one.

    Args:
        full: the cache that writes, greedily.
    """

    def __init__(self, reader: Reader, documents: Sequence[Document], full: Kind) -> None:
        self._reader = reader
        ids, mask = pad_left([one.ids[0].tolist() for one in documents], torch.device("cpu"))
        self._mask = pad(mask, (0, ANSWER), value=1)
        self._batch = Document(ids, ids[:, :0], (), (), "")
        self._likely: list[Tensor] = []  # [documents, vocabulary] of each token; grows while `full` writes
        for likely in self._predictions(full):
            self._likely.append(likely)

    def rows(self, kind: Kind) -> list[list[Row]]:
        """Of each document, divergence from the full cache in nats and the share of equal choices, in parts."""
        pairs = zip(self._likely, self._predictions(kind), strict=True)
        found = [((full.exp() * (full - own)).sum(-1), full.argmax(-1) == own.argmax(-1)) for full, own in pairs]
        means = (torch.stack(one, 1).float().unflatten(1, (-1, PART)).mean(-1) for one in zip(*found, strict=True))
        return [
            [
                {"kind": "answer", "question": at * PART, "kl": round(kl, 5), "same": round(same, 4)}
                for at, (kl, same) in enumerate(zip(*of_one, strict=True))
            ]
            for of_one in zip(*(one.tolist() for one in means), strict=True)
        ]

    def _predictions(self, kind: Kind) -> Iterator[Tensor]:
        """Log probabilities of each token of the answers, `[documents, vocabulary]`."""
        cache, end = kind.make(self._reader.model.config, self._batch), 0
        for ids in self._batch.ids.split(self._reader.chunk or self._batch.ids.shape[1], 1):
            logits, end = self._feed(ids, cache, end)
        for at in tqdm(range(ANSWER), f"{kind.name} {kind.share}", leave=False):
            yield logits[:, -1].log_softmax(-1)
            if at + 1 < ANSWER:
                logits, end = self._feed(self._likely[at].argmax(-1, keepdim=True), cache, end)

    def _feed(self, ids: Tensor, cache: Any, start: int) -> tuple[Tensor, int]:
        end = start + ids.shape[1]
        return feed(self._reader.model, ids, self._mask[:, :end], cache).float(), end


@torch.inference_mode()
def measure_answers(options: argparse.Namespace, reader: Reader, full: Kind, kinds: Sequence[Kind]) -> None:
    """Measure what is missing, and append it, when a cache is done with all documents.

    Args:
        options: `name`, `length`, `chunk`, `first`, `answers`, `output`.
    """
    indices = range(options.first, options.first + options.answers)
    documents = [document(reader.tokenizer, options.length, index) for index in indices]
    answers = None
    for kind in kinds:
        keys = [key_of(options, *both, kind) for both in zip(indices, documents, strict=True)]
        there = read_rows(options.output)
        if all(is_there(there, key, "answer") for key in keys):
            continue
        answers = answers or Answers(reader, documents, full)
        made = zip(keys, answers.rows(kind), strict=True)
        append(options.output, [{**key, **row} for key, parts in made for row in parts])
        print(f"{options.name} {options.length}, {kind.name} {kind.share}: {len(keys)} answers", flush=True)
