"""Short stories: a hero, a friend, a plot in eight beats, and a few ways to tell each beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from demo_model.grammar import capitalise, read_data, stable_hash, with_article, words_of
from demo_model.small_talk import Exchange, any_name, any_word

_PRONOUNS = {
    "he": {"he": "he", "him": "him", "his": "his"},
    "she": {"he": "she", "him": "her", "his": "her"},
}
_HE_NAMES = words_of(
    "Rusty, Tim, Otto, Felix, Barnaby, Jasper, Milo, Pip, Bruno, Hugo, Toby, Oscar, Leo, Finn, Max"
)
_SHE_NAMES = words_of(
    "Ruby, Mina, Tilda, Rosie, Luna, Clara, Hazel, Ivy, Nell, Wilma, Poppy, Daisy, Emma, Ada, Flora, Lily"
)

_KINDS = words_of(
    """
    fox, hen, cat, dog, mouse, rabbit, bear, owl, frog, duck, horse, pig, goat, wolf, deer, squirrel, hedgehog, turtle
    badger, otter, lion, tiger, elephant, giraffe, monkey, penguin, whale, crow, swan, sheep, donkey, bee, ant, snail
    beaver, mole, crocodile, kangaroo, parrot, butterfly, spider, dolphin, seal, goose, camel, panda, koala, zebra
    shark, octopus, crab, bat, lamb, chicken, puppy, kitten, pony, dinosaur, llama, hippo, raven, fish, bird, snake
    dragon, robot, king, queen, prince, princess, wizard, witch, giant, knight, pirate, ghost, mermaid, unicorn, dwarf
    baker, farmer, sailor, teacher, gardener, painter, shepherd, doctor, pilot, clown, cook, firefighter, fisherman
    lighthouse keeper, snowman, astronaut, detective, musician, inventor, boy, girl, old man, old woman, elf, toy soldier
    man, woman, child, fairy, monster, ninja, cowboy, programmer, engineer, scientist, grandmother, grandfather, alien
    kettle, cloud, lamp, candle, train, ship, clock, star, snowflake, teapot, umbrella, pilot light, flame, ember, tree
    computer, language model, GPU, server, car, rocket, stone, flower, river, house, boat, kite, stove, moon, lighthouse
    """
)
_MALE_KINDS = frozenset(
    words_of(
        "king, prince, wizard, boy, old man, knight, fisherman, snowman, man, cowboy, grandfather"
    )
)
_FEMALE_KINDS = frozenset(
    words_of("queen, princess, witch, girl, old woman, mermaid, hen, woman, grandmother")
)

_ADJECTIVES = words_of(
    """
    little, brave, clever, shy, kind, curious, lazy, cheerful, happy, sad, old, big
    wise, lost, tiny, young, quiet, friendly, small, gentle, funny
    """
)
_HOMES = words_of(
    """
    in a small house near the forest; in a village by the sea; on the edge of a green meadow; at the foot of a mountain
    in a quiet valley; beside a clear stream; on a little island; in a house with a red door; near an old mill
    at the end of a long road; under a great oak tree; not far from the river
    """.replace(";", ",")
)
_PLACES = {
    "to the forest": "in the forest",
    "to the river": "by the river",
    "to the meadow": "in the meadow",
    "to the beach": "on the beach",
    "to the old bridge": "near the old bridge",
    "to the lake": "by the lake",
    "to the top of the hill": "on the hill",
    "to the market": "at the market",
    "to the old mill": "near the old mill",
    "into the garden": "in the garden",
    "to the big oak tree": "under the big oak tree",
    "to the harbour": "at the harbour",
}
_THINGS = words_of(
    """
    red ball, blue scarf, golden key, silver bell, wooden flute, paper boat, warm hat, little drum, shiny stone, green kite
    old book, small lantern, brass compass, yellow umbrella, toy train, music box, woollen blanket, silver spoon
    """
)
_FOODS = words_of(
    """
    apple pie, fresh bread, honey cakes, sweet berries, pancakes, roasted nuts, bread and butter, ripe pears
    bread and jam, plum cake, cheese and apples, blueberries, ginger biscuits, cherry cake, bread and cheese
    """
)
_SKILLS = words_of(
    "swim, whistle, dance, sing, juggle, row a boat, ride a bicycle, bake bread, read, skate, paint, play the flute"
)
_BUILDINGS = words_of(
    "tree house, raft, big kite, bridge, little boat, windmill, snow castle, bird house"
)
_TIMES = words_of(
    "morning, afternoon, day, cold morning, sunny day, windy day, grey morning, quiet afternoon, bright morning"
)

_OPENINGS = (
    "Once upon a time there was {hero} named {name}. {He} lived {home}.",
    "There was once {hero} whose name was {name}. {He} lived {home}.",
    "Long ago, {home}, there lived {hero} called {name}.",
    "Once there was {hero} called {name}, who lived {home}.",
    "{Hero} named {name} lived {home}.",
)
_BRIDGES = (
    "The story does not end there.",
    "But that was only the beginning.",
    "Some time later, something else happened.",
)
_PARAGRAPH_ENDS = (3, 5, 7)

_SHORT_REQUESTS = (
    "Tell me a short story about {x}.",
    "Tell me a story about {x}.",
    "Can you tell me a story about {x}?",
    "Can you tell me a short story about {x}?",
    "Please tell me a story about {x}.",
    "Write a short story about {x}.",
    "Write a story about {x}.",
    "I would like to hear a story about {x}.",
    "A story about {x}, please.",
    "Do you know a story about {x}?",
    "Tell me about {x} in a short story.",
)
_OPEN_REQUESTS = (
    "Tell me a story.",
    "Tell me a short story.",
    "Can you tell me a story?",
    "Please tell me a story.",
    "Write a story.",
    "Write a short story.",
    "Do you know a story?",
    "I would like to hear a story.",
    "Tell me a bedtime story.",
    "Once upon a time",
    "Another story, please.",
    "Tell me another story.",
    "A story, please.",
)
_LONG_REQUESTS = (
    "Tell me a long story about {x}.",
    "Write a long story about {x}.",
    "Can you tell me a long story about {x}?",
    "Please tell me a long story about {x}.",
)


@dataclass(frozen=True, slots=True)
class Hero:
    """Who a story is about; `asked` is how a user would ask for it."""

    name: str
    kind: str
    adjective: str
    pronoun: str

    @property
    def described(self) -> str:
        """The hero as the story first names them: "a little fox"."""
        return with_article(f"{self.adjective} {self.kind}".strip())


@cache
def plots() -> dict[str, tuple[tuple[str, ...], ...]]:
    """Plot name -> its beats -> the ways to tell each beat."""
    found: dict[str, tuple[tuple[str, ...], ...]] = {}
    for block in read_data("plots").strip().split("\n\n"):
        title, *beats = block.splitlines()
        found[title.removeprefix("# ")] = tuple(
            tuple(way.strip() for way in beat.split(" | ")) for beat in beats
        )
    return found


def prefer(options: Sequence[str], key: str, rng: Random) -> str:
    """Half of the time the option that belongs to the key, else any.

    Without it a greedy reader of this text would hear one and the same story, the likeliest, about
    every hero.
    """
    return options[stable_hash(key) % len(options)] if rng.random() < 0.5 else rng.choice(options)


def make_hero(rng: Random, kind: str | None = None) -> Hero:
    """A hero whose name fits; now and then of a kind that no dictionary has."""
    if kind is None:
        kind = any_word(rng) if rng.random() < 0.06 else rng.choice(_KINDS)
    adjective = rng.choice(_ADJECTIVES) if rng.random() < 0.7 and not kind.startswith("old") else ""
    if kind in _MALE_KINDS or kind in _FEMALE_KINDS:
        pronoun = "he" if kind in _MALE_KINDS else "she"
    else:
        pronoun = prefer(("he", "she"), f"{kind}/pronoun", rng)
    names = _HE_NAMES if pronoun == "he" else _SHE_NAMES
    name = any_name(rng) if rng.random() < 0.15 else prefer(names, f"{kind}/name", rng)
    return Hero(name, kind, adjective, pronoun)


def _make_friend(hero: Hero, rng: Random) -> Hero:
    friend = make_hero(rng, prefer(_KINDS, f"{hero.kind}/friend", rng))
    while friend.name == hero.name or friend.kind == hero.kind:
        friend = make_hero(rng)
    return friend


def tell(hero: Hero, rng: Random, *, parts: int = 1, friend: Hero | None = None) -> str:
    """A story of this hero: one plot, or several one after the other."""
    friend = friend or _make_friend(hero, rng)
    titles = sorted(plots())
    paragraphs: list[str] = []
    for part in range(parts):
        title = prefer(titles, f"{hero.kind}/plot {part}", rng)
        titles.remove(title)
        slots = _slots(hero, friend, rng)
        beats = [_OPENINGS if part == 0 else _BRIDGES, *plots()[title]]
        sentences = [
            _fill(prefer(ways, f"{hero.kind}/{title} {beat}", rng), slots, rng)
            for beat, ways in enumerate(beats)
        ]
        cut = rng.choice(_PARAGRAPH_ENDS)
        paragraphs += [" ".join(sentences[:cut]), " ".join(sentences[cut:])]
    return "\n\n".join(paragraphs)


def story_exchange(rng: Random) -> Exchange:
    """A request for a story and the story."""
    hero = make_hero(rng)
    kind = rng.random()
    if kind < 0.15:
        return Exchange(rng.choice(_OPEN_REQUESTS), tell(hero, rng))
    if kind < 0.25:
        friend = _make_friend(hero, rng)
        both = f"{_asked(hero, rng)} and {with_article(friend.kind)}"
        return Exchange(rng.choice(_SHORT_REQUESTS).format(x=both), tell(hero, rng, friend=friend))
    asked = _asked(hero, rng)
    if kind < 0.4:
        return Exchange(rng.choice(_LONG_REQUESTS).format(x=asked), tell(hero, rng, parts=2))
    return Exchange(rng.choice(_SHORT_REQUESTS).format(x=asked), tell(hero, rng))


def _asked(hero: Hero, rng: Random) -> str:
    way = rng.random()
    if way < 0.15:
        return f"{with_article(hero.kind)} named {hero.name}"
    if way < 0.4:
        return hero.described
    return with_article(hero.kind)


def _slots(hero: Hero, friend: Hero, rng: Random) -> dict[str, str]:
    """Words for the places in a plot; each also with a large first letter."""
    place = prefer(list(_PLACES), f"{hero.kind}/place", rng)
    thing = prefer(_THINGS, f"{hero.kind}/thing", rng)
    slots = {
        "name": hero.name,
        "hero": hero.described,
        "friend": friend.name,
        "friend_full": f"{friend.name} the {friend.kind}",
        "fhis": _PRONOUNS[friend.pronoun]["his"],
        "home": prefer(_HOMES, f"{hero.kind}/home", rng),
        "place_to": place,
        "place_at": _PLACES[place],
        "thing": thing,
        "a_thing": with_article(thing),
        "food": prefer(_FOODS, f"{hero.kind}/food", rng),
        "skill": prefer(_SKILLS, f"{hero.kind}/skill", rng),
        "a_building": with_article(prefer(_BUILDINGS, f"{hero.kind}/building", rng)),
        **_PRONOUNS[hero.pronoun],
    }
    return slots | {capitalise(key): capitalise(value) for key, value in slots.items()}


def _fill(template: str, slots: dict[str, str], rng: Random) -> str:
    return template.format(**slots, time=rng.choice(_TIMES))
