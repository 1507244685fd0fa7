"""kvpress on the prompts of our own tables: needles, the question not known when the context is compressed.

    python benchmarks/kvpress_rows.py --model FOLDER --name smollm2 --limit 2

In an environment of its own, with kvpress 0.5.5 and transformers 5.2.0 (it needs one below 5.3). Every press
compresses the context; then the question and the full cache's answer are fed in one forward, as in the tables of
`real_models.py`. Goes on where it stopped; `real_models.py page` sets its rows beside ours.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import kvpress
import torch
from common import RESULTS, save
from real_models import NEEDLES
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_paged_eviction_eval.data.prompting.prompts import encode
from hf_paged_eviction_eval.data.prompting.suites import load_samples, score
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.agreement import divergence
from hf_paged_eviction_eval.running.generation import end_tokens

#: Tokens of the context that stay, by press.
PRESSES: dict[str, tuple[Callable[[float], Any], tuple[int, ...]]] = {
    "KVzipPress": (lambda ratio: kvpress.KVzipPress(ratio), (112, 224)),
    "AdaKVPress(ExpectedAttentionPress)": (
        lambda ratio: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio, epsilon=1e-2)),
        (112, 224),
    ),
    "ExpectedAttentionPress": (lambda ratio: kvpress.ExpectedAttentionPress(ratio), (224,)),
    "SnapKVPress": (lambda ratio: kvpress.SnapKVPress(ratio), (224,)),
    "TOVAPress": (lambda ratio: kvpress.TOVAPress(ratio), (224,)),
    "KeyDiffPress": (lambda ratio: kvpress.KeyDiffPress(ratio), (224,)),
}


@torch.inference_mode()
def rows(model: Any, tokenizer: Any, prompt: Any, settings: TaskSettings) -> Iterator[dict[str, Any]]:
    """The full cache's row, and where it is right one per press and size."""
    sample, context, question = prompt.sample, torch.tensor([prompt.context]), [*prompt.question]
    ends = end_tokens(model, tokenizer, sample.stop_at_newline)
    cache = DynamicCache(config=model.config)
    model.model(context, past_key_values=cache)
    said: list[int] = []
    found, fed = [], question
    while not said or (len(said) < sample.max_new_tokens and said[-1] not in ends):
        found.append(model(torch.tensor([fed]), past_key_values=cache, logits_to_keep=1).logits[0, -1])
        said.append(int(found[-1].argmax()))
        fed = said[-1:]
    expected = torch.stack(found)

    def row(name: str, tokens: int | None, logits: Tensor) -> dict[str, Any]:
        text = tokenizer.decode(logits.argmax(-1).tolist(), skip_special_tokens=True)
        return {
            "task": sample.task,
            "id": sample.id,
            "press": name,
            "tokens": tokens,
            "score": float(score(sample, text, settings)),
            "kl": divergence(expected, logits).mean().item(),
        }

    yield (full := row("full", None, expected))
    if full["score"] < 1:
        return
    for name, (made, sizes) in PRESSES.items():
        for tokens in sizes:
            cache = DynamicCache(config=model.config)
            with made(1 - tokens / context.shape[1])(model):
                model.model(input_ids=context, past_key_values=cache)
            ids = torch.tensor([question + said[:-1]])
            places = torch.arange(context.shape[1], context.shape[1] + ids.shape[1])[None]
            output = model(ids, past_key_values=cache, position_ids=places, logits_to_keep=len(said))
            yield row(name, tokens, output.logits[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--name", required=True, help="of the model, in the results")
    parser.add_argument("--limit", type=int, default=2, help="prompts per task")
    options = parser.parse_args()
    path = RESULTS / f"kvpress_{options.name}.json"
    found = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {(row["task"], row["id"]) for row in found}
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = []
    for task in NEEDLES.split(","):
        settings = TaskSettings(tasks=(task,), limit=options.limit, policies=(), budgets=(), question_aware=False)
        for at, sample in enumerate(load_samples(task, settings, tokenizer, 1024)):
            prompts.append(
                (at, encode(sample, tokenizer, question_aware=False, max_length=None, chat_template="auto"), settings)
            )
    for _, prompt, settings in sorted(prompts, key=lambda each: each[0]):
        if (prompt.sample.task, prompt.sample.id) not in done:
            found += rows(model, tokenizer, prompt, settings)
            save(f"kvpress_{options.name}", {"kvpress": "0.5.5", "rows": found})


if __name__ == "__main__":
    main()
