"""The attention modules of a model, and forward pre-hooks that see their input."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from hf_paged_eviction.internals import is_latent_attention, paged_layers

#: Called with a module and the arguments of its forward; returns the arguments to use, or None to keep them.
Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]


def hooked(hooks: Mapping[nn.Module, Hook]) -> ExitStack:
    """Register forward pre-hooks; the end of the context manager, or `close()`, removes them."""
    handles = ExitStack()
    for module, hook in hooks.items():
        handles.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    return handles


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input of an attention module, `[batch, tokens, hidden]`, from the arguments of its forward.

    Raises:
        ValueError: there is none.
    """
    keyword = kwargs.get("hidden_states")
    hidden = keyword if keyword is not None else next((value for value in args if isinstance(value, Tensor)), None)
    if not isinstance(hidden, Tensor) or hidden.ndim != 3:
        raise ValueError("This attention module is not called with hidden states [batch, tokens, hidden].")
    return hidden


def attention_modules(model: Any) -> dict[int, nn.Module]:
    """The self-attention modules of the layers that evict, by index in the model.

    Raises:
        ValueError: gates cannot read the input of each of these layers.
    """
    config = model.config
    if is_latent_attention(config):
        raise ValueError("This model caches latents instead of keys and values (MLA), and gates score KV heads.")
    wanted = set(paged_layers(config))
    modules: dict[int, nn.Module] = {}
    for index, module in _candidates(model):
        if index in wanted:
            modules.setdefault(index, module)  # the outermost of several
    if not wanted or wanted - set(modules):
        raise ValueError(
            f"Layers {sorted(wanted - set(modules))} of this {config.model_type} model have no attention module with "
            "an index of its own (layer_idx), so a gate would not know which layer it reads."
            if wanted
            else "No layer of this model can evict, so there is nothing to gate."
        )
    return modules


def _candidates(model: Any) -> Iterator[tuple[int, nn.Module]]:
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        called = (type(module).__name__ + name).lower().replace("attention", "attn")
        if isinstance(index, int) and "attn" in called and not any(word in called for word in ("cross", "vision")):
            yield index, module
