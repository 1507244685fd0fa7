"""`prepare`: measure a model once, so that caches of it keep the right tokens."""

import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..integration.kept_state import aside
from ..integration.models import is_latent_attention, paged_layers, why_not_ours
from ..integration.weights import register_weights, without_parallel
from ..learned.calibration import Calibration, load_calibration, profile_path, save_calibration
from ..learned.calibration.lookup import HOME, find_calibration, use_profile
from ..learned.measured import OF_USE, Use
from ..options.cache_options import AUTO
from ..queries.attention import PAGED_EVICTION
from ..recipes.fit.calibration import Window, fit, read_tokens
from .measuring import Trials
from .passages import documentation, one_row, passages
from .profile import Profile
from .search import Search, steps

#: Tokens of a window that scores are fitted to, and how many windows there are.
_WINDOW, _WINDOWS = 1024, 5
#: Of a passage that caches are compared on: its tokens, those behind it, and the facts in it.
_LENGTH, _GOING_ON, _FACTS = 880, 64, 6
#: Passages: with facts and without, in turns.
_PASSAGES = 4


@torch.no_grad()
def prepare(
    model: Any,
    tokenizer: Any = None,
    *,
    text: str | None = None,
    use: Use = "both",
    profile: str | Path | None = None,
    progress: bool = True,
) -> Profile:
    """Measure which tokens and heads matter for a model, so that `PagedEvictionCache` keeps them.

    Sets the attention implementation "paged_eviction", registers the weights (`register_weights`) and looks for the
    model's profile: on this machine, then in the package. If there is none, it is measured and stored, so the next call
    only computes the digest of the weights. Copies in other dtypes and from GGUF files share the digest.

    A profile holds a score of tokens and the budget of each KV head, fitted to the model's attention while it reads
    some text. It also holds the divergence of several kinds of caches from the full cache: on text that goes on, and on
    made-up facts. The question about a fact comes either after the context was compressed or at the end of the prompt.

    >>> print(prepare(model, tokenizer))  # doctest: +SKIP

    Args:
        model: a decoder, in evaluation mode.
        tokenizer: the model's tokenizer; needed only if the profile has to be measured.
        text: text to read, some ten thousand words like those that the model will read; None = the documentation of
            Python.
        use: what the cache is for: "text" (text that goes on), "questions" (facts) or "both".
        profile: use this profile: a file, a registered name, or `organisation/name` on the Hugging Face Hub.
        progress: show a progress bar with the remaining time.

    Raises:
        ValueError: this kind of model cannot be measured, or the profile belongs to another model; the message says
            what to do instead.
        TypeError: an argument has the wrong type.
    """
    if use not in OF_USE:
        raise ValueError(f"use must be one of {', '.join(map(repr, OF_USE))}, got {use!r}.")
    model = without_parallel(model)
    config = model.config
    _check(config)
    model.set_attn_implementation(PAGED_EVICTION)
    digest = register_weights(model)
    if profile is not None:
        calibration = load_calibration(profile)
        calibration.check_model(config)
        path = Path(str(profile))
    else:
        file = find_calibration(config)
        if file is None or load_calibration(file).measured is None:
            file = profile_path(digest)
            _measure(model, tokenizer, text, file, use, progress)
        path, calibration = file, load_calibration(file)
    use_profile(config, str(path), use)
    return Profile(str(path), calibration, use)


def _check(config: Any) -> None:
    """Refuse models of which nothing can be measured.

    Raises:
        ValueError: with what they get without.
    """
    reason = why_not_ours(config)
    if is_latent_attention(config):
        reason = "this model caches latents (MLA) instead of keys and values"
    elif not paged_layers(config):
        reason = "no layer of this model evicts"
    if reason is not None:
        raise ValueError(
            f"There is nothing to prepare: {reason}. PagedEvictionCache(model.config, policy={AUTO!r}) uses a "
            "default that needs no profile."
        )


def _measure(model: Any, tokenizer: Any, text: str | None, path: Path, use: str, progress: bool) -> None:
    if tokenizer is None:
        raise ValueError(
            "This machine has no profile of these weights, so it has to be measured, which needs the tokenizer: "
            "prepare(model, tokenizer). Or give a profile from elsewhere: profile=FILE."
        )
    _check_folder(path.parent)
    text = documentation() if text is None else text
    windows, rest = _windows(tokenizer, text, model.device)
    read = list(islice(passages(tokenizer, rest, _LENGTH, _GOING_ON, _FACTS), _PASSAGES))
    if len(read) < 2:
        raise ValueError(
            f"text= has too few tokens to measure on: {2 * (_WINDOW + _LENGTH + _GOING_ON):,} or more are needed."
        )
    total = read_tokens(windows) // _WINDOW + len(read) + steps(len(read))
    training = model.training
    with aside(model), tqdm(total=total, desc="measuring this model", disable=not progress, leave=False) as bar:
        model.eval()
        try:
            fitted = fit(model, windows, lambda tokens: bar.update(tokens / _WINDOW)).calibration
            trials = []
            for passage in read:
                trials.append(Trials(model, passage))
                bar.update()
            calibration = _with_rows(model, fitted, trials, use, bar.update)
        finally:
            model.train(training)
    save_calibration(calibration, path)


def _check_folder(folder: Path) -> None:
    """Make the folder of profiles and write to it, before minutes are spent on what cannot be stored.

    Raises:
        ValueError: it cannot be written, or its name has no UTF-8.
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


def _with_rows(model: Any, fitted: Calibration, trials: list[Trials], use: str, tick: Any) -> Calibration:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.safetensors"
        save_calibration(fitted, file)
        return replace(fitted, measured=Search(model, file, trials, tick).run(use))


def _windows(tokenizer: Any, text: str, device: Any) -> tuple[list[Window], str]:
    """Windows from all over the first part of a text, and the text behind it."""
    half = len(text) // 2
    ids = tokenizer(text[:half], add_special_tokens=False, verbose=False)["input_ids"]
    step = max((len(ids) - _WINDOW) // max(_WINDOWS - 1, 1), _WINDOW)
    parts = [ids[at : at + _WINDOW] for at in range(0, len(ids) - _WINDOW + 1, step)][:_WINDOWS]
    return [Window(one_row(part).to(device)) for part in parts], text[half:]
