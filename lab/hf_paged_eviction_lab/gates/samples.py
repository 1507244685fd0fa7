"""Hidden states and targets of some windows of text, in a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_paged_eviction import make_policy
from hf_paged_eviction.internals import (
    DISTANCE,
    Queries,
    Seen,
    Visit,
    Window,
    feed,
    fold,
    overheard,
    repeated,
    usable,
    watch,
    watched,
)

from ..fitted import Progress
from .install import Hook, attention_modules, hidden_states, hooked


def collect(
    model: Any, windows: Sequence[Window], target: str, probe: Sequence[int], folder: Path, progress: Progress
) -> list[int]:
    """Let the model read windows, and write a file for each. It is left as it was found.

    Args:
        target: "attention" or "kvzip", see `Training`.
        probe: ids of what asks to repeat, for the target "kvzip".
        progress: counts the layers, too, which are trained later.

    Returns:
        The layers that evict.

    Raises:
        ValueError: no layer of this model can have a gate, there is no probe, or no room to repeat a window.
    """
    modules = attention_modules(model)
    if target == "kvzip":
        _check_room(model.config, windows, probe)
    states: dict[int, Tensor] = {}

    def note_states(index: int) -> Hook:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states.setdefault(index, hidden_states(args, kwargs).detach())  # a repetition has others

        return hook

    with watched(model), hooked({module: note_states(index) for index, module in modules.items()}):
        for at, window in enumerate(windows):
            tensors: dict[str, Tensor] = {}

            def note(seen: Seen, tensors: dict[str, Tensor] = tensors) -> None:
                tensors[f"{seen.layer_idx}.hidden"] = states[seen.layer_idx][seen.usable].cpu().contiguous()
                tensors[f"{seen.layer_idx}.target"] = usable(seen, seen.future).float().cpu().contiguous()

            if target == "attention":
                watch(model, window.tokens, window.mask, DISTANCE, note)
            else:
                watch_repeated(model, window, probe, note)
            save_file(tensors, _file(folder, at))
            states.clear()
            progress(at + 1, len(windows) + len(modules))
    return sorted(modules)


def watch_repeated(model: Any, window: Window, probe: Sequence[int], visit: Visit) -> None:
    """Let the model read windows, then a probe and the same again, and call `visit` for each layer: KVzip's score
    (arXiv 2505.23416), the largest attention that the repetition pays to a token, is `Seen.future`.

    Args:
        model: with the attention implementation "paged_eviction".
        probe: ids of what asks to repeat.
    """
    tokens, count = window.tokens, window.tokens.shape[1]
    real = torch.ones_like(tokens) if window.mask is None else window.mask
    ids, real_probe = repeated(torch.as_tensor(probe), tokens, real)
    every = torch.cat([real, real_probe], dim=1)
    places = (every.cumsum(-1) - 1).masked_fill(every == 0, -1)

    def hear(index: int, queries: Queries, keys: Tensor, values: Tensor) -> None:
        if keys.shape[2] == count:
            return  # the window itself
        positions = places[:, None].expand(-1, keys.shape[1], -1)
        nothing = torch.zeros(positions.shape, device=keys.device)
        observe = make_policy("kvzip").observe
        largest = fold(observe, {"attention": nothing}, queries, positions, places[:, count:])["attention"]
        keys, values, positions, largest = (column[:, :, :count] for column in (keys, values, positions, largest))
        visit(Seen(index, keys, values, positions, largest, places[:, :count] >= 0))

    cache = overheard(model, hear)
    with torch.inference_mode():
        feed(model, tokens, window.mask, cache)
        feed(model, ids, None if window.mask is None else every, cache)


def read_samples(folder: Path, layer: int, windows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Hidden states `[n, hidden]` and targets `[n, kv_heads]` of some windows, both float32."""
    hidden, target = [], []
    for at in windows:
        with safe_open(_file(folder, at), framework="pt") as file:
            hidden.append(file.get_tensor(f"{layer}.hidden").float())
            target.append(file.get_tensor(f"{layer}.target").mT)
    return torch.cat(hidden), torch.cat(target)


def _file(folder: Path, window: int) -> Path:
    return folder / f"window-{window}.safetensors"


def _check_room(config: Any, windows: Sequence[Window], probe: Sequence[int]) -> None:
    if not len(probe):
        raise ValueError("The target 'kvzip' asks the model to repeat a text: give probe_ids, such as those of REPEAT.")
    room = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = 2 * max(window.tokens.shape[1] for window in windows) + len(probe)
    if isinstance(room, int) and longest > room > 0:
        raise ValueError(
            f"The target 'kvzip' has the model read every window twice, up to {longest} tokens, and it was made for "
            f"{room}: take shorter windows."
        )
