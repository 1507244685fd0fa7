"""What a person types behind a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..environment import model_facts, versions
from ..errors import UserError
from ..options.evaluate import whole_number
from ..requests import attention_for
from ..tasks.task import count_tokens
from .blocks import show_blocks
from .conversation import Conversation
from .figures import Footprint, layer_table, status_text
from .screen import Screen
from .settings import one_policy, read_text


@dataclass
class Commands:
    """Carries out commands.

    Attributes:
        files: texts that go in front of the next message.
        ended: whether the chat is over.
    """

    conversation: Conversation
    screen: Screen
    files: list[str] = field(default_factory=list)
    ended: bool = False

    def run(self, line: str) -> None:
        """Carry out "/name rest".

        Raises:
            UserError: there is no such command, or what stands behind it is wrong.
        """
        name, _, rest = line[1:].strip().partition(" ")
        if name not in _COMMANDS:
            close = get_close_matches(name, _COMMANDS, n=1)
            hint = f", did you mean /{close[0]}?" if close else ";"
            raise UserError(f"unknown command /{name}{hint} /help lists them, // sends a message that begins with /")
        _COMMANDS[name].run(self, rest.strip())

    def help(self, rest: str) -> None:
        """What can be typed."""
        table = Table.grid(padding=(0, 2))
        for name, command in _COMMANDS.items():
            if not command.meaning:  # another name of one that is listed
                continue
            table.add_row(f"/{name} {command.usage}".strip(), command.meaning)
        table.add_row("Ctrl-C", "stop an answer; what was read and said stays")
        table.add_row("Ctrl-D", "end the chat")
        self.screen.show(table)

    @torch.inference_mode()
    def stats(self, rest: str) -> None:
        """Figures of every layer."""
        self.screen.show(layer_table(self.conversation.cache))

    def blocks(self, rest: str) -> None:
        """What is held."""
        talk = self.conversation
        self.screen.show(show_blocks(talk.cache, rest, talk.ids, talk.tokenizer, talk.context))

    def budget(self, rest: str) -> None:
        """Hold fewer tokens."""
        talk = self.conversation
        if rest:
            talk.shrink(_tokens("/budget", rest))
        self.screen.say(status_text(Footprint.of(talk.cache)))

    def policy(self, rest: str) -> None:
        """Another policy, in a new conversation."""
        talk = self.conversation
        if not rest:
            self.screen.say(f"{talk.settings.policy}; `paged-eviction policies` lists all")
            return
        name = one_policy(rest)
        loading = talk.settings.loading
        attention_for([name], loading.attn_implementation, loading.disposal)
        if talk.settings.context is not None:
            raise UserError(f"/policy {name}: {talk.settings.context} was compressed with {talk.settings.policy}")
        talk.begin(talk.settings.with_policy(name))
        self.screen.say(f"a new conversation with {name}")

    def reset(self, rest: str) -> None:
        """A new conversation."""
        talk = self.conversation
        if rest and talk.settings.context is not None:
            raise UserError(f"/reset {rest}: {talk.settings.context} has its own budget; /reset, then /budget {rest}")
        talk.begin(talk.settings.with_budget(_tokens("/reset", rest)) if rest else talk.settings)
        self.files.clear()
        self.screen.say(f"a new conversation with {talk.settings.policy} and a budget of {talk.settings.budget:,}")

    def file(self, rest: str) -> None:
        """A text for the next message."""
        if not rest:
            raise UserError("/file: name a text file, such as /file notes.txt")
        text = read_text("/file", rest)
        if not text.strip():
            raise UserError(f"/file: {rest!r} is empty")
        self.files.append(text)
        count = count_tokens(self.conversation.tokenizer, text)
        self.screen.say(f"{count:,} tokens of {rest} go in front of your next message")

    def save(self, rest: str) -> None:
        """Write a file."""
        _write(self.conversation, self.screen, rest)
        self.screen.say(f"written to {rest}")

    def exit(self, rest: str) -> None:
        """No more."""
        self.ended = True


@dataclass(frozen=True)
class _Command:
    usage: str
    meaning: str
    run: Callable[[Commands, str], None]


_COMMANDS = {
    "help": _Command("", "this list", Commands.help),
    "stats": _Command("", "what every layer has seen, holds and has evicted", Commands.stats),
    "blocks": _Command(
        "[LAYER [HEAD]]", "which tokens are held, coloured by score; of one layer: its blocks with their text",
        Commands.blocks,
    ),
    "budget": _Command("[N]", "hold N tokens from now on, fewer than before", Commands.budget),
    "policy": _Command("[NAME]", "begin a new conversation with another policy", Commands.policy),
    "reset": _Command("[N]", "begin a new conversation, with a budget of N tokens", Commands.reset),
    "file": _Command("PATH", "put a text file in front of the next message", Commands.file),
    "save": _Command("FILE", "write messages and figures as JSON; what was shown as .svg or .html", Commands.save),
    "exit": _Command("", "end the chat; /quit too", Commands.exit),
    "quit": _Command("", "", Commands.exit),
}  # fmt: skip


def _tokens(command: str, typed: str) -> int:
    found = whole_number(typed)
    if found is None:
        raise UserError(f"{command} {typed}: write a number of tokens, such as {command} 256")
    return found


_PICTURES = frozenset({".svg", ".html"})


def _write(conversation: Conversation, screen: Screen, name: str) -> None:
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
            path.write_text(json.dumps(_as_json(conversation), indent=2, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        raise UserError(f"/save: cannot write {name!r}: {error.strerror}") from error


def _as_json(conversation: Conversation) -> dict[str, Any]:
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
