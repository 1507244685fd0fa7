"""The calibration of a model: fitted scores of tokens, shares of heads and measured caches, in a file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..integration.models import paged_layers, shape_facts
from ..integration.weights import registered_digest, weights_digest
from ..naming.digests import content_digest
from ..naming.fitted import FittedFiles, Tensors
from ..naming.tensors import FileKind
from .measured import Measured
from .score import VERSION, LayerScore
from .shares import HeadShares

#: Name of the digest of the weights in fingerprints, see `integration.weights`.
WEIGHTS = "weights"
#: Value of "keys" in files whose scores read keys before rotary embedding; others read keys as cached.
_UNROTATED = "unrotated"
#: Shares of the tokens for which there are shares of heads.
_KEPT = "kept"
_SHARES = "shares"
#: The caches that were tried.
_MEASURED = "measured"


def fingerprint(config: Any) -> dict[str, str]:
    """The shape of a model by its configuration, and the digest of its weights if they are registered."""
    facts, digest = shape_facts(config.get_text_config(decoder=True)), registered_digest(config)
    return {name: str(value) for name, value in facts.items()} | ({} if digest is None else {WEIGHTS: digest})


def model_fingerprint(model: Any) -> dict[str, str]:
    """The fingerprint of a model, with the digest of its weights.

    Raises:
        ValueError: see `weights_digest`.
    """
    return {**fingerprint(model.config), WEIGHTS: weights_digest(model)}


def different_model(expected: Mapping[str, str], actual: Mapping[str, str]) -> str:
    """The differences between two fingerprints in words, such as "hidden_size 64 instead of 128"; "" = none. Facts that
    only one of them has do not count."""
    return ", ".join(
        f"{name} {actual[name]} instead of {value}"
        for name, value in expected.items()
        if name in actual and actual[name] != value
    )


def refuse_other_model(expected: Mapping[str, str], actual: Mapping[str, str], subject: str, remedy: str) -> None:
    """Refuse a file that was fitted to another model.

    Args:
        expected: fingerprint in the file.
        actual: fingerprint of the present model.
        subject: the beginning of the message, such as "These gates were trained for".
        remedy: the last sentence of the message.

    Raises:
        ValueError: with what differs.
    """
    different = different_model(expected, actual)
    if different:
        raise ValueError(f"{subject} another model: {different}. {remedy}")


@dataclass(frozen=True)
class Calibration:
    """The scores of all layers of a model that evict.

    Attributes:
        layers: by index in the model.
        model: see `model_fingerprint`.
        facts: facts about the fit: texts, tokens, version, correlations.
        unrotated: True = it scores keys before rotary embedding, False = keys as cached. The direction of a rotated key
            depends on its position, so such a score is valid only for positions like those of the fit.
        shares: shares of the budget, for `allocator="heads"`; None = none were learned.
        measured: the caches that `prepare` tried, and their divergences; None = none.
    """

    layers: Mapping[int, LayerScore]
    model: Mapping[str, str]
    facts: Mapping[str, str] = field(default_factory=dict)
    unrotated: bool = False
    shares: HeadShares | None = None
    measured: Measured | None = None

    @cached_property
    def digest(self) -> str:
        """A digest of the scores and shares, 32 hexadecimal digits."""
        layers = {index: layer.tensors() for index, layer in self.layers.items()}
        tensors = {f"{index}.{name}": part for index, parts in layers.items() for name, part in parts.items()}
        settings = f"unrotated {self.unrotated}"
        if self.shares is not None:
            settings += f" kept {self.shares.kept}"
            tensors |= {f"{index}.shares": table for index, table in self.shares.layers.items()}
        return content_digest(settings, tensors)[:32]

    def check_model(self, config: Any) -> None:
        """Refuse another model, or other weights if they are registered.

        Raises:
            ValueError: with what differs.
        """
        remedy = "Make one for this model with `paged-eviction prepare`."
        refuse_other_model(self.model, fingerprint(config), "This calibration was made for", remedy)
        missing = sorted(set(paged_layers(config)) - set(self.layers))
        if missing:
            raise ValueError(f"This calibration lacks layers of this model that evict: {missing}. {remedy}")

    def score(self, keys: Tensor, values: Tensor, positions: Tensor, layer_idx: int, first_head: int = 0) -> Tensor:
        """Score the tokens of a layer: `[batch, kv_heads, tokens]` float32.

        Args:
            keys, values: `[batch, kv_heads, tokens, dim]`; keys before or after rotary embedding, see `unrotated`.
            positions: `[batch, kv_heads, tokens]`.
            first_head: index in the layer of the first of these heads.

        Raises:
            ValueError: the layer belongs to another model.
        """
        layer = self.layers.get(layer_idx)
        if layer is None:
            indices = ", ".join(map(str, sorted(self.layers)))
            raise ValueError(f"This calibration has no layer {layer_idx}: it was made for the layers {indices}.")
        heads = keys.shape[1]
        if first_head + heads > layer.kv_heads or keys.shape[3] != layer.key_dim or values.shape[3] != layer.value_dim:
            raise ValueError(
                f"This calibration was made for a model whose layer {layer_idx} has {layer.kv_heads} KV heads with "
                f"keys of {layer.key_dim} and values of {layer.value_dim} dimensions; this one has "
                f"{first_head + heads} or more with {keys.shape[3]} and {values.shape[3]}."
            )
        return self._placed(layer_idx, keys.device, first_head, heads)(keys, values, positions)

    @cached_property
    def _copies(self) -> dict[tuple[int, torch.device, int, int], LayerScore]:
        return {}

    def _placed(self, layer_idx: int, device: torch.device, first_head: int, heads: int) -> LayerScore:
        """A layer where its keys are: copied there once, because a copy makes an accelerator wait."""
        key = (layer_idx, device, first_head, heads)
        if key not in self._copies:
            self._copies[key] = self.layers[layer_idx].to(device, slice(first_head, first_head + heads))
        return self._copies[key]


def _made(layers: Tensors, metadata: dict[str, Any]) -> Calibration:
    scores = {index: LayerScore.of(parts) for index, parts in layers.items()}
    shares = None
    if _KEPT in metadata:
        kept_shares = tuple(float(share) for share in json.loads(metadata[_KEPT]))
        shares = HeadShares(kept_shares, {index: parts[_SHARES] for index, parts in layers.items()})
    if metadata.get("keys", _UNROTATED) != _UNROTATED:
        raise ValueError(f"its scores read keys that are {metadata['keys']!r}, and not {_UNROTATED!r}")
    measured = Measured.of(metadata[_MEASURED]) if _MEASURED in metadata else None
    return Calibration(
        scores, metadata["model"], metadata["facts"], metadata.get("keys") == _UNROTATED, shares, measured
    )


_FILES = FittedFiles(FileKind("calibration", VERSION, "feature_version"), "paged-eviction prepare", _made, "profile")
load_calibration = _FILES.load


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration; `load_calibration` reads it back bit by bit."""
    layers = {index: layer.tensors() for index, layer in calibration.layers.items()}
    more = {"keys": _UNROTATED} if calibration.unrotated else {}
    if calibration.shares is not None:
        more[_KEPT] = json.dumps(calibration.shares.kept)
        layers = {index: {**parts, _SHARES: calibration.shares.layers[index]} for index, parts in layers.items()}
    if calibration.measured is not None:
        more[_MEASURED] = calibration.measured.text
    _FILES.save(path, layers, calibration.model, calibration.facts, **more)
