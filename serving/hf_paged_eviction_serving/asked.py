"""What a request over HTTP asks of its answer: all of it is done, or the request is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .sampler import Sampling

#: Fields that transformers' server takes and ignores, with the values that change nothing.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (),  # done here
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "audio": (),
    "presence_penalty": (),  # done here
    "response_format": ({"type": "text"},),
    "stop": ([],),
    "suffix": ("",),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "web_search_options": (),
}
_DONE = frozenset({"frequency_penalty", "presence_penalty", "suffix"})
#: What the field `generation_config` may set.
_SETTINGS = frozenset(
    "do_sample eos_token_id max_new_tokens min_p pad_token_id repetition_penalty temperature top_k top_p".split()
)


def refuse_unserved(body: Mapping[str, Any]) -> None:
    """Refuse fields that would be ignored.

    Raises:
        ValueError: with the name of the field.
    """
    for name, harmless in _HARMLESS.items():
        value = body.get(name)
        if name not in _DONE and value is not None and value not in harmless:
            raise ValueError(f"{name}={value!r} is not supported here. Leave it out.")
    given = body.get("generation_config")
    if given is not None:
        settings = json.loads(given)
        unknown = sorted(set(settings) - _SETTINGS) if isinstance(settings, dict) else [given]
        if unknown:
            raise ValueError(f"generation_config: {', '.join(unknown)} is not supported here. Leave it out.")


def sampling_of(body: Mapping[str, Any], config: Any, own: Any) -> Sampling:
    """How the tokens of a request are chosen.

    Args:
        body: the request.
        config: the `GenerationConfig` that transformers' server made for it.
        own: that of the model, or None if the request brings its own.

    Raises:
        TypeError, ValueError: a value is not valid; the message names it.
    """
    temperature, top_p = body.get("temperature"), body.get("top_p")
    if temperature is not None or top_p is not None:
        config.do_sample = temperature is None or float(temperature) != 0
    if own is not None:
        config.repetition_penalty = own.repetition_penalty  # transformers puts the penalty of frequency there
    if (config.max_new_tokens or 0) < 1:
        raise ValueError(f"an answer needs at least one token, got {config.max_new_tokens} as its limit.")
    return replace(
        Sampling.of(config),
        seed=_seed(body.get("seed")),
        presence_penalty=float(body.get("presence_penalty") or 0),
        frequency_penalty=float(body.get("frequency_penalty") or 0),
        logit_bias={int(token): float(bias) for token, bias in (body.get("logit_bias") or {}).items()},
    )


def _seed(seed: Any) -> int | None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed must be an integer, got {seed!r}.")
    return seed
