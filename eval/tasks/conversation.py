"""A long conversation that comes back to its topics, and a question about one of them.

Made for what EpiCache (arXiv 2509.17396) promises: many turns, topics that lie far apart, one memory for all of them.
Its benchmarks ask for more than a small model can say, so facts and questions are those of the suite, which the
embedded model was trained for. No score is comparable with a published one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from . import haystack, library
from .sample import Sample
from .suite import KvRecall, KvRecallMany, Passkey, VariableTracking
from .task import (
    Facts,
    NeedleTask,
    Query,
    Task,
    Tokenizer,
    answer_room,
    count_tokens,
    default_load,
    question_fields,
    taken,
)
from .words import Words

SYSTEM = "The user and the agent talk. Remember what is said."
"""What stands before the first turn."""

_TOPICS: tuple[NeedleTask, ...] = (KvRecall(), KvRecallMany(), VariableTracking(), Passkey())
_VISITS = 2  # how often the conversation comes to each topic
_TURN_TOKENS = 64
_SPEAKERS = ("User", "Agent")
_TURN = re.compile(r"(?=\n\n(?:User|Agent):\n)")


@dataclass(frozen=True)
class _Topic:
    """What is said about one thing, and what can be asked."""

    task: NeedleTask
    facts: Facts
    module: str

    def lines(self, rng: random.Random) -> list[str]:
        """Consecutive lines of its own text, with the newlines before them."""
        lines = library.filler_lines(self.module)
        start = rng.randrange(max(1, len(lines) - 6))
        return ["\n" + line.strip("\n") for line in lines[start : start + rng.randint(2, 5)]]


class Conversation(Task):
    """Four topics, each with facts and text of its own, and two visits to each, in turns.

    Samples that differ in their question only share a conversation: one for each topic.
    """

    name = "conversation"
    description = "A conversation that visits four topics twice; a question about a fact of one of them."

    def make(self, tokenizer: Tokenizer, length: int, index: int, seed: int = 0, chat: bool = False) -> Sample:
        conversation, asked = divmod(index, len(_TOPICS))
        rng = self._rng(length, conversation, seed)
        topics = _draw(rng, length)
        queries = [topic.facts.queries[0] for topic in topics]

        def after(query: Query) -> int:
            return taken(tokenizer, query.ask, query.cue, chat) + answer_room(tokenizer, query.completion, chat)

        budget = length - max(map(after, queries))
        turns = _turns(tokenizer, rng, topics, budget)
        query, topic = queries[asked], topics[asked]
        context = "".join([SYSTEM, *turns]) + "\n\n"
        place = min(context.index("\n" + topic.facts.needles[needle] + "\n") for needle in query.needles)
        return Sample(
            id=self._id(length, index, seed),
            task=self.name,
            context=context,
            **question_fields(query.ask, query.cue, chat),
            answers=(query.answer,),
            max_new_tokens=answer_room(tokenizer, query.completion, chat),
            metadata={
                **query.metadata,
                "topic": topic.task.name,
                "turns": len(turns),
                "depth": round(place / len(context), 4),
            },
        )

    def score(self, sample: Sample, prediction: str) -> float:
        topic = next(each for each in _TOPICS if each.name == sample.metadata["topic"])
        return topic.score(sample, prediction)


def split_turns(context: str) -> tuple[str, list[str]]:
    """What stands before the first turn of a conversation, and its turns; joined they are the context."""
    system, *turns = _TURN.split(context)
    return system, turns


def _draw(rng: random.Random, length: int) -> list[_Topic]:
    words, load = Words(rng), default_load(length // 2)
    modules = rng.sample(library.FILLER, len(_TOPICS))
    return [_Topic(task, task.draw(rng, words, load), name) for task, name in zip(_TOPICS, modules, strict=True)]


def _turns(tokenizer: Tokenizer, rng: random.Random, topics: Sequence[_Topic], budget: int) -> list[str]:
    """As many turns as fit, in visits to one topic after the other."""

    def cost(text: str) -> int:
        return count_tokens(tokenizer, text)

    count = max(_VISITS * len(topics), budget // _TURN_TOKENS)
    facts = _deal(rng, topics, count)
    bare = [_turn(number, lines, []) for number, (_, lines) in enumerate(facts)]
    spare = budget - cost("".join([SYSTEM, *bare]) + "\n\n") - 2
    if spare < 0:
        raise ValueError(
            f"task 'conversation' does not fit: its facts and questions take {-spare} tokens more than the length "
            f"asked for; ask for a length of at least {-spare} tokens more"
        )
    fillers: list[list[str]] = [[] for _ in facts]
    misses = 0
    for number in cycle(range(count)):  # turns grow alike, so that every topic gets its share of the text
        text = facts[number][0].lines(rng) if rng.random() < 0.7 else ["\n" + haystack.sentence(rng)]
        price = cost("".join(text))
        if price <= spare:
            fillers[number] += text
            spare -= price
        else:
            misses += 1
            if misses == 8:
                break
    while True:
        turns = [_turn(number, lines, fillers[number]) for number, (_, lines) in enumerate(facts)]
        if cost("".join([SYSTEM, *turns]) + "\n\n") <= budget:
            return turns
        max(fillers, key=len).pop()


def _deal(rng: random.Random, topics: Sequence[_Topic], count: int) -> list[tuple[_Topic, list[str]]]:
    """The topic of each turn, and the facts that it tells: those of a topic in order, over all its turns."""
    visits = _VISITS * len(topics)
    owners = [topics[number * visits // count % len(topics)] for number in range(count)]
    dealt: list[list[str]] = [[] for _ in owners]
    for topic in topics:
        turns = [number for number, owner in enumerate(owners) if owner is topic]
        places = sorted(rng.choice(turns) for _ in topic.facts.needles)
        for place, needle in zip(places, topic.facts.needles, strict=True):
            dealt[place].append(needle)
    return list(zip(owners, dealt, strict=True))


def _turn(number: int, facts: Sequence[str], filler: Sequence[str]) -> str:
    half = len(filler) // 2
    lines = [*filler[:half], *("\n" + fact for fact in facts), *filler[half:]]
    return f"\n\n{_SPEAKERS[number % 2]}:\n" + "".join(lines).lstrip("\n")
