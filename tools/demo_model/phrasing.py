"""How one question is put in many ways, and which of those ways training never sees."""

from __future__ import annotations

from random import Random

from demo_model.grammar import Fact, capitalise, stable_hash, uncapitalise

SMALL_TALK = "small talk"

_PLAIN = "{q}"

_DIRECT = (
    "Please tell me: {l}",
    "Tell me: {l}",
    "Hello. {q}",
    "Hello! {q}",
    "Hi, {l}",
    "I have a question. {q}",
    "I have a question: {l}",
    "Quick question: {l}",
    "Ember, {l}",
    "Hey Ember, {l}",
    "Please answer: {l}",
    "Please answer this question. {q}",
    "{q} Please tell me.",
    "{q} Thank you.",
    "Now tell me, {l}",
    "And {l}",
    "Can you tell me, {l}",
)
_CLAUSE = (
    "Can you tell me {c}?",
    "Could you tell me {c}?",
    "Can you please tell me {c}?",
    "Could you tell me {c}, please?",
    "Please tell me {c}.",
    "Tell me {c}.",
    "Tell me {c}, please.",
    "Do you know {c}?",
    "I want to know {c}.",
    "I would like to know {c}.",
    "Hello, can you tell me {c}?",
)

# Never used in training: evaluation asks whether the model copes with a way of asking that it has
# not met.
UNSEEN_DIRECT = (
    "One more thing: {l}",
    "May I ask you something? {q}",
    "Here is my question. {q}",
    "Well, {l}",
)
UNSEEN_CLAUSE = (
    "Would you tell me {c}?",
    "I need to know {c}.",
    "Please say {c}.",
    "I wonder if you know {c}.",
)

_FORMS_NEEDED_TO_HOLD_ONE_OUT = 4


def held_out_form(fact: Fact) -> str | None:
    """The form of this fact's question that training never sees, in any wrapping; None where forms
    are few.

    The first form is the plainest and is always trained. Greetings do not paraphrase one another
    ("I am ill.", "I am lonely."), so nothing could be learned about one from the rest, and all of
    them are trained.
    """
    if len(fact.forms) < _FORMS_NEEDED_TO_HOLD_ONE_OUT or fact.group == SMALL_TALK:
        return None
    return min(fact.forms[1:], key=lambda form: stable_hash(f"{fact.answer}/{form}"))


def training_forms(fact: Fact) -> tuple[str, ...]:
    """The forms of this fact's question that training may use."""
    withheld = held_out_form(fact)
    return tuple(form for form in fact.forms if form != withheld)


def wrap(form: str, is_clause: bool, rng: Random, *, unseen: bool = False) -> str:
    """Put a form into a polite or a plain wrapping."""
    if is_clause:
        return rng.choice(UNSEEN_CLAUSE if unseen else _CLAUSE).format(c=form)
    wrappings = (_PLAIN,) * len(_DIRECT) + _DIRECT
    wrapping = rng.choice(UNSEEN_DIRECT if unseen else wrappings)
    return wrapping.format(q=form, l=uncapitalise(form))


def restyle(question: str, rng: Random) -> str:
    """Type it as people do: sometimes in small letters, sometimes without the last mark."""
    style = rng.random()
    if 0.5 < style < 0.52:
        return question.upper()
    if style < 0.12 or style > 0.92:
        question = question.lower()
    if style < 0.24 and question.rstrip("?.!"):
        question = question.rstrip("?.!").rstrip(" =")
    return question


def ask(fact: Fact, rng: Random) -> str:
    """One of the ways in which training may ask for a fact."""
    form = rng.choice(training_forms(fact))
    return _say(fact, form, rng)


def ask_held_out(fact: Fact, rng: Random) -> str | None:
    """A way of asking whose form training never sees, and whose words it cannot meet by way of
    another form.

    They can coincide: "3 - 2 = ?" without its last marks is "3 - 2", and "about Ghana" may follow
    "Tell me".
    """
    form = held_out_form(fact)
    if form is None:
        return None
    question = _say(fact, form, rng)
    return None if bare_words(question) in _trained_words(fact) else question


def bare_words(question: str) -> str:
    """A question without what `restyle` may change."""
    return question.lower().rstrip("?.! =")


def _trained_words(fact: Fact) -> set[str]:
    """Every question that training may ask for this fact, each bare."""
    return {
        bare_words(wrapping.format(q=form, l=uncapitalise(form), c=form))
        for form in training_forms(fact)
        for wrapping in (_CLAUSE if form in fact.clauses else (_PLAIN, *_DIRECT))
    }


def ask_unseen_wrapping(fact: Fact, rng: Random) -> str:
    """A way of asking whose form is known and whose wrapping is not."""
    form = rng.choice(training_forms(fact))
    return capitalise(wrap(form, form in fact.clauses, rng, unseen=True))


def _say(fact: Fact, form: str, rng: Random) -> str:
    if fact.group == SMALL_TALK:
        return restyle(form, rng)
    return restyle(capitalise(wrap(form, form in fact.clauses, rng)), rng)
