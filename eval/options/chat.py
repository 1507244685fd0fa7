"""The options of `paged-eviction chat`."""

from __future__ import annotations

from typing import ClassVar

from .base import File, Options, option
from .cache import OneCacheOptions
from .model import EMBEDDED, ModelOptions

#: The demonstration of the embedded model is 2,000 tokens long, and its answers are words.
EMBEDDED_BUDGET, EMBEDDED_ANSWER = 256, 32
BUDGET, ANSWER = 1024, 512


class SamplingOptions(Options):
    """How the next token is chosen."""

    panel: ClassVar[str] = "Answers"

    max_new_tokens: int | None = option(
        None,
        "Most tokens of an answer.",
        at_least=1,
        shown=f"{ANSWER}, {EMBEDDED_ANSWER} for the embedded model",
    )
    temperature: float = option(
        0.0,
        "0 takes the likeliest token. Above, tokens are drawn, other settings as the checkpoint says.",
        at_least=0.0,
    )
    top_p: float = option(1.0, "Share of the probability that is drawn from.", at_least=0.0, at_most=1.0)
    seed: int = option(0, "With the number of the turn, decides what is drawn; also of --demo.", at_least=0)


class ChatOptions(ModelOptions, OneCacheOptions, SamplingOptions):
    """What was typed."""

    panel: ClassVar[str] = "Messages"

    context: File | None = option(
        None,
        "Begin behind a text that `paged-eviction compress` has read; the file says how its cache is made.",
        metavar="FILE.safetensors",
        panel="Cache",
    )
    prefill_chunk_size: int = option(
        512,
        "Most tokens per forward while a message is read: bounds the memory of long ones.",
        at_least=1,
        panel="Cache",
    )
    full: bool = option(
        False,
        "A full cache answers too, from the same tokens; it reads the whole conversation again every time.",
        panel="Cache",
    )
    system: str | None = option(None, "The system message.", metavar="TEXT|@FILE")
    chat_template: bool = option(
        True,
        "Messages in the tokenizer's chat template, where it has one, or as plain text.",
        flags="--chat-template/--no-chat-template",
    )
    prompt: list[str] | None = option(
        None,
        "A message instead of the keyboard; several are sent one after the other. /commands work too.",
        metavar="TEXT|@FILE",
    )
    demo: bool = option(False, "Begin with a built-in conversation: facts, filler, questions.")

    @property
    def on_embedded(self) -> bool:
        """Whether the model is the one that ships with the package."""
        return self.model == EMBEDDED
