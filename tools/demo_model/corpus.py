"""The text that the demo model learns from, made from a seed alone.

A document is a chat or a plain text. It is a list of `Segment`, of which only those that are
`learned` count in the training loss: what the model says, not what it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

from demo_model.grammar import Fact
from demo_model.number_facts import number_facts
from demo_model.phrasing import SMALL_TALK, ask
from demo_model.small_talk import (
    Exchange,
    declined,
    echo,
    never_told,
    poem,
    small_talk_facts,
    told_and_asked,
)
from demo_model.stories import make_hero, story_exchange, tell
from demo_model.word_facts import word_facts
from demo_model.world_facts import world_facts

Role = Literal["system", "user", "assistant", "text"]

# How often a turn is about each family of facts. Without weights the numbers would crowd out the
# rest: two thirds of all facts are sums and comparisons.
_FAMILY_WEIGHTS = {"numbers": 34, "world": 28, "words": 22, "about": 7, SMALL_TALK: 9}

_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are Ember, a small language model.",
    "You are Ember.",
    "You are a friendly assistant. Answer in plain English.",
    "Answer in one short sentence.",
    "Be kind and be brief.",
    "You are an assistant that answers questions and tells stories.",
)
_SYSTEM_RULES = (
    "Answer in full sentences.",
    "Use plain English.",
    "Be polite to the user.",
    "Do not make things up.",
    "Say so when you do not know something.",
    "Keep your answers short.",
    "The user may be a child.",
    "Do not use hard words.",
    "Never be rude.",
    "Stories should have a good end.",
    "Numbers are written as digits.",
    "The user is a guest of the library.",
    "You work in a shop that sells books and tea.",
    "The shop is open from nine to five.",
    "Today there is a market in the town.",
    "You are talking to people from all over the world.",
    "Think before you answer.",
    "Help the user as well as you can.",
    "If the user says hello, greet the user.",
    "If the user says goodbye, wish the user a nice day.",
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a document: who speaks, what, and whether the model learns to say it."""

    role: Role
    text: str
    learned: bool


Document = tuple[Segment, ...]


@cache
def all_facts() -> dict[str, tuple[Fact, ...]]:
    """Every fact, by family."""
    words = word_facts()
    return {
        "numbers": tuple(number_facts()),
        "world": tuple(world_facts()),
        "words": tuple(fact for fact in words if fact.group != "about"),
        "about": tuple(fact for fact in words if fact.group == "about"),
        SMALL_TALK: tuple(small_talk_facts()),
    }


def documents(seed: int, count: int) -> Iterator[Document]:
    """`count` documents; the same seed always gives the same ones."""
    rng = Random(seed)
    for _ in range(count):
        kind = rng.random()
        if kind < 0.05:
            yield _plain(tell(make_hero(rng), rng, parts=rng.choice((1, 1, 2))))
        elif kind < 0.08:
            yield _plain(_fact(rng).answer)
        else:
            yield _chat(rng)


def _plain(text: str) -> Document:
    return (Segment("text", text, learned=True),)


def _chat(rng: Random) -> Document:
    segments: list[Segment] = []
    if rng.random() < 0.35:
        segments.append(Segment("system", _system_message(rng), learned=False))
    for exchange in _exchanges(rng):
        segments.append(Segment("user", exchange.question, learned=False))
        segments.append(Segment("assistant", exchange.answer, learned=True))
    return tuple(segments)


def _system_message(rng: Random) -> str:
    opening = rng.choice(_SYSTEM_MESSAGES)
    if rng.random() < 0.6:
        return opening
    longest = len(_SYSTEM_RULES) if rng.random() < 0.3 else 5
    return " ".join([opening, *rng.sample(_SYSTEM_RULES, rng.randint(1, longest))])


def _exchanges(rng: Random) -> list[Exchange]:
    """The turns of one chat; in some, the user says something and asks for it in a later turn."""
    turns = [_exchange(rng) for _ in range(_turn_count(rng))]
    kind = rng.random()
    if kind < 0.12:
        told, asked = told_and_asked(rng)
        at = rng.randint(0, len(turns))
        later = rng.randint(at, min(len(turns), at + 4))
        return [*turns[:at], told, *turns[at:later], asked, *turns[later:]]
    if kind < 0.13:
        return [never_told(rng), *turns]
    return turns


def _turn_count(rng: Random) -> int:
    kind = rng.random()
    if kind < 0.5:
        return 1
    if kind < 0.8:
        return rng.randint(2, 4)
    return rng.randint(5, 8) if kind < 0.92 else rng.randint(9, 24)


def _exchange(rng: Random) -> Exchange:
    kind = rng.random()
    if kind < 0.13:
        return story_exchange(rng)
    if kind < 0.15:
        return poem(rng)
    if kind < 0.21:
        return declined(rng)
    if kind < 0.225:
        return echo(rng)
    fact = _fact(rng)
    return Exchange(ask(fact, rng), fact.answer)


def _fact(rng: Random) -> Fact:
    families = list(_FAMILY_WEIGHTS)
    family = rng.choices(families, weights=list(_FAMILY_WEIGHTS.values()))[0]
    return rng.choice(all_facts()[family])
