"""What a chat was asked for, checked."""

from __future__ import annotations

from pathlib import Path

from hf_paged_eviction.options.cache_options import AUTO

from ..budgets import FULL, ORACLE, parse_memory
from ..defaults import settled
from ..distributed import launched
from ..errors import UserError
from ..options.base import flag
from ..options.cache import OneCacheOptions
from ..options.chat import ANSWER, BUDGET, EMBEDDED_ANSWER, EMBEDDED_BUDGET, ChatOptions
from ..policy_names import ALL, choose_policies, split_name
from ..requests import attention_for, device_for
from ..settings import Settings


def chat_settings(options: ChatOptions) -> ChatOptions:
    """Check what was typed, and fill in what was not: policy, device, attention, sizes, texts of files.

    Raises:
        UserError: something that cannot work.
    """
    if launched() > 1:
        raise UserError("a chat runs in one process: start it without a launcher; --device-map auto splits a model")
    policy = options.policy if options.policy == AUTO else one_policy(options.policy)
    if options.context is not None:
        _check_context(options)
    if options.memory is not None:
        _check_memory(options)
    if options.protect_system and options.system is None:
        raise UserError("--protect-system protects the system message: give one, --system TEXT or --system @FILE")
    named = [] if policy == AUTO else [policy]
    found = options.but(
        policy=policy,
        device=device_for(options),
        attn_implementation=attention_for(named, options.attn_implementation, options.disposal),
        budget=options.budget or (EMBEDDED_BUDGET if options.on_embedded else BUDGET),
        max_new_tokens=options.max_new_tokens or (EMBEDDED_ANSWER if options.on_embedded else ANSWER),
        system=None if options.system is None else text_or_file("--system", options.system),
    )
    chosen = settled(model_settings(found))
    same = {name: getattr(chosen, name) for name in ("attn_implementation", "sink_tokens", "recent_tokens")}
    return found.but(policy=chosen.policies[0], **same)


def model_settings(options: ChatOptions) -> Settings:
    """What `models.load` needs, and what the cache is told."""
    size = str(options.budget) if options.memory is None else options.memory
    return Settings(**{**options.common(Settings), "policies": (options.policy,), "budgets": (size,)})


#: What cannot be said beside --context, and why.
_AGAINST_A_CONTEXT = {
    **dict.fromkeys(
        [*OneCacheOptions.model_fields, "memory"], "its cache was made with all of these when the text was read"
    ),
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


def _check_memory(options: ChatOptions) -> None:
    if options.budget is not None:
        raise UserError(
            f"--budget {options.budget} and --memory {options.memory} both say how much is held: give one of them"
        )
    found = parse_memory(options.memory or "")
    if len(found) > 1 or found[0].is_full:
        raise UserError(f"--memory {options.memory}: a conversation has one cache, write one size, such as 2MiB")


def one_policy(typed: str) -> str:
    """The name of one policy that a chat can use."""
    names = choose_policies(typed)
    if len(names) > 1:
        raise UserError(f"policy {typed!r}: a conversation has one cache, name one policy")
    if names[0] in (FULL, ALL):
        raise UserError(f"policy {typed!r}: name one policy; --full lets a full cache answer too")
    if split_name(names[0])[0] == ORACLE:
        raise UserError("policy 'oracle': it looks ahead to the answer of the full cache, which a chat does not know")
    return names[0]


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
