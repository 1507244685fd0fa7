"""Gates at work: forward pre-hooks that hand each layer's hidden state to its gate, and the marks to the cache."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_paged_eviction.internals import Marks, is_latent_attention, model_fingerprint, paged_layers, paged_part

from .gates import GateLayer, Gates, load_gates

#: Called with a module and the arguments that it is about to be called with.
Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


def install_gates(model: Any, file: str | Path | Gates) -> ExitStack:
    """Let gates see the hidden states of a model, for caches with the policy `gate:FILE`.

    >>> with install_gates(model, "qwen.safetensors"):  # doctest: +SKIP
    ...     cache = PagedEvictionCache(model.config, budget=1024, policy="gate:qwen.safetensors")
    ...     model.generate(**inputs, cache=cache)

    One forward pre-hook is registered in each self-attention module whose layer has a gate, and nothing is replaced.
    A forward with another cache, or with a cache of another policy, passes through at the cost of a look at its
    arguments. Install before the model is compiled: a graph holds the hooks that were there when it was made.

    Args:
        model: a decoder.
        file: what `paged-eviction fit-gate` wrote, a name given to such a file, `organisation/name` on the Hugging Face
            Hub, or `Gates`.

    Returns:
        A context manager; its end, or `close()`, takes the gates out again.

    Raises:
        ValueError: there is no such file, it belongs to another model, or this model has no place for gates.
    """
    gates = file if isinstance(file, Gates) else load_gates(file)
    gates.check_fingerprint(model_fingerprint(model))
    modules = attention_modules(model)
    strange = sorted(set(gates.layers) - set(modules))
    if strange:
        raise ValueError(
            f"These gates are for layers {sorted(gates.layers)} and this model has no attention that evicts in "
            f"{strange}. Train some for this model with `paged-eviction fit-gate`."
        )
    hooks = {index: GateHook(index, layer, gates.digest) for index, layer in gates.layers.items()}
    for index, hook in hooks.items():
        hook.place(next(modules[index].parameters()).device)
    return hooked({modules[index]: hook for index, hook in hooks.items()})


def hooked(hooks: Mapping[nn.Module, Hook]) -> ExitStack:
    """Register forward pre-hooks; the end of the context manager, or `close()`, takes them out."""
    handles = ExitStack()
    for module, hook in hooks.items():
        handles.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    return handles


def is_installed(model: Any, gates: Gates) -> bool:
    """Whether these gates are in a model."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return any(isinstance(hook, GateHook) and hook.digest == gates.digest for hook in hooks)


class GateHook:
    """The hook of one layer.

    Args:
        layer_idx: index in the model.
        layer: the gate.
        digest: of the gates.
    """

    def __init__(self, layer_idx: int, layer: GateLayer, digest: str) -> None:
        self._layer_idx, self._layer, self.digest = layer_idx, layer, digest
        self._device: Any = None

    def place(self, device: Any) -> None:
        """The hidden states will be there."""
        if device.type != "meta":  # weights that are fetched for each forward
            self._layer, self._device = self._layer.to(device), device

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        marks = self._marks(args, kwargs)
        if marks is None or marks.source != f"gates {self.digest}":
            return
        hidden = hidden_states(args, kwargs)
        if hidden.shape[-1] != self._layer.hidden:
            raise ValueError(
                f"The gate of layer {self._layer_idx} was trained on hidden states of {self._layer.hidden} numbers, "
                f"and these have {hidden.shape[-1]}."
            )
        if hidden.device != self._device:
            self.place(hidden.device)
        marks.tell(self._layer(hidden))

    def _marks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Marks | None:
        """Where the cache of this forward keeps marks of this layer."""
        for argument in (*kwargs.values(), *args):
            if isinstance(argument, Cache) and self._layer_idx < len(argument.layers):
                layer = paged_part(argument.layers[self._layer_idx])
                return None if layer is None else layer.marks
        return None


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What an attention module was called with, `[batch, tokens, hidden]`."""
    keyword = kwargs.get("hidden_states")
    hidden = keyword if keyword is not None else next((value for value in args if isinstance(value, Tensor)), None)
    if not isinstance(hidden, Tensor) or hidden.ndim != 3:
        raise ValueError("This attention module is not called with hidden states [batch, tokens, hidden].")
    return hidden


def attention_modules(model: Any) -> dict[int, nn.Module]:
    """The self-attention modules of the layers that evict, by index in the model.

    Raises:
        ValueError: this model has none that a gate could stand before.
    """
    config = model.config
    if config.is_encoder_decoder:
        raise ValueError("Gates stand before the self-attention of decoders; this is an encoder-decoder model.")
    if is_latent_attention(config):
        raise ValueError("This model caches latents instead of keys and values (MLA), and gates score KV heads.")
    wanted = set(paged_layers(config))
    modules: dict[int, nn.Module] = {}
    for index, module in _candidates(model):
        if index in wanted:
            modules.setdefault(index, module)  # the outermost of several
    if wanted - set(modules):
        raise ValueError(
            f"Layers {sorted(wanted - set(modules))} of this {config.model_type} model have no attention module with "
            "an index of its own (layer_idx), so a gate would not know what it sees."
        )
    return modules


def _candidates(model: Any) -> Iterator[tuple[int, nn.Module]]:
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        called = (type(module).__name__ + name).lower().replace("attention", "attn")
        if isinstance(index, int) and "attn" in called and not any(word in called for word in ("cross", "vision")):
            yield index, module
