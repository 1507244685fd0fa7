"""Train gates for a model: forward passes over some text, then steps of each small network alone."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged_eviction.internals import (
    DISTANCE,
    HELD_OUT,
    PAGED_EVICTION,
    Seen,
    model_fingerprint,
    spearman,
    text_facts,
    usable,
    using,
    watch,
)

from ..fitted import Progress, no_progress
from .gates import GateLayer, Gates
from .modules import Hook, attention_modules, hidden_states, hooked

#: Tokens of one step.
_BATCH = 1024
#: Highest learning rate, times the root of the hidden size; and its upper bound.
_RATE, _HIGHEST_RATE = 0.25, 0.03
#: The smallest mean target, so that its logarithm is finite.
_SMALLEST = 1e-6

#: Of one layer and window: hidden states `[n, hidden]` in the model's dtype and targets `[n, kv_heads]` float32.
Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Training:
    """How gates are trained.

    Attributes:
        units: width of the layer between hidden state and scores.
        epochs: how often each token is used.
    """

    units: int = 64
    epochs: int = 6


def fit_gates(
    model: Any,
    windows: Sequence[Tensor],
    training: Training | None = None,
    progress: Progress = no_progress,
) -> Gates:
    """Train a gate for each layer that evicts.

    The target of a token is the largest attention weight that it gets from a query at least 64 tokens later (the mean
    over the query heads of a group). The model is left as it was found; meanwhile its attention implementation is
    "paged_eviction". The hidden states of all windows are held in memory on the CPU: tokens x hidden size x layers
    numbers in the model's dtype. The fact "held_out_spearman" says how well the scores rank the tokens of every fourth
    window, by layer a number for each KV head.

    Args:
        model: a decoder, in evaluation mode.
        windows: `[rows, tokens]` int64 each, of any text, some hundred tokens long or more.
        training: how; None = the defaults.
        progress: counts windows, then layers.

    Raises:
        ValueError: no layer of this model can have a gate, or there is too little text.
    """
    training = training or Training()
    samples = collect(model, windows, progress)
    layers, ranks = {}, {}
    for done, (index, of_layer) in enumerate(samples.items(), 1):
        train = [sample for at, sample in enumerate(of_layer) if at % HELD_OUT != 1]
        layers[index] = train_layer(train, training)
        ranks[index] = _ranks(layers[index], of_layer[1::HELD_OUT])
        progress(len(windows) + done, len(windows) + len(samples))
    settings = {name: str(value) for name, value in asdict(training).items()}
    facts = {**text_facts(windows), "distance": str(DISTANCE), **settings, "held_out_spearman": json.dumps(ranks)}
    return Gates(layers, model_fingerprint(model), facts)


def collect(model: Any, windows: Sequence[Tensor], progress: Progress = no_progress) -> dict[int, list[Sample]]:
    """Let the model read the windows: a sample of each, by layer. See `fit_gates` for errors."""
    modules = attention_modules(model)
    long_enough = [window for window in windows if window.shape[1] > DISTANCE + 1]
    if len(long_enough) < 2:
        raise ValueError(
            f"Gates need at least 2 windows of more than {DISTANCE + 1} tokens, one of them to check with; got "
            f"{len(long_enough)}."
        )
    samples: dict[int, list[Sample]] = {index: [] for index in modules}
    hidden: dict[int, Tensor] = {}

    def note_hidden(index: int) -> Hook:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden[index] = hidden_states(args, kwargs).detach()

        return hook

    def note(seen: Seen) -> None:
        states = usable(hidden.pop(seen.layer_idx)[:, None])[0]
        samples[seen.layer_idx].append((states.cpu(), usable(seen.future).mT.float().cpu().contiguous()))

    hooks = {module: note_hidden(index) for index, module in modules.items()}
    with using(model, PAGED_EVICTION), hooked(hooks):
        for done, window in enumerate(long_enough, 1):
            watch(model, window, note)
            progress(done, len(windows) + len(modules))
    return samples


def train_layer(samples: Sequence[Sample], training: Training) -> GateLayer:
    """Train the gate of one layer by Poisson regression, so that a score is the expected target.

    The loss, :math:`e^f - y f`, needs no logarithm of targets that are nearly 0, and its minimum is the mean of the
    target: scores can be averaged over heads and tokens. The same samples give the same gate.
    """
    hidden, target = (torch.cat(parts) for parts in zip(*samples, strict=True))
    size = target.mean(0).clamp_min(_SMALLEST)
    rate = min(_RATE / hidden.shape[1] ** 0.5, _HIGHEST_RATE)
    steps = training.epochs * -(-len(hidden) // _BATCH)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(0)
        network = _Network(hidden, target.shape[1], training.units)
        optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.1)
        for _ in range(training.epochs):
            for batch in torch.randperm(len(hidden)).split(_BATCH):
                log_scores = network(hidden[batch]).clamp_max(20)
                loss = (log_scores.exp() - target[batch] / size * log_scores).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return network.layer(size)


class _Network(nn.Module):
    """A gate that learns, of hidden states of mean 0 and deviation 1.

    Args:
        hidden: `[n, hidden]`, the hidden states that it will read.
        heads: number of KV heads.
        units: see `Training`.
    """

    def __init__(self, hidden: Tensor, heads: int, units: int) -> None:
        super().__init__()
        self._inner, self._outer = nn.Linear(hidden.shape[1], units), nn.Linear(units, heads)
        deviation, self._mean = torch.std_mean(hidden.float(), 0, unbiased=False)
        self._deviation = torch.where(deviation > 1e-6, deviation, 1.0)  # a channel that never varies stays small

    def forward(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` -> logarithms `[n, heads]`."""
        states = (hidden.float() - self._mean) / self._deviation
        log_scores: Tensor = self._outer(nn.functional.gelu(self._inner(states)))
        return log_scores

    def layer(self, size: Tensor) -> GateLayer:
        """The same function, of plain hidden states, of targets that were divided by `size` `[heads]`."""
        weights = (self._inner.weight.detach() / self._deviation).contiguous()
        offset = self._inner.bias.detach() - weights @ self._mean
        return GateLayer(weights, offset, self._outer.weight.detach(), self._outer.bias.detach() + size.log())


def _ranks(gate: GateLayer, samples: Sequence[Sample]) -> list[float]:
    """Rank correlation of score and target for each KV head, the mean over windows."""
    ranks = [spearman(gate.log_scores(hidden).mT.contiguous(), target.mT.contiguous()) for hidden, target in samples]
    return [round(value, 4) for value in torch.stack(ranks).mean(0).tolist()]
