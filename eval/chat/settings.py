"""What a chat was asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..budgets import FULL
from ..commands.options import Options
from ..distributed import launched
from ..errors import UserError
from ..policy_names import ALL, ORACLE, choose_policies, split_name
from ..requests import shared_settings
from ..settings import EMBEDDED, Settings

if TYPE_CHECKING:
    from ..commands.chat import ChatOptions

#: The demonstration of the embedded model is 2,000 tokens long, and its answers are words.
EMBEDDED_BUDGET, EMBEDDED_ANSWER = 256, 32
BUDGET, ANSWER = 1024, 512


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        max_new_tokens: most tokens of an answer.
        temperature: 0 takes the likeliest token.
        top_p: share of the probability that is drawn from.
        seed: with the number of the turn, decides what is drawn.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class ChatSettings:
    """A model, a cache, and how to talk.

    Attributes:
        loading: what `models.load` needs, with the one policy.
        budget: tokens held per layer.
        sink_tokens: first tokens that are never evicted; None is one block.
        system: text of the system message.
        protect_system: whether the system message is never evicted.
        template: whether the tokenizer's chat template is used, where it has one.
        chunk: most tokens per forward while a message is read.
        compare: whether a full cache answers too.
    """

    loading: Settings
    budget: int
    sink_tokens: int | None
    system: str | None
    protect_system: bool
    template: bool
    chunk: int
    sampling: Sampling
    compare: bool

    @property
    def policy(self) -> str:
        """Its name, perhaps with an allocator: "h2o@cake"."""
        return self.loading.policies[0]

    def with_policy(self, policy: str, budget: int) -> ChatSettings:
        """The same chat with another cache."""
        loading = replace(self.loading, policies=(policy,), budgets=(str(budget),))
        return replace(self, loading=loading, budget=budget)


def chat_settings(options: ChatOptions) -> ChatSettings:
    """Check what was typed.

    Raises:
        UserError: something that cannot work.
    """
    if launched() > 1:
        raise UserError("a chat runs in one process: start it without a launcher; --device-map auto splits a model")
    usual_budget, usual_answer = (EMBEDDED_BUDGET, EMBEDDED_ANSWER) if options.model == EMBEDDED else (BUDGET, ANSWER)
    budget = options.budget or usual_budget
    system = None if options.system is None else text_or_file("--system", options.system)
    if options.protect_system and system is None:
        raise UserError("--protect-system protects the system message: give one, --system TEXT or --system @FILE")
    shared = shared_settings(
        Options(
            model=options.model,
            revision=options.revision,
            tokenizer=options.tokenizer,
            trust_remote_code=options.trust_remote_code,
            allow_pickle=options.allow_pickle,
            dtype=options.dtype,
            attn_implementation=options.attn_implementation,
            device=options.device,
            device_map=options.device_map,
            policies=one_policy(options.policy),
            budgets=str(budget),
            block_size=options.block_size,
            heads=options.heads,
        )
    )
    return ChatSettings(
        loading=Settings(**shared),
        budget=budget,
        sink_tokens=options.sink_tokens,
        system=system,
        protect_system=options.protect_system,
        template=options.chat_template,
        chunk=options.prefill_chunk_size,
        sampling=Sampling(options.max_new_tokens or usual_answer, options.temperature, options.top_p, options.seed),
        compare=options.full,
    )


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
