"""The model type `hf-paged-eviction` of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.functional import log_softmax
from tqdm import tqdm

from hf_paged_eviction import PagedEvictionCache, __version__, register_weights, weights_digest
from hf_paged_eviction.internals import ANSWERS_AS_TOKENS, CACHE_ARGUMENT, PAGED_EVICTION, feed, generate_settings

from ..errors import UserError
from ..grouping import grouped
from ..models.loading import source
from ..options.settings import EMBEDDED
from ..running.meaning import files_of
from .cache_settings import OURS, CacheSettings, own_answers
from .likelihood import Answer, Row, score

#: What the harness hands to `_loglikelihood_tokens`: the two strings (or None), context ids, continuation ids.
Request = tuple[Any, list[int], list[int]]


@register_model("hf-paged-eviction")
class PagedEvictionLM(HFLM):  # type: ignore[misc]
    """An `HFLM` that generates, and scores continuations, through `PagedEvictionCache`.

    Likelihoods are those of decoding: the context is read and compressed, and every token of the continuation is
    predicted from what is held then (see `likelihood`). A rolling likelihood has no context to compress, so its windows
    go through the cache token by token once the budget is full: that takes as long as generating the text would.

    Args:
        pretrained: as for `HFLM`; "embedded" is the small model that ships with this package.
        dtype: as for `HFLM`; "auto" is float32 for the embedded model.
        kwargs: all of `hf_paged_eviction.CacheOptions` but `static`; a `budget` in bytes is that of one row, whatever
            the batch, and a share is taken of each prompt without its pads. A policy or allocator that looks at
            attention makes "paged_eviction" the default of `attn_implementation`. `prefill_chunk_size`: tokens of the
            prompt per forward; None = all at once. And every other argument of `HFLM`. The Python files of a model are
            run with `trust_remote_code=True` only; weights that are not safetensors are read with
            `use_safetensors=False` only.

    Raises:
        UserError: arguments or a model that cannot work, before any weight is read.
    """

    def __init__(self, pretrained: Any, *, dtype: Any = "auto", **kwargs: Any) -> None:
        ours = {name: kwargs.pop(name) for name in OURS if name in kwargs}
        for name in kwargs:
            # It would reach `from_pretrained`, which complains late and says little.
            if close := get_close_matches(name, OURS, n=1, cutoff=0.75):
                raise UserError(f"unknown model argument {name!r}: did you mean {close[0]!r}?")
        self._cache = CacheSettings(**ours)
        if isinstance(pretrained, str):
            if self._cache.needs_attention:
                kwargs.setdefault("attn_implementation", PAGED_EVICTION)
            # Left open, transformers asks on the standard input, and takes what a pipe says for an answer.
            kwargs["trust_remote_code"] = bool(kwargs.get("trust_remote_code"))
            if not (kwargs.get("autogptq") or kwargs.get("gptqmodel")):  # they have rules of their own
                kwargs.setdefault("use_safetensors", True)
            if pretrained == EMBEDDED and dtype == "auto":
                dtype = torch.float32  # the shipped file is half precision to be small, not to be computed in
            pretrained = source(pretrained)
        self._attention: str | None = kwargs.get("attn_implementation")
        super().__init__(pretrained, dtype=dtype, **kwargs)
        register_weights(self.model)
        self._cache = self._cache.for_model(self.model)

    def _get_backend(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super()._get_backend(config, *args, **kwargs)
        if self.backend != "causal":
            raise UserError(f"hf-paged-eviction serves decoder-only models, and {config.model_type} is none: use hf")
        self._cache.check(config, self._attention)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results, and how the cache was set."""
        return {**super().get_model_info(), "hf_paged_eviction": {"version": __version__, **self._cache.labels}}

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take a file of answers (`--use_cache`), which the harness asks by the question alone.

        Raises:
            UserError: its answers are of another model, or of other settings of the cache.
        """
        if getattr(cache_hook, "dbdict", None) is not None:
            files = files_of(self._cache.new_cache(self.model.config, 1 << 20), self._cache)
            meaning = {
                **{name: str(label) for name, label in self._cache.labels.items()},
                **{f"files {name}": digest for name, digest in files.items()},
                "weights": weights_digest(self.model),
                "dtype": str(self.model.dtype),
                "max_length": self.max_length,
                "version": __version__,
            }
            own_answers(cache_hook.dbdict, meaning)
        super().set_cache_hook(cache_hook)

    # ---- generation -----------------------------------------------------------------------------------------------

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], *, attention_mask: Tensor, **kwargs: Any
    ) -> Tensor:
        settings = self._settings(kwargs)
        lengths = attention_mask.sum(-1).tolist()
        # The harness pads on the left. What is a pad in all rows of a group is left out.
        parts: list[tuple[list[int], int, Tensor]] = []
        for (tokens, _), rows in self._groups(lengths).items():
            pads = context.shape[1] - max(lengths[row] for row in rows)
            ids, real = context[rows, pads:], attention_mask[rows, pads:]
            cache = self._cache.new_cache(self.model.config, tokens, real)
            ids = super()._model_generate(
                ids,
                max_length - pads,
                stop,
                attention_mask=real,
                **{CACHE_ARGUMENT: cache},
                **settings,
            )
            parts.append((rows, pads, ids))
        width = max(pads + ids.shape[1] for _, pads, ids in parts)
        output = context.new_full((len(context), width), self.tokenizer.pad_token_id)
        for rows, pads, ids in parts:
            output[rows, pads : pads + ids.shape[1]] = ids
        return output

    def _settings(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `generate`, without those that the harness gives itself: what a task or `--gen_kwargs` asks for,
        under what comes from the checkpoint."""
        sets = {**ANSWERS_AS_TOKENS, "max_new_tokens": None, "stop_strings": None}  # `stop` are those of the task
        try:
            settings = generate_settings(self.model, asked, "hf-paged-eviction", sets=sets)
        except ValueError as error:
            raise UserError(str(error)) from error
        settings["prefill_chunk_size"] = self._cache.prefill_chunk_size
        return {name: value for name, value in settings.items() if name not in ("use_cache", "max_length")}

    def _groups(self, lengths: Sequence[int]) -> dict[tuple[int, int], list[int]]:
        """By budget (and length), the rows that may share a cache of that budget, given the lengths of their prompts.

        A row's answer must not depend on its batch, but the chunks of a prefill begin where the batch begins: with
        them, only prompts of equal length go together.
        """
        chunked = self._cache.prefill_chunk_size is not None
        sizes = [(self._cache.tokens(length), length if chunked else 0) for length in lengths]
        return grouped(range(len(sizes)), lambda row: sizes[row])

    # ---- likelihood -----------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        if self._cache.sizes.tokens is None and any(strings is None for strings, *_ in requests):
            raise UserError(
                f"budget={self._cache.budget} is a share of the prompt, and a rolling likelihood (perplexity) has no "
                "prompt: give tokens"
            )
        rows = _rows(requests, self.max_length)
        answers: dict[int, Answer] = {}
        waiting, size = list(rows), override_bs or self._likelihood_batch(requests, rows)
        hidden = disable_tqdm or self.rank != 0
        with tqdm(total=len(requests), disable=hidden, desc="Running loglikelihood requests") as progress:
            for first in range(0, len(waiting), size):
                for row, row_answers in self._scored(waiting[first : first + size]):
                    for index, answer in zip(rows[row], row_answers, strict=True):
                        answers[index] = answer
                        if (strings := requests[index][0]) is not None:
                            self.cache_hook.add_partial("loglikelihood", strings, answer)
                        progress.update()
        return [answers[index] for index in range(len(requests))]

    def _likelihood_batch(self, requests: Sequence[Request], rows: dict[Row, list[int]]) -> int:
        """Rows that fit together, by the longest, which comes first."""
        if self.batch_size != "auto":
            return int(self.batch_size)
        return int(self._detect_batch_size(requests, next(iter(rows.values()))[0])) if rows else 1

    def _scored(self, batch: Sequence[Row]) -> Iterator[tuple[Row, list[Answer]]]:
        """Rows, whose budgets may differ, and the answers to each."""
        for (tokens, _), indices in self._groups([len(row.context) for row in batch]).items():
            rows = [batch[index] for index in indices]
            forward = partial(self._forward, self._cache.new_cache(self.model.config, tokens))
            # Attention is looked at in another way where several tokens come at once.
            room = 0 if self._cache.needs_attention else tokens
            yield from zip(rows, score(forward, rows, room, self._cache.prefill_chunk_size, self.device), strict=True)

    @torch.no_grad()
    def _forward(self, cache: PagedEvictionCache, ids: Tensor, mask: Tensor, keep: int) -> Tensor:
        precision = self.mixed_precision_dtype
        with torch.autocast(self.device.type, precision, enabled=precision is not None):
            logits = feed(self.model, ids, mask, cache, keep=keep)
        return log_softmax(logits[:, -keep:], dim=-1, dtype=self.softmax_dtype)


def _rows(requests: Sequence[Request], max_length: int) -> dict[Row, list[int]]:
    """What to run, longest first, with the indices of the requests that it answers, one per `Row.last`."""
    shared: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for index, (_, context, continuation) in enumerate(requests):
        context_tokens = max_length + 1 - len(continuation)
        if context_tokens < 1 or not context or not continuation:
            raise UserError(
                f"a continuation of {len(continuation)} tokens after {len(context)} does not fit: the model takes "
                f"{max_length} tokens, and at least one of each is needed"
            )
        # Too long: the context loses its oldest tokens, as for every model of the harness.
        shared.setdefault((tuple(context[-context_tokens:]), tuple(continuation[:-1])), []).append(index)
    rows = {
        Row(context, middle, tuple(requests[index][2][-1] for index in indices)): indices
        for (context, middle), indices in shared.items()
    }
    return dict(sorted(rows.items(), key=lambda item: -len(item[0].context) - len(item[0].middle)))
