"""What decides a row besides its prompt, its policy and its budget: settings, weights, and files that it is made of."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from hf_paged_eviction import EvictionPolicy, PagedEvictionCache, make_disposal, weights_digest
from hf_paged_eviction.internals import AUTO, PAGED_EVICTION, file_digest

from ..caches.making import policy_of
from ..data.prompting.prompts import Prompt
from ..metrics.library import PREFIX, is_library_metric
from ..models.loading import source
from ..options.settings import Settings, TextSettings

#: What rows tell by themselves, and what only says how many there are.
LISTED = frozenset({"policies", "budgets", "tasks", "lengths", "limit", "task_file", "files"})
#: Files beside the weights that say how a model computes, reads and ends an answer.
_MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "adapter_config.json")


def meanings(settings: Settings, model: Any, caches: Mapping[str, PagedEvictionCache]) -> dict[str, dict[str, Any]]:
    """What decides the rows of each policy that depends on files, by policy; under "" of all others.

    Args:
        caches: an empty one for each policy, by the name that rows have for it.
    """
    values = {name: value for name, value in settings.as_json().items() if name not in LISTED}
    del values["profile"]  # of those policies that read it
    if isinstance(settings, TextSettings):  # the names of policies say it
        del values["positions"]
    if values["attn_implementation"] == PAGED_EVICTION:  # which computes as sdpa does, and only shows the queries
        values["attn_implementation"] = None
    values |= {"weights": weights_digest(model), **_model_files(settings)}
    files = {
        policy: files_of(empty, settings) | ({AUTO: policy_of(empty)} if policy.startswith(AUTO) else {})
        for policy, empty in caches.items()
    }
    return {"": values} | {policy: {**values, "files": used} for policy, used in files.items() if used}


def prompt_digest(prompt: Prompt) -> str:
    """16 hexadecimal digits of what the model is asked, and of what its answer is scored by."""
    sample = prompt.sample
    ids = array("q", (*prompt.context, -1, *prompt.question, -2, sample.max_new_tokens))
    scored = (sample.metric, sample.answers, sample.all_classes, sample.stop_at_newline, prompt.protected)
    return hashlib.sha256(ids.tobytes() + repr((scored, _script(sample.metric))).encode()).hexdigest()[:16]


def text_digest(ids: array[int], length: int) -> str:
    """16 hexadecimal digits of a text and of the length that its bins and shares refer to."""
    return hashlib.sha256(ids.tobytes() + str(length).encode()).hexdigest()[:16]


@cache
def _script(metric: str | None) -> list[str]:
    """Digests of the files of a metric of the user's."""
    if metric is None or not is_library_metric(metric):
        return []
    place = Path(metric.removeprefix(PREFIX).partition("#")[0])
    files = [place] if place.is_file() else sorted(place.glob("*.py"))
    return [file_digest(file) for file in files]


def _model_files(settings: Settings) -> dict[str, str]:
    """Digests of small files of the model and of its tokenizer, where they are files of their own."""
    digests = {}
    for name in dict.fromkeys([settings.model, settings.tokenizer or settings.model]):
        folder = Path(source(name))
        for file in _MODEL_FILES:
            path = folder / file if folder.is_dir() else try_to_load_from_cache(name, file, revision=settings.revision)
            if isinstance(path, str | Path) and Path(path).is_file():
                digests[file if name == settings.model else f"tokenizer/{file}"] = file_digest(path)
    return digests


def files_of(cache: PagedEvictionCache, settings: Any) -> dict[str, str]:
    """Digests of what a cache is made of besides this package: its profile, other fitted files, and modules of others.

    Args:
        settings: its `disposal`.
    """
    disposal = make_disposal(settings.disposal)
    digests: dict[str, str] = {}
    if cache.profile is not None:
        digests[Path(cache.profile).name] = file_digest(cache.profile)
    for thing in (*_parts(cache.policy), cache.allocator, disposal):
        fitted = getattr(thing, "file", None)
        if isinstance(fitted, str) and Path(fitted).is_file():
            digests[fitted] = file_digest(fitted)
        module = type(thing).__module__
        file = getattr(sys.modules.get(module), "__file__", None)
        if module.partition(".")[0] != "hf_paged_eviction" and file is not None:
            digests[module] = file_digest(file)
    return digests


def _parts(policy: EvictionPolicy) -> Iterator[EvictionPolicy]:
    """A policy, and those that it is made around."""
    yield policy
    for value in vars(policy).values():
        if isinstance(value, EvictionPolicy):
            yield from _parts(value)
