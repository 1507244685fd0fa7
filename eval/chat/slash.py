"""What a person types behind a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..environment import model_facts, versions
from ..errors import UserError
from ..options.evaluate import whole_number
from ..policy_names import one_policy
from ..requests import attention_for
from ..summaries.formats import to_terminal
from ..tasks.task import count_tokens
from .blocks import BlockMap, block_list
from .conversation import Conversation
from .figures import Footprint, layer_table
from .screen import Screen
from .settings import read_text


class Commands:
    """Carries out commands.

    Attributes:
        files: texts that go in front of the next message.
        ended: whether the chat is over.
    """

    def __init__(self, conversation: Conversation, screen: Screen) -> None:
        self.talk, self.screen = conversation, screen
        self.files: list[str] = []
        self.ended = False

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
        _COMMANDS[name][1](self, rest.strip())

    def help(self, rest: str) -> None:
        """this list"""
        table = Table.grid(padding=(0, 2))
        for name, (usage, command) in _COMMANDS.items():
            table.add_row(f"/{name} {usage}".strip(), command.__doc__)
        table.add_row("Ctrl-C", "stop an answer; what was read and said stays")
        table.add_row("Ctrl-D", "end the chat")
        self.screen.show(table)

    @torch.inference_mode()
    def stats(self, rest: str) -> None:
        """what every layer has seen, holds and has evicted"""
        self.screen.show(to_terminal(layer_table(self.talk.cache)))

    def blocks(self, rest: str) -> None:
        """which tokens are held, coloured by score; of one layer: its blocks with their text"""
        talk, words = self.talk, rest.split()
        if len(words) > 2 or not all(word.isascii() and word.isdecimal() for word in words):
            raise UserError(f"/blocks {rest}: write /blocks, /blocks LAYER or /blocks LAYER HEAD")
        if not words or not talk.seen:
            self.screen.show(BlockMap(talk.cache))
            return
        layer, head = [*map(int, words), 0][:2]
        self.screen.show(block_list(talk.cache, layer, head, talk.ids, talk.tokenizer, talk.context))

    def budget(self, rest: str) -> None:
        """hold N tokens from now on, fewer than before"""
        if rest:
            self.talk.shrink(_tokens("/budget", rest))
        self.screen.say(str(Footprint.of(self.talk.cache).line()))

    def policy(self, rest: str) -> None:
        """begin a new conversation with another policy"""
        options = self.talk.options
        if not rest:
            self.screen.say(f"{options.policy}; `paged-eviction policies` lists all")
            return
        name = one_policy(rest)
        attention_for([name], options.attn_implementation, options.disposal)
        if options.context is not None:
            raise UserError(f"/policy {name}: {options.context} was compressed with {options.policy}")
        self.talk.begin(options.but(policy=name))
        self.screen.say(f"a new conversation with {name}")

    def reset(self, rest: str) -> None:
        """begin a new conversation, with a budget of N tokens"""
        options = self.talk.options
        if rest and options.context is not None:
            raise UserError(f"/reset {rest}: {options.context} has its own budget; /reset, then /budget {rest}")
        self.talk.begin(options.but(budget=str(_tokens("/reset", rest))) if rest else options)
        self.files.clear()
        options = self.talk.options
        self.screen.say(f"a new conversation with {options.policy} and a budget of {self.talk.budget:,}")

    def file(self, rest: str) -> None:
        """put a text file in front of the next message"""
        if not rest:
            raise UserError("/file: name a text file, such as /file notes.txt")
        text = read_text("/file", rest)
        if not text.strip():
            raise UserError(f"/file: {rest!r} is empty")
        self.files.append(text)
        count = count_tokens(self.talk.tokenizer, text)
        self.screen.say(f"{count:,} tokens of {rest} go in front of your next message")

    def save(self, rest: str) -> None:
        """write messages and figures as JSON; what was shown as .svg or .html"""
        if not rest:
            raise UserError("/save: name a file, such as /save chat.json or /save chat.svg")
        path = Path(rest).expanduser()
        try:
            if path.suffix.lower() in (".svg", ".html"):
                self.screen.export(path)
            else:
                path.write_text(json.dumps(_as_json(self.talk), indent=2, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            raise UserError(f"/save: cannot write {rest!r}: {error.strerror}") from error
        self.screen.say(f"written to {rest}")

    def exit(self, rest: str) -> None:
        """end the chat"""
        self.ended = True


#: What stands behind a name in the list, and what it does; the list shows its docstring.
_COMMANDS: dict[str, tuple[str, Callable[[Commands, str], None]]] = {
    "help": ("", Commands.help),
    "stats": ("", Commands.stats),
    "blocks": ("[LAYER [HEAD]]", Commands.blocks),
    "budget": ("[N]", Commands.budget),
    "policy": ("[NAME]", Commands.policy),
    "reset": ("[N]", Commands.reset),
    "file": ("PATH", Commands.file),
    "save": ("FILE", Commands.save),
    "exit": ("", Commands.exit),
    "quit": ("", Commands.exit),
}


def _tokens(command: str, typed: str) -> int:
    found = whole_number(typed)
    if found is None:
        raise UserError(f"{command} {typed}: write a number of tokens, such as {command} 256")
    return found


def _as_json(talk: Conversation) -> dict[str, Any]:
    """Settings, messages, tokens, and what every answer cost."""
    return {
        "settings": talk.options.as_json(),
        "model": model_facts(talk.model),
        "versions": versions(),
        "messages": list(talk.turns.messages),
        "context_tokens": talk.context,
        "ids": talk.ids[talk.context :],
        "answers": [{**asdict(answer), "tokens_per_second": answer.tokens_per_second} for answer in talk.answers],
        "stats": asdict(talk.cache.stats()),
    }
