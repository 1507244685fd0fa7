"""Write a trained model in the form in which it ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Half precision, and configuration files that several releases of transformers read alike."""
    model.to(torch.float16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    ).save_pretrained(folder)
    # Version 4 looks for the base frequency at the top level, version 5 inside `rope_parameters`.
    _update(folder / "config.json", rope_theta=model.config.rope_parameters["rope_theta"], dtype="float32")
    # Version 5 writes a class name that version 4 does not know; both know this one.
    _update(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def _update(path: Path, **values: Any) -> None:
    settings = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
