"""Tells a worker what each request of its batch asked for. vLLM shows parameters of requests to logits processors."""

import weakref
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as ProcessorOfRunnerV2

from .requests import REQUEST_ID, RequestOptions
from .settings import live, settings_of

_OF_SERVER: "weakref.WeakValueDictionary[int, RequestOptionsProcessor]" = weakref.WeakValueDictionary()
#: Servers of which a backend of ours plans the forwards, by identity.
planned: set[int] = set()


@dataclass(frozen=True)
class Shown:
    """What vLLM shows of a request.

    Attributes:
        options: what it asked for.
        request_id: its id; None = not known.
        answer: the list of its tokens generated, which tells requests apart (runner V1).
    """

    options: RequestOptions = field(default_factory=RequestOptions)
    request_id: str | None = None
    answer: list[int] | None = None

    @classmethod
    def of(cls, parameters: Any, answer: list[int] | None = None) -> "Shown":
        """A request with these parameters."""
        return cls(RequestOptions.of(parameters.extra_args), (parameters.extra_args or {}).get(REQUEST_ID), answer)


class RequestOptionsProcessor(LogitsProcessor, ProcessorOfRunnerV2):
    """Reads the options of requests and changes no logits; for both model runners of vLLM.

    Attributes:
        of_row: requests by row of the batch (runner V1) or of the table of requests (V2).
    """

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        self.of_row: dict[int, Shown] = {}
        self._server = id(vllm_config)
        self._evicts = settings_of(vllm_config) is not None
        _OF_SERVER[self._server] = self

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request with options that are not valid.

        Raises:
            ValueError: the message says what would be valid.
        """
        try:
            options = RequestOptions.of(sampling_params.extra_args)
        except TypeError as error:
            raise ValueError(str(error)) from error
        if options != RequestOptions():
            sampling_params.skip_reading_prefix_cache = True  # snapshots are those of requests without options
        # Where this process runs the model, too. vLLM does not say which server is asked, if there are several.
        refusals = [refusal for refusal in map(options.refused_by, live()) if refusal is not None]
        if refusals and len(refusals) == len(live()):
            raise refusals[-1]

    def _check(self) -> None:
        """Refuse to go on without eviction where a server has the setting.

        Raises:
            RuntimeError: its attention backend is none of ours.
        """
        if self._evicts and self._server not in planned:
            raise RuntimeError(
                "paged_eviction: the attention backend of this server does not evict. Start vLLM with "
                "--attention-backend FLASH_ATTN or TRITON_ATTN, or on a CPU."
            )

    def is_argmax_invariant(self) -> bool:
        """True: no logits change."""
        return True

    def apply(self, logits: Any, *_: Any) -> Any:
        """The logits."""
        return logits

    def update_state(self, batch_update: "BatchUpdate | None") -> None:
        """Runner V1: the batch has changed."""
        if batch_update is not None:
            self._check()
        process_dict_updates(self.of_row, batch_update, lambda parameters, _, answer: Shown.of(parameters, answer))

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Runner V2: a request takes a row of the table."""
        self._check()
        self.of_row[req_idx] = Shown.of(sampling_params)
        return False


def shown(vllm_config: Any, row: int) -> Shown:
    """What is known of the request in a row."""
    processor = _OF_SERVER.get(id(vllm_config))
    return Shown() if processor is None else processor.of_row.get(row, Shown())
