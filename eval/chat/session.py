"""The loop: a line comes in, an answer or a report goes out."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator

from hf_paged_eviction.naming.sizes import readable_bytes

from ..errors import UserError
from ..models import load
from ..options.chat import ChatOptions
from ..prompting.chat_template import has_template
from ..requests import model_settings
from .conversation import Answer, Conversation, FullAnswer
from .demo import demo_turns
from .figures import Footprint
from .interrupt import Interrupt
from .screen import Answering, Screen
from .settings import chat_settings, text_or_file
from .slash import Commands

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
    """One conversation on one screen."""

    def __init__(self, conversation: Conversation, screen: Screen) -> None:
        self.conversation, self.screen = conversation, screen
        self._commands = Commands(conversation, screen)
        self._told: set[str] = set()

    def greet(self, *, helpful: bool) -> None:
        """What kind of chat this is."""
        talk, options = self.conversation, self.conversation.options
        self.screen.say(
            f"{options.model}, {options.policy}, budget {talk.budget:,} in blocks of {options.block_size}"
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
        while not self._commands.ended:
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
            if self._commands.ended:
                break
        if empty:
            raise UserError("the message is empty: write one, --prompt TEXT or a line on the standard input")

    def demo(self, seed: int) -> bool:
        """A conversation that tells facts, and asks for them when much else was said; whether it came to its end."""
        turns = list(demo_turns(self.conversation.tokenizer, seed))
        right = 0
        for turn in turns:
            answer = self.message(turn.message, typed=False, shown=turn.shown)
            good = turn.is_right(answer.text)
            right += good
            if answer.interrupted:
                self.screen.say("the demonstration ends here", "dim")
                return False
            self.screen.say(f"{'right' if good else 'forgotten'}: {turn.answer}", "green" if good else "red")
        policy, footprint = self.conversation.options.policy, Footprint.of(self.conversation.cache)
        others = " or ".join(f"--policy {name}" for name in ("paged_eviction", "keydiff", "recency") if name != policy)
        self.screen.say(
            f"{right} of {len(turns)} right with {policy}, {footprint.held:,} of {footprint.seen:,} tokens held; "
            f"try {others}",
            "bold",
        )
        return True

    def line(self, line: str, *, typed: bool) -> Answer | None:
        """A command, or a message and its answer.

        Raises:
            UserError: it cannot be carried out or read.
        """
        if line.startswith("/") and not line.startswith("//"):
            self.screen.heard(line, typed=typed)
            self._commands.run(line)
            return None
        return self.message(line[1:] if line.startswith("//") else line, typed=typed)

    def message(self, message: str, *, typed: bool, shown: str | None = None) -> Answer:
        """Read a message, with the files in front of it, and answer it.

        Args:
            typed: it stands on the screen already.
            shown: stands there instead of it.

        Raises:
            UserError: it is empty, or has no place.
        """
        talk, screen = self.conversation, self.screen
        turn = talk.prepare(message, self._commands.files)
        self._commands.files.clear()
        screen.heard(shown or message, typed=typed)
        if turn.rewritten:
            self._note(
                "the chat template would now write earlier turns in another way than they were read (many leave out "
                "the thinking); the cache keeps what was read"
            )
        hears = Answering(screen, talk.cache)
        with warnings.catch_warnings(record=True) as warned, Interrupt() as interrupt, hears:
            answer = talk.answer(turn, hears, interrupt)
        screen.answered(answer)
        if answer.full is not None:
            screen.say(_comparison(answer, answer.full), "dim")
        self._say_ending(answer)
        for each in warned:
            self._note(str(each.message))
        return answer

    def _note(self, text: str) -> None:
        """What is worth saying once."""
        if text not in self._told:
            self._told.add(text)
            self.screen.say(f"note: {text}", "yellow")

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


def _comparison(answer: Answer, full: FullAnswer) -> str:
    size = readable_bytes(full.kv_bytes)
    if full.tokens == answer.tokens:
        return f"full cache ({size}): the same answer"
    return f"full cache ({size}) differs after {full.same} equal tokens: {full.text.strip()}"


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
