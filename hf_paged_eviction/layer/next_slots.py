"""The slots of the next token in compiled steps."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class NextSlots:
    """The slots of the next token in compiled steps, for the layers of a group; tensors at fixed addresses.

    Attributes:
        slots: `[layers * B, S, 1]` int64, with the rows of all layers, layer by layer.
        visible: `[layers * B, S, C]` bool, slots with real tokens; None if the model's mask is used, or if all slots
            hold real tokens.
        all_real: whether all usable slots hold real tokens, so that a step needs no mask. It is decided after a forward
            of several tokens and valid until the next one, because a graph has either a mask or none. Compiled code
            does not read it: that would add a guard.
        filling: `visible`; None also if all usable slots hold real tokens.
    """

    slots: Tensor
    visible: Tensor | None
    all_real: bool
    filling: Tensor | None
