"""Train gates as Attention-Gate does: by the loss of the language model, through its attention.

Attention-Gate (2410.12876): before each attention layer a gate says of each token and head whether later tokens may
attend to it; what it says is taken as yes or no in the forward and as a number between in the backward (straight
through), and the loss is the language model's plus a term that asks for a share of tokens that are let through.

Different here: the gate reads the token's own hidden state alone (Attention-Gate's is a small attention over all of
them), so that it can mark a token as it comes, and works in every cache; it speaks for KV heads; tokens nearer than
`DISTANCE` are attended to in any case, as no cache evicts them; the loss counts the tokens behind that distance; the
model is frozen, and no gradient passes from one gate to another through hidden states.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged_eviction.internals import DISTANCE, Progress, Window, model_fingerprint, split

from .fit import check_numbers, folded, read_facts, scale
from .gated_attention import Gatekeeper, gated, yes_or_no
from .gates import GateLayer, Gates
from .install import attention_modules

#: Rate of learning, at its highest.
_RATE = 5e-3
#: The first offset: everything is let through.
_OPEN = 2.0


@dataclass(frozen=True)
class StraightThrough:
    """How gates are trained by the language model's loss.

    Attributes:
        units: of the layer between hidden state and mark; 0 = a line.
        epochs: how often each window is read.
        seed: of the first weights and the order.
        keep: the share of tokens that is asked for: the budget, as a share of the text.
        weight: of the term that asks for it, next to the loss of the language model in nats.

    Raises:
        ValueError: a number is out of range.
    """

    units: int = 64
    epochs: int = 2
    seed: int = 0
    keep: float = 1 / 16
    weight: float = 5.0

    def __post_init__(self) -> None:
        check_numbers(self.units, self.epochs)
        if not 0 < self.keep < 1:
            raise ValueError(f"keep must be between 0 and 1, got {self.keep!r}.")
        if not self.weight > 0:
            raise ValueError(f"weight must be above 0, got {self.weight!r}.")


def train_gates(
    model: Any,
    windows: Sequence[Window],
    training: StraightThrough | None = None,
    progress: Progress = lambda tokens: None,
) -> Gates:
    """Train a gate for each layer that evicts, by the loss of the language model where gates shut out tokens.

    Gradients go through the model: the activations of a window are held, as in a training without an optimizer's
    numbers. Its weights stay as they are, and get no gradients. Attention is computed by an implementation of its own
    meanwhile, which holds `[heads, tokens, tokens]` numbers per layer.

    Args:
        model: a decoder, in evaluation mode.
        windows: see `fit_gates`; each is a step.
        training: how; None = the defaults.
        progress: called with the number of its tokens after each window that was trained on, each time it was.

    Raises:
        ValueError: no layer of this model can have a gate; too little text; or the attention of this model cannot be
            replaced.
    """
    training = training or StraightThrough()
    train, checks = split(windows)
    modules = attention_modules(model)
    with torch.inference_mode(False), torch.enable_grad(), _frozen(model), gated(model, modules) as keeper:
        school = _School(model, keeper, training, train[0])
        school.study(train, progress)
        held_out = school.check(checks)
        layers = {index: gate.layer() for index, gate in school.gates.items()}
    facts = {"loss": "straight_through", **{name: str(value) for name, value in asdict(training).items()}}
    return Gates(layers, model_fingerprint(model), {**read_facts(windows), **facts, **held_out})


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Within, nothing of the model gets a gradient."""
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in learning:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in learning:
            weight.requires_grad_(True)


class _Trainee(nn.Module):
    """A gate that learns: the logarithm of the odds that a token is let through.

    Args:
        states: `[tokens, hidden]`, some of what it will read: it learns how large the numbers are.
    """

    def __init__(self, states: Tensor, heads: int, units: int) -> None:
        super().__init__()
        hidden = states.shape[-1]
        self.inner = nn.Linear(hidden, units) if units else None
        self.outer = nn.Linear(units or hidden, heads)
        nn.init.constant_(self.outer.bias, _OPEN)
        self.mean, self.deviation = scale(states.float())
        self.to(states.device)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, kv_heads, tokens]`."""
        states = (hidden.float() - self.mean) / self.deviation
        if self.inner is not None:
            states = nn.functional.gelu(self.inner(states))
        odds: Tensor = self.outer(states)
        return odds.mT

    def layer(self) -> GateLayer:
        """The same for `gate:FILE`: the mark is the odds."""
        return folded(self.inner, self.outer, self.mean, self.deviation)


class _School:
    """The gates of a model, and the steps that change them.

    Args:
        first: a window to learn sizes from.
    """

    def __init__(self, model: Any, keeper: Gatekeeper, training: StraightThrough, first: Window) -> None:
        self._model, self._keeper, self._training = model, keeper, training
        with torch.no_grad():
            self._loss(first)
        keeper.check()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(training.seed)
            self.gates = {
                index: _Trainee(states.flatten(0, 1), keeper.heads[index], training.units)
                for index, states in sorted(keeper.hidden.items())
            }
        self._weights = [weight for gate in self.gates.values() for weight in gate.parameters()]
        self._steps = torch.optim.Adam(self._weights, _RATE)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def study(self, windows: Sequence[Window], progress: Progress) -> None:
        """Read the windows as often as there are epochs."""
        generator = torch.Generator().manual_seed(self._training.seed)
        epochs = [torch.randperm(len(windows), generator=generator).tolist() for _ in range(self._training.epochs)]
        order = [windows[at] for epoch in epochs for at in epoch]
        self._keeper.gates = self.gates
        for done, window in enumerate(order):
            for group in self._steps.param_groups:  # a tenth of the steps up, then down to nothing
                group["lr"] = _RATE * min((done + 1) / (0.1 * len(order) + 1), 1 - done / len(order))
            self._learn(window)
            progress(window.count)

    def _learn(self, window: Window) -> None:
        loss = self._loss(window)
        too_many = [(share - self._training.keep).abs().to(loss) for share in self._kept(window).values()]
        loss = loss + self._training.weight * torch.stack(too_many).mean()
        self._steps.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._steps.step()

    def _loss(self, window: Window) -> Tensor:
        """Of the language model, nats per token behind the first `DISTANCE`."""
        ids, mask = window.tokens, window.mask
        logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, DISTANCE:-1]
        labels = ids[:, DISTANCE + 1 :]
        if mask is not None:
            labels = labels.masked_fill(mask[:, DISTANCE + 1 :] == 0, -100)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten().to(logits.device))

    def _kept(self, window: Window) -> dict[int, Tensor]:
        """By layer, the share of tokens that is let through: a number with the gradient of a sigmoid."""
        shares = {}
        for index, odds in self._keeper.odds.items():
            hard = yes_or_no(odds)
            real = torch.ones_like(window.tokens) if window.mask is None else window.mask
            real = real[:, None].to(hard)
            shares[index] = (hard * real).sum() / (real.sum() * hard.shape[1])
        return shares

    # ---- report ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def check(self, windows: Sequence[Window]) -> dict[str, str]:
        """Of windows that were not trained on: nats per token with the full cache and where gates shut out tokens, and
        by layer the share of tokens that is let through; means, as JSON."""
        full, shut = [], []
        by_layer: dict[int, list[float]] = {index: [] for index in self.gates}
        for window in windows:
            self._keeper.gates = {}
            full.append(float(self._loss(window)))
            self._keeper.gates = self.gates
            shut.append(float(self._loss(window)))
            for index, share in self._kept(window).items():
                by_layer[index].append(float(share))
        loss = {"full": round(fmean(full), 4), "gated": round(fmean(shut), 4)}
        shares = {index: round(fmean(layer_shares), 4) for index, layer_shares in by_layer.items()}
        return {"held_out_loss": json.dumps(loss), "held_out_kept": json.dumps(shares)}
