"""The attention implementations of a model and of its parts, kept and restored one by one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel


class Implementations:
    """The attention implementation of each part of a model (text, vision, audio, ...) at this moment.

    `set_attn_implementation` sets all parts to one; setting the old name of the whole would do so, too.

    Args:
        model: a model of transformers.
    """

    def __init__(self, model: Any) -> None:
        configs = [model.config, *(part.config for part in model.modules() if isinstance(part, PreTrainedModel))]
        self._parts: dict[int, tuple[Any, Any]] = {}  # configs cannot be hashed
        while configs:
            config = configs.pop()
            if id(config) not in self._parts:
                self._parts[id(config)] = config, config._attn_implementation
                configs += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]

    def restore(self) -> None:
        """Set each part to what it had."""
        for config, implementation in self._parts.values():
            config._attn_implementation_internal = implementation  # the property would set the parts of a part, too


@contextmanager
def using(model: Any, implementation: str) -> Iterator[None]:
    """Context manager: the model uses this attention implementation; afterwards each part has its own again."""
    if model.config.get_text_config(decoder=True)._attn_implementation == implementation:
        yield
        return
    before = Implementations(model)
    try:
        model.set_attn_implementation(implementation)
        yield
    finally:
        before.restore()
