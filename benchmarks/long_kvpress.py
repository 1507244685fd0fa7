"""What presses of kvpress answer of the documents of `long_rows.py`, in an environment without this package.

    pip install 'transformers==5.2.0' kvpress==0.5.5
    python benchmarks/long_kvpress.py --model FOLDER --name qwen --length 2048 --documents 20

A press reads a document in one forward and compresses it behind that, so its rows are those of one forward (`chunk` 0).
Documents, questions and verdicts are those of `long_rows.py`, and so is the file of rows. A share is of the tokens of
16-bit keys and values. These presses only mask what they drop: bytes and seconds are what kvpress needs.

  adakv@1/8    scores of ExpectedAttention, AdaKV over the heads of a layer
  kvzip@1/8    KVzip, over all heads of all layers; it reads the text a second time to score it
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from importlib.metadata import version
from typing import Any

from kvpress import AdaKVPress, ExpectedAttentionPress, KVzipPress
from long_documents import Document
from long_reader import FULL, Reader, add_options, append, facts_of_run, measure
from transformers import DynamicCache

PRESSES = {"adakv": lambda ratio: AdaKVPress(ExpectedAttentionPress(ratio)), "kvzip": KVzipPress}


@dataclass(frozen=True)
class Pressed:
    """A press, and the share of the tokens that it keeps."""

    name: str
    share: str = ""

    def make(self, config: Any, one: Document) -> DynamicCache:
        """An empty cache."""
        return DynamicCache(config=config)

    def reading(self, model: Any) -> AbstractContextManager[Any]:
        """In which the model's next forward is compressed."""
        for layer in model.model.layers:  # what the press of the document before has masked
            layer.self_attn.masked_key_indices = None
        return nullcontext() if self.name == FULL else PRESSES[self.name](float(1 - Fraction(self.share)))(model)


@contextmanager
def without_template(model: Any, tokenizer: Any) -> Any:
    """KVzip takes the beginning of a prompt for the chat template of the tokenizer that lies beside the model, and does
    not score it: these documents have none."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)
        model.config.save_pretrained(folder)
        model.config._name_or_path = folder
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "kvzip@1/4,kvzip@1/8,adakv@1/4,adakv@1/8")
    options = parser.parse_args()
    options.chunk = 0
    reader = Reader.of(options.model, options.chunk)
    used = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    append(options.output, [facts_of_run(options, {**used, "torch_threads": 1, "device": "cpu"})])
    kinds = [Pressed(FULL), *(Pressed(*text.strip().split("@")) for text in options.caches.split(","))]
    with without_template(reader.model, reader.tokenizer):
        measure(options, reader, kinds)


if __name__ == "__main__":
    main()
