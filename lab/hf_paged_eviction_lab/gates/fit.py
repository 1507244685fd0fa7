"""Train gates for a model: forward passes over some text, then a few minutes of steps for each layer by itself."""

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged_eviction import __version__
from hf_paged_eviction.internals import DISTANCE, HELD_OUT, Progress, Window, model_fingerprint, spearman, split

from .gates import GateLayer, Gates
from .samples import Samples, Target, digest

#: Tokens of one step.
_BATCH = 1024
#: Highest rate of learning, times the root of the number of inputs; no higher than the second number.
_RATE, _HIGHEST_RATE = 0.25, 0.03
#: What the square of a weight of a line costs, for features of deviation 1 and per sample.
_PENALTY = 1e-2
#: The smallest target that its logarithm is taken of.
_SMALLEST = 1e-6
#: Of the tokens of held-out windows, the share that is looked at for `held_out_found`.
_SHARE = 1 / 16


@dataclass(frozen=True)
class Training:
    """How gates are trained.

    Attributes:
        target: see `gate_samples.Target`.
        units: of the layer between hidden state and mark; 0 = a line, by ridge regression on the target's logarithm.
        epochs: how often each token is looked at; of no meaning for a line.
        seed: of the first weights and the order.

    Raises:
        ValueError: a number is out of range.
    """

    target: Target = "attention"
    units: int = 64
    epochs: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        check_numbers(self.units, self.epochs)


def check_numbers(units: int, epochs: int) -> None:
    """Refuse units and epochs that mean nothing.

    Raises:
        ValueError: a number is out of range.
    """
    for name, value, least in (("units", units, 0), ("epochs", epochs, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def fit_gates(
    model: Any,
    windows: Sequence[Window],
    training: Training | None = None,
    *,
    probe_ids: Sequence[int] = (),
    folder: Path | None = None,
    progress: Progress = lambda tokens: None,
    layers: Callable[[Sequence[int]], Iterable[int]] = lambda indices: indices,
) -> Gates:
    """Train a gate for each layer that evicts, on what later tokens of some text really do with each token.

    The model is left as it was found; its attention implementation is "paged_eviction" meanwhile, and nothing is
    propagated back through it. Hidden states go to files: tokens x hidden size x layers numbers.

    Args:
        model: a decoder, in evaluation mode.
        windows: of any text, some hundred tokens each or more. Every fourth is kept for checking.
        training: how; None = the defaults.
        probe_ids: ids of what asks the model to repeat, such as `recipes.procedures.probe.REPEAT`, for the target
            "kvzip".
        folder: in which a temporary one for the samples is made; None = that of the system.
        progress: called after each window with the number of its tokens.
        layers: given the indices of the layers, yields them one by one as they are trained: for a progress bar.

    Raises:
        ValueError: no layer of this model can have a gate; or too little text.
    """
    training = training or Training()
    train, checks = _numbers(windows)
    gates, ranks, best = {}, {}, {}
    with tempfile.TemporaryDirectory(dir=folder) as where:
        samples = Samples(Path(where), model, windows, training.target, probe_ids)
        samples.collect(progress)
        for index in layers(samples.layers):
            hidden, target = samples.of(index, train)
            if not len(hidden):
                raise ValueError(f"No window is longer than {DISTANCE} tokens: there is nothing to train on.")
            line = training.units == 0
            gates[index] = fit_line(hidden, target) if line else fit_network(hidden, target, training)
            ranks[index], best[index] = _check(gates[index], samples, index, checks)
    facts = {name: str(value) for name, value in asdict(training).items()}
    held_out = {"held_out_spearman": json.dumps(ranks), "held_out_found": json.dumps(best)}
    return Gates(gates, model_fingerprint(model), {**read_facts(windows), **facts, **held_out})


def _numbers(windows: Sequence[Window]) -> tuple[list[int], list[int]]:
    """Of the windows to train on, and to check with."""
    split(windows)  # refuses too few
    numbers = range(len(windows))
    return [at for at in numbers if at % HELD_OUT != 1], [at for at in numbers if at % HELD_OUT == 1]


# ---- one layer ------------------------------------------------------------------------------------------------------


def fit_line(hidden: Tensor, target: Tensor) -> GateLayer:
    """Ridge regression of the target's logarithm on the hidden state, in closed form.

    Args:
        hidden: `[n, hidden]` float32.
        target: `[n, kv_heads]` float32, not negative.
    """
    mean, deviation = scale(hidden)
    states = ((hidden - mean) / deviation).double()
    wanted = target.clamp_min(_SMALLEST).log().double()
    middle = wanted.mean(0)
    matrix = states.mT @ states / len(states)
    matrix = matrix + torch.diag(torch.full((len(matrix),), _PENALTY, dtype=matrix.dtype))
    weights = torch.linalg.solve(matrix, states.mT @ (wanted - middle) / len(states))
    weights = (weights / deviation[:, None].double()).mT
    return GateLayer(weights.float().contiguous(), (middle - weights @ mean.double()).float())


def fit_network(hidden: Tensor, target: Tensor, training: Training) -> GateLayer:
    """A layer of units between, trained so that the mark is the target's mean: Poisson regression.

    Its loss, :math:`e^f - y f`, takes targets that are mostly next to nothing, and does not ask for the logarithm of
    those that are nothing; what it foretells can be added up over heads and tokens.

    Args:
        hidden, target: see `fit_line`.
    """
    generator = torch.Generator().manual_seed(training.seed)
    mean, deviation = scale(hidden)
    size = target.mean(0).clamp_min(_SMALLEST)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(training.seed)
        inner, outer = nn.Linear(hidden.shape[1], training.units), nn.Linear(training.units, target.shape[1])
        network = nn.Sequential(inner, nn.GELU(), outer)
        rounds = training.epochs * -(-len(hidden) // _BATCH)
        rate = min(_RATE / hidden.shape[1] ** 0.5, _HIGHEST_RATE)
        optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=rounds + 1, pct_start=0.1)
        for _ in range(training.epochs):
            for batch in torch.randperm(len(hidden), generator=generator).split(_BATCH):
                log_marks = network((hidden[batch] - mean) / deviation).clamp_max(20)
                loss = (log_marks.exp() - target[batch] / size * log_marks).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    gate = folded(inner, outer, mean, deviation)
    return replace(gate, offset=gate.offset + size.log())


def folded(inner: nn.Linear | None, outer: nn.Linear, mean: Tensor, deviation: Tensor) -> GateLayer:
    """A gate of what was trained on hidden states of mean 0 and deviation 1."""
    first = outer if inner is None else inner
    weights = first.weight.detach() / deviation
    offset = first.bias.detach() - weights @ mean
    if inner is None:
        return GateLayer(weights.contiguous(), offset)
    return GateLayer(outer.weight.detach().clone(), outer.bias.detach().clone(), weights.contiguous(), offset)


def scale(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each number; of one that hardly varies 1, so that it is not blown up."""
    deviation = hidden.std(0, unbiased=False)
    return hidden.mean(0), torch.where(deviation > 1e-6, deviation, 1.0)


# ---- result ---------------------------------------------------------------------------------------------------------


def _check(gate: GateLayer, samples: Samples, index: int, windows: Sequence[int]) -> list[list[float]]:
    """How well a gate foretells the target in windows that it was not trained on, by KV head: the correlation of ranks,
    and what the best sixteenth of the tokens by mark gets, of what the best sixteenth gets. Means over windows."""
    rows = []
    for window in windows:
        hidden, target = samples.of(index, [window])
        if len(hidden) < 2:
            continue
        marks, target = gate.logarithm(hidden).mT.contiguous(), target.mT.contiguous()
        count = max(1, int(len(hidden) * _SHARE))
        best = target.topk(count, dim=-1).values.sum(-1).clamp_min(_SMALLEST)
        chosen = target.gather(-1, marks.topk(count, dim=-1).indices).sum(-1)
        rows.append(torch.stack([spearman(marks, target).float(), chosen / best]))
    means = torch.stack(rows).mean(0) if rows else torch.full((2, gate.kv_heads), float("nan"))
    return [[round(value, 4) for value in row] for row in means.tolist()]


def read_facts(windows: Sequence[Window]) -> dict[str, str]:
    """What a file of gates tells of the text that it was made from, and of what made it."""
    return {
        "hf_paged_eviction": __version__,
        "tokens": str(sum(window.count for window in windows)),
        "windows": str(len(windows)),
        "digest": digest(windows),
        "distance": str(DISTANCE),
    }
