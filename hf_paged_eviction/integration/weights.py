"""A digest of a model's weights, which tells models of the same shape apart."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..naming.by_object import ByObject

#: Number of values that are read of each tensor (all of a smaller one).
SAMPLE = 16_384
#: Rises when the digests of unchanged weights change.
_VERSION = 1
#: Steps in which small numbers are told apart: GGUF files of Gemma hold norms plus one, which costs the last bits.
_STEPS = 2.0**20
#: Parts of a name that stand for a wrapper: of torch.compile and of PEFT.
_WRAPPERS = frozenset({"_orig_mod", "base_layer", "original_module"})
#: The wrapper of the first FSDP, by name: importing it takes time.
_FLAT = "FullyShardedDataParallel"
#: Registered digests, by configuration.
_REGISTERED = ByObject[str]()


def weights_digest(model: Any) -> str:
    """A digest of the weights of a model: 32 hexadecimal digits.

    It reads a fixed sample of every tensor, rounded to values that bfloat16 and float16 both represent. So these have
    the same digest: copies in float32 and bfloat16, a GGUF file that transformers has dequantised, a file saved from
    any of these, and a float16 copy of weights that were published in bfloat16 or float16 (a float16 copy of other
    weights is rounded twice). The digest includes the names of the tensors, without prefixes that wrappers add; tied
    weights count once. Quantised layers (bitsandbytes, GPTQ, torchao, GGUF that stays packed) have another digest than
    the weights that they were made from. Of adapters (PEFT) only active ones count, so `disable_adapter()` gives the
    digest of the base model. A change to a few rows of a large matrix may go unnoticed.

    Args:
        model: on any devices, also if accelerate keeps weights in other memory or on disk. If the model is split over
            processes, all of them have to call this.

    Raises:
        TypeError: `model` is not a module.
        ValueError: weights are on the meta device, or some are missing, or `FullyShardedDataParallel` holds them
            (`fully_shard` works).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}.")
    root = _unwrapped(model)
    digests = {name: _tensor_digest(name, tensor) for name, tensor in _tensors(root)}
    if not digests:
        raise ValueError(f"{type(root).__name__} has no weights, so there is no digest of them.")
    _count_tied_once(root, digests)
    return _digest_of([*digests.items(), *_scalings(root)])


def _digest_of(parts: Iterable[tuple[str, str]]) -> str:
    whole = hashlib.sha256(f"weights {_VERSION}\n".encode())
    for name, digest in sorted(parts):
        whole.update(f"{name} {digest}\n".encode())
    return whole.hexdigest()[:32]


def register_weights(model: Any) -> str:
    """Register the weights of a model for caches that are made from `model.config`; returns their digest.

    A config does not know its weights. Without this call, no file that belongs to them can be found or checked. Call it
    again after the weights have changed.

    Raises:
        TypeError, ValueError: see `weights_digest`.
    """
    digest = weights_digest(model)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        _REGISTERED[config] = digest
    return digest


def register_checkpoint(config: Any, folder: Path) -> str | None:
    """Register the weights of a checkpoint as `register_weights` does, without building the model.

    The digest is that of the model if its tensors have the same names and shapes in the files, as in most checkpoints
    of decoders. Otherwise no profile has it.

    Args:
        config: the configuration of the model.
        folder: its folder, with `model.safetensors` or parts of it.

    Returns:
        the digest; None = there are no such files.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = {str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
    elif whole.is_file():
        names = {whole.name}
    else:
        return None
    digests: dict[str, str] = {}
    for file_name in sorted(names):
        with safe_open(folder / file_name, "pt") as file:  # maps the file: only samples are read
            digests |= {name: _tensor_digest(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    first = next((digest for name, digest in digests.items() if name.endswith("embed_tokens.weight")), None)
    if first is not None and digests.get("lm_head.weight") == first:
        del digests["lm_head.weight"]
    digest = _digest_of(digests.items())
    for one in (config, config.get_text_config(decoder=True)):
        _REGISTERED[one] = digest
    return digest


def registered_digest(config: Any) -> str | None:
    """The digest of the weights that a configuration belongs to; None if they are not registered.

    Args:
        config: `model.config`, that very object or its text part.
    """
    return _REGISTERED.get(config)


# ---- which tensors ---------------------------------------------------------------------------------------------------


def without_parallel(model: Any) -> Any:
    """The model that `DataParallel` or `DistributedDataParallel` wraps, which has neither its configuration nor its
    methods; another model is returned as it is.

    Raises:
        ValueError: `FullyShardedDataParallel` holds the weights, see `weights_digest`.
    """
    if isinstance(model, nn.Module) and any(type(one).__name__ == _FLAT for one in model.modules()):
        raise ValueError(
            f"{_FLAT} replaces the weights by parts of them without their names and shapes, so it cannot be told which "
            "model this is, and only the wrapper itself, not the model in it, can be called. Use "
            "torch.distributed.fsdp.fully_shard, or pass the model before it is wrapped."
        )
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def is_split(model: nn.Module) -> bool:
    """Whether each process holds a part of the weights, so that all have to call the model together."""
    tensors = chain(model.parameters(), model.buffers())
    return (getattr(model, "tp_size", None) or 1) > 1 or any(isinstance(tensor, DTensor) for tensor in tensors)


def _unwrapped(model: Any) -> Any:
    while True:
        model = without_parallel(model)
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
                raise ValueError(
                    "This adapter is a learned prompt (prompt learning of PEFT), not weights of the model: there "
                    "is no digest of both together. Use the digest of model.get_base_model()."
                )
            model = model.get_base_model()
        else:
            return model


def _tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that are saved with the model, by name, each once; of adapters those that are active."""
    adapters = {_plain(path): module for path, module in root.named_modules() if hasattr(module, "active_adapters")}
    adapters.pop("", None)  # the model itself, which has only the names of its adapters
    sharded = (getattr(root, "tp_size", None) or 1) > 1
    seen: set[int] = set()
    for path, module in root.named_modules():
        saved = {
            name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set
        }
        for name, tensor in {**module._parameters, **saved}.items():
            full = _plain(f"{path}.{name}" if path else name)
            if tensor is None or id(tensor) in seen or not _is_active(full, adapters):
                continue
            seen.add(id(tensor))
            sharded = sharded and not isinstance(tensor, DTensor)
            yield full, _loaded(full, tensor, module, name)
    if sharded:
        raise ValueError(
            "This model is split over processes, and it is not known which part this process holds, so its weights "
            "have no digest. Load it with a transformers release whose tensor parallelism uses DTensor (5.23 or "
            "later)."
        )


def _plain(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _is_active(name: str, adapters: dict[str, Any]) -> bool:
    """Whether a tensor takes part: all do but those of adapters that are switched off, or merged into the weights."""
    parts = name.split(".")
    for end in range(1, len(parts) - 1):
        layer = adapters.get(".".join(parts[:end]))
        if layer is not None and parts[end] in _containers(layer):
            return parts[end + 1] in _active(layer)
    return True


def _containers(layer: Any) -> set[str]:
    """Names under which a layer of PEFT keeps the tensors of its adapters."""
    named = (*getattr(layer, "adapter_layer_names", ()), *getattr(layer, "other_param_names", ()))
    return {"modules_to_save", *named}


def _active(layer: Any) -> list[str]:
    off = getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False)
    return [] if off else list(layer.active_adapters)


def _scalings(root: nn.Module) -> list[tuple[str, str]]:
    """The scaling factors of the active adapters of each layer, as (name, value)."""
    lines = []
    for path, layer in root.named_modules():
        scaling = getattr(layer, "scaling", None)
        if isinstance(scaling, dict) and hasattr(layer, "active_adapters"):
            factors = [(name, scaling[name]) for name in _active(layer) if name in scaling]
            lines += [(f"{_plain(path)} scaling {name}", str(factor)) for name, factor in factors]
    return lines


def _loaded(full: str, tensor: Tensor, module: nn.Module, name: str) -> Tensor:
    """The tensor itself, where accelerate keeps it elsewhere between forwards."""
    if tensor.device.type != "meta":
        return tensor
    hook = getattr(module, "_hf_hook", None)
    for module_hook in getattr(hook, "hooks", [hook]):
        weights = getattr(module_hook, "weights_map", None)
        if weights is not None:
            return torch.as_tensor(weights[name], device="cpu")
    raise ValueError(f"{full} is on the meta device, without numbers: load the weights first.")


def _count_tied_once(root: nn.Module, digests: dict[str, str]) -> None:
    """Leave the output embedding out where it is a copy of the input's: the same model, saved untied."""
    try:
        ends: tuple[Any, ...] = (root.get_input_embeddings(), root.get_output_embeddings())  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return
    paths = {id(module): path for path, module in root.named_modules()}
    first, last = (_plain(f"{paths.get(id(module))}.weight") for module in ends)
    if first != last and first in digests and digests[first] == digests.get(last):
        del digests[last]


# ---- one tensor ------------------------------------------------------------------------------------------------------


def _tensor_digest(name: str, tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if hasattr(tensor, "__tensor_flatten__"):  # a tensor made of other tensors, such as codes and scales
        inner, _ = tensor.__tensor_flatten__()
        return " ".join(_tensor_digest(f"{name}.{part}", getattr(tensor, part)) for part in inner)
    numbers = _sample(tensor)
    content = f"{tuple(tensor.shape)} {numbers.dtype}\n".encode() + numbers.numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


@torch.no_grad()
def _sample(tensor: Tensor) -> Tensor:
    """Some numbers of a tensor, on the CPU: float32 as far as copies agree, or integers as they are."""
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point() and flat.element_size() == 1:  # codes of 8 bits, which are not rounded
        flat = flat.view(torch.uint8)
    if flat.numel() > SAMPLE:
        flat = flat[_places(flat.numel()).to(flat.device)]
    flat = flat.cpu()
    if not flat.is_floating_point():
        return flat.long()
    rounded = (flat.bfloat16().half().float() * _STEPS).round() / _STEPS + 0.0  # no negative zero
    return rounded.masked_fill(rounded.isnan(), torch.nan)


@lru_cache(maxsize=64)
def _places(size: int) -> Tensor:
    """Places all over a tensor, in no step with its rows: multiples of the golden ratio."""
    turns = torch.arange(SAMPLE, device="cpu") * 2_654_435_769 % 2**32
    return (turns.double() * (size / 2**32)).long()
