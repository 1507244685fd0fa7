"""kvpress on the prompts of our own tables: needles, the question not known when the context is compressed.

    python benchmarks/kvpress_rows.py --model FOLDER --name smollm2 --limit 16
    python benchmarks/kvpress_rows.py --model FOLDER --name smollm2 --limit 16 --profile FILE  # LUKVPress alone

In an environment of its own, with kvpress 0.5.5 and transformers 5.2.0 (it needs one below 5.3). Every press
compresses the context; then the question and the full cache's answer are fed in one forward, as in the tables of
`real_models.py`; of a base model, up to where it is right. Goes on where it stopped; `real_models.py page` sets its
rows beside ours. Of Gemma 3 kvpress knows the model with images alone, of which it leaves sliding layers as they are;
so does this for the model without. A press that refuses the model has no rows, and it is said.

`LUKVPress` gives each head a share of the tokens around a press that scores: here the shares of our profile, raised to
the powers that `prepare` tries with these scores, in place of its own table, which there is of one larger model.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import kvpress
import torch
from common import RESULTS, save
from kvpress.presses import base_press
from real_models import BASE, NEEDLES
from torch import Tensor
from transformers import DynamicCache, Gemma3ForCausalLM

from hf_paged_eviction.allocators.share import share_out
from hf_paged_eviction.learned.calibration import load_calibration
from hf_paged_eviction_eval.data.prompting.prompts import encode
from hf_paged_eviction_eval.models.loading import load
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.agreement import divergence
from hf_paged_eviction_eval.running.generation import Judge, end_tokens, is_settled
from hf_paged_eviction_eval.tasks.suites import load_samples, score

#: Tokens of a text for which shares are turned into numbers of tokens, and the least that a head keeps of them.
_TOKENS, _LEAST = 1000, 4
_QUARTER = ("ExpectedAttention", "SnapKV", "TOVA", "KeyDiff")
#: Tokens of the context that stay, by press.
PRESSES: dict[str, tuple[Callable[[float], Any], tuple[int, ...]]] = {
    "KVzipPress": (kvpress.KVzipPress, (112, 224)),
    "AdaKVPress(ExpectedAttentionPress)": (
        lambda ratio: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio, epsilon=1e-2)),
        (112, 224),
    ),
    **{f"{name}Press": (getattr(kvpress, f"{name}Press"), (224,)) for name in _QUARTER},
}
#: Presses that score, and the power of the shares around them.
SCORING = {"KeyDiff": (kvpress.KeyDiffPress, 1.5), "SnapKV": (kvpress.SnapKVPress, 2.0)}
SCORING["ExpectedAttention"] = partial(kvpress.ExpectedAttentionPress, epsilon=1e-2), 1.0


def with_shares(profile: Path) -> dict[str, tuple[Callable[[float], Any], tuple[int, ...]]]:
    """`LUKVPress` around each scoring press, with the shares of a profile."""

    def press(scoring: Callable[[float], Any], curve: Any, ratio: float) -> Any:
        made = kvpress.LUKVPress(scoring(0.0), compression_ratio=ratio, sink=16, window=16)
        made._budget_curves = curve
        return made

    return {
        f"LUKVPress({name}Press)": (partial(press, scoring, pruned(profile, power)), (112, 224))
        for name, (scoring, power) in SCORING.items()
    }


def pruned(profile: Path, power: float) -> Any:
    """`[99, layers, kv_heads]` shares of the tokens that each head loses, where 1 to 99 % go in all."""
    shares, curve = load_calibration(profile).shares, []
    if shares is None:
        raise SystemExit(f"{profile} has no shares of heads: make it with paged-eviction prepare")
    for percent in range(1, 100):
        weights = [layer**power for layer in shares.at(torch.tensor([1 - percent / 100]))]
        joined = torch.cat(weights, dim=1)
        total = round(_TOKENS * (1 - percent / 100)) * joined.shape[1]
        tokens = share_out(joined, total, _LEAST, torch.tensor([_TOKENS]))
        curve.append(1 - tokens.double().view(len(weights), -1) / _TOKENS)
    return torch.stack(curve).numpy()


def full_answer(model: Any, tokenizer: Any, prompt: Any, judge: Judge | None) -> tuple[list[int], Tensor]:
    """What the full cache says, and the logits that it says it by, `[tokens, vocabulary]`."""
    ends, cache = end_tokens(model, tokenizer, prompt.sample.stop_at_newline), DynamicCache(config=model.config)
    model.model(torch.tensor([prompt.context]), past_key_values=cache)
    answer, logits, fed = list[int](), list[Tensor](), [*prompt.question]
    while not answer or (len(answer) < prompt.sample.max_new_tokens and answer[-1] not in ends):
        logits.append(model(torch.tensor([fed]), past_key_values=cache, logits_to_keep=1).logits[0, -1])
        answer.append(int(logits[-1].argmax()))
        fed = answer[-1:]
        if judge and is_settled(answer, judge):
            return answer[:-1], torch.stack(logits[:-1])
    return answer, torch.stack(logits)


def masks(config: Any, cache: DynamicCache, read: int, fed: int) -> dict[str, Tensor] | None:
    """What each of `fed` tokens behind `read` sees, where a model has layers of two kinds, which hold not as many."""
    kinds = getattr(config, "layer_types", None)
    if not kinds or len(set(kinds)) == 1:
        return None
    seen, rows = {}, torch.arange(fed)[:, None]
    for kind, reach in (("full_attention", read + fed), ("sliding_attention", config.sliding_window)):
        # A press has moved what it keeps: all of it comes before what is fed.
        places = torch.arange(-cache.layers[kinds.index(kind)].keys.shape[-2], fed)
        seen[kind] = ((places <= rows) & (places > rows - reach))[None, None]
    return seen


@torch.inference_mode()
def rows(
    model: Any, tokenizer: Any, prompt: Any, settings: TaskSettings, presses: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The full cache's row, and where it is right one per press and size; a press that fails is taken out."""
    sample, context, question = prompt.sample, torch.tensor([prompt.context]), [*prompt.question]

    def scored(tokens: list[int]) -> float:
        return float(score(sample, tokenizer.decode(tokens, skip_special_tokens=True), settings))

    judge = (lambda tokens: scored([*tokens]) == 1) if settings.stop_when_right else None
    answer, expected = full_answer(model, tokenizer, prompt, judge)
    row = partial(dict, task=sample.task, id=sample.id)
    right = scored(answer)
    yield row(press="full", tokens=None, score=right, kl=0.0)
    if right < 1:
        return
    ids = torch.tensor([question + answer[:-1]])
    places = torch.arange(context.shape[1], context.shape[1] + ids.shape[1])[None]
    for name, (press, sizes) in [*presses.items()]:
        for tokens in sizes:
            cache = DynamicCache(config=model.config)
            try:
                with press(1 - tokens / context.shape[1])(model):
                    model.model(input_ids=context, past_key_values=cache)
            except (ValueError, AttributeError) as error:
                print(f"{name} does not run on this model: {error}")
                del presses[name]
                break
            seen, count = masks(model.config, cache, context.shape[1], ids.shape[1]), len(answer)
            how = {"attention_mask": seen, "past_key_values": cache, "position_ids": places, "logits_to_keep": count}
            logits = model(ids, **how).logits[0]
            apart = divergence(expected, logits).mean().item()
            yield row(press=name, tokens=tokens, score=scored(logits.argmax(-1).tolist()), kl=apart)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder; of a GGUF file, what newer transformers save")
    parser.add_argument("--name", required=True, help="of the model, in the results")
    parser.add_argument("--limit", type=int, default=2, help="prompts per task")
    parser.add_argument("--profile", type=Path, help="of the model, for LUKVPress; then no other press runs")
    options = parser.parse_args()
    path = RESULTS / f"kvpress_{options.name}.json"
    finished = json.loads(path.read_text())["rows"] if path.exists() else []
    presses = dict(PRESSES) if options.profile is None else with_shares(options.profile)
    done = {(row["task"], row["id"]) for row in finished if row["press"] in presses or row["score"] < 1}
    base_press.Gemma3ForConditionalGeneration = Gemma3ForCausalLM
    settings = TaskSettings(
        model=options.model, tasks=(), dtype="float32", limit=options.limit, policies=(), budgets=(),
        question_aware=False, stop_when_right=options.name in BASE,
    )  # fmt: skip
    model, tokenizer = load(settings)
    samples = [load_samples(task, settings, tokenizer, 1024) for task in NEEDLES.split(",")]
    for sample in (sample for several in zip_longest(*samples) for sample in several if sample is not None):
        if (sample.task, sample.id) not in done:
            prompt = encode(sample, tokenizer, question_aware=False, max_length=None, chat_template="auto")
            new = rows(model, tokenizer, prompt, settings, presses)
            finished += new if options.profile is None else (row for row in new if row["press"] != "full")
            save(f"kvpress_{options.name}", {"kvpress": "0.5.5", "rows": finished})


if __name__ == "__main__":
    main()
