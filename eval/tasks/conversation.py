"""A long conversation that comes back to its topics, and a question about one of them.

Made for what EpiCache (arXiv 2509.17396) promises: many turns, topics that lie far apart, one memory for all of them.
Its benchmarks ask for more than a small model can say, so facts and questions are those of the suite, which the
embedded model was trained for. No score is comparable with a published one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from ..data import library
from ..data.sample import Sample
from . import haystack
from .suite import KV_RECALL, KV_RECALL_MANY, PASSKEY, VARIABLE_TRACKING
from .task import Facts, FreeTask, NeedleTask, Query, Request, default_load
from .words import Words

SYSTEM = "The user and the agent talk. Remember what is said."
"""What stands before the first turn."""

_TOPICS: tuple[NeedleTask, ...] = (KV_RECALL, KV_RECALL_MANY, VARIABLE_TRACKING, PASSKEY)
_VISITS = 2  # how often the conversation comes to each topic
_TURN_TOKENS = 64
_SPEAKERS = ("User", "Agent")


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


def _sample(request: Request) -> Sample:
    """A question about one of four topics, each with facts and text of its own, and two visits to each, in turns.

    Samples that differ in their question only share a conversation: one for each topic.
    """
    conversation, question = divmod(request.index, len(_TOPICS))
    rng = request.rng(conversation)
    topics = _draw(rng, request.length)
    queries = [topic.facts.queries[0] for topic in topics]

    def after(query: Query) -> int:
        return request.taken(query.ask, query.cue) + request.answer_room(query.completion)

    turns = _turns(request, rng, topics, request.length - max(map(after, queries)))
    query, topic = queries[question], topics[question]
    context = "".join([SYSTEM, *turns]) + "\n\n"
    place = min(context.index("\n" + topic.facts.needles[needle] + "\n") for needle in query.needles)
    return request.sample(
        context,
        query.ask,
        query.cue,
        (query.answer,),
        request.answer_room(query.completion),
        query.metadata | {"topic": topic.task.name, "turns": len(turns), "depth": round(place / len(context), 4)},
        metric=topic.task.metric,
    )


CONVERSATION = FreeTask(
    "conversation",
    "A conversation that visits four topics twice; a question about a fact of one of them.",
    "words_in_place",
    _sample,
)


def _draw(rng: random.Random, length: int) -> list[_Topic]:
    words, load = Words(rng), default_load(length // 2)
    modules = rng.sample(library.FILLER, len(_TOPICS))
    return [_Topic(task, task.draw(rng, words, load), name) for task, name in zip(_TOPICS, modules, strict=True)]


def _turns(request: Request, rng: random.Random, topics: Sequence[_Topic], budget: int) -> list[str]:
    """As many turns as fit, in visits to one topic after the other."""
    cost = request.count
    count = max(_VISITS * len(topics), budget // _TURN_TOKENS)
    facts = _deal(rng, topics, count)
    bare = [_turn(number, lines, []) for number, (_, lines) in enumerate(facts)]
    spare = budget - cost("".join([SYSTEM, *bare]) + "\n\n") - 2
    if spare < 0:
        raise request.too_short(-spare)
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
