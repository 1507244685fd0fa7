"""Hidden states and targets of some windows of text, in a folder."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_paged_eviction.internals import DISTANCE, Progress, Seen, Window, usable, watch, watched

from .install import attention_modules, hidden_states
from .repeating import watch_repeated

#: "attention": the largest weight that a token gets from tokens of the text at least 64 later, the mean over the query
#: heads of a group. "kvzip": the largest that it gets from any query head while the model repeats the text.
Target = Literal["attention", "kvzip"]
TARGETS: tuple[Target, ...] = ("attention", "kvzip")

#: Takes a layer's hidden states `[batch, tokens, hidden]` and what was measured.
_Note = Callable[[Seen, Tensor], None]


class Samples:
    """The samples of one run: a file for each window, with hidden states in the model's type and float32 targets.

    Args:
        folder: empty; the caller removes it.
        windows: of text, all of them.
        target: see `Target`.
        probe: ids of what asks to repeat, for the target "kvzip".

    Raises:
        ValueError: there is no such target, no probe, or no room in the model to repeat a window.
    """

    def __init__(
        self, folder: Path, model: Any, windows: Sequence[Window], target: Target, probe: Sequence[int] = ()
    ) -> None:
        self.folder, self.windows, self.target = folder, windows, target
        self._model, self._probe = model, tuple(probe)
        _check_target(target, model.config, windows, self._probe)

    def collect(self, progress: Progress) -> None:
        """Let the model read them. It is left as it was found.

        Raises:
            ValueError: no layer of this model can have a gate.
        """
        modules = attention_modules(self._model)
        states: dict[int, Tensor] = {}
        with watched(self._model), _overheard(modules, states):
            for index, window in enumerate(self.windows):
                tensors: dict[str, Tensor] = {}

                def note(seen: Seen, hidden: Tensor, tensors: dict[str, Tensor] = tensors) -> None:
                    tensors[f"{seen.layer_idx}.hidden"] = hidden[seen.usable].cpu().contiguous()
                    tensors[f"{seen.layer_idx}.target"] = usable(seen, seen.future).float().cpu().contiguous()

                self._read(window, states, note)
                save_file(tensors, self._path(index))
                progress(window.count)

    def _read(self, window: Window, states: dict[int, Tensor], note: _Note) -> None:
        tokens, mask = window.tokens, window.mask
        if self.target == "attention":
            watch(self._model, tokens, mask, DISTANCE, lambda seen: note(seen, states[seen.layer_idx]))
            return
        first: dict[int, Tensor] = {}  # the repetition has hidden states of its own
        watch_repeated(
            self._model,
            tokens,
            mask,
            self._probe,
            lambda seen: note(seen, first[seen.layer_idx]),
            read=lambda: first.update(states),
        )

    @property
    def layers(self) -> list[int]:
        """With samples, by index in the model."""
        with safe_open(self._path(0), framework="pt") as file:
            return sorted({int(name.split(".")[0]) for name in file.keys()})  # noqa: SIM118 - no dictionary

    def of(self, layer: int, windows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states `[n, hidden]` and targets `[n, kv_heads]` of some windows, both float32."""
        hidden, target = [], []
        for index in windows:
            with safe_open(self._path(index), framework="pt") as file:
                hidden.append(file.get_tensor(f"{layer}.hidden").float())
                target.append(file.get_tensor(f"{layer}.target").mT)
        return torch.cat(hidden), torch.cat(target)

    def _path(self, index: int) -> Path:
        return self.folder / f"window-{index}.safetensors"


def _check_target(target: str, config: Any, windows: Sequence[Window], probe: tuple[int, ...]) -> None:
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}.")
    if target != "kvzip":
        return
    if not probe:
        raise ValueError("The target 'kvzip' asks the model to repeat a text: give probe_ids, such as those of REPEAT.")
    room = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = 2 * max((window.tokens.shape[1] for window in windows), default=0) + len(probe)
    if isinstance(room, int) and longest > room > 0:
        raise ValueError(
            f"The target 'kvzip' has the model read every window twice, up to {longest} tokens, and it was made for "
            f"{room}: take shorter windows."
        )


def digest(windows: Sequence[Window]) -> str:
    """Of the tokens."""
    sha256 = hashlib.sha256()
    for window in windows:
        sha256.update(window.tokens.cpu().numpy().tobytes())
    return f"sha256:{sha256.hexdigest()}"


@contextmanager
def _overheard(modules: dict[int, Any], states: dict[int, Tensor]) -> Iterator[None]:
    """Meanwhile `states` has what each of the modules was called with last."""

    def listen(index: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[index] = hidden_states(args, kwargs).detach()

        return hook

    handles = [module.register_forward_pre_hook(listen(index), with_kwargs=True) for index, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
