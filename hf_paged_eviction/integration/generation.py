"""What a call of `generate` runs with that answers through a cache of ours."""

import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from transformers import GenerationConfig, GenerationMixin

from .cache_argument import unwrapped

#: One answer for each prompt, as tokens, through the cache that is handed over.
ANSWERS_AS_TOKENS: dict[str, Any] = {
    "use_cache": True,
    "cache_implementation": None,
    "max_cache_len": None,
    "return_dict_in_generate": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "output_logits": False,
    "num_return_sequences": 1,
    "prefill_chunk_size": None,
    "max_length": None,
    # Assisted decoding: in transformers up to 5.24 its answers are wrong where any cache has read a part of the prompt,
    # and where tokens are evicted they depend on how many are guessed at once.
    "assistant_model": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": None,
}
#: Settings that would change what is answered, and why none of our calls can follow them.
CHANGES_PROMPT = {"token_healing": "it changes the end of a prompt that has been read"}
_NEUTRAL_AT_ONE = ("guidance_scale", "encoder_repetition_penalty")
#: Arguments that single ways of decoding take.
_OF_MODES = ("tokenizer", "assistant_tokenizer")
#: Attributes of a generation configuration that say where it comes from.
_NO_SETTINGS = ("_from_model_config", "transformers_version")


def generate_settings(
    model: Any,
    arguments: Mapping[str, Any],
    caller: str,
    *,
    sets: Mapping[str, Any] = ANSWERS_AS_TOKENS,
    cannot: Mapping[str, str] = CHANGES_PROMPT,
) -> dict[str, Any]:
    """The keyword arguments of a call of `generate`, from arguments, `generation_config=` and the model, in this order.

    What the caller sets itself (`sets`) is said as an argument, so that no checkpoint changes it; whoever asks for
    anything else is refused. A `generation_config=` becomes arguments: what it leaves open is the model's.

    Args:
        arguments: as for `generate`, without the inputs and the cache.
        caller: the name in messages.
        sets: settings of this caller, by name; "assistant_model", which is an argument only, may be among them.
        cannot: settings that cannot be followed wherever they stand, and why.

    Raises:
        ValueError: an argument or `generation_config=` asks for another value than the caller's, or anybody for what
            cannot be followed.
    """
    known, own = vars(GenerationConfig()), getattr(model, "generation_config", None)
    config = arguments.get("generation_config")
    asked = {name: value for name, value in arguments.items() if name != "generation_config"}
    # What was copied from the checkpoint is the checkpoint's.
    in_config = {
        name: value
        for name, value in ({} if config is None else vars(config)).items()
        if name in known and value not in (None, known[name], getattr(own, name, None)) and name not in _NO_SETTINGS
    }
    for place, settings in (("", asked), (" of generation_config=", in_config)):
        for name in settings.keys() & sets.keys():
            if settings[name] not in (None, sets[name]):
                raise ValueError(
                    f"{name}={settings[name]!r:.80}{place}: {caller} sets {name} itself, because it answers through "
                    "its own cache. Leave it out, or call generate."
                )
    merged = in_config | {name: value for name, value in asked.items() if value is not None or name not in in_config}
    for name, reason in cannot.items():
        value = merged.get(name)
        value = getattr(own, name, None) if value is None else value
        if value and not (name in _NEUTRAL_AT_ONE and value == 1):
            raise ValueError(
                f"{name}={value!r:.80} (an argument, or in the generation configuration of the call or the model): "
                f"{reason}. Set it to {known.get(name)!r}, or call generate."
            )
    return {
        **{name: value for name, value in merged.items() if name not in sets},
        **{name: value for name, value in sets.items() if name in known},
    }


def check_names(model: Any, arguments: Iterable[str], caller: str, names: Iterable[str]) -> None:
    """Refuse arguments that neither `generate` nor the model has, before any text is read.

    Args:
        names: the caller's own arguments, which may have been meant.

    Raises:
        TypeError: the message names the closest one.
    """
    forward, prepare = unwrapped(model).forward, unwrapped(model).prepare_inputs_for_generation
    calls = (model.generate, GenerationMixin.generate, forward, prepare)
    taken = {
        *vars(GenerationConfig()),
        *_OF_MODES,
        *(name for call in calls for name in inspect.signature(call).parameters),
    }
    for name in arguments:
        if name not in taken:
            close = get_close_matches(name, sorted({*names, *taken}), n=1)
            hint = f"Did you mean {close[0]!r}?" if close else "See CacheOptions, and generate of transformers."
            raise TypeError(f"{caller}, generate and the model have no argument {name!r}. {hint}")


def effective(model: Any, settings: Mapping[str, Any], name: str) -> Any:
    """What `generate` with these settings takes for `name`; None = the default of transformers."""
    value = settings.get(name)
    return getattr(model.generation_config, name, None) if value is None else value
