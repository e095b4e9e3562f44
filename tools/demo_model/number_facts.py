"""Facts about numbers, letters, days and months."""

from __future__ import annotations

import itertools

from demo_model.grammar import Fact, capitalise, join_words, pairs, with_article, words_of

NUMBER_WORDS = words_of(
    "zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen,"
    "sixteen, seventeen, eighteen, nineteen, twenty"
)
_ORDINALS = words_of(
    "first, second, third, fourth, fifth, sixth, seventh, eighth, ninth, tenth, eleventh, twelfth"
)
_DAYS = words_of("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
_MONTHS = words_of(
    "January, February, March, April, May, June, July, August, September, October, November, December"
)
_SEASONS = words_of("spring, summer, autumn, winter")
_MONTH_LENGTHS = {"April": 30, "June": 30, "September": 30, "November": 30}
_SHAPES = "triangle:three, square:four, rectangle:four, pentagon:five, hexagon:six, octagon:eight"

LARGEST_NUMBER = 20
LARGEST_FACTOR = 10


def _sum_fact(left: int, right: int) -> Fact:
    word_left, word_right = NUMBER_WORDS[left], NUMBER_WORDS[right]
    return Fact(
        "sum",
        f"{left} plus {right} is {left + right}.",
        (
            f"What is {left} plus {right}?",
            f"What is {left} + {right}?",
            f"How much is {left} + {right}?",
            f"{left} + {right}?",
            f"{left} + {right} = ?",
            f"{left}+{right}",
            f"What does {left} plus {right} make?",
            f"Add {left} and {right}.",
            f"What is {word_left} plus {word_right}?",
        ),
        (
            f"what {left} plus {right} is",
            f"how much {left} + {right} is",
            f"the sum of {left} and {right}",
        ),
    )


def _difference_fact(left: int, right: int) -> Fact:
    word_left, word_right = NUMBER_WORDS[left], NUMBER_WORDS[right]
    return Fact(
        "difference",
        f"{left} minus {right} is {left - right}.",
        (
            f"What is {left} minus {right}?",
            f"What is {left} - {right}?",
            f"How much is {left} - {right}?",
            f"{left} - {right}?",
            f"{left} - {right} = ?",
            f"{left}-{right}",
            f"Take {right} away from {left}.",
            f"Subtract {right} from {left}.",
            f"What is {word_left} minus {word_right}?",
        ),
        (f"what {left} minus {right} is", f"how much {left} - {right} is"),
    )


def _product_fact(left: int, right: int) -> Fact:
    return Fact(
        "product",
        f"{left} times {right} is {left * right}.",
        (
            f"What is {left} times {right}?",
            f"What is {left} * {right}?",
            f"How much is {left} times {right}?",
            f"{left} * {right} = ?",
            f"Multiply {left} by {right}.",
            f"What is {NUMBER_WORDS[left]} times {NUMBER_WORDS[right]}?",
        ),
        (f"what {left} times {right} is", f"how much {left} times {right} is"),
    )


def _arithmetic() -> list[Fact]:
    up_to = range(LARGEST_NUMBER + 1)
    factors = range(1, LARGEST_FACTOR + 1)
    facts = [_sum_fact(a, b) for a in up_to for b in up_to if a + b <= LARGEST_NUMBER]
    facts += [_difference_fact(a, b) for a in up_to for b in up_to if b <= a]
    return facts + [_product_fact(a, b) for a in factors for b in factors]


def _neighbours() -> list[Fact]:
    facts: list[Fact] = []
    for number in range(1, LARGEST_NUMBER):
        word = NUMBER_WORDS[number]
        for side, other in (("after", number + 1), ("before", number - 1)):
            facts.append(
                Fact(
                    "neighbour",
                    f"The number {side} {number} is {other}.",
                    (
                        f"What number comes {side} {number}?",
                        f"Which number comes {side} {number}?",
                        f"What is the number {side} {number}?",
                        f"What number is {side} {number}?",
                        f"What number comes {side} {word}?",
                    ),
                    (f"which number comes {side} {number}", f"the number {side} {number}"),
                )
            )
    return facts


def _parity() -> list[Fact]:
    facts: list[Fact] = []
    for number in range(1, LARGEST_NUMBER + 1):
        kind = "odd" if number % 2 else "even"
        facts.append(
            Fact(
                "parity",
                f"The number {number} is {kind}.",
                (
                    f"Is {number} even or odd?",
                    f"Is {number} odd or even?",
                    f"Is the number {number} even or odd?",
                    f"Is {NUMBER_WORDS[number]} even or odd?",
                ),
                (f"whether {number} is even or odd", f"if {number} is odd or even"),
            )
        )
    return facts


def _comparisons() -> list[Fact]:
    up_to = range(LARGEST_NUMBER + 1)
    return [_comparison(small, large) for small in up_to for large in up_to if small < large]


def _comparison(small: int, large: int) -> Fact:
    return Fact(
        "comparison",
        f"The larger number is {large}.",
        (
            f"Which is larger, {small} or {large}?",
            f"Which is larger, {large} or {small}?",
            f"Which is bigger, {small} or {large}?",
            f"Which is bigger, {large} or {small}?",
            f"Which number is bigger, {small} or {large}?",
            f"What is more, {large} or {small}?",
        ),
        (f"which is larger, {small} or {large}", f"which is bigger, {large} or {small}"),
    )


def _counts() -> list[Fact]:
    facts: list[Fact] = []
    for last in range(3, LARGEST_NUMBER + 1):
        word = NUMBER_WORDS[last]
        up = [str(n) for n in range(1, last + 1)]
        facts.append(
            Fact(
                "count",
                f"{', '.join(up)}.",
                (
                    f"Count to {last}.",
                    f"Count to {word}.",
                    f"Count from 1 to {last}.",
                    f"Count up to {last}.",
                ),
            )
        )
        facts.append(
            Fact(
                "count down",
                f"{', '.join(reversed(up))}.",
                (
                    f"Count down from {last}.",
                    f"Count back from {last}.",
                    f"Count down from {word}.",
                ),
            )
        )
    for first in range(2, LARGEST_NUMBER - 1):
        for last in range(first + 2, LARGEST_NUMBER + 1):
            text = ", ".join(str(n) for n in range(first, last + 1))
            facts.append(
                Fact(
                    "count",
                    f"{text}.",
                    (
                        f"Count from {first} to {last}.",
                        f"Count up from {first} to {last}.",
                        f"Say the numbers from {first} to {last}.",
                    ),
                )
            )
    return facts


def _letters() -> list[Fact]:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    facts = [
        Fact(
            "letter",
            f"The letter {side} {letter} is {other}.",
            (
                f"What letter comes {side} {letter}?",
                f"Which letter comes {side} {letter}?",
                f"What is the letter {side} {letter}?",
                f"Which letter is {side} {letter}?",
            ),
            (f"which letter comes {side} {letter}", f"the letter {side} {letter}"),
        )
        for earlier, later in itertools.pairwise(letters)
        for side, letter, other in (("after", earlier, later), ("before", later, earlier))
    ]
    alphabet = Fact(
        "list",
        f"The alphabet is {', '.join(letters)}.",
        (
            "What is the alphabet?",
            "Say the alphabet.",
            "What are the letters of the alphabet?",
            "List the letters.",
        ),
        ("the alphabet", "the letters of the alphabet"),
    )
    return [*facts, alphabet]


def _circle(kind: str, names: list[str]) -> list[Fact]:
    """Which of a circle of names (days, months, seasons) follows and precedes each other one."""
    facts: list[Fact] = []
    for index, name in enumerate(names):
        for side, other in (
            ("after", names[(index + 1) % len(names)]),
            ("before", names[index - 1]),
        ):
            facts.append(
                Fact(
                    f"{kind} order",
                    f"The {kind} {side} {name} is {other}.",
                    (
                        f"What {kind} comes {side} {name}?",
                        f"Which {kind} comes {side} {name}?",
                        f"What is the {kind} {side} {name}?",
                        f"Which {kind} is {side} {name}?",
                        f"What comes {side} {name}?",
                    ),
                    (f"which {kind} comes {side} {name}", f"the {kind} {side} {name}"),
                )
            )
    return facts


def _numbered(kind: str, whole: str, names: list[str]) -> list[Fact]:
    """Which day of the week, or month of the year, is the third."""
    return [
        Fact(
            f"{kind} number",
            f"The {ordinal} {kind} of the {whole} is {name}.",
            (
                f"What is the {ordinal} {kind} of the {whole}?",
                f"Which is the {ordinal} {kind} of the {whole}?",
                f"Name the {ordinal} {kind} of the {whole}.",
                f"Which {kind} of the {whole} is the {ordinal}?",
            ),
            (
                f"the {ordinal} {kind} of the {whole}",
                f"what the {ordinal} {kind} of the {whole} is",
            ),
        )
        for ordinal, name in zip(_ORDINALS, names, strict=False)
    ]


def _month_lengths() -> list[Fact]:
    return [
        Fact(
            "month length",
            "February has 28 days, and 29 in a leap year."
            if month == "February"
            else f"{month} has {_MONTH_LENGTHS.get(month, 31)} days.",
            (
                f"How many days does {month} have?",
                f"How many days are in {month}?",
                f"How many days are there in {month}?",
                f"How long is {month}?",
            ),
            (
                f"how many days {month} has",
                f"how many days are in {month}",
                f"the number of days in {month}",
            ),
        )
        for month in _MONTHS
    ]


def _lists() -> list[Fact]:
    facts: list[Fact] = []
    for kind, whole, names in (
        ("day", "week", _DAYS),
        ("month", "year", _MONTHS),
        ("season", "year", _SEASONS),
    ):
        facts.append(
            Fact(
                "list",
                f"The {kind}s of the {whole} are {join_words(names)}.",
                (
                    f"What are the {kind}s of the {whole}?",
                    f"List the {kind}s of the {whole}.",
                    f"Name the {kind}s of the {whole}.",
                    f"Say the {kind}s of the {whole}.",
                ),
                (f"the {kind}s of the {whole}", f"what the {kind}s of the {whole} are"),
            )
        )
        facts.append(
            Fact(
                "list",
                f"There are {NUMBER_WORDS[len(names)]} {kind}s in a {whole}.",
                (
                    f"How many {kind}s are in a {whole}?",
                    f"How many {kind}s are there in a {whole}?",
                    f"How many {kind}s does a {whole} have?",
                ),
                (f"how many {kind}s are in a {whole}", f"the number of {kind}s in a {whole}"),
            )
        )
    return facts


def _shapes() -> list[Fact]:
    facts: list[Fact] = []
    for shape, sides in pairs(_SHAPES):
        name = with_article(shape)
        facts.append(
            Fact(
                "shape",
                f"{capitalise(name)} has {sides} sides.",
                (
                    f"How many sides does {name} have?",
                    f"How many sides are there in {name}?",
                    f"How many sides has {name} got?",
                ),
                (f"how many sides {name} has", f"the number of sides of {name}"),
            )
        )
    return facts


def number_facts() -> list[Fact]:
    """All facts of this module."""
    numbers = _arithmetic() + _neighbours() + _parity() + _comparisons() + _counts()
    calendar = _circle("day", _DAYS) + _circle("month", _MONTHS) + _circle("season", _SEASONS)
    calendar += (
        _numbered("day", "week", _DAYS) + _numbered("month", "year", _MONTHS) + _month_lengths()
    )
    return numbers + calendar + _letters() + _lists() + _shapes()
