"""Each request that brings a sampler has its tokens chosen by it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.requests import FutureRequestState

from hf_paged_eviction.internals import log_failure

from .contexts import ServedContext
from .sampler import Sampler


class SamplingProcessor(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Chooses the tokens of requests with a sampler. transformers chooses those of other requests.

    All logits of a request with a sampler become minus infinity, except that of the chosen token, so transformers has
    to choose it. If a sampler fails, its request ends with the reason and the tokens so far; other requests continue.
    So does a request that failed earlier in the forward, or whose logits are not finite.

    Attributes:
        failure: returns why a request failed in the present forward, by its id; None = it did not.
    """

    failure: Callable[[str], Exception | None]

    #: Arguments of a request for the processor. The scheduler handles contexts.
    supported_kwargs = {"sampler": Sampler, "context": ServedContext, "protect": Sequence, "salt": str, "budget": int}  # noqa: RUF012 (as transformers spells it)
    ignored_kwargs = ()

    def __init__(self) -> None:
        self._states: list[Any] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Nothing to do, because no arguments are tensors."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
        """Note the requests of the rows of the next logits."""
        self._states = [request.state for request in requests_with_new_token]
        return torch.zeros(len(self._states), dtype=torch.int32, device="cpu")

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Choose the tokens of requests with a sampler.

        Args:
            scores: `[rows, vocabulary]` float32, changed in place.
        """
        finite = [True] * len(self._states)
        if any("sampler" not in state.logit_processor_kwargs for state in self._states):
            finite = scores.amax(-1).isfinite().tolist()
        # Rows of unfinished prompts stand at the end.
        for row, state, right in zip(scores, self._states, finite, strict=False):
            token = self._choose(row, state, right)
            if token is not None:
                row.fill_(-torch.inf).index_fill_(0, token, 0.0)
        return scores

    def _choose(self, row: Tensor, state: Any, finite: bool) -> Tensor | None:
        """The next token of a request; None = transformers chooses it."""
        failed = self.failure(state.request_id)
        if failed is not None:
            return _end(state, str(failed))
        sampler = state.logit_processor_kwargs.get("sampler")
        try:
            if sampler is not None:
                token: Tensor = sampler.choose(row, state.initial_tokens, state.generated_tokens)
                return token
            if not finite:  # transformers would draw tokens for all requests together, and fail for all
                raise ValueError("the logits are not finite numbers")
        except Exception as error:
            return _end(state, f"its sampler failed: {log_failure(state.request_id, 'sampled', error)}")
        return None


def _end(state: Any, reason: str) -> Tensor:
    """Let a request take no more tokens, the next one included; returns one for the batch to go on with."""
    state.error = reason
    state._new_tokens_limit, state._eos_token_ids = 0, set()
    return torch.zeros(1, dtype=torch.int64, device="cpu")
