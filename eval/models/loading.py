"""Load the model and the tokenizer that a run names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import CacheLayerMixin
from transformers.utils.logging import disable_progress_bar

from hf_paged_eviction import register_weights
from hf_paged_eviction.internals import cache_argument, unwrapped

from ..errors import UserError, reason
from ..hub import require_network
from ..options.settings import EMBEDDED, Settings, TaskSettings
from .device import is_out_of_memory

_EXPECTED = (
    "expected: a folder that exists, or a name on the Hugging Face Hub and a network (log in with "
    "`hf auth login` to load a private or gated model)"
)
_OTHER_DEVICE = "choose another --device, or hide the one that fails (CUDA_VISIBLE_DEVICES)"
#: What devices and their libraries say when they fail; no file is to blame.
_DEVICE_FAILED = (
    *("CUDA error", "HIP error", "XPU error", "MPS backend", "CUBLAS_STATUS", "CUDNN_STATUS", "NCCL error"),
    *("CUDA driver", "NVIDIA driver", "No CUDA GPUs", "Torch not compiled with"),
)
#: What transformers says, what that means where it is not clear, and the way out where that is a special one.
_KNOWN = (
    (
        "does not recognize this architecture",
        "",
        f"this is transformers {transformers.__version__}: install a newer release",
    ),
    ("ignore_mismatched_sizes", "the shapes of its weights are not those of its config.json, see the report above", ""),
    (
        "for this kind of AutoModel",
        "transformers has no causal language model of its type",
        "choose a model that generates text",
    ),
    (
        "automatic conversion of the weights",
        "its weights could not be converted, see CONVERSION in the report above",
        "where that names memory or a device, take --dtype bfloat16 or another --device; else download the files again",
    ),
    *((phrase, "", _OTHER_DEVICE) for phrase in _DEVICE_FAILED),
)


def load(settings: Settings) -> tuple[Any, Any]:
    """The model, in evaluation mode on its devices, and its tokenizer; refuses what the two of them refuse."""
    tokenizer = load_tokenizer(settings)
    return load_model(settings), tokenizer


def check_ids(model: Any, highest: int, settings: Settings) -> None:
    """Refuse token ids that the model does not have.

    Args:
        highest: of all that it will be given.

    Raises:
        UserError: the tokenizer is that of another model.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if highest >= vocabulary:
        raise UserError(
            f"the tokenizer of {settings.tokenizer or settings.model!r} gives the id {highest}, but the model "
            f"{settings.model!r} has only {vocabulary:,} tokens: it belongs to another model; give the right one with "
            "--tokenizer"
        )


def load_model(settings: Settings, kind: Any = AutoModelForCausalLM) -> Any:
    """The model alone, in evaluation mode on its devices.

    Args:
        kind: an auto class of transformers.

    Raises:
        UserError: there is no such model, it does not fit, or it brings code or pickles that are not allowed.
    """
    named = _named(settings, settings.model)
    # Where a model on the Hub has no safetensors, transformers would ask a service to write them, for all to see.
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
    # Its bars would be drawn over the progress of the run.
    disable_progress_bar()
    _check_adapter(settings)
    try:
        model = kind.from_pretrained(source(settings.model), **named, **_arguments(settings))
    except UnpicklingError as error:
        raise UserError(f"the weights of {settings.model!r} hold more than tensors, and are not loaded") from error
    except Exception as error:  # damaged files raise a dozen classes
        raise _model_error(settings, error) from error
    if kind is AutoModelForCausalLM:
        _refuse_without_cache(model)
    register_weights(model)
    return _moved(model, settings).eval()


def _moved(model: Any, settings: Settings) -> Any:
    """The model on its device; one that is split is where it belongs, and must not be moved."""
    if settings.device_map:
        return model
    try:
        return model.to(settings.device)
    except Exception as error:  # each kind of device has classes of its own
        if is_out_of_memory(error):
            raise _too_large(settings) from error
        raise UserError(
            f"cannot move the model {settings.model!r} to {settings.device}: {reason(error)}; choose another --device"
        ) from error


def _too_large(settings: Settings) -> UserError:
    split = settings.device_map
    place, more = ("all devices together", "") if split else (settings.device, ", --device-map auto splits it over all")
    return UserError(f"the model {settings.model!r} does not fit on {place}: --dtype bfloat16 halves it{more}")


def _refuse_without_cache(model: Any) -> None:
    """A model whose state is no cache of keys and values has nothing to evict."""
    inner = unwrapped(model)
    layers = [] if cache_argument(inner.forward) is None else DynamicCache(config=inner.config).layers
    if not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        raise UserError(
            f"a {model.config.model_type} model takes no cache of keys and values, so there is nothing to evict"
        )


def _arguments(settings: Settings) -> dict[str, Any]:
    wanted = {
        "dtype": resolve_dtype(settings),
        "use_safetensors": None if settings.allow_pickle else True,
        "weights_only": True,
        "attn_implementation": settings.attn_implementation,
        "device_map": settings.device_map,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def load_config(settings: Settings) -> Any:
    """The configuration alone."""
    named = _named(settings, settings.model)
    try:
        config = AutoConfig.from_pretrained(source(settings.model), **named)
    except Exception as error:  # damaged files raise a dozen classes
        raise _model_error(settings, error) from error
    return config


def load_tokenizer(settings: Settings) -> Any:
    """The tokenizer alone."""
    name = settings.tokenizer or settings.model
    named = _named(settings, name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source(name), **named)
    except Exception as error:  # damaged files raise a dozen classes
        if _wants_code(settings, error):
            raise _brings_code(f"the tokenizer of {name!r}") from error
        raise UserError(
            f"cannot load a tokenizer from {name!r}: {_why(name, error)}, or name another tokenizer with --tokenizer"
        ) from error
    try:
        ids = tokenizer("The code of maple is amber.", add_special_tokens=False)["input_ids"]
    except Exception as error:  # whatever a damaged one raises
        raise UserError(f"the tokenizer of {name!r} cannot read a text: {reason(error)}") from error
    if not ids:
        raise UserError(f"the tokenizer of {name!r} makes no token of a text: its files are damaged or incomplete")
    if isinstance(settings, TaskSettings) and settings.chat_template_kwargs:
        _tell_template(tokenizer, json.loads(settings.chat_template_kwargs))
    return tokenizer


def _tell_template(tokenizer: Any, template_arguments: Mapping[str, Any]) -> None:
    """Hand these values to the chat template, whenever it is rendered.

    Raises:
        UserError: there is none, or it does not ask for one of them.
    """
    unknown = [name for name in template_arguments if name not in str(tokenizer.chat_template or "")]
    if unknown:
        reason = f"does not ask for {', '.join(unknown)}" if tokenizer.chat_template else "does not exist"
        raise UserError(f"--chat-template-kwargs: the chat template of the tokenizer {reason}")
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **template_arguments)


def _named(settings: Settings, name: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` that belong to a name.

    Raises:
        UserError: it is neither here nor on the Hub.
    """
    _refuse_unreachable(name, settings)
    revision = {"revision": settings.revision} if settings.revision and name == settings.model else {}
    return {"trust_remote_code": settings.trust_remote_code, **revision}


def _refuse_unreachable(name: str, settings: Settings) -> None:
    """A name that is on no machine within reach is refused at once: the Hub's own client tries for a minute."""
    if Path(name).suffix.lower() == ".gguf":
        raise UserError(
            f"cannot load {name!r}: python benchmarks/fetch_models.py {name} makes a folder of it: give that"
        )
    if name == EMBEDDED or Path(name).exists():
        return
    cached = (
        try_to_load_from_cache(name, file, revision=settings.revision) for file in ("config.json", "tokenizer.json")
    )
    try:
        if any(isinstance(file, str) for file in cached):
            return
    except HFValidationError as error:
        raise UserError(
            f"cannot load {name!r}: there is no such folder, and it cannot be a name on the Hub either"
        ) from error
    require_network(f"the model {name!r}", "give a folder")


def _check_adapter(settings: Settings) -> None:
    """transformers reads the weights of an adapter (PEFT) whatever their format is."""
    pickled, safe = (Path(settings.model) / f"adapter_model.{kind}" for kind in ("bin", "safetensors"))
    if pickled.exists() and not safe.exists() and not settings.allow_pickle:
        raise _only_pickles(f"the adapter in {settings.model!r}")


def _model_error(settings: Settings, error: Exception) -> UserError:
    name = f"the model {settings.model!r}"
    if is_out_of_memory(error):
        return _too_large(settings)
    if _wants_code(settings, error):
        return _brings_code(name)
    if _wants_pickle(settings, error):
        return _only_pickles(name)
    return UserError(f"cannot load {name}: {_why(settings.model, error)}")


def _why(name: str, error: Exception) -> str:
    """What went wrong in `from_pretrained`, and the way out of it."""
    for phrase, meaning, way_out in _KNOWN:
        if phrase in str(error):
            return f"{meaning or reason(error)}; {way_out or _way_out(name, error)}"
    return f"{reason(error)}; {_way_out(name, error)}"


def _way_out(name: str, error: Exception) -> str:
    command = re.search("`(pip install [^`]+)`", str(error))
    if command:
        return f"install the missing package: {command[1]}"
    if isinstance(error, ImportError):
        return "install the missing package, or choose a model and an attention implementation that do not need it"
    if name == EMBEDDED or Path(name).exists():
        return "its files may be damaged or incomplete: download them again, or write them with save_pretrained"
    return _EXPECTED


def _only_pickles(name: str) -> UserError:
    return UserError(
        f"{name} has no weights in safetensors: its weights are pickles, which can hold code. Convert it "
        "(in transformers: from_pretrained, then save_pretrained), or add --allow-pickle, which reads tensors only"
    )


def _wants_code(settings: Settings, error: Exception) -> bool:
    return not settings.trust_remote_code and "trust_remote_code" in str(error)


def _brings_code(what: str) -> UserError:
    return UserError(
        f"{what} comes with Python files, which would run with all your rights: read them, then add --trust-remote-code"
    )


def _wants_pickle(settings: Settings, error: Exception) -> bool:
    if settings.allow_pickle or not isinstance(error, OSError) or "safetensors" not in str(error):
        return False
    folder = Path(settings.model)
    return not folder.is_dir() or any(folder.glob("*.bin"))


def source(name: str) -> str:
    """What `from_pretrained` takes for the name of a model."""
    if name != EMBEDDED:
        return name
    from .. import embedded

    return str(embedded.path())


def resolve_dtype(settings: Settings) -> torch.dtype | str:
    """`auto` is float32 on a CPU, and the checkpoint's own precision elsewhere."""
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)  # type: ignore[no-any-return]
    # The embedded model's file is half precision to be small, not to be computed in.
    return torch.float32 if settings.device == "cpu" or settings.model == EMBEDDED else "auto"
