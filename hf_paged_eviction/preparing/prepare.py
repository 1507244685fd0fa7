"""`prepare`: measure a model once, so that caches of it keep the right tokens."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock
from torch import Tensor

from ..integration.kept_state import aside
from ..integration.models import is_latent_attention, paged_layers, why_not_ours
from ..integration.weights import is_split, register_weights, without_parallel
from ..learned.calibration import load_calibration, save_calibration
from ..learned.lookup import (
    HOME,
    chosen_profile,
    profile_path,
    profile_paths,
    published_profile,
    use_profile,
    why_unusable,
)
from ..learned.measured import OF_USE, Use
from ..naming.files import set_aside
from ..options.cache_options import AUTO, BLOCK_SIZE, SMALL_BLOCK_SIZE
from ..queries.attention import PAGED_EVICTION
from ..version import __version__
from .difference import NoDifferenceError
from .effort import NORMAL, QUICK, Effort
from .fitting import fit
from .passages import Passage, documentation, one_row, passages
from .profile import Profile
from .progress import Progress, of_passage, of_reading, of_window
from .readings import Readings
from .search import MEMORY_SHARES, SHARES, Search, halves

#: Tokens of a window that scores are fitted to.
_WINDOW = 1024
#: Of a passage that caches are compared on: its tokens, those behind it, and the facts in it.
_LENGTH, _GOING_ON, _FACTS = 880, 64, 6


@torch.no_grad()
def prepare(
    model: Any,
    tokenizer: Any = None,
    *,
    text: str | None = None,
    use: Use = "both",
    profile: str | Path | None = None,
    quick: bool = False,
    progress: bool = True,
) -> Profile:
    """Measure which tokens and heads matter for a model, so that `PagedEvictionCache` keeps them.

    Sets the attention implementation "paged_eviction", registers the weights (`register_weights`) and looks for the
    model's profile: on this machine, then in the package. If there is none, it is measured and stored, so the next call
    only computes the digest of the weights. Copies in other dtypes and from GGUF files share the digest. A measurement
    that was stopped goes on where it was when it is called again with the same arguments. Of several processes that
    measure the same weights at once, such as those of `DistributedDataParallel`, one measures and the others wait.

    A profile holds a score of tokens and the budget of each KV head, fitted to the model's attention while it reads
    some text. It also holds the divergence of several kinds of caches from the full cache: on text that goes on, and on
    made-up facts, many in a text or one alone. The question about a fact comes either after the context was compressed
    (unknown), or at the end of the prompt (known). Caches with few bits are compared at shares of the bytes of 16-bit
    keys and values, whatever the dtype of this model, so that a profile serves copies in all of them.

    >>> print(prepare(model, tokenizer))  # doctest: +SKIP

    Args:
        model: a decoder, in evaluation mode.
        tokenizer: the model's tokenizer; needed only if the profile has to be measured.
        text: text to read, some ten thousand words like those that the model will read; None = the documentation of
            Python.
        use: what the cache is for: "text" (text that goes on), "questions" (facts) or "both".
        profile: use this profile, a file.
        quick: if the profile has to be measured, try fewer caches on less text.
        progress: show a progress bar with the remaining time. If more than ten minutes are left, a line names cheaper
            settings.

    Raises:
        ValueError: this kind of model cannot be measured, random eviction is as good as any on these weights, or the
            profile belongs to another model; the message says what to do instead.
        TypeError: an argument has the wrong type.
    """
    model = without_parallel(model)
    _check_arguments(model, tokenizer, use, text)
    config = model.config
    _check_model(config)
    model.set_attn_implementation(PAGED_EVICTION)
    with closing(Progress(progress)) as bar:
        digest = register_weights(model)
        if profile is not None:
            path = Path(str(profile))
            load_calibration(profile).check_model(config)
        else:
            found = _find(config, digest, use)
            path = found or profile_path(digest, use)
            if found is None:
                effort = QUICK if quick else NORMAL
                measurement = _Measurement(model, tokenizer, text, path, use, effort, bar)
                with nullcontext() if is_split(model) else _turn_of(path):
                    _set_aside_unusable(config, digest, use)
                    found = None if is_split(model) else _find(config, digest, use)  # measured by another process
                    if found is None:
                        measurement.run()
                path = found or path
    use_profile(config, path, use)
    return Profile(str(path), load_calibration(path), use)


def _check_arguments(model: Any, tokenizer: Any, use: object, text: object) -> None:
    """Raise TypeError or ValueError if these are not a model, its tokenizer, a use and a text."""
    if isinstance(model, str | Path):
        raise TypeError(
            f"prepare takes a loaded model, not the name {str(model)!r}: "
            f"prepare(AutoModelForCausalLM.from_pretrained({str(model)!r}), tokenizer)."
        )
    if _is_tokenizer(model):
        raise TypeError("prepare got a tokenizer in place of the model: write prepare(model, tokenizer).")
    if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
        raise TypeError(f"prepare takes a model of transformers, got {type(model).__name__}.")
    if tokenizer is not None and not _is_tokenizer(tokenizer):
        raise TypeError(f"tokenizer must be the model's tokenizer, got {type(tokenizer).__name__}.")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"text must be one text, got a {type(text).__name__}: join several with '\n\n'.join(texts).")
    if use not in OF_USE:
        raise ValueError(f"use must be one of {', '.join(map(repr, OF_USE))}, got {use!r}.")


def _is_tokenizer(thing: object) -> bool:
    return callable(thing) and hasattr(thing, "decode") and not hasattr(thing, "forward")


def _check_model(config: Any) -> None:
    """Refuse models of which nothing can be measured.

    Raises:
        ValueError: the message says which default their caches get instead.
    """
    latents = "this model caches latents (MLA) instead of keys and values" if is_latent_attention(config) else None
    if latents is None and not paged_layers(config):
        kinds = sorted({*(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())})
        raise ValueError(
            f"There is nothing to prepare: no layer of this {config.model_type} model evicts"
            f"{f' (its layers are {kinds})' if kinds else ''}. Layers with a sliding window and recurrent ones hold a "
            "fixed number of tokens already, so use the model without a cache of this package."
        )
    if reason := latents or why_not_ours(config):
        raise ValueError(
            f"There is nothing to prepare: {reason}. PagedEvictionCache(model.config, policy={AUTO!r}) uses a "
            "default that needs no profile."
        )


@contextmanager
def _turn_of(path: Path) -> Iterator[None]:
    """Context manager: no other process measures this profile."""
    lock = path.with_suffix(".lock")
    try:
        with FileLock(lock):
            yield
    finally:
        with suppress(OSError):  # of a system that keeps files for those that wait
            lock.unlink(missing_ok=True)


def _find(config: Any, digest: str, use: Use) -> Path | None:
    """The profile that serves a use: the one that was chosen before, on this machine, or in the package."""
    published, chosen = published_profile(digest), chosen_profile(config)
    for path in (chosen, *profile_paths(digest, use), published):
        if path is not None and not why_unusable(path, config):
            measured = load_calibration(path).measured
            if measured is not None and measured.serves(use):
                return path
    return None


def _set_aside_unusable(config: Any, digest: str, use: Use) -> None:
    """Rename files under the names of these weights that are damaged, or the profiles of others, and warn of each."""
    for path in profile_paths(digest, use):
        if reason := why_unusable(path, config):
            set_aside(path, reason)


class _Measurement:
    """The measurement of a model.

    Args:
        model, tokenizer, text, use: see `prepare`.
        path: where the profile will be.
        effort: how much is measured.
        bar: shows the progress.

    Raises:
        ValueError: there is no tokenizer, too little text, or no folder to store the profile in.
    """

    def __init__(
        self, model: Any, tokenizer: Any, text: str | None, path: Path, use: str, effort: Effort, bar: Progress
    ) -> None:
        if tokenizer is None:
            raise ValueError(
                "This machine has no profile of these weights, so it has to be measured, which needs the tokenizer: "
                "prepare(model, tokenizer). Or give a profile from elsewhere: profile=FILE."
            )
        _check_folder(path.parent)
        text = documentation() if text is None else text
        self._model, self._path, self._use, self._effort, self._bar = model, path, use, effort, bar
        self._windows, rest = _windows(tokenizer, text, effort.windows, model.device)
        self._passages = list(islice(passages(tokenizer, rest, _LENGTH, _GOING_ON, _FACTS, use), effort.passages))
        if len(self._windows) < 2 or len(self._passages) < 2:
            raise ValueError(
                f"text= has too few tokens to measure on: {2 * (_WINDOW + _LENGTH + _GOING_ON):,} or more are needed."
            )
        self._subject = {
            "version": __version__,
            "model": path.stem,
            "dtype": str(model.dtype),
            "use": use,
            "effort": asdict(effort),
            "lengths": [_WINDOW, _LENGTH, _GOING_ON, _FACTS, BLOCK_SIZE, SMALL_BLOCK_SIZE],
            "text": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
        }

    def run(self) -> None:
        """Measure, or go on, and store the profile.

        Raises:
            NoDifferenceError: see there.
        """
        # Beside the profile; of a model that is split over processes each has its own.
        own = f".{dist.get_rank()}" if is_split(self._model) else ""
        begun, fitted = (
            self._path.with_suffix(own + suffix) for suffix in (".unfinished.jsonl", ".unfinished.safetensors")
        )
        self._check_fitted(fitted, begun)
        readings = Readings(begun, self._subject)
        self._bar.begin(_work(self._effort, self._passages), self._cheaper())
        training = self._model.training
        with aside(self._model):
            self._model.eval()
            try:
                if readings.goes_on and fitted.is_file():
                    self._bar.advance(of_window(self._effort.windows))
                else:
                    advance = self._bar.advance
                    scores = fit(self._model, self._windows, lambda tokens: advance(of_window(tokens / _WINDOW)))
                    save_calibration(scores, fitted)
                subject = self._model, fitted, self._passages, self._effort, self._use, readings
                measured = Search(*subject, self._bar.advance, self._bar.skip).run()
                save_calibration(replace(load_calibration(fitted), measured=measured), self._path)
            except NoDifferenceError:
                fitted.unlink()
                begun.unlink()
                raise
            finally:
                self._model.train(training)
        fitted.unlink()
        begun.unlink()

    def _check_fitted(self, fitted: Path, begun: Path) -> None:
        """Set aside scores of an unfinished measurement that cannot be used, and what was measured with them."""
        reason = why_unusable(fitted, self._model.config) if os.path.lexists(fitted) else ""
        if reason:
            set_aside(fitted, reason)
            if begun.exists():
                set_aside(begun, "it was measured with these scores")

    def _cheaper(self) -> dict[str, float]:
        """The work of cheaper settings."""
        cheaper = {}
        if self._effort is not QUICK:
            cheaper["quick=True"] = _work(QUICK, self._passages[: QUICK.passages])
        if self._use != "text":
            cheaper['use="text"'] = _work(self._effort, [replace(passage, questions=()) for passage in self._passages])
        return cheaper


def _check_folder(folder: Path) -> None:
    """Make the folder of profiles and write to it, before minutes are spent on what cannot be stored.

    Raises:
        ValueError: it cannot be written, or its name is not UTF-8.
    """
    try:
        str(folder).encode()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, UnicodeEncodeError) as error:
        raise ValueError(
            f"The profile cannot be stored in {str(folder)!r}: {error}. Name another folder in the environment "
            f"variable {HOME}."
        ) from error


def _work(effort: Effort, read: list[Passage]) -> float:
    """The expected work of a whole measurement, see `Search.run`."""
    first, others = ([read[at] for at in half] for half in halves(len(read)))
    begin, end = (sum(map(of_reading, half)) for half in (first, others))
    kinds = len(effort.bits) + effort.stay - 1
    in_bits = sum(of_reading(passage, few_bits=True) for passage in first) * kinds * len(MEMORY_SHARES)
    readings = begin * (len(effort.candidates) + effort.stay + 3) + end * len(SHARES) * (effort.stay + 1)
    return of_window(effort.windows) + sum(map(of_passage, read)) + readings + in_bits


def _windows(tokenizer: Any, text: str, count: int, device: Any) -> tuple[list[Tensor], str]:
    """Windows from all over the first part of a text, and the text behind it."""
    half = len(text) // 2
    ids = tokenizer(text[:half], add_special_tokens=False, verbose=False)["input_ids"]
    step = max((len(ids) - _WINDOW) // max(count - 1, 1), _WINDOW)
    parts = [ids[at : at + _WINDOW] for at in range(0, len(ids) - _WINDOW + 1, step)][:count]
    return [one_row(part).to(device) for part in parts], text[half:]
