"""Failures that belong to one request, and end no other."""

from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor, OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState, RequestStatus

from hf_paged_eviction.internals import log_failure


def update_each(processor: ContinuousBatchProcessor) -> None:
    """Let the requests of a processor take in the tokens of each forward one by one; the scheduler ends those that
    fail. transformers lets them do so together, and stops at the first that fails.
    """
    update = processor.update_batch

    def update_batch() -> None:
        results, at = processor.inputs_and_outputs, 0
        batch, tokens, logprobs = results.prepare_batch_update()
        try:
            for future in batch:
                end = at + bool(future.has_new_token)
                one = [future], tokens[at:end], None if logprobs is None else logprobs[at:end]
                results.prepare_batch_update = lambda one=one: one
                try:
                    update()
                except Exception as error:
                    reason = log_failure(future.state.request_id, "given its token", error)
                    processor.scheduler.end(future.state, reason)
                at = end
        finally:
            results.__dict__.pop("prepare_batch_update", None)  # the method of its class again

    processor.update_batch = update_batch


class IsolatedRouter(OutputRouter):  # type: ignore[misc]
    """Delivers the results of each request on its own.

    transformers hands all results of a step to the event loop of one of them, and a closed loop ends its thread.

    Args:
        cancel: called with the id of a request whose results cannot be delivered.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        super().__init__()
        self._cancel = cancel

    def deliver(self, output: Any) -> None:
        """Deliver a result, see `OutputRouter.deliver`."""
        try:
            super().deliver(output)
        except Exception as error:
            log_failure(output.request_id, "answered", error)
            self._cancel(output.request_id)

    def fail_and_deliver(self, state: RequestState, error: Exception) -> None:
        """Deliver an error, see `OutputRouter.fail_and_deliver`; if the request cannot be read, the error alone."""
        try:
            super().fail_and_deliver(state, error)
        except Exception as second:
            reason = str(log_failure(state.request_id, "failed", second))
            self.deliver(
                GenerationOutput(request_id=state.request_id, error=state.error or reason, status=RequestStatus.FAILED)
            )

    def deliver_batch(self, outputs: list[Any]) -> None:
        """Deliver the results of a step."""
        for output in outputs:
            self.deliver(output)
