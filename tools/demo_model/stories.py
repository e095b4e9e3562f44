"""Short stories: a hero, a friend, a plot in eight beats, and a few ways to tell each beat."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from demo_model.grammar import capitalise, read_data, with_article, words_of
from demo_model.small_talk import Exchange, any_name

_PRONOUNS = {
    "he": {"he": "he", "him": "him", "his": "his"},
    "she": {"he": "she", "him": "her", "his": "her"},
}
_HE_NAMES = words_of("Rusty, Tim, Otto, Felix, Barnaby, Jasper, Milo, Pip, Bruno, Hugo, Toby, Oscar, Leo, Finn, Max")
_SHE_NAMES = words_of("Ruby, Mina, Tilda, Rosie, Luna, Clara, Hazel, Ivy, Nell, Wilma, Poppy, Daisy, Emma, Ada, Flora, Lily")

_KINDS = words_of(
    """
    fox, hen, cat, dog, mouse, rabbit, bear, owl, frog, duck, horse, pig, goat, wolf, deer, squirrel, hedgehog, turtle
    badger, otter, lion, tiger, elephant, giraffe, monkey, penguin, whale, crow, swan, sheep, donkey, bee, ant, snail
    beaver, mole, crocodile, kangaroo, parrot, butterfly, spider, dolphin, seal, goose, camel, panda, koala, zebra
    dragon, robot, king, queen, prince, princess, wizard, witch, giant, knight, pirate, ghost, mermaid, unicorn, dwarf
    baker, farmer, sailor, teacher, gardener, painter, shepherd, doctor, pilot, clown, cook, firefighter, fisherman
    lighthouse keeper, snowman, astronaut, detective, musician, inventor, boy, girl, old man, old woman, elf, toy soldier
    """
)
_MALE_KINDS = frozenset(words_of("king, prince, wizard, boy, old man, knight, fisherman, snowman"))
_FEMALE_KINDS = frozenset(words_of("queen, princess, witch, girl, old woman, mermaid, hen"))

_ADJECTIVES = words_of("little, brave, clever, shy, kind, curious, lazy, cheerful, young, quiet, friendly, small, gentle, funny")
_HOMES = words_of(
    """
    in a small house near the forest; in a village by the sea; on the edge of a green meadow; at the foot of a mountain
    in a quiet valley; beside a clear stream; on a little island; in a house with a red door; near an old mill
    at the end of a long road; under a great oak tree; not far from the river
    """.replace(";", ",")
)
_PLACES = (
    ("to the forest", "in the forest"),
    ("to the river", "by the river"),
    ("to the meadow", "in the meadow"),
    ("to the beach", "on the beach"),
    ("to the old bridge", "near the old bridge"),
    ("to the lake", "by the lake"),
    ("to the top of the hill", "on the hill"),
    ("to the market", "at the market"),
    ("to the old mill", "near the old mill"),
    ("into the garden", "in the garden"),
    ("to the big oak tree", "under the big oak tree"),
    ("to the harbour", "at the harbour"),
)
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
_BUILDINGS = words_of("tree house, raft, big kite, bridge, little boat, windmill, snow castle, bird house")
_TIMES = words_of("morning, afternoon, day, cold morning, sunny day, windy day, grey morning, quiet afternoon, bright morning")

_OPENINGS = (
    "Once upon a time there was {hero} named {name}. {He} lived {home}.",
    "There was once {hero} whose name was {name}. {He} lived {home}.",
    "Long ago, {home}, there lived {hero} called {name}.",
    "Once there was {hero} called {name}, who lived {home}.",
    "{Hero} named {name} lived {home}.",
)
_BRIDGES = ("The story does not end there.", "But that was only the beginning.", "Some time later, something else happened.")
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
        found[title.removeprefix("# ")] = tuple(tuple(way.strip() for way in beat.split(" | ")) for beat in beats)
    return found


def make_hero(rng: Random) -> Hero:
    """A hero whose name fits."""
    kind = rng.choice(_KINDS)
    adjective = rng.choice(_ADJECTIVES) if rng.random() < 0.7 else ""
    if kind in _MALE_KINDS or kind in _FEMALE_KINDS:
        pronoun = "he" if kind in _MALE_KINDS else "she"
    else:
        pronoun = rng.choice(("he", "she"))
    if kind.startswith("old"):
        adjective = ""
    name = any_name(rng) if rng.random() < 0.1 else rng.choice(_HE_NAMES if pronoun == "he" else _SHE_NAMES)
    return Hero(name, kind, adjective, pronoun)


def tell(hero: Hero, rng: Random, *, parts: int = 1) -> str:
    """A story of this hero: one plot, or several one after the other."""
    friend = make_hero(rng)
    while friend.name == hero.name or friend.kind == hero.kind:
        friend = make_hero(rng)
    paragraphs: list[str] = []
    for part, title in enumerate(rng.sample(sorted(plots()), parts)):
        slots = _slots(hero, friend, rng)
        beats = [_OPENINGS if part == 0 else _BRIDGES, *plots()[title]]
        sentences = [_fill(rng.choice(ways), slots, rng) for ways in beats]
        cut = rng.choice(_PARAGRAPH_ENDS)
        paragraphs += [" ".join(sentences[:cut]), " ".join(sentences[cut:])]
    return "\n\n".join(paragraphs)


def story_exchange(rng: Random) -> Exchange:
    """A request for a story and the story."""
    hero = make_hero(rng)
    kind = rng.random()
    if kind < 0.15:
        return Exchange(rng.choice(_OPEN_REQUESTS), tell(hero, rng))
    asked = _asked(hero, rng)
    if kind < 0.3:
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
    place_to, place_at = rng.choice(_PLACES)
    thing = rng.choice(_THINGS)
    slots = {
        "name": hero.name,
        "hero": hero.described,
        "friend": friend.name,
        "friend_full": f"{friend.name} the {friend.kind}",
        "fhis": _PRONOUNS[friend.pronoun]["his"],
        "home": rng.choice(_HOMES),
        "place_to": place_to,
        "place_at": place_at,
        "thing": thing,
        "a_thing": with_article(thing),
        "food": rng.choice(_FOODS),
        "skill": rng.choice(_SKILLS),
        "a_building": with_article(rng.choice(_BUILDINGS)),
        **_PRONOUNS[hero.pronoun],
    }
    return slots | {capitalise(key): capitalise(value) for key, value in slots.items()}


def _fill(template: str, slots: dict[str, str], rng: Random) -> str:
    return template.format(**slots, time=rng.choice(_TIMES))
