"""What a chat was asked for, checked."""

from __future__ import annotations

from pathlib import Path

from ..defaults import one_cache
from ..distributed import launched
from ..errors import UserError
from ..options.base import flag
from ..options.cache import OneCacheOptions
from ..options.chat import ANSWER, BUDGET, EMBEDDED_ANSWER, EMBEDDED_BUDGET, ChatOptions
from ..requests import device_for


def chat_settings(options: ChatOptions) -> ChatOptions:
    """Check what was typed, and fill in what was not: policy, device, attention, sizes, texts of files.

    Raises:
        UserError: something that cannot work.
    """
    if launched() > 1:
        raise UserError("a chat runs in one process: start it without a launcher; --device-map auto splits a model")
    if options.context is not None:
        _check_context(options)
    if options.protect_system and options.system is None:
        raise UserError("--protect-system protects the system message: give one, --system TEXT or --system @FILE")
    found = options.but(
        device=device_for(options),
        budget=options.budget or str(EMBEDDED_BUDGET if options.on_embedded else BUDGET),
        max_new_tokens=options.max_new_tokens or (EMBEDDED_ANSWER if options.on_embedded else ANSWER),
        system=None if options.system is None else text_or_file("--system", options.system),
    )
    chosen = one_cache(found)
    same = {name: getattr(chosen, name) for name in ("attn_implementation", "sink_tokens", "recent_tokens")}
    return found.but(policy=chosen.policies[0], **same)


#: What cannot be said beside --context, and why.
_AGAINST_A_CONTEXT = {
    **dict.fromkeys(OneCacheOptions.model_fields, "its cache was made with all of these when the text was read"),
    "full": "a full cache would have to read the text, which is not in the file",
    "system": "the conversation begins with the context",
    "protect_system": "the conversation begins with the context",
}


def _check_context(options: ChatOptions) -> None:
    for name, reason in _AGAINST_A_CONTEXT.items():
        if name in options.model_fields_set:
            raise UserError(
                f"{flag(name)} does not go with --context {options.context}: {reason}; leave one of them out"
            )


def text_or_file(option: str, typed: str) -> str:
    """The text itself, or what stands in the file after an @."""
    return read_text(option, typed[1:]) if typed.startswith("@") else typed


def read_text(what: str, name: str) -> str:
    """The text of a file.

    Raises:
        UserError: it cannot be read as UTF-8; says so after `what`.
    """
    try:
        return Path(name).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{what}: cannot read {name!r}: {reason}") from error
