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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged_eviction.internals import DISTANCE, Window, split

from ..fitted import Progress
from .gated_attention import GatedLayer, gated, yes_or_no
from .gates import GateLayer
from .install import attention_modules
from .network import Network
from .training import Training

#: Rate of learning, at its highest.
_RATE = 5e-3
#: The first offset: everything is let through.
_OPEN = 2.0
#: Weight of the term that asks for a share of tokens, next to the loss of the language model in nats.
_WEIGHT = 5.0


def train_through_model(
    model: Any, windows: Sequence[Window], training: Training, progress: Progress
) -> tuple[dict[int, GateLayer], dict[str, str]]:
    """Train a gate for each layer that evicts, by the loss of the language model where gates shut out tokens.

    Gradients go through the model: the activations of a window are held, as in a training without an optimizer's
    numbers. Its weights stay as they are, and get no gradients. Attention is computed by an implementation of its own
    meanwhile, which holds `[heads, tokens, tokens]` numbers per layer.

    Args:
        windows: see `fit_gates`; each is a step.

    Returns:
        The gates, and how well they do on held-out windows.

    Raises:
        ValueError: no layer of this model can have a gate, or its attention cannot be replaced.
    """
    train, held_out = split(windows)
    modules = attention_modules(model)
    with torch.inference_mode(False), torch.enable_grad(), _frozen(model), gated(model, modules) as layers:
        networks = _networks(model, layers, train[0], training.units)
        generator = torch.Generator().manual_seed(0)
        epochs = [torch.randperm(len(train), generator=generator).tolist() for _ in range(training.rounds)]
        order = [train[at] for epoch in epochs for at in epoch]
        weights = [weight for network in networks.values() for weight in network.parameters()]
        optimizer = torch.optim.Adam(weights, _RATE)
        for done, window in enumerate(order):
            for group in optimizer.param_groups:  # a tenth of the steps up, then down to nothing
                group["lr"] = _RATE * min((done + 1) / (0.1 * len(order) + 1), 1 - done / len(order))
            loss = _loss(model, window)
            too_many = [(share - training.keep).abs().to(loss) for share in _kept(layers, window).values()]
            loss = loss + _WEIGHT * torch.stack(too_many).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            progress(done + 1, len(order))
        facts = _check(model, layers, held_out)
        return {index: network.layer() for index, network in networks.items()}, facts


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


def _networks(model: Any, layers: Mapping[int, GatedLayer], first: Window, units: int) -> dict[int, Network]:
    """Gates that let everything through, for hidden states as large as those of a window."""
    with torch.no_grad():
        _loss(model, first)
    silent = [index for index, layer in layers.items() if not layer.kv_heads]
    if silent:
        raise ValueError(
            f"The attention of layers {silent} is not called by transformers' AttentionInterface, so no gate can shut "
            "out a token there: train by regression."
        )
    networks = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for index, layer in sorted(layers.items()):
            if layer.hidden is not None:
                networks[index] = Network(layer.hidden.flatten(0, 1), layer.kv_heads, units)
                nn.init.constant_(networks[index].outer.bias, _OPEN)
                layer.gate = networks[index]
    return networks


def _loss(model: Any, window: Window) -> Tensor:
    """Of the language model, nats per token behind the first `DISTANCE`."""
    ids, mask = window.tokens, window.mask
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, DISTANCE:-1]
    labels = ids[:, DISTANCE + 1 :]
    if mask is not None:
        labels = labels.masked_fill(mask[:, DISTANCE + 1 :] == 0, -100)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten().to(logits.device))


def _kept(layers: Mapping[int, GatedLayer], window: Window) -> dict[int, Tensor]:
    """By layer, the share of tokens that is let through: a number with the gradient of a sigmoid."""
    shares = {}
    real = torch.ones_like(window.tokens) if window.mask is None else window.mask
    for index, layer in layers.items():
        if layer.odds is not None:
            hard = yes_or_no(layer.odds)
            counted = real[:, None].to(hard)
            shares[index] = (hard * counted).sum() / (counted.sum() * hard.shape[1])
    return shares


@torch.no_grad()
def _check(model: Any, layers: Mapping[int, GatedLayer], windows: Sequence[Window]) -> dict[str, str]:
    """Of windows that were not trained on: nats per token with the full cache and where gates shut out tokens, and by
    layer the share of tokens that is let through; means, as JSON."""
    shut, shares = [], []
    for window in windows:
        shut.append(float(_loss(model, window)))
        shares.append({index: float(share) for index, share in _kept(layers, window).items()})
    for layer in layers.values():
        layer.gate = None
    full = [float(_loss(model, window)) for window in windows]
    kept = {index: round(fmean(share[index] for share in shares), 4) for index in layers}
    loss = {"full": round(fmean(full), 4), "gated": round(fmean(shut), 4)}
    return {"held_out_loss": json.dumps(loss), "held_out_kept": json.dumps(kept)}
