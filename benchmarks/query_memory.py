"""What queries that wait are worth, untrained and trained: `python benchmarks/query_memory.py --help`.

"decoder": the embedded model, which was trained causally, reads its prompts as if it were a prefix model, with memories
for all keys. Scores of tasks (greedy answers, the question is part of the prompt), and perplexity of what follows a
prompt. `0` are prompts read causally.

"encoder": a small BERT is trained to fill in masked tokens of texts whose second half repeats the first, so that what
is masked in the first half can be known only from what comes 16 tokens later. It is trained with full attention,
without a query memory or with one, and then asked with each of them. Memories hold 20 of 32 tokens; full attention
holds all.
"""

import argparse
from contextlib import AbstractContextManager, nullcontext
from math import exp
from statistics import mean
from typing import Any

import torch
from common import save
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM, DynamicCache

from hf_paged_eviction import query_memory
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import get_task, held_out_texts, make_samples

TASKS = ("kv_recall", "kv_recall_many", "variable_tracking", "few_shot", "span_copy", "passkey")
DELAYS = (0, 8, 32, 128)
_LENGTH, _WORDS, _MASK = 32, 20, 20
_WAYS: dict[str, dict[str, Any] | None] = {
    "full attention": None,
    "no delay": {"queries": 0, "keys": 20, "chunk": 4},
    "16 tokens of delay": {"queries": 16, "keys": 20, "chunk": 4},
}


# ---- the decoder -----------------------------------------------------------------------------------------------------


def waiting(model: Any, delay: int) -> AbstractContextManager[None]:
    """Prompts whose queries wait; 0 = causal."""
    if not delay:
        return nullcontext()
    return query_memory(model, queries=delay, keys=4096, chunk=min(delay, 16), prefix=True)


@torch.inference_mode()
def answer(model: Any, ids: Tensor, count: int, delay: int) -> list[int]:
    """Greedy tokens after a prompt `[1, n]`."""
    cache = DynamicCache(config=model.config)
    with waiting(model, delay):
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    said: list[int] = []
    while True:
        said.append(int(logits[0, -1].argmax()))
        if len(said) == count:
            return said
        logits = model(torch.tensor([said[-1:]]), past_key_values=cache).logits


@torch.inference_mode()
def loss_after(model: Any, ids: Tensor, prompt: int, delay: int) -> float:
    """Mean loss of the tokens behind the first `prompt` of `[1, n]`."""
    cache = DynamicCache(config=model.config)
    with waiting(model, delay):
        model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1)
    logits = model(ids[:, prompt:-1], past_key_values=cache).logits[0]
    return float(cross_entropy(logits, ids[0, prompt + 1 :]))


def decoder(length: int, count: int) -> dict[str, Any]:
    """Scores in % and perplexity, by delay."""
    model, tokenizer = embedded.load()
    scores: dict[str, dict[int, float]] = {}
    for task in TASKS:
        samples = make_samples(task, tokenizer, length, count)
        prompts = [tokenizer(sample.prompt, return_tensors="pt")["input_ids"] for sample in samples]
        for delay in DELAYS:
            said = [
                tokenizer.decode(answer(model, ids, sample.max_new_tokens, delay), skip_special_tokens=True)
                for ids, sample in zip(prompts, samples, strict=True)
            ]
            found = mean(get_task(task).score(sample, text) for sample, text in zip(samples, said, strict=True))
            scores.setdefault(task, {})[delay] = 100 * found
        print(task, scores[task], flush=True)
    texts = [tokenizer(text, return_tensors="pt")["input_ids"][:, :length] for text in held_out_texts().values()]
    texts = [ids for ids in texts if ids.shape[1] == length]
    perplexity = {delay: exp(mean(loss_after(model, ids, length // 2, delay) for ids in texts)) for delay in DELAYS}
    print(perplexity, flush=True)
    return {"length": length, "count": count, "scores": scores, "texts": len(texts), "perplexity": perplexity}


# ---- the encoder -----------------------------------------------------------------------------------------------------


def texts_that_repeat(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids with masks in them `[rows, 32]`, and the ids that were masked (-100 elsewhere); no token is masked twice."""
    half = torch.randint(_WORDS, (rows, _LENGTH // 2), generator=generator)
    ids = torch.cat([half, half], dim=1)
    draw = torch.rand(rows, _LENGTH // 2, generator=generator)
    masked = torch.cat([draw < 0.2, draw > 0.8], dim=1)
    return ids.masked_fill(masked, _MASK), ids.masked_fill(~masked, -100)


def way(model: Any, name: str) -> AbstractContextManager[None]:
    settings = _WAYS[name]
    return nullcontext() if settings is None else query_memory(model, **settings)


def trained(name: str, steps: int) -> Any:
    """A BERT of two layers that learned to fill in masks, attending in one of the ways."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = BertConfig(
        vocab_size=_WORDS + 1,
        max_position_embeddings=_LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.15,
        **sizes,
    )
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    with way(model, name):
        for _ in range(steps):
            ids, wanted = texts_that_repeat(32, generator)
            loss = model(ids, labels=wanted).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.inference_mode()
def filled_in(model: Any, name: str) -> list[float]:
    """Shares of masks of the first and of the second half that are filled in right, in %."""
    ids, wanted = texts_that_repeat(256, torch.Generator().manual_seed(2))
    with way(model, name):
        right = model(ids).logits.argmax(-1) == wanted
    halves = zip(right.chunk(2, dim=1), (wanted >= 0).chunk(2, dim=1), strict=True)
    return [100 * float(hit.sum() / masked.sum()) for hit, masked in halves]


def encoder(steps: int) -> dict[str, Any]:
    """By way of training and way of asking."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in _WAYS:
        model = trained(name, steps)
        found[name] = {asked: filled_in(model, asked) for asked in _WAYS}
        print(name, found[name], flush=True)
    return {"steps": steps, "filled_in": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--count", type=int, default=6, help="prompts per task")
    parser.add_argument("--steps", type=int, default=300, help="of training the encoder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    save("query_memory", {"encoder": encoder(options.steps), "decoder": decoder(options.length, options.count)})


if __name__ == "__main__":
    main()
