"""What was fitted to a model: tensors by layer, and the model that they belong to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from hf_paged_eviction.internals import fingerprint, map_tensors, refuse_other_model

#: Called with the steps of a fit that are done, and how many there are.
Progress = Callable[[int, int], None]
Shape = tuple[int, ...]
P = TypeVar("P", bound="Layer")


def no_progress(done: int, of: int) -> None:
    """For a fit that nobody watches."""


class Layer:
    """A frozen dataclass of tensors, some of which may be None."""

    def tensors(self) -> dict[str, Tensor]:
        """All that it consists of, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def to(self: P, device: torch.device) -> P:
        """The same in float32 on a device."""
        with torch.inference_mode(False):
            return map_tensors(lambda tensor: tensor.detach().to(device, torch.float32), self)

    def check_shapes(self, shapes: Mapping[str, Shape]) -> None:
        """Refuse tensors that do not fit together, or are not finite.

        Raises:
            ValueError: with the tensor.
        """
        for name, tensor in self.tensors().items():
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, expected {shapes[name]}")
            if not (tensor.is_floating_point() and tensor.isfinite().all()):
                raise ValueError(f"{name} holds something else than finite numbers")


L = TypeVar("L")


@dataclass(frozen=True)
class Fitted(Generic[L]):
    """What was fitted to all layers of a model that evict.

    Attributes:
        layers: by index in the model.
        model: see `model_fingerprint`.
        facts: what it was fitted to, and how well.
        digest: of the file that it was read from.

    Class attributes:
        subject: beginning of the message about another model.
        command: makes such a file.
    """

    layers: Mapping[int, L]
    model: Mapping[str, str]
    facts: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""

    subject: ClassVar[str]
    command: ClassVar[str]

    def check_model(self, config: Any) -> None:
        """Refuse another model; by its weights, too, where they are registered.

        Raises:
            ValueError: with what differs.
        """
        self.check_fingerprint(fingerprint(config))

    def check_fingerprint(self, actual: Mapping[str, str]) -> None:
        """As `check_model`, of a model with this `model_fingerprint`."""
        refuse_other_model(self.model, actual, self.subject, f"Fit some to this model with `{self.command}`.")

    def __deepcopy__(self, memo: Any) -> "Fitted[L]":
        return self  # nobody writes to it
