"""What a cache to which no policy is named keeps of a real model's answers and of running text.

    python benchmarks/defaults.py --model FOLDER_OR_NAME --texts A.txt B.txt --output benchmarks/results/defaults.json

Needles of RULER and passkeys that the full cache answers, teacher-forced: an answer is kept if each of its tokens is
the likeliest. *known*: the prompt is compressed with its question; *unknown*: the context alone. Running text: nats per
token over those of the full cache behind as many tokens as are held, read in chunks of 64. Rows are added to those of
an output that is there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval.tasks import get_task

TASKS = ("passkey", "ruler_niah_single_1", "ruler_niah_single_2", "ruler_niah_multikey_1")
LENGTH, CHUNK = 768, 64


def prompts(tokenizer: Any, seeds: int) -> Iterator[tuple[str, list[int], int, list[int]]]:
    """Name, ids of the prompt, how many of them are the context, ids of the answer."""
    for seed in range(201, 201 + seeds):
        for name in TASKS:
            sample = get_task(name).make(tokenizer, LENGTH, 0, seed)
            context, ids = tokenizer(sample.context)["input_ids"], tokenizer(sample.prompt)["input_ids"]
            shared = next((at for at, pair in enumerate(zip(context, ids, strict=False)) if len(set(pair)) > 1), None)
            answer = tokenizer(f" {sample.answers[0]}", add_special_tokens=False)["input_ids"]
            yield f"{name}/{seed}", ids, len(context) if shared is None else shared, answer


def answered(model: Any, cache: Any, ids: list[int], compressed: int, answer: list[int]) -> bool:
    """Whether every token of the answer is the likeliest, once the first tokens were read and compressed."""
    model(torch.tensor([ids[:compressed]]), past_key_values=cache, logits_to_keep=1)
    rest = torch.tensor([ids[compressed:] + answer[:-1]])
    found = model(rest, past_key_values=cache, logits_to_keep=len(answer)).logits[0].argmax(-1)
    return bool((found == torch.tensor(answer)).all())


def nats(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of each token but the first, `[length - 1]`."""
    found = []
    for start in range(0, ids.shape[1], CHUNK):
        logits = model(ids[:, start : start + CHUNK], past_key_values=cache).logits[0]
        wanted = ids[0, start + 1 : start + CHUNK + 1]
        found.append(-logits[: len(wanted)].log_softmax(-1).gather(-1, wanted[:, None])[:, 0])
    return torch.cat(found)


def blocks(tokens: float) -> int:
    """In whole blocks."""
    return max(3, round(tokens / 16)) * 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--policies", nargs="+", default=["auto", "paged_eviction"])
    parser.add_argument("--name", help="what the model is called, where the folder is not")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, attn_implementation="paged_eviction")
    name = given.name or Path(given.model).name
    if given.name:
        model.config._name_or_path = given.name
    model.eval()
    rows: list[dict[str, Any]] = json.loads(given.output.read_text())["rows"] if given.output.exists() else []

    def note(**row: Any) -> None:
        rows.append(row)
        print(row, flush=True)
        given.output.write_text(json.dumps({"model": name, "rows": rows}, indent=1) + "\n")

    def caches(length: int) -> Iterator[tuple[dict[str, Any], Any]]:
        for share in given.shares:
            for policy in given.policies:
                cache = PagedEvictionCache(model.config, budget=blocks(share * length), policy=policy)
                label = policy if policy != "auto" else f"auto: {cache.policy.name}@{cache._options.allocator.label}"
                yield {"share": share, "policy": label}, cache

    with torch.no_grad():
        for path in given.texts:
            ids = torch.tensor([tokenizer(path.read_text("utf-8"))["input_ids"][:LENGTH]])
            full = nats(model, DynamicCache(config=model.config), ids)
            for setting, cache in caches(ids.shape[1]):
                lost = (nats(model, cache, ids) - full)[blocks(setting["share"] * ids.shape[1]) :]
                note(text=path.stem, **setting, nats_over_full=round(lost.mean().item(), 4))
        for prompt, ids, context, answer in prompts(tokenizer, given.seeds):
            if not answered(model, DynamicCache(config=model.config), ids, len(ids) - 1, answer):
                continue
            for protocol, compressed in (("known", len(ids) - 1), ("unknown", context)):
                for setting, cache in caches(compressed):
                    kept = answered(model, cache, ids, compressed, answer)
                    note(prompt=prompt, protocol=protocol, **setting, answered=kept)


if __name__ == "__main__":
    main()
