"""Facts about countries, animals, plants, the sky and simple science."""

from __future__ import annotations

from demo_model.grammar import Fact, capitalise, from_rows, pairs, read_data, rows, with_article

_COUNTRIES = """
France:Paris:Europe, Germany:Berlin:Europe, Italy:Rome:Europe, Spain:Madrid:Europe, Portugal:Lisbon:Europe
England:London:Europe, Ireland:Dublin:Europe, Scotland:Edinburgh:Europe, Wales:Cardiff:Europe, Norway:Oslo:Europe
Sweden:Stockholm:Europe, Finland:Helsinki:Europe, Denmark:Copenhagen:Europe, Iceland:Reykjavik:Europe
the Netherlands:Amsterdam:Europe, Belgium:Brussels:Europe, Austria:Vienna:Europe, Switzerland:Bern:Europe
Poland:Warsaw:Europe, Hungary:Budapest:Europe, Romania:Bucharest:Europe, Bulgaria:Sofia:Europe, Greece:Athens:Europe
Croatia:Zagreb:Europe, Slovenia:Ljubljana:Europe, Slovakia:Bratislava:Europe, Serbia:Belgrade:Europe
Albania:Tirana:Europe, Estonia:Tallinn:Europe, Latvia:Riga:Europe, Lithuania:Vilnius:Europe, Ukraine:Kyiv:Europe
Malta:Valletta:Europe, the Czech Republic:Prague:Europe, Japan:Tokyo:Asia, China:Beijing:Asia, India:New Delhi:Asia
South Korea:Seoul:Asia, Thailand:Bangkok:Asia, Vietnam:Hanoi:Asia, Nepal:Kathmandu:Asia, Mongolia:Ulaanbaatar:Asia
Pakistan:Islamabad:Asia, Bangladesh:Dhaka:Asia, the Philippines:Manila:Asia, Malaysia:Kuala Lumpur:Asia
Iran:Tehran:Asia, Iraq:Baghdad:Asia, Jordan:Amman:Asia, Lebanon:Beirut:Asia, Saudi Arabia:Riyadh:Asia
Qatar:Doha:Asia, Oman:Muscat:Asia, Laos:Vientiane:Asia, Cambodia:Phnom Penh:Asia, Bhutan:Thimphu:Asia
Egypt:Cairo:Africa, Kenya:Nairobi:Africa, Nigeria:Abuja:Africa, Ghana:Accra:Africa, Ethiopia:Addis Ababa:Africa
Morocco:Rabat:Africa, Tunisia:Tunis:Africa, Algeria:Algiers:Africa, Senegal:Dakar:Africa, Uganda:Kampala:Africa
Rwanda:Kigali:Africa, Zambia:Lusaka:Africa, Zimbabwe:Harare:Africa, Angola:Luanda:Africa, Mali:Bamako:Africa
Namibia:Windhoek:Africa, Botswana:Gaborone:Africa, Sudan:Khartoum:Africa, Mozambique:Maputo:Africa
Madagascar:Antananarivo:Africa, Libya:Tripoli:Africa, Somalia:Mogadishu:Africa
the United States:Washington:North America, Canada:Ottawa:North America, Mexico:Mexico City:North America
Cuba:Havana:North America, Jamaica:Kingston:North America, Costa Rica:San José:North America
Brazil:Brasília:South America, Argentina:Buenos Aires:South America, Chile:Santiago:South America
Peru:Lima:South America, Colombia:Bogotá:South America, Venezuela:Caracas:South America
Ecuador:Quito:South America, Uruguay:Montevideo:South America, Paraguay:Asunción:South America
Turkey:Ankara, Russia:Moscow, Indonesia:Jakarta:Asia, Kazakhstan:Astana, Armenia:Yerevan, Kuwait:Kuwait City:Asia
Guyana:Georgetown:South America, Australia:Canberra:Oceania, New Zealand:Wellington:Oceania, Fiji:Suva:Oceania
"""

# animal | its young | its sound (third person, or "-") | legs | its home | its food | its class
_ANIMALS = """
dog | puppy | barks | four | a kennel | meat | mammal
cat | kitten | meows | four | a house | fish and meat | mammal
cow | calf | moos | four | a barn | grass | mammal
sheep | lamb | bleats | four | a field | grass | mammal
horse | foal | neighs | four | a stable | grass and hay | mammal
pig | piglet | oinks | four | a sty | grain and vegetables | mammal
goat | kid | bleats | four | a farmyard | leaves and grass | mammal
hen | chick | clucks | two | a coop | grain | bird
duck | duckling | quacks | two | a pond | plants and insects | bird
goose | gosling | honks | two | a farmyard | grass | bird
owl | owlet | hoots | two | a hollow tree | mice | bird
lion | cub | roars | four | the savanna | meat | mammal
tiger | cub | roars | four | the jungle | meat | mammal
bear | cub | growls | four | a den | berries and fish | mammal
wolf | pup | howls | four | a den | meat | mammal
fox | kit | barks | four | a burrow | small animals and berries | mammal
rabbit | kit | - | four | a burrow | grass and carrots | mammal
mouse | pup | squeaks | four | a hole | seeds | mammal
frog | tadpole | croaks | four | a pond | insects | amphibian
bee | larva | buzzes | six | a hive | nectar and pollen | insect
ant | larva | - | six | an anthill | seeds and crumbs | insect
spider | spiderling | - | eight | a web | insects | arachnid
elephant | calf | trumpets | four | the savanna | leaves and grass | mammal
kangaroo | joey | - | four | the grasslands of Australia | grass | mammal
deer | fawn | - | four | the forest | leaves and grass | mammal
swan | cygnet | hisses | two | a lake | water plants | bird
penguin | chick | - | two | the cold south | fish | bird
snake | snakelet | hisses | no | a hole | small animals | reptile
whale | calf | sings | no | the sea | tiny sea animals and fish | mammal
donkey | foal | brays | four | a stable | grass and hay | mammal
butterfly | caterpillar | - | six | a meadow | nectar | insect
giraffe | calf | - | four | the savanna | leaves | mammal
squirrel | kit | chatters | four | a tree | nuts | mammal
camel | calf | - | four | the desert | dry plants | mammal
eagle | eaglet | screams | two | a nest on a cliff | fish and small animals | bird
"""

_COLOURS = """
the sky:blue, grass:green, snow:white, a lemon:yellow, coal:black, blood:red, a carrot:orange, milk:white, the sea:blue
a ripe banana:yellow, a ripe tomato:red, a ripe strawberry:red, chocolate:brown, an elephant:grey, a polar bear:white
a crow:black, a flamingo:pink, a pumpkin:orange, a leaf in spring:green, a fire engine:red, the sun at noon:yellow
a lime:green, an aubergine:purple, a cucumber:green, a swan:white, a plum:purple, a cherry:red, salt:white, gold:yellow
"""

_MIXES = "red and yellow:orange, blue and yellow:green, red and blue:purple, red and white:pink, black and white:grey"

_CAN_FLY = "owl:yes, penguin:no, bee:yes, dog:no, eagle:yes, ostrich:no, butterfly:yes, horse:no, bat:yes, frog:no, duck:yes"


def _countries() -> list[Fact]:
    facts: list[Fact] = []
    for entry in _COUNTRIES.replace("\n", ",").split(","):
        if not entry.strip():
            continue
        country, city, *continent = entry.strip().split(":")
        facts.append(_capital(country, city))
        facts.append(
            Fact(
                "country of",
                f"{city} is the capital of {country}.",
                (
                    f"{city} is the capital of which country?",
                    f"Which country has the capital {city}?",
                    f"Which country is {city} the capital of?",
                    f"What country has {city} as its capital?",
                ),
                (
                    f"which country {city} is the capital of",
                    f"which country has the capital {city}",
                ),
            )
        )
        if continent:
            facts.append(_continent(country, continent[0]))
            facts.append(_about(country, city, continent[0]))
    return facts


def _capital(country: str, city: str) -> Fact:
    return Fact(
        "capital",
        f"The capital of {country} is {city}.",
        (
            f"What is the capital of {country}?",
            f"What's the capital of {country}?",
            f"Which city is the capital of {country}?",
            f"What city is the capital of {country}?",
            f"What is the capital city of {country}?",
            f"Name the capital of {country}.",
        ),
        (
            f"the capital of {country}",
            f"what the capital of {country} is",
            f"which city is the capital of {country}",
            f"the name of the capital of {country}",
        ),
    )


def _verb(country: str) -> str:
    return "are" if country == "the Philippines" else "is"


def _about(country: str, city: str, continent: str) -> Fact:
    verb = _verb(country)
    return Fact(
        "country",
        f"{capitalise(country)} {verb} a country in {continent}, and the capital is {city}.",
        (
            f"Tell me about {country}.",
            f"What do you know about {country}?",
            f"Describe {country}.",
            f"What is {country}?",
        ),
        (f"about {country}", f"something about {country}", f"what you know about {country}"),
    )


def _continent(country: str, continent: str) -> Fact:
    verb = _verb(country)
    return Fact(
        "continent",
        f"{capitalise(country)} {verb} in {continent}.",
        (
            f"Which continent {verb} {country} in?",
            f"What continent {verb} {country} in?",
            f"Where {verb} {country}?",
            f"In which part of the world {verb} {country}?",
            f"On which continent {verb} {country}?",
        ),
        (f"where {country} {verb}", f"which continent {country} {verb} in"),
    )


def _animals() -> list[Fact]:
    facts: list[Fact] = []
    for animal, young, sound, legs, home, food, kind in rows(_ANIMALS):
        name = with_article(animal)
        subject = capitalise(name)
        facts += _looks(animal, name, young, legs, kind)
        facts.append(
            Fact(
                "home",
                f"{subject} lives in {home}.",
                (
                    f"Where does {name} live?",
                    f"What is the home of {name}?",
                    f"What does {name} live in?",
                ),
                (f"where {name} lives", f"what {name} lives in", f"the home of {name}"),
            )
        )
        facts.append(
            Fact(
                "food",
                f"{subject} eats {food}.",
                (
                    f"What does {name} eat?",
                    f"What is the food of {name}?",
                    f"What does {name} like to eat?",
                ),
                (f"what {name} eats", f"what {name} likes to eat", f"the food of {name}"),
            )
        )
        if sound != "-":
            facts.append(
                Fact(
                    "sound",
                    f"{subject} {sound}.",
                    (
                        f"What sound does {name} make?",
                        f"What noise does {name} make?",
                        f"What does {name} say?",
                    ),
                    (f"what sound {name} makes", f"what {name} says", f"the sound of {name}"),
                )
            )
    return facts


def _looks(animal: str, name: str, young: str, legs: str, kind: str) -> list[Fact]:
    subject = capitalise(name)
    return [
        Fact(
            "young",
            f"A young {animal} is called {with_article(young)}.",
            (
                f"What is a young {animal} called?",
                f"What is a baby {animal} called?",
                f"What do you call a young {animal}?",
                f"What do you call a baby {animal}?",
                f"What is the young of {name}?",
            ),
            (
                f"what a young {animal} is called",
                f"what a baby {animal} is called",
                f"the name of a young {animal}",
            ),
        ),
        Fact(
            "legs",
            f"{subject} has {legs} legs.",
            (
                f"How many legs does {name} have?",
                f"What number of legs does {name} have?",
                f"How many legs has {name} got?",
            ),
            (f"how many legs {name} has", f"the number of legs of {name}"),
        ),
        Fact(
            "class",
            f"{subject} is {with_article(kind)}.",
            (
                f"What kind of animal is {name}?",
                f"What is {name}?",
                f"What type of animal is {name}?",
                f"What sort of animal is {name}?",
            ),
            (f"what kind of animal {name} is", f"what sort of animal {name} is"),
        ),
    ]


def _colours() -> list[Fact]:
    facts = [
        Fact(
            "colour",
            f"{capitalise(thing)} is {colour}.",
            (
                f"What colour is {thing}?",
                f"What color is {thing}?",
                f"Which colour is {thing}?",
                f"What is the colour of {thing}?",
                f"What is the color of {thing}?",
            ),
            (f"what colour {thing} is", f"what color {thing} is", f"the colour of {thing}"),
        )
        for thing, colour in pairs(_COLOURS)
    ]
    for mix, colour in pairs(_MIXES):
        facts.append(
            Fact(
                "mix",
                f"{capitalise(mix)} make {colour}.",
                (
                    f"What do {mix} make?",
                    f"What colour do {mix} make?",
                    f"What color do {mix} make?",
                    f"Which colour do you get from {mix}?",
                ),
                (f"what {mix} make", f"what colour {mix} make", f"which colour you get from {mix}"),
            )
        )
    return facts


def _flight() -> list[Fact]:
    facts: list[Fact] = []
    for animal, flies in pairs(_CAN_FLY):
        name = with_article(animal)
        answer = f"Yes, {name} can fly." if flies == "yes" else f"No, {name} cannot fly."
        facts.append(
            Fact(
                "flight",
                answer,
                (f"Can {name} fly?", f"Is {name} able to fly?", f"Does {name} fly?"),
                (f"whether {name} can fly", f"if {name} can fly"),
            )
        )
    return facts


def world_facts() -> list[Fact]:
    """All facts of this module."""
    return (
        _countries()
        + _animals()
        + _colours()
        + _flight()
        + from_rows("science", read_data("science"))
    )
