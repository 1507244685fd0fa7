"""Recall beside dropping and beside four bits, at the same device bytes: `python benchmarks/recall_bytes.py --help`.

The embedded model reads contexts of 1k and of 8k tokens; the question comes as a second turn, so no policy knows it.
Each context is read once, and every cache is given what that reading left. Answers are greedy, one forward per token.

The model was trained on up to 2,304 tokens. Beyond 4,096 its rotary positions are stretched by YaRN (factor 4), without
any training; what the full cache then says is the yardstick.

Per variant: mean score by task, device bytes (keys, values, summaries), host bytes, milliseconds of a step, and bytes
fetched from host memory per step. Times are medians over all steps of all samples; the variants take turns.
"""

import argparse
import json
import time
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from common import RESULTS, save
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.running.prefill import replay
from hf_paged_eviction_eval.running.recording import RecordingCache
from hf_paged_eviction_eval.tasks import get_task, make_samples

TASKS = ("passkey", "kv_recall", "kv_recall_many", "variable_tracking", "span_copy")
POLICIES = ("keydiff", "paged_eviction", "recency")
CHUNK = 1024
#: Bytes of a token in four bits, as a share of those of one in 16, for heads of 32; 32 tokens more are not rounded.
CODED = 0.3125


def stretched(model: Any, length: int) -> Any:
    """The model for texts of such a length."""
    if length <= model.config.max_position_embeddings:
        return model
    config = deepcopy(model.config)
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    }
    config.max_position_embeddings = 16384
    other = type(model)(config).eval().to(model.dtype)
    other.load_state_dict(model.state_dict())
    other.set_attn_implementation("paged_eviction")
    return other


def variants(length: int) -> dict[str, dict[str, Any]]:
    """By name, the arguments of a cache. All but "full" hold about as many device bytes."""
    sixteenth = length // 16
    # A box for each block of 16 takes as much as a sixteenth of the tokens.
    share, own = (3, 2) if length < 4096 else (2, 1)
    blocks = min(own * sixteenth // 16 - 3, 16)
    found: dict[str, dict[str, Any]] = {"full": {}}
    for policy in POLICIES:
        few = {"budget": int((share * sixteenth - 32) / CODED) // 16 * 16, "bits": 4}
        recall = {"budget": own * sixteenth, "disposal": f"recall(blocks={blocks})"}
        ways = {"drop": {"budget": share * sixteenth}, "bits=4": few, "recall": recall}
        found |= {f"{policy}, {way}": {"policy": policy, **settings} for way, settings in ways.items()}
    each = f"blocks={blocks}, every=8"
    found["keydiff, recall, every 8 tokens"] = {**found["keydiff, recall"], "disposal": f"recall({each})"}
    found["keydiff, recall, ahead"] = {
        **found["keydiff, recall"],
        "disposal": f"recall(blocks={blocks}, prefetch={blocks})",
    }
    return found


class Measured:
    """What one variant has shown so far."""

    def __init__(self) -> None:
        self.scores: dict[str, list[float]] = {}
        self.steps: list[float] = []
        self.fetched: list[float] = []
        self.foreseen = self.faults = self.device = self.host = 0

    def note(self, cache: DynamicCache, faults: int, steps: int, block: int) -> None:
        """The cache has answered in so many steps."""
        if not isinstance(cache, PagedEvictionCache):
            self.device = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            return
        stats = cache.stats()
        self.device, self.host = stats.storage_bytes + stats.summary_bytes, stats.host_bytes
        self.fetched.append((stats.faults - faults) * block / steps)
        self.faults += stats.faults - faults
        for _, layer in cache.paged_layers:
            stage = getattr(layer.outlet, "stage", None)
            self.foreseen += 0 if stage is None else stage.foreseen

    def summary(self, full: int) -> dict[str, Any]:
        """For the results; `full` bytes of the full cache."""
        return {
            "scores": {task: sum(values) / len(values) for task, values in self.scores.items()},
            "device_share": self.device / full,
            "host_share": self.host / full,
            "step_ms": 1e3 * median(self.steps),
            "fetched_share": sum(self.fetched) / max(len(self.fetched), 1) / full,
            "foreseen": self.foreseen / self.faults if self.foreseen else None,
        }


@torch.inference_mode()
def answer(model: Any, question: Tensor, cache: DynamicCache, count: int, found: Measured) -> list[int]:
    """Greedy tokens after the question `[1, n]`."""
    logits = model(input_ids=question, past_key_values=cache, use_cache=True).logits
    faults = cache.stats().faults if isinstance(cache, PagedEvictionCache) else 0
    said: list[int] = []
    while len(said) < count:
        said.append(int(logits[0, -1].argmax()))
        start = time.perf_counter()
        logits = model(input_ids=torch.tensor([said[-1:]]), past_key_values=cache, use_cache=True).logits
        found.steps.append(time.perf_counter() - start)
    config = model.config
    block = 16 * config.num_key_value_heads * config.head_dim * 2 * 2
    found.note(cache, faults, count, block)
    return said


@torch.inference_mode()
def read(model: Any, ids: Tensor) -> tuple[RecordingCache, dict[int, Any]]:
    """A context `[1, n]`, read with the full cache, and its queries by layer."""
    source = RecordingCache(model.config)
    for start in range(0, ids.shape[1], CHUNK):
        model(input_ids=ids[:, start : start + CHUNK], past_key_values=source, use_cache=True, logits_to_keep=1)
    return source, source.stop()


def measure(model: Any, tokenizer: Any, length: int, count: int, seed: int) -> dict[str, Any]:
    """All variants at one length."""
    model, settings = stretched(model, length), variants(length)
    found = {name: Measured() for name in settings}
    for task in TASKS:
        for sample in make_samples(task, tokenizer, length, count, seed):
            context = tokenizer(sample.context, return_tensors="pt", verbose=False)["input_ids"]
            whole = tokenizer(sample.prompt, return_tensors="pt", verbose=False)["input_ids"]
            source, queries = read(model, context)
            for name, each in settings.items():
                cache: DynamicCache = deepcopy(source)
                if each:
                    cache = PagedEvictionCache(model.config, **each)
                    replay(source, cache, torch.tensor([0]), context.shape[1], queries)
                said = answer(model, whole[:, context.shape[1] :], cache, sample.max_new_tokens, found[name])
                score = get_task(task).score(sample, tokenizer.decode(said))
                found[name].scores.setdefault(task, []).append(score)
        print(length, task, {name: round(sum(of.scores[task]) / count, 2) for name, of in found.items()}, flush=True)
    return {
        "count": count,
        "recall": settings["keydiff, recall"]["disposal"],
        "variants": {name: of.summary(found["full"].device) for name, of in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 8192], help="tokens of a prompt")
    parser.add_argument("--count", type=int, nargs="*", default=[12, 6], help="prompts per task, for each length")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = embedded.load(attn_implementation="paged_eviction", dtype=torch.bfloat16)
    # What is not measured now stays as it was measured before.
    path = RESULTS / "recall_bytes.json"
    lengths = json.loads(path.read_text())["lengths"] if path.exists() else {}
    for length, count in zip(options.lengths, options.count, strict=True):
        lengths[str(length)] = measure(model, tokenizer, length, count, options.seed)
        save("recall_bytes", {"lengths": lengths})


if __name__ == "__main__":
    main()
