"""Train gates for a model: forward passes over some text, then a few minutes of steps for each layer by itself."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction.internals import (
    DISTANCE,
    HELD_OUT,
    Window,
    model_fingerprint,
    spearman,
    split,
    text_facts,
)

from ..fitted import Progress, no_progress
from .gates import GateLayer, Gates
from .network import Network, scale
from .samples import collect, read_samples
from .straight_through import train_through_model
from .training import Training

#: Tokens of one step.
_BATCH = 1024
#: Highest rate of learning, times the root of the number of inputs; no higher than the second number.
_RATE, _HIGHEST_RATE = 0.25, 0.03
#: What the square of a weight of a line costs, for features of deviation 1 and per sample.
_PENALTY = 1e-2
#: The smallest target that its logarithm is taken of.
_SMALLEST = 1e-6


def fit_gates(
    model: Any,
    windows: Sequence[Window],
    training: Training | None = None,
    *,
    probe_ids: Sequence[int] = (),
    folder: Path | None = None,
    progress: Progress = no_progress,
) -> Gates:
    """Train a gate for each layer that evicts.

    By a regression a gate learns what later tokens of some text really do with each token. Nothing is propagated back
    through the model; its attention implementation is "paged_eviction" meanwhile. Hidden states go to files:
    tokens x hidden size x layers numbers. In every case the model is left as it was found.

    Args:
        model: a decoder, in evaluation mode.
        windows: of any text, some hundred tokens each or more. Every fourth is kept for checking.
        training: how; None = the defaults.
        probe_ids: ids of what asks the model to repeat, such as `recipes.procedures.probe.REPEAT`, for the target
            "kvzip".
        folder: in which a temporary one for the samples is made; None = that of the system.

    Raises:
        ValueError: no layer of this model can have a gate; or too little text.
    """
    training = training or Training()
    split(windows)  # refuses too few
    if training.target == "straight_through":
        layers, held_out = train_through_model(model, windows, training, progress)
    else:
        with tempfile.TemporaryDirectory(dir=folder) as samples:
            layers, held_out = _regression(model, windows, training, probe_ids, Path(samples), progress)
    settings = {name: str(value) for name, value in asdict(replace(training, epochs=training.rounds)).items()}
    facts = {**text_facts(windows), "distance": str(DISTANCE), **settings}
    return Gates(layers, model_fingerprint(model), {**facts, **held_out})


def _regression(
    model: Any, windows: Sequence[Window], training: Training, probe: Sequence[int], folder: Path, progress: Progress
) -> tuple[dict[int, GateLayer], dict[str, str]]:
    indices = collect(model, windows, training.target, probe, folder, progress)
    numbers = range(len(windows))
    train, checks = ([at for at in numbers if (at % HELD_OUT == 1) is held] for held in (False, True))
    gates, ranks = {}, {}
    for done, index in enumerate(indices, len(windows) + 1):
        hidden, target = read_samples(folder, index, train)
        if not len(hidden):
            raise ValueError(f"No window is longer than {DISTANCE} tokens: there is nothing to train on.")
        gates[index] = fit_network(hidden, target, training) if training.units else fit_line(hidden, target)
        ranks[index] = _ranks(gates[index], [read_samples(folder, index, [at]) for at in checks])
        progress(done, len(windows) + len(indices))
    return gates, {"held_out_spearman": json.dumps(ranks)}


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
    generator = torch.Generator().manual_seed(0)
    size = target.mean(0).clamp_min(_SMALLEST)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(0)
        network = Network(hidden, target.shape[1], training.units)
        rounds = training.rounds * -(-len(hidden) // _BATCH)
        rate = min(_RATE / hidden.shape[1] ** 0.5, _HIGHEST_RATE)
        optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=rounds + 1, pct_start=0.1)
        for _ in range(training.rounds):
            for batch in torch.randperm(len(hidden), generator=generator).split(_BATCH):
                log_marks = network(hidden[batch]).clamp_max(20)
                loss = (log_marks.exp() - target[batch] / size * log_marks).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    gate = network.layer()
    return replace(gate, offset=gate.offset + size.log())


def _ranks(gate: GateLayer, windows: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """The correlation of ranks of marks and target by KV head, the mean over windows that were not trained on."""
    pairs = [(gate.logarithm(hidden).mT.contiguous(), target.mT.contiguous()) for hidden, target in windows]
    ranks = [spearman(*pair) for pair in pairs if pair[0].shape[1] > 1]
    return [round(value, 4) for value in torch.stack(ranks).mean(0).tolist()] if ranks else []
