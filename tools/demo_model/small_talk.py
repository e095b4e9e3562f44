"""Conversation beyond facts: greetings, what the model must decline, poems, and what a user says
about themself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo_model.grammar import Fact, capitalise, from_rows, read_data, with_article, words_of
from demo_model.phrasing import SMALL_TALK

DECLINED = "I am sorry, I do not know that. I am only a small model."
TOO_LARGE = "I am sorry, I can only do small sums."

GIVEN_NAMES = words_of(
    """
    Anna, Ben, Clara, David, Emma, Finn, Grace, Hugo, Ida, Jack, Kate, Leo, Maria, Noah, Olga, Paul, Rosa, Sam, Tina,
    Victor, Alice, Bob, Carol, Daniel, Eva, Frank, George, Hannah, Ivan, Julia, Karl, Laura, Martin, Nina, Oscar,
    Peter, Rachel, Simon, Tom, Vera, Walter, Yusuf, Zoe, Ali, Amina, Chen, Diego, Fatima, Hiro, Ines, Jonas, Kofi,
    Lena, Mei, Nadia, Omar, Priya, Ravi, Sara, Tariq, Mary, John, James, Lucy, Sophie, Mark, Adam, Helen, Max, Ruth
    """
)
_ONSETS = words_of(
    "b, c, d, f, g, h, j, k, l, m, n, p, r, s, t, v, w, x, y, z, br, ch, cl, dr, gr, kr, pl, sh, st, th, tr, qu"
)
_VOWELS = words_of("a, e, i, o, u, ai, ee, ia, oo, y, ou, an, en, in, or, ar, el")
_CODAS = [*words_of("n, r, s, t, l, m, k, p, x, d, ck, pe, ne, la, ra, do, nd, rt"), "", "", ""]

_UNKNOWN_SUBJECTS = words_of(
    """
    the population of {place}, the president of {place}, the price of gold, the history of {place}, quantum physics
    the stock market, the latest news, the winner of the last match, the best phone, the meaning of life, black holes
    the theory of relativity, the length of the Danube, the distance to the moon, the speed of light, the flag of {place}
    the money of {place}, the king of {place}, the weather in {place}, the food of {place}, the best film of the year
    the Roman Empire, the French Revolution, the inventor of the telephone, the author of Hamlet, my bank account
    the rules of chess, the law of {place}, DNA, photosynthesis, algebra, the square root of 50, bitcoin, Napoleon
    Shakespeare, Einstein, the Second World War, the size of {place}, my future, the password, machine learning
    """
)
_UNKNOWN_QUESTIONS = (
    "What is {x}?",
    "Tell me about {x}.",
    "Explain {x}.",
    "What do you know about {x}?",
    "Can you explain {x}?",
    "Please tell me about {x}.",
    "I want to know about {x}.",
    "Can you tell me about {x}?",
)
_UNKNOWN_WORD_QUESTIONS = (
    "What is the capital of {name}?",
    "What's the capital of {name}?",
    "Which city is the capital of {name}?",
    "Where is {name}?",
    "Who is {name}?",
    "What is {name}?",
    "What is {word}?",
    "What is a {word}?",
    "What does {word} mean?",
    "What colour is a {word}?",
    "How do I use {name}?",
    "Tell me about {name}.",
    "What is the opposite of {word}?",
    "How does {name} work?",
)
_UNKNOWN_TASKS = words_of(
    """
    Write a program in Python., Translate this into German., Translate this text., Fix my code., Write an essay.
    Write a letter to my boss., Plan my holiday., Summarise this article., Draw a picture., Book a flight.
    Play some music., Call my mother., Send an email., Open the door., Who won the last election?
    Who is the president?, Who wrote Hamlet?, When did the war end?, How do I fix my car?, Who invented the telephone?
    What is the best phone?, Solve this equation., Write a function that sorts a list., What should I invest in?
    How do I cook rice?, How do I learn to drive?, How do I get rich?, How do I fall asleep?, How do I find a job?
    Why is grass green?, Why do cats purr?, Why do birds sing?, Why is gold yellow?, Why do people laugh?
    What is love?, What is time?, What is happiness?, What is art?, What is money?, What is science?, What is truth?
    Is the sun hot?, Is it cold outside?, Is gold heavy?, Is it true?, Are there aliens?, Is chocolate healthy?
    When is Easter?, When was the first train built?, When does the shop open?, When is lunch?, Where are my keys?
    Where can I buy a car?, Where is the station?, Say something in French., Write a haiku about the sea.
    Who was the first man on the moon?, Who painted the Mona Lisa?, Which phone should I buy?, Which book is the best?
    How tall is the Eiffel Tower?, How far is it to Paris?, How many people live in London?, How fast is a train?
    Tell me about your day., Tell me the truth., Do my homework., Recommend a film., Compare two cars.
    """
)
_PLACES = words_of(
    "France, Japan, Brazil, Kenya, Canada, Spain, India, Peru, Norway, Egypt, China, Mexico, Italy, Chile"
)

_COLOURS = words_of(
    "red, blue, green, yellow, purple, orange, pink, black, white, brown, grey, silver, gold"
)
_PETS = words_of(
    "dog, cat, horse, rabbit, mouse, hen, duck, goat, parrot, fish, fox, bear, owl, turtle, pony"
)
_FOODS = words_of(
    "soup, bread, cheese, rice, cake, honey, pasta, salad, pie, toast, fish, pancakes, apples, chocolate"
)

_POEM_SUBJECTS = words_of(
    """
    the moon, the sun, the sea, the rain, the snow, the wind, a cat, a dog, a fox, a bird, a tree, a flower, a river
    the night, the morning, spring, summer, autumn, winter, a star, a little boat, a house, a garden, love, a friend
    a candle, a train, a cloud, a robot, a dragon, a horse, a mouse, a bee, the forest, the stars, the city, coffee, tea
    """
)
_RHYMES = (
    ("It is here when the day is new,", "and the grass is bright with dew."),
    ("I think of it when I am far away,", "and it brings me home at the end of the day."),
    ("When all the world is still,", "I see it from the hill."),
    ("It makes the morning bright,", "and keeps me company at night."),
    ("It asks for nothing at all,", "in the spring or in the fall."),
    ("I met it once upon the way,", "and I am smiling to this day."),
    ("Quiet and small and true,", "I share it now with you."),
    ("The old clock ticks upon the wall,", "and I love it most of all."),
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn of the user and its answer."""

    question: str
    answer: str


def small_talk_facts() -> list[Fact]:
    """Greetings and the like; each has one fixed answer, so they are kept with the facts."""
    return from_rows(SMALL_TALK, read_data("small_talk"))


def any_name(rng: Random) -> str:
    """A given name, or one made of syllables, so that the model learns to copy names it has never
    met.
    """
    if rng.random() < 0.5:
        return rng.choice(GIVEN_NAMES)
    return capitalise(any_word(rng))


def any_word(rng: Random) -> str:
    """A word that no dictionary has."""
    syllables = (rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3)))
    return "".join(syllables) + rng.choice(_CODAS)


def declined(rng: Random) -> Exchange:
    """A question that the model cannot answer, and a plain statement that it cannot."""
    kind = rng.random()
    if kind < 0.2:
        numbers = [
            rng.randint(21, 999),
            rng.randint(0, 20) if rng.random() < 0.5 else rng.randint(21, 999),
        ]
        rng.shuffle(numbers)
        sign = rng.choice(("plus", "minus", "times", "+", "-", "*", "divided by"))
        form = rng.choice(
            ("What is {} {} {}?", "How much is {} {} {}?", "{} {} {}", "{} {} {} = ?")
        )
        return Exchange(form.format(numbers[0], sign, numbers[1]), TOO_LARGE)
    if kind < 0.4:
        return Exchange(rng.choice(_UNKNOWN_TASKS), DECLINED)
    if kind < 0.65:
        form = rng.choice(_UNKNOWN_WORD_QUESTIONS)
        word = any_word(rng)
        return Exchange(form.format(word=word, name=capitalise(word)), DECLINED)
    subject = rng.choice(_UNKNOWN_SUBJECTS).format(place=rng.choice(_PLACES))
    return Exchange(rng.choice(_UNKNOWN_QUESTIONS).format(x=subject), DECLINED)


def poem(rng: Random) -> Exchange:
    """A four-line poem about a thing that the user names."""
    subject = rng.choice(_POEM_SUBJECTS) if rng.random() < 0.8 else with_article(any_word(rng))
    form = rng.choice(
        ("Write a poem about {}.", "Tell me a poem about {}.", "Write a short poem about {}.")
    )
    first, second = rng.sample(_RHYMES, 2)
    lines = [f"This is a song of {subject}.", "Listen, it is not long.", *first, *second]
    return Exchange(form.format(subject), "\n".join([f"{lines[0]} {lines[1]}", *lines[2:]]))


def echo(rng: Random) -> Exchange:
    """A greeting to a third person, which the model copies."""
    name = any_name(rng)
    form, answer = rng.choice(
        (
            ("Say hello to {}.", "Hello, {}!"),
            ("Say goodbye to {}.", "Goodbye, {}!"),
            ("Say thank you to {}.", "Thank you, {}!"),
            ("Wish {} a good day.", "Have a good day, {}!"),
        )
    )
    return Exchange(form.format(name), answer.format(name))


def _told_name(rng: Random) -> tuple[Exchange, Exchange]:
    name = any_name(rng)
    said = rng.choice(
        (
            "My name is {}.",
            "I am {}.",
            "Hello, I am {}.",
            "Hi, my name is {}.",
            "You can call me {}.",
        )
    )
    asked = rng.choice(
        ("What is my name?", "Who am I?", "Do you know my name?", "Do you remember my name?")
    )
    return (
        Exchange(said.format(name), f"It is nice to meet you, {name}."),
        Exchange(asked, f"Your name is {name}."),
    )


def _told_colour(rng: Random) -> tuple[Exchange, Exchange]:
    colour = rng.choice(_COLOURS)
    said = rng.choice(
        ("My favourite colour is {}.", "My favorite color is {}.", "I like the colour {} best.")
    )
    asked = rng.choice(
        (
            "What is my favourite colour?",
            "What is my favorite color?",
            "Which colour do I like best?",
        )
    )
    return (
        Exchange(
            said.format(colour), f"That is a lovely colour. I will remember that you like {colour}."
        ),
        Exchange(asked, f"Your favourite colour is {colour}."),
    )


def _told_pet(rng: Random) -> tuple[Exchange, Exchange]:
    pet, name = with_article(rng.choice(_PETS)), any_name(rng)
    said = rng.choice(("I have {} called {}.", "I have {} named {}.", "My pet is {} called {}."))
    asked = rng.choice(
        ("What is my pet called?", "What is the name of my pet?", "Which pet do I have?")
    )
    return (
        Exchange(said.format(pet, name), f"How nice! I am sure that {name} is happy with you."),
        Exchange(asked, f"You have {pet} called {name}."),
    )


def _told_food(rng: Random) -> tuple[Exchange, Exchange]:
    food = rng.choice(_FOODS)
    said = rng.choice(("I like {}.", "I love {}.", "I like to eat {}.", "My favourite food is {}."))
    asked = rng.choice(
        ("What do I like to eat?", "What is my favourite food?", "Which food do I like?")
    )
    return (
        Exchange(said.format(food), f"I am glad that you like {food}. Enjoy your meal!"),
        Exchange(asked, f"You like to eat {food}."),
    )


_TOLD: tuple[Callable[[Random], tuple[Exchange, Exchange]], ...] = (
    _told_name,
    _told_colour,
    _told_pet,
    _told_food,
)
_NEVER_TOLD = (
    ("What is my name?", "You have not told me your name."),
    ("Do you know my name?", "You have not told me your name."),
    ("What is my favourite colour?", "You have not told me your favourite colour."),
    ("What do I like to eat?", "You have not told me what you like to eat."),
    ("What is my pet called?", "You have not told me about your pet."),
)


def told_and_asked(rng: Random) -> tuple[Exchange, Exchange]:
    """The user says something about themself, and asks for it later in the same chat."""
    return rng.choice(_TOLD)(rng)


def never_told(rng: Random) -> Exchange:
    """The user asks for what the chat has not said; only for the start of a chat."""
    return Exchange(*rng.choice(_NEVER_TOLD))
