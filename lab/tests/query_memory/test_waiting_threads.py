"""Only in the thread that asked for it do queries wait."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import BartConfig, BartForConditionalGeneration

import models
from closeness import assert_close
from hf_paged_eviction_lab.query_memory import query_memory


def test_another_thread_encodes_as_always() -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = models.randomise(
        BartForConditionalGeneration(BartConfig(vocab_size=models.VOCABULARY, **sizes, **heads)), 0
    )
    ids = torch.stack(models.prompts([20, 20]))

    def encode() -> torch.Tensor:
        with torch.no_grad():
            return model.get_encoder()(ids).last_hidden_state

    encoded: dict[str, Any] = {"before": encode()}
    with query_memory(model, queries=1, keys=4, chunk=2):
        other = threading.Thread(target=lambda: encoded.update(beside=encode()))
        other.start()
        other.join()
        encoded["inside"] = encode()
    assert_close(encoded["beside"], encoded["before"])
    assert (encoded["inside"] - encoded["before"]).abs().max() > 1e-2
