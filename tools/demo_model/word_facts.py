"""Facts about words: opposites, plurals, past forms, meanings, jobs, tools and short lists."""

from __future__ import annotations

from demo_model.grammar import (
    Fact,
    capitalise,
    from_rows,
    join_words,
    pairs,
    read_data,
    rows,
    with_article,
    words_of,
)

_OPPOSITES = """
hot:cold, big:small, tall:short, fast:slow, happy:sad, day:night, up:down, left:right, in:out, open:closed, full:empty
wet:dry, hard:soft, clean:dirty, old:young, rich:poor, strong:weak, thick:thin, early:late, black:white, good:bad
true:false, loud:quiet, light:dark, deep:shallow, near:far, first:last, easy:difficult, high:low, wide:narrow
sweet:sour, awake:asleep, alive:dead, brave:afraid, top:bottom, front:back, inside:outside, yes:no, always:never
begin:end, buy:sell, push:pull, give:take, win:lose, love:hate, laugh:cry, start:stop, come:go, sit:stand, float:sink
remember:forget, arrive:leave, above:below, before:after, more:less, many:few, north:south, east:west, rough:smooth
sharp:blunt, cheap:expensive, friend:enemy, question:answer, summer:winter, morning:evening, safe:dangerous, same:different
"""

_PLURALS = """
mouse:mice, foot:feet, tooth:teeth, child:children, man:men, woman:women, goose:geese, leaf:leaves, wolf:wolves
knife:knives, box:boxes, bus:buses, baby:babies, city:cities, cat:cats, dog:dogs, house:houses, person:people
sheep:sheep, potato:potatoes, tomato:tomatoes, lady:ladies, fox:foxes, glass:glasses, brush:brushes, story:stories
shelf:shelves, life:lives, half:halves, book:books, tree:trees, berry:berries, ox:oxen, fly:flies, dish:dishes
"""

_PASTS = """
go:went, see:saw, eat:ate, run:ran, come:came, give:gave, take:took, make:made, write:wrote, sing:sang, swim:swam
drink:drank, begin:began, find:found, think:thought, buy:bought, bring:brought, teach:taught, catch:caught, say:said
tell:told, sleep:slept, keep:kept, feel:felt, leave:left, build:built, send:sent, stand:stood, fall:fell, fly:flew
know:knew, grow:grew, speak:spoke, break:broke, walk:walked, play:played, help:helped, jump:jumped, try:tried, do:did
"""

_JOBS = """
bakes bread:baker, grows food:farmer, puts out fires:firefighter, teaches children:teacher, flies planes:pilot
heals sick people:doctor, heals sick animals:vet, catches fish:fisherman, builds houses:builder, mends pipes:plumber
cuts hair:hairdresser, mends teeth:dentist, makes clothes:tailor, sells meat:butcher, brings letters:postman
paints pictures:painter, writes books:writer, drives a bus:bus driver, steers a ship:captain, mends shoes:cobbler
grows flowers:gardener, cooks meals in a restaurant:cook, makes things from wood:carpenter, studies the stars:astronomer
lends books:librarian, guards sheep:shepherd, plays music:musician, makes pots from clay:potter, keeps bees:beekeeper
"""

_TOOLS = """
cut paper:scissors, cut bread:a bread knife, drive in a nail:a hammer, turn a screw:a screwdriver, cut wood:a saw
sweep the floor:a broom, eat soup:a spoon, boil water:a kettle, wash your hands:soap and water, dry your hands:a towel
brush your teeth:a toothbrush, comb your hair:a comb, write on paper:a pen, open a locked door:a key, see in the dark:a lamp
keep food cold:a fridge, bake a cake:an oven, iron a shirt:an iron, dig a hole:a spade, water the plants:a watering can
tell the time:a clock, measure a table:a ruler, look at the stars:a telescope, keep dry in the rain:an umbrella
sew on a button:a needle and thread, catch fish:a fishing rod, climb to the roof:a ladder, fry an egg:a frying pan
find the north:a compass, light a candle:a match, weigh flour:a pair of scales, tie a parcel:string, wash the floor:a mop
"""

_EXAMPLES = """
fruits | apples, pears, plums
vegetables | carrots, peas, potatoes
colours | red, blue, green
animals | dogs, cats, horses
farm animals | cows, sheep, pigs
birds | owls, ducks, swans
insects | bees, ants, butterflies
flowers | roses, tulips, daisies
trees | oaks, pines, birches
drinks | water, milk, tea
tools | hammers, saws, screwdrivers
metals | iron, gold, copper
planets | Mars, Venus, Jupiter
oceans | the Pacific, the Atlantic, the Indian Ocean
rivers | the Nile, the Amazon, the Danube
countries | France, Japan, Brazil
cities | Paris, Tokyo, Cairo
shapes | circles, squares, triangles
sports | football, tennis, swimming
musical instruments | pianos, violins, drums
vehicles | cars, buses, bicycles
clothes | shirts, socks, coats
rooms | kitchens, bedrooms, bathrooms
meals | breakfast, lunch, dinner
jobs | teachers, farmers, doctors
languages | English, French, Spanish
"""


def _opposites() -> list[Fact]:
    facts: list[Fact] = []
    for left, right in pairs(_OPPOSITES):
        for word, other in ((left, right), (right, left)):
            facts.append(
                Fact(
                    "opposite",
                    f"The opposite of {word} is {other}.",
                    (
                        f"What is the opposite of {word}?",
                        f"What's the opposite of {word}?",
                        f"Which word is the opposite of {word}?",
                        f"Give the opposite of {word}.",
                        f"Name the opposite of {word}.",
                    ),
                    (f"the opposite of {word}", f"what the opposite of {word} is"),
                )
            )
    return facts


def _plurals() -> list[Fact]:
    return [
        Fact(
            "plural",
            f"The plural of {one} is {many}.",
            (
                f"What is the plural of {one}?",
                f"What's the plural of {one}?",
                f"What is the plural form of {one}?",
                f"Give the plural of {one}.",
            ),
            (f"the plural of {one}", f"what the plural of {one} is"),
        )
        for one, many in pairs(_PLURALS)
    ]


def _pasts() -> list[Fact]:
    return [
        Fact(
            "past",
            f"The past tense of {now} is {then}.",
            (
                f"What is the past tense of {now}?",
                f"What's the past tense of {now}?",
                f"What is the past form of {now}?",
                f"Give the past tense of {now}.",
            ),
            (f"the past tense of {now}", f"what the past tense of {now} is"),
        )
        for now, then in pairs(_PASTS)
    ]


def _jobs() -> list[Fact]:
    facts: list[Fact] = []
    for work, job in pairs(_JOBS):
        worker = with_article(job)
        answer = f"{capitalise(worker)} {work}."
        facts.append(
            Fact(
                "job",
                answer,
                (f"Who {work}?", f"Which person {work}?"),
                (f"who {work}", f"which person {work}", f"the name of the person who {work}"),
            )
        )
        facts.append(
            Fact(
                "job",
                answer,
                (
                    f"What does {worker} do?",
                    f"What is the job of {worker}?",
                    f"What is the work of {worker}?",
                ),
                (f"what {worker} does", f"the job of {worker}"),
            )
        )
    return facts


def _tools() -> list[Fact]:
    return [
        Fact(
            "tool",
            f"To {task}, you use {tool}.",
            (
                f"What do you use to {task}?",
                f"What do I need to {task}?",
                f"What can I use to {task}?",
                f"With what do you {task}?",
            ),
            (f"what you use to {task}", f"what I need to {task}"),
        )
        for task, tool in pairs(_TOOLS)
    ]


def _examples() -> list[Fact]:
    return [
        Fact(
            "examples",
            f"Three {kind} are {join_words(words_of(examples))}.",
            (
                f"Name three {kind}.",
                f"Name 3 {kind}.",
                f"List three {kind}.",
                f"Give me three {kind}.",
                f"What are three {kind}?",
            ),
            (f"three {kind}", f"the names of three {kind}"),
        )
        for kind, examples in rows(_EXAMPLES)
    ]


def _meanings() -> list[Fact]:
    """Definitions: each line of the table is a noun and what it is."""
    facts: list[Fact] = []
    for noun, meaning in rows(read_data("meanings")):
        name = with_article(noun)
        facts.append(
            Fact(
                "meaning",
                f"{capitalise(name)} is {meaning}.",
                (
                    f"What is {name}?",
                    f"What's {name}?",
                    f"Explain what {name} is.",
                    f"What does the word {noun} mean?",
                    f"What is the meaning of {noun}?",
                    f"Define {noun}.",
                ),
                (f"what {name} is", f"what the word {noun} means", f"the meaning of {noun}"),
            )
        )
    return facts


def word_facts() -> list[Fact]:
    """All facts of this module."""
    facts = _opposites() + _plurals() + _pasts() + _jobs() + _tools() + _examples() + _meanings()
    return (
        facts
        + from_rows("household", read_data("household"))
        + from_rows("about", read_data("about"))
    )
