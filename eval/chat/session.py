"""The loop: a line comes in, an answer or what the cache holds goes out."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches

from rich.table import Table

from hf_paged_eviction.naming.sizes import readable_bytes

from ..data.prompting.chat_template import has_template
from ..errors import UserError
from ..models.loading import load
from ..options.chat import ChatOptions
from ..options.evaluate import whole_number
from ..options.files import text_or_file
from ..options.requests import model_settings
from .answering import Interrupt
from .blocks import BlockMap
from .conversation import Answer, Conversation
from .demo import demo_turns
from .figures import Footprint
from .screen import Answering, Screen
from .settings import chat_settings

_PROMPT = "you> "


def run_chat(options: ChatOptions) -> None:
    """Talk until the messages end.

    Raises:
        UserError: what was asked for cannot work; messages from a person are answered with the error instead.
        KeyboardInterrupt: the second Ctrl-C.
    """
    found = chat_settings(options)
    prompts = [text_or_file("--prompt", typed) for typed in options.prompt or ()]
    person = sys.stdin.isatty()
    screen = Screen(piped=not (person or prompts or options.demo))
    session = Session(Conversation(*load(model_settings(found)), found), screen)
    session.greet(helpful=person and not prompts)
    if options.demo and not session.demo(options.seed) and not person:
        raise KeyboardInterrupt
    if prompts:
        session.script(prompts)
    elif person:
        session.talk()
    elif not options.demo:
        session.script(_piped_lines())


class Session:
    """One conversation on one screen.

    Attributes:
        ended: whether the chat is over.
    """

    def __init__(self, conversation: Conversation, screen: Screen) -> None:
        self.conversation, self.screen, self.ended = conversation, screen, False
        self._told: set[str] = set()

    def greet(self, *, helpful: bool) -> None:
        """What kind of chat this is."""
        talk, options = self.conversation, self.conversation.options
        self.screen.say(
            f"{options.model}, {talk.policy}, budget {talk.budget:,} in blocks of {talk.block_size}"
            + (f" ({options.budget})" if isinstance(options.size, str) else "")
            + (f", behind {talk.context:,} tokens of {options.context}" if options.context else "")
            + ("; /help lists commands" if helpful else ""),
            "dim",
        )
        if options.chat_template and not has_template(talk.tokenizer):
            self.screen.say("note: this tokenizer has no chat template: the model continues plain text", "dim")
        if helpful and options.on_embedded:
            self.screen.say(
                "note: the embedded model answers only questions of its own kind, about facts it was told: "
                "try --demo, or `The code of maple is amber. What is the code of maple? The code of maple is`; "
                "--model names another",
                "dim",
            )

    def talk(self) -> None:
        """Messages that a person types, until Ctrl-D or /exit."""
        while not self.ended:
            try:
                self.line(self._typed(), typed=True)
            except EOFError:
                self.screen.notes.print()
                return
            except UserError as error:
                self.screen.say(f"error: {error}", "red")

    def script(self, lines: Iterable[str]) -> None:
        """Messages that were written before; blank ones are left out.

        Raises:
            UserError: one of them is a mistake, or there is none.
            KeyboardInterrupt: Ctrl-C stopped an answer, and nobody is there to say how to go on.
        """
        empty = True
        for line in filter(str.strip, lines):
            answer = self.line(line, typed=False)
            empty = False
            if answer is not None and answer.interrupted:
                raise KeyboardInterrupt
            if self.ended:
                break
        if empty:
            raise UserError("the message is empty: write one, --prompt TEXT or a line on the standard input")

    def demo(self, seed: int) -> bool:
        """A conversation that tells facts, and asks for them when much else was said; whether it came to its end."""
        turns = list(demo_turns(self.conversation.tokenizer, seed))
        right = 0
        for turn in turns:
            answer = self.message(turn.message, shown=turn.shown)
            good = turn.is_right(answer.text)
            right += good
            if answer.interrupted:
                self.screen.say("the demonstration ends here", "dim")
                return False
            self.screen.say(f"{'right' if good else 'forgotten'}: {turn.answer}", "green" if good else "red")
        policy, footprint = self.conversation.policy, Footprint.of(self.conversation.cache)
        others = " or ".join(f"--policy {name}" for name in ("paged_eviction", "keydiff", "recency") if name != policy)
        self.screen.say(
            f"{right} of {len(turns)} right with {policy}, {footprint.held:,} of {footprint.seen:,} tokens held; "
            f"try {others}",
            "bold",
        )
        return True

    def line(self, line: str, *, typed: bool) -> Answer | None:
        """A command, or a message and its answer.

        Args:
            typed: it stands on the screen already.

        Raises:
            UserError: it cannot be carried out or read.
        """
        shown = None if typed else line
        if not line.startswith("/") or line.startswith("//"):
            return self.message(line[1:] if line.startswith("//") else line, shown)
        if shown:
            self.screen.heard(shown)
        name, _, rest = line[1:].strip().partition(" ")
        if name not in COMMANDS:
            close = get_close_matches(name, COMMANDS, n=1)
            hint = f", did you mean /{close[0]}?" if close else ";"
            raise UserError(f"unknown command /{name}{hint} /help lists them, // sends a message that begins with /")
        COMMANDS[name][1](self, rest.strip())
        return None

    def message(self, message: str, shown: str | None) -> Answer:
        """Read a message and answer it.

        Args:
            shown: the message, or instead of it; None: it stands on the screen already.

        Raises:
            UserError: it is empty, or has no place.
        """
        talk, screen = self.conversation, self.screen
        turn = talk.prepare(message)
        if shown is not None:
            screen.heard(shown)
        if turn.rewritten:
            self._note(
                "the chat template would now write earlier turns in another way than they were read (many leave out "
                "the thinking); the cache keeps what was read"
            )
        hears = Answering(screen, talk)
        with warnings.catch_warnings(record=True) as warned, Interrupt() as interrupt, hears:
            answer = talk.answer(turn, hears, interrupt)
        screen.answered(answer)
        self._compare(answer)
        self._say_ending(answer)
        for each in warned:
            self._note(str(each.message))
        return answer

    def _note(self, text: str) -> None:
        """What is worth saying once."""
        if text not in self._told:
            self._told.add(text)
            self.screen.say(f"note: {text}", "yellow")

    def _compare(self, answer: Answer) -> None:
        full = answer.full
        if full is not None:
            differs = f" differs after {full.same} equal tokens: {full.text.strip()}"
            said = ": the same answer" if full.tokens == answer.tokens else differs
            self.screen.say(f"full cache ({readable_bytes(full.kv_bytes)}){said}", "dim")

    def _say_ending(self, answer: Answer) -> None:
        talk = self.conversation
        if answer.ending == "stopped":
            self.screen.say("stopped; what was read and said stays", "yellow")
        if answer.ending == "unread":
            self.screen.say(
                f"stopped; {answer.read:,} new tokens were read, the other {len(talk.ids) - talk.seen:,} are read "
                "with your next message; /reset drops everything",
                "yellow",
            )
        if answer.ending == "length":
            self.screen.say(f"the answer ends at its limit (--max-new-tokens {talk.options.max_new_tokens})", "dim")

    def _typed(self) -> str:
        """One message; a terminal that brackets what is pasted gives its lines together."""
        if self.screen.moves:
            _edit_lines()
        while True:
            try:
                if sys.stdout.isatty():
                    return input(_PROMPT)
                self.screen.notes.print(_PROMPT, end="")
                return input()
            except KeyboardInterrupt:
                self.screen.notes.print()
                self.screen.say("Ctrl-D or /exit ends the chat", "dim")

    # ---- commands

    def help(self, rest: str) -> None:
        """this list"""
        table = Table.grid(padding=(0, 2))
        for name, (usage, command) in COMMANDS.items():
            table.add_row(f"/{name} {usage}".strip(), command.__doc__)
        table.add_row("Ctrl-C", "stop an answer; what was read and said stays")
        table.add_row("Ctrl-D", "end the chat")
        self.screen.notes.print(table)

    def blocks(self, rest: str) -> None:
        """which tokens are held, layer by layer, coloured by score"""
        self.screen.notes.print(BlockMap(self.conversation.cache))

    def budget(self, rest: str) -> None:
        """hold N tokens from now on, fewer than before"""
        if rest:
            tokens = whole_number(rest)
            if tokens is None:
                raise UserError(f"/budget {rest}: write a number of tokens, such as /budget 256")
            self.conversation.shrink(tokens)
        self.screen.say(str(Footprint.of(self.conversation.cache).line()))

    def reset(self, rest: str) -> None:
        """begin a new conversation"""
        self.conversation.begin()
        self.screen.say(f"a new conversation with a budget of {self.conversation.budget:,}")

    def exit(self, rest: str) -> None:
        """end the chat"""
        self.ended = True


#: What stands behind a name in the list, and what it does; the list shows its docstring.
COMMANDS: dict[str, tuple[str, Callable[[Session, str], None]]] = {
    "help": ("", Session.help),
    "blocks": ("", Session.blocks),
    "budget": ("[N]", Session.budget),
    "reset": ("", Session.reset),
    "exit": ("", Session.exit),
}


def _piped_lines() -> Iterator[str]:
    try:
        yield from (line.rstrip("\r\n") for line in sys.stdin)
    except UnicodeDecodeError as error:
        raise UserError(f"the standard input is not {error.encoding} text: convert it first, with iconv") from error


def _edit_lines() -> None:
    try:
        import readline
    except ImportError:  # Windows edits lines by itself
        return
    readline.parse_and_bind("set enable-bracketed-paste on")
