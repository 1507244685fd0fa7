"""Logits of prompt tokens, for requests that ask for log probabilities of their prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .failures import alone
from .live_request import LiveRequest
from .sampling import Sampler


@dataclass(frozen=True)
class Reading:
    """A part of a prompt that a forward reads.

    Attributes:
        request: the request.
        sampler: its sampler, which gets the log probabilities.
        first: index of its first token in the forward.
        following: the next token of the prompt, for each token of this part (except the last token of the prompt).
    """

    request: LiveRequest
    sampler: Sampler
    first: int
    following: Sequence[int]


def wants_prompt_logits(state: Any) -> bool:
    """Whether a request asks for log probabilities of its prompt."""
    sampler = state.logit_processor_kwargs.get("sampler")
    return sampler is not None and sampler.reads_prompt


class PromptLogits:
    """Makes a model compute more logits than continuous batching asks for, and removes them from the output.

    Attributes:
        readings: parts of prompts in the next forward.
    """

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self._hooks: list[Any] = []

    def install(self, model: Any) -> None:
        """Install hooks in the model."""
        if not self._hooks:
            self._hooks = [
                model.register_forward_pre_hook(self._ask, with_kwargs=True),
                model.register_forward_hook(self._take, with_kwargs=True, always_call=True),
            ]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _ask(self, model: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        logits_to_keep = inputs.get("logits_to_keep")
        if not self.readings or logits_to_keep is None:  # the model computes the logits of all tokens
            return None
        return args, inputs | {
            "logits_to_keep": torch.cat([logits_to_keep, logits_to_keep.new_tensor(_places(self.readings))])
        }

    def _take(self, model: Any, args: tuple[Any, ...], inputs: dict[str, Any], output: Any) -> None:
        readings, self.readings = self.readings, []
        if not readings or output is None:  # the forward failed
            return
        places, logits = _places(readings), output.logits
        if inputs.get("logits_to_keep") is None:
            rows = logits[0, places]
        else:
            own_count = logits.shape[1] - len(places)
            rows, output.logits = logits[0, own_count:], logits[:, :own_count]
        for reading, own in zip(
            readings, rows.split([len(prompt_reading.following) for prompt_reading in readings]), strict=True
        ):
            with alone(reading.request, "read"):
                reading.sampler.note_prompt(own, reading.following)


def _places(readings: Sequence[Reading]) -> list[int]:
    """In the forward."""
    return [reading.first + at for reading in readings for at in range(len(reading.following))]
