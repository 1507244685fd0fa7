"""How far a compressed cache leads the model away from what it does with the full one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction.internals import feed as feed_model

from .prefill import Inputs, after_forwards, feed


@dataclass(frozen=True)
class FullAnswer:
    """What the full cache said to one prompt.

    Attributes:
        tokens: its answer, with the token that ended it.
        logits: `[tokens, vocabulary]` on the CPU, the model's own, before each of these tokens.
    """

    tokens: tuple[int, ...]
    logits: Tensor


@contextmanager
def recorded_logits(model: Any, wanted: bool = True) -> Iterator[list[Tensor]]:
    """The logits `[rows, vocabulary]` after the last token of every forward inside this block, on the CPU.

    Nothing is recorded unless `wanted`.
    """
    logits: list[Tensor] = []
    with after_forwards(model, (lambda _, output: logits.append(output.logits[:, -1].cpu())) if wanted else None):
        yield logits


def identical_share(tokens: Sequence[int], answer: FullAnswer) -> float:
    """Share of the full cache's tokens that stand at the same place in `tokens`."""
    same = sum(ours == token for ours, token in zip(tokens, answer.tokens, strict=False))
    return same / len(answer.tokens)


def mean_kl(
    model: Any, inputs: Inputs, cache: DynamicCache, first_logits: Tensor, answers: Sequence[FullAnswer]
) -> list[float]:
    """KL divergence in nats of this cache's next-token distribution from the full cache's, mean over the answer.

    The full cache's answer is fed, one token per step. The first token counts, too; if the prompt is read in one
    forward, nothing has been evicted before it, and its divergence is 0.

    Args:
        cache: has seen the prompts; used up by this.
        first_logits: `[rows, vocabulary]`, after the prompts.
        answers: one per row.
    """
    longest = max(len(answer.tokens) for answer in answers)
    fed = torch.tensor([answer.tokens + (0,) * (longest - len(answer.tokens)) for answer in answers])
    ids, mask = inputs.extended(fed)
    width = inputs.ids.shape[1]
    sums, logits = torch.zeros(len(answers), dtype=torch.float64), first_logits
    for step in range(longest):
        if step:
            column = width + step
            logits = feed(model, ids[:, column - 1 : column], mask[:, :column], cache)
        full = torch.stack([answer.logits[min(step, len(answer.tokens) - 1)] for answer in answers])
        over = torch.tensor([step >= len(answer.tokens) for answer in answers])
        sums += divergence(full.to(logits.device), logits).double().cpu().masked_fill(over, 0)
    return [float(total) / len(answer.tokens) for total, answer in zip(sums, answers, strict=True)]


@torch.inference_mode()
def logits_along(
    model: Any, inputs: Inputs, cache: DynamicCache, first_logits: Tensor | None, answers: Sequence[FullAnswer]
) -> list[Tensor]:
    """The model's logits `[tokens, vocabulary]` before each token of an answer per row, fed in one forward.

    Args:
        cache: has seen the prompts; used up by this.
        first_logits: `[rows, vocabulary]`, after the prompts.
    """
    if first_logits is None:
        raise ValueError("the logits after the prompts were not recorded: settings.agreement does")
    longest = max(len(answer.tokens) for answer in answers)
    logits_so_far = first_logits[:, None].cpu()
    if longest > 1:
        # Whatever stands behind a row's own answer: nothing of that is looked at.
        fed = torch.tensor([answer.tokens[:-1] + (0,) * (longest - len(answer.tokens)) for answer in answers])
        ids, mask = inputs.extended(fed)
        rest = feed_model(model, ids[:, inputs.ids.shape[1] :], mask, cache, keep=0)
        logits_so_far = torch.cat([logits_so_far, rest.cpu()], dim=1)
    return [states[: len(answer.tokens)] for states, answer in zip(logits_so_far, answers, strict=True)]


def divergence(full: Tensor, logits: Tensor) -> Tensor:
    """KL(full || other) in nats of distributions given as logits `[rows, vocabulary]`: `[rows]` float32, >= 0."""
    expected, ours = full.float().log_softmax(-1), logits.float().log_softmax(-1)
    share = expected.exp()
    # What the full cache rules out adds nothing, ruled out by the other or not.
    return (share * (expected - ours)).masked_fill(share == 0, 0).sum(-1).clamp_min(0)
