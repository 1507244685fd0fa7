"""Logits of prompt tokens, for requests that ask for log probabilities of their prompts."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hf_paged_eviction.serving.live_request import alone


class Reading(NamedTuple):
    """A part of a prompt that a forward reads.

    Attributes:
        state: transformers' state of the request, whose sampler gets the log probabilities.
        first: index of its first token in the forward.
        following: the next token of the prompt, for each token of this part (except the last token of the prompt).
    """

    state: Any
    first: int
    following: Sequence[int]


class PromptLogits:
    """Context manager: inside, samplers with `prompt_logprobs` get the logits of their prompts. The model computes more
    logits than continuous batching asks for; they are removed from its output.

    Args:
        manager: manager of `paged_batching`.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __enter__(self) -> "PromptLogits":
        model = self._manager.model
        self._hooks = [
            model.register_forward_pre_hook(self._ask, with_kwargs=True),
            model.register_forward_hook(self._take, with_kwargs=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _readings(self) -> Iterator[Reading]:
        """Of the present forward."""
        scheduler, first = self._manager.scheduler, 0
        for future in () if scheduler is None else scheduler.batch:
            state = future.state
            sampler = state.logit_processor_kwargs.get("sampler")
            if sampler is not None and sampler.reads_prompt and not state.generated_tokens:
                end = len(state.initial_tokens) - len(state.remaining_prefill_tokens)
                yield Reading(state, first, state.initial_tokens[end - future.query_length + 1 : end + 1])
            first += future.query_length

    def _ask(self, model: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        places, logits_to_keep = _places(self._readings()), inputs.get("logits_to_keep")
        if not places or logits_to_keep is None:  # the model computes the logits of all tokens
            return None
        return args, inputs | {"logits_to_keep": torch.cat([logits_to_keep, logits_to_keep.new_tensor(places)])}

    def _take(self, model: Any, args: tuple[Any, ...], inputs: dict[str, Any], output: Any) -> None:
        readings = list(self._readings())
        if not readings:
            return
        places, logits = _places(readings), output.logits
        if inputs.get("logits_to_keep") is None:
            rows = logits[0, places]
        else:
            own_count = logits.shape[1] - len(places)
            rows, output.logits = logits[0, own_count:], logits[:, :own_count]
        requests = self._manager.scheduler.bounded.requests
        for reading, own in zip(readings, rows.split([len(part.following) for part in readings]), strict=True):
            with alone(requests[reading.state.request_id], "read"):
                reading.state.logit_processor_kwargs["sampler"].note_prompt(own, reading.following)


def _places(readings: Iterator[Reading] | Sequence[Reading]) -> list[int]:
    """In the forward."""
    return [reading.first + at for reading in readings for at in range(len(reading.following))]
