"""Are a few fitted keys, biases and values worth more than a few tokens that stay as they are?

    python benchmarks/attention_matching.py run --model FOLDER --name smollm2 --data FOLDER_OF_LONGBENCH_RECORDS
    python benchmarks/attention_matching.py table --name smollm2

Attention Matching (Fast KV Compaction, arXiv 2602.16284) replaces the cache of a context by `t` of its keys per KV
head, a bias for each, and new values, such that for reference queries the sum of the exponentials and the output stay
what they were. Here the reference queries are those of the context repeated (as KVzip asks for it), all of them; the
weights, which are the exponentials of the biases, solve a non-negative least-squares problem, the values one with a
ridge towards what they were. The context is read without its question; then question and the full cache's answer are
fed. `run` goes on where it stopped.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from common import RESULTS, save
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

from hf_paged_eviction.integration.model_rotary import layer_rotaries
from hf_paged_eviction.learned.calibration import load_calibration
from hf_paged_eviction.learned.calibration.shelf import find_calibration
from hf_paged_eviction.precision.codec import Codec
from hf_paged_eviction.recipes.procedures.probe import REPEAT
from hf_paged_eviction_eval.data.prompting.chat_template import end_of_turn
from hf_paged_eviction_eval.data.prompting.prompts import encode
from hf_paged_eviction_eval.data.prompting.suites import is_generated, load_samples, score
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.agreement import divergence
from hf_paged_eviction_eval.running.generation import end_tokens

ROOT = Path("results/attention_matching")
NEEDLES = (
    "passkey ruler_niah_single_1 ruler_niah_single_2 ruler_niah_multikey_1 ruler_niah_single_3 ruler_niah_multikey_2"
)
RECORDS = "qasper multifieldqa_en hotpotqa 2wikimqa narrativeqa triviaqa trec samsum"
#: Tokens that every head keeps, at the beginning and at the end, under every method.
FIRST, LAST = 4, 8
#: Bytes of a token and head in a 16-bit model: as it is, and in 4 bits with the distances of its levels.
PLAIN, CODED = 256, 68
#: Of the bytes of the whole context; the last in 4 bits alone, where it is a sixteenth of the tokens.
SHARES = (0.125, 0.05, 0.02)


@dataclass
class Held:
    """What one layer holds of the context, by KV head: keys and values `[t, dim]`, bias `[t]` or None."""

    keys: list[Tensor]
    values: list[Tensor]
    bias: list[Tensor | None]


@dataclass(frozen=True)
class Asked:
    """The reference queries of one layer, by KV head.

    Attributes:
        queries: `[heads, n, dim]`, scaled.
        own: `[heads, n]` logarithm of the sum of exponentials over the context.
        all: the same over the context and the repeated text before the query.
        output: `[heads, n, dim]`, of the context alone.
    """

    queries: Tensor
    own: Tensor
    all: Tensor
    output: Tensor


# ---- the model, with what it holds of the context beside the tokens that follow --------------------------------------


class Reading:
    """What attention reads: `held` of the context by layer, or nothing while the context itself is read."""

    held: list[Held] | None = None
    asked: list[Asked] | None = None  # recorded, where it is a list


def flash(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and logarithm of the sum of exponentials, of `[1, heads, n, dim]` each."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = kernel(query, key, value, is_causal=causal, scale=scaling)
    return output, lse


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    """Causal attention to what is held and to the tokens that follow it, one row."""
    group, count = query.shape[1] // key.shape[1], query.shape[2]
    wide = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    output, lse = flash(query, *wide, scaling, causal=count > 1)
    if Reading.held is not None:
        held = Reading.held[module.layer_idx]
        ours, before = zip(*[_read(query[0], held, head, group, scaling) for head in range(key.shape[1])], strict=True)
        context, own = torch.cat(ours)[None], torch.cat(before)[None]
        whole = own.logaddexp(lse)
        output = context * (own - whole).exp()[..., None] + output * (lse - whole).exp()[..., None]
        if Reading.asked is not None:
            numbers = (query[0] * scaling, own[0], whole[0], context[0])
            Reading.asked.append(Asked(*(each.unflatten(0, (-1, group)).flatten(1, 2) for each in numbers)))
    return output.transpose(1, 2), None


def _read(query: Tensor, held: Held, head: int, group: int, scaling: float) -> tuple[Tensor, Tensor]:
    asked = query[head * group : (head + 1) * group]
    keys, values, bias = held.keys[head], held.values[head], held.bias[head]
    if bias is None:
        output, lse = flash(
            asked.flatten(0, 1)[None, None], keys[None, None], values[None, None], scaling, causal=False
        )
        return output[0, 0].view_as(asked), lse[0, 0].view(asked.shape[:2])
    logits = asked @ keys.mT * scaling + bias
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


def load(folder: str) -> tuple[Any, Any]:
    """Model and tokenizer."""
    AttentionInterface.register("attention_matching", attend)
    AttentionMaskInterface.register("attention_matching", lambda *_, **__: None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="attention_matching")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def read(model: Any, ids: list[int]) -> list[Held]:
    """Keys and values of a context, in every layer."""
    Reading.held, cache = None, DynamicCache(config=model.config)
    model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
    return [Held([*layer.keys[0]], [*layer.values[0]], [None] * layer.keys.shape[1]) for layer in cache.layers]


def follow(model: Any, held: list[Held], seen: int, ids: list[int], keep: int, cache: Any = None) -> Tensor:
    """Logits after the last `keep` of the tokens that follow a context of which this is held, in one forward.

    Args:
        seen: tokens of the context, and of what is in the cache behind it.
    """
    Reading.held = held
    places = torch.arange(seen, seen + len(ids))[None]
    cache = DynamicCache(config=model.config) if cache is None else cache
    output = model(torch.tensor([ids]), position_ids=places, past_key_values=cache, logits_to_keep=keep)
    return output.logits[0]


def reference(model: Any, full: list[Held], seen: int, ids: list[int]) -> list[Asked]:
    """What the repeated context asks for, in every layer, with the full cache."""
    Reading.asked = found = []
    follow(model, full, seen, ids, 1)
    Reading.asked = None
    return found


def answer(model: Any, full: list[Held], seen: int, question: list[int], most: int, ends: frozenset[int]) -> list[int]:
    """The greedy answer of the full cache."""
    said: list[int] = []
    fed, cache = question, DynamicCache(config=model.config)
    while not said or (len(said) < most and said[-1] not in ends):
        said.append(int(follow(model, full, seen, fed, 1, cache)[-1].argmax()))
        seen, fed = seen + len(fed), said[-1:]
    return said


# ---- which keys ------------------------------------------------------------------------------------------------------


def kvzip_scores(full: list[Held], asked: list[Asked]) -> Tensor:
    """`[layers, heads, tokens]`, the largest weight that a reference query pays."""
    found = []
    for held, each in zip(full, asked, strict=True):
        logits = (
            query @ keys.mT - whole[:, None]
            for query, keys, whole in zip(each.queries, held.keys, each.all, strict=True)
        )
        found.append(torch.stack([part.amax(0).exp() for part in logits]))
    return torch.stack(found)


def calibrated_scores(model: Any, full: list[Held]) -> Tensor:
    """`[layers, heads, tokens]`, of the calibration that comes with the package."""
    file = find_calibration(model.config)
    if file is None:
        raise SystemExit("no calibration: the folder must be called as the model of one that comes with the package")
    calibration = load_calibration(str(file))
    heads, tokens = len(full[0].keys), full[0].keys[0].shape[0]
    places = torch.arange(tokens).expand(1, heads, tokens)
    both = [(torch.stack(held.keys)[None], torch.stack(held.values)[None]) for held in full]
    return torch.stack([calibration.score(*states, places, layer, 0)[0] for layer, states in enumerate(both)])


def choose(scores: Tensor, count: int, equal: bool = False) -> list[list[Tensor]]:
    """Places of the tokens that stay, by layer and head: `count` in the mean, by one threshold, or in every head."""
    scores = scores.clone()
    scores[..., :FIRST] = scores[..., -LAST:] = math.inf
    if equal:
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(count, -1).indices, True)
    else:
        best = scores.flatten().topk(count * scores.shape[0] * scores.shape[1]).indices
        kept = torch.zeros(scores.numel(), dtype=torch.bool).index_fill_(0, best, True).view(scores.shape)
    return [[each.nonzero()[:, 0] for each in layer] for layer in kept]


# ---- what they say ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """What is fitted, and how.

    Attributes:
        weights: ridge of the weights towards 1, in queries that pay all their attention; None = no biases.
        values: ridge of the values towards what they were, in the same unit; None = they stay.
        by_share: each query counts by the square of what the context gets of its attention; else all alike.
    """

    weights: float | None = None
    values: float | None = None
    by_share: bool = False


def fit_head(fit: Fit, asked: Asked, head: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor | None]:
    """New values `[t, dim]` and biases of the keys that stay."""
    share = (asked.own - asked.all)[head].exp() if fit.by_share else torch.ones_like(asked.own[head])
    paid = (asked.queries[head] @ keys.mT - asked.own[head][:, None]).exp()  # what was paid within the context
    bias = None
    if fit.weights is not None:
        rows = paid * share[:, None]
        weights = bounded_least_squares(rows.mT @ rows, rows.mT @ share, fit.weights)
        paid, bias = paid * weights, weights.log()
    if fit.values is None:
        return values, bias
    paid = paid / paid.sum(-1, keepdim=True).clamp_min(1e-20)
    missing = (asked.output[head] - paid @ values) * share[:, None]
    rows = paid * share[:, None]
    gram = (rows.mT @ rows).double()
    gram.diagonal().add_(fit.values)
    return values + torch.cholesky_solve((rows.mT @ missing).double(), torch.linalg.cholesky(gram)).float(), bias


def bounded_least_squares(gram: Tensor, right: Tensor, ridge: float, low: float = 1e-5, high: float = 1e3) -> Tensor:
    """The `w` from `low` to `high` with the least `|Aw - b|^2 + ridge |w - 1|^2`, given `A'A` and `A'b`: accelerated
    projected gradients (FISTA with restarts) after the columns were brought to one length."""
    gram = gram.double() + ridge * torch.eye(len(gram), dtype=torch.float64)
    right = right.double() + ridge
    scale = gram.diagonal().rsqrt()
    gram, right = gram * scale * scale[:, None], right * scale
    low_, high_ = low / scale, high / scale
    direction = torch.ones_like(right)
    for _ in range(20):
        direction = gram @ direction
        largest = direction.norm()
        direction = direction / largest
    found = point = (1 / scale).clamp(low_, high_)
    speed = 1.0
    for _ in range(100):
        new = (point - (gram @ point - right) / (1.02 * largest)).clamp(low_, high_)
        moved = new - found
        if (point - new) @ moved > 0:
            speed = 1.0
        faster = (1 + math.sqrt(1 + 4 * speed * speed)) / 2
        found, point, speed = new, new + (speed - 1) / faster * moved, faster
        if moved.norm() <= 1e-6 * found.norm():
            break
    return (found * scale).float()


def compact(full: list[Held], kept: list[list[Tensor]], asked: list[Asked], fit: Fit) -> list[Held]:
    """What is held after the fit."""
    made = []
    for held, layer, queries in zip(full, kept, asked, strict=True):
        keys = [states[places] for states, places in zip(held.keys, layer, strict=True)]
        values = [states[places] for states, places in zip(held.values, layer, strict=True)]
        fitted = [fit_head(fit, queries, head, *each) for head, each in enumerate(zip(keys, values, strict=True))]
        made.append(Held(keys, [each[0] for each in fitted], [each[1] for each in fitted]))
    return made


def rounded(model: Any, held: list[Held], kept: list[list[Tensor]], bits: int = 4) -> list[Held]:
    """Keys and values in few bits, as `bits=` keeps them, all but the first tokens; the mean that is subtracted is that
    of what is held."""
    rotary = layer_rotaries(model.config, [0])[0]
    made = []
    for layer, places in zip(held, kept, strict=True):
        states: list[list[Tensor]] = []
        for codec, old in (
            (Codec(bits, True, centred=True, rotary=rotary), layer.keys),
            (Codec(bits, True), layer.values),
        ):
            states.append([])
            for each, at in zip(old, places, strict=True):
                many, where = each[None, None], at[None]
                given = codec.alike(many, where, None) if codec.centred else None, where[:, None, :, None]
                new = codec.decode(codec.encode(many, *given), many.shape[-1], many.dtype, *given)[0, 0]
                states[-1].append(torch.cat([each[:FIRST], new[FIRST:]]))
        made.append(Held(states[0], states[1], layer.bias))
    return made


# ---- one prompt under all methods ------------------------------------------------------------------------------------

DROP, VALUES, BOTH = Fit(), Fit(values=1.0), Fit(0.01, 1.0, by_share=True)
#: By score: what is done with the tokens that it keeps.
METHODS = {
    "kvzip": {"drop": DROP, "values": VALUES, "both": BOTH},
    "calibrated": {"drop": DROP, "values": VALUES},
    "kvzip, equal shares": {"drop": DROP, "both": BOTH},
}
#: The same where as many 4-bit tokens are kept as fit into the bytes. Where these are many, there is nothing to fit.
IN_BITS = {
    0.125: {"kvzip": {"drop": DROP}, "calibrated": {"drop": DROP}},
    0.05: {"kvzip": {"drop": DROP, "values": VALUES, "both": BOTH}, "calibrated": {"drop": DROP}},
    0.02: {"kvzip": {"drop": DROP, "values": VALUES}},
}


def methods(scores: dict[str, Tensor], tokens: int) -> Iterator[tuple[dict[str, Any], list[list[Tensor]], Fit]]:
    """What is compared: its name, the places that stay, and the fit."""
    for share in SHARES:
        for score_, fits in METHODS.items() if share != SHARES[-1] else ():
            name, _, equal = score_.partition(", ")
            kept = choose(scores[name], int(share * tokens), bool(equal))
            for what, fit in fits.items():
                yield {"share": share, "score": score_, "method": what, "bits": None}, kept, fit
        for name, fits in IN_BITS[share].items():
            many = FIRST + (share * tokens - FIRST) * PLAIN / CODED  # the first tokens stay as they came
            kept = choose(scores[name], int(many))
            for what, fit in fits.items():
                yield {"share": share, "score": name, "method": what, "bits": 4}, kept, fit


@torch.inference_mode()
def rows(model: Any, tokenizer: Any, prompt: Any, settings: TaskSettings, most: int) -> Iterator[dict[str, Any]]:
    """One row per method."""
    sample, ids, question = prompt.sample, [*prompt.context], [*prompt.question]
    seen = len(ids)
    full = read(model, ids)
    ends = end_tokens(model, tokenizer, sample.stop_at_newline)
    said = answer(model, full, seen, question, min(sample.max_new_tokens, most), ends)
    fed = question + said[:-1]
    expected = follow(model, full, seen, fed, len(said))

    def row(name: dict[str, Any], logits: Tensor) -> dict[str, Any]:
        text = tokenizer.decode(logits.argmax(-1).tolist(), skip_special_tokens=True)
        same = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
        numbers = {"kl": divergence(expected, logits).mean().item(), "same": same}
        return {
            "task": sample.task,
            "id": sample.id,
            "tokens": seen,
            **name,
            **numbers,
            "right": float(score(sample, text, settings)),
        }

    yield row({"share": 1.0, "score": "", "method": "full", "bits": None}, expected)
    probe = tokenizer.encode(REPEAT + (end_of_turn(tokenizer) if prompt.chat else ""), add_special_tokens=False)
    asked = reference(model, full, seen, probe + ids)
    scores = {"kvzip": kvzip_scores(full, asked), "calibrated": calibrated_scores(model, full)}
    for name, kept, fit in methods(scores, seen):
        held = compact(full, kept, asked, fit)
        if name["bits"]:
            held = rounded(model, held, kept, name["bits"])
        yield row(name, follow(model, held, seen, fed, len(said)))


def prompts(tokenizer: Any, options: argparse.Namespace) -> Iterator[tuple[Any, TaskSettings]]:
    """The first of every task, then the second, and so on."""
    found = []
    names = {"policies": (), "budgets": (), "seed": options.seed, "question_aware": False}
    for task in (*NEEDLES.split(), *(RECORDS.split() if options.data else ())):
        made = is_generated(task)
        if not (limit := options.needles if made else options.records):
            continue
        settings = TaskSettings(tasks=(task,), limit=limit, data_dir=options.data, **names)
        length = None if made else options.longest
        for at, sample in enumerate(load_samples(task, settings, tokenizer, options.length if made else None)):
            read_as = encode(sample, tokenizer, question_aware=False, max_length=length, chat_template="auto")
            found.append((at, read_as, settings))
    for _, prompt, settings in sorted(found, key=lambda each: each[0]):
        yield prompt, settings


def run(options: argparse.Namespace) -> None:
    """The prompts that are missing."""
    torch.set_num_threads(options.threads)
    path = ROOT / f"{options.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {each["id"] for each in load_rows(path)}
    model, tokenizer = load(options.model)
    for prompt, settings in prompts(tokenizer, options):
        if prompt.sample.id in done:
            continue
        began = time.process_time()
        found = list(rows(model, tokenizer, prompt, settings, options.answer))
        with path.open("a") as file:
            file.write("".join(json.dumps(each) + "\n" for each in found))
        print(f"{prompt.sample.id}: {found[0]['tokens']} tokens, {time.process_time() - began:.0f} s", flush=True)


# ---- the table -------------------------------------------------------------------------------------------------------


def load_rows(path: Path) -> list[dict[str, Any]]:
    """All that was written."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(options: argparse.Namespace) -> None:
    """Means, and differences to dropping paired by prompt, printed and kept."""
    found = load_rows(ROOT / f"{options.name}.jsonl")
    kinds: dict[str, Callable[[str], bool]] = {
        "needles": lambda task: task in NEEDLES.split(),
        "records": lambda task: task in RECORDS.split(),
    }
    summary = []
    for kind, belongs in kinds.items():
        full = {row["id"]: row for row in found if row["method"] == "full" and belongs(row["task"])}
        if kind == "needles":
            full = {id_: row for id_, row in full.items() if row["right"] == 1}
        by_name: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
        for row in found:
            if row["id"] in full and row["method"] != "full":
                key = row["share"], row["bits"], row["score"], row["method"]
                by_name.setdefault(key, {})[row["id"]] = row
        for (share, bits, score_, method), own in sorted(by_name.items(), key=str):
            bar = by_name[share, bits, score_, "drop"]
            line = {"kind": kind, "share": share, "bits": bits, "score": score_, "method": method, "prompts": len(own)}
            line["full"] = round(mean(full[id_]["right"] for id_ in own), 3)
            for number in ("kl", "same", "right"):
                apart = [own[id_][number] - bar[id_][number] for id_ in own]
                line[number] = round(mean(row[number] for row in own.values()), 4)
                line[f"{number}_error"] = _error([row[number] for row in own.values()])
                line[f"{number}_over_drop"] = round(mean(apart), 4)
                line[f"{number}_over_drop_error"] = _error(apart)
            summary.append(line)
            print(_told(line))
    name = f"attention_matching_{options.name}"
    before = RESULTS / f"{name}.json"
    if before.exists():  # kinds that were not run again stay
        ran = {line["kind"] for line in summary}
        summary += [line for line in json.loads(before.read_text())["rows"] if line["kind"] not in ran]
    save(name, {"first": FIRST, "last": LAST, "rows": summary})


def _told(line: dict[str, Any]) -> str:
    bits = line["bits"] or 16
    text = f"{line['kind']:8} {line['share']:6.1%} {bits:>2} bits {line['score']:20} {line['method']:8}"
    text += f" n={line['prompts']}"
    for number in ("kl", "same", "right"):
        apart = f"{line[f'{number}_over_drop']:+.3f} ± {line[f'{number}_over_drop_error'] or math.nan:.3f}"
        text += f"  {number} {line[number]:.3f} ({apart})"
    return f"{text}, full {line['full']:.3f}"


def _error(numbers: list[float]) -> float | None:
    return round(stdev(numbers) / len(numbers) ** 0.5, 4) if len(numbers) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--model", required=True, help="a folder with a model that has a calibration in the package")
    running.add_argument("--data", help="folder of LongBench records; none = needles alone")
    running.add_argument("--needles", type=int, default=3, help="prompts per task")
    running.add_argument("--records", type=int, default=2, help="per task")
    running.add_argument("--length", type=int, default=1024, help="tokens of the needles' prompts")
    running.add_argument("--longest", type=int, default=2000, help="tokens to which records are cut")
    running.add_argument("--answer", type=int, default=48, help="most tokens of an answer that are compared")
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--threads", type=int, default=1)
    for command in (running, commands.add_parser("table")):
        command.add_argument("--name", required=True, help="of the model, in the results")
    options = parser.parse_args()
    {"run": run, "table": table}[options.command](options)


if __name__ == "__main__":
    main()
