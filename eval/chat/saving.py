"""A conversation as a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..environment import model_facts, versions
from ..errors import UserError
from .conversation import Conversation
from .screen import Screen

_PICTURES = frozenset({".svg", ".html"})


def save(conversation: Conversation, screen: Screen, name: str) -> None:
    """Write what was shown as .svg or .html, else messages and figures as JSON.

    Raises:
        UserError: no name, or the file cannot be written.
    """
    if not name:
        raise UserError("/save: name a file, such as /save chat.json or /save chat.svg")
    path = Path(name).expanduser()
    try:
        if path.suffix.lower() in _PICTURES:
            screen.export(path)
        else:
            path.write_text(json.dumps(as_json(conversation), indent=2, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        raise UserError(f"/save: cannot write {name!r}: {error.strerror}") from error


def as_json(conversation: Conversation) -> dict[str, Any]:
    """Settings, messages, tokens, and what every answer cost."""
    return {
        "settings": conversation.settings.as_json(),
        "model": model_facts(conversation.model),
        "versions": versions(),
        "messages": list(conversation.turns.messages),
        "context_tokens": conversation.context,
        "ids": conversation.ids[conversation.context :],
        "answers": [
            {**asdict(answer), "tokens_per_second": answer.tokens_per_second} for answer in conversation.answers
        ],
        "stats": asdict(conversation.cache.stats()),
    }
