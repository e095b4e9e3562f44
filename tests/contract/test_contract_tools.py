"""What the engine's grammars let through is what the gateway reads as calls, valid by their
schemas; and what models write gets through.
"""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from pilotlight.engine.errors import BadRequest
from pilotlight.engine.grammar.matching import Lexicon, compile_grammar
from pilotlight.policy.request import Grammar, Vocabulary
from pilotlight.text.bundle import TextBundle
from pilotlight.text.stream import OutputText
from pilotlight.text.testing import byte_level_json
from pilotlight.text.tokenizer import TextTokenizer
from pilotlight.text.tools.dialects import HERMES, LLAMA, MISTRAL, PLAIN, ToolDialect
from pilotlight.text.tools.grammar import Function, Markers, call_grammar
from pilotlight.text.tools.parser import ToolParser
from pilotlight.text.tools.testing import WEATHER, written_calls

END = 1
MAX_TOKENS = 600
THINK = "<think>"
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": WEATHER,
    "get": {"type": "object", "properties": {}, "additionalProperties": False},
    "search-all": {
        "type": "object",
        "$defs": {
            "range": {
                "type": "object",
                "properties": {"from": {"type": "integer"}},
                "required": ["from"],
            }
        },
        "properties": {
            "in": {"enum": ["a", "b", "<tool_call>", "]"]},
            "ranges": {"type": "array", "items": {"$ref": "#/$defs/range"}, "maxItems": 2},
            "exact": {"type": ["boolean", "null"]},
        },
        "required": ["in", "ranges"],
    },
    # Says nothing of its own type.
    "either": {
        "anyOf": [
            {"properties": {"q": {"type": "number"}}, "required": ["q"]},
            {"properties": {"r": {"type": "null"}}},
        ]
    },
}
FUNCTIONS = [Function(name=name, parameters=schema) for name, schema in SCHEMAS.items()]
CASES = [
    pytest.param(dialect, special, id=f"{dialect.name}-{'tokens' if special else 'spelled'}")
    for dialect in (HERMES, MISTRAL, LLAMA, PLAIN)
    for special in (True, False)
    if dialect.markers or not special
]


class Reader:
    """A tokenizer, as gateway and engine have it, and a dialect on it."""

    def __init__(self, folder: Path, dialect: ToolDialect, *, special: bool) -> None:
        made: Any = Tokenizer.from_str(byte_level_json())
        markers = dialect.markers if special else ()
        made.add_tokens([AddedToken(token, special=True) for token in (*markers, THINK)])
        path = folder / "tokenizer.json"
        path.write_text(made.to_str())
        self.dialect = dialect
        self.tokenizer = TextTokenizer(TextBundle(tokenizer_json=made.to_str()))
        self.lexicon = Lexicon(
            Vocabulary(path=str(path), eos_token_ids=(END,)), self.tokenizer.vocab_size
        )
        added = self.tokenizer.added_tokens
        self.markers = Markers(
            ids={marker: added[marker] for marker in markers},
            others=tuple(
                token_id
                for token, token_id in added.items()
                if token not in markers and token_id != END
            ),
        )

    def grammar(self, functions: list[Function], *, forced: bool, several: bool) -> Grammar:
        return call_grammar(self.dialect, functions, self.markers, forced=forced, several=several)

    def allows(self, grammar: Grammar, text: str) -> bool:
        matcher = compile_grammar(self.lexicon, grammar)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    def walk(self, grammar: Grammar, rng: random.Random, begun: str = "") -> list[int]:
        """An output of tokens that are drawn from what is allowed, with a leaning to what closes,
        ends and calls.
        """
        matcher = compile_grammar(self.lexicon, grammar)
        output = self.tokenizer.encode(begun, add_special_tokens=False)
        assert matcher.try_consume_tokens(output) == len(output)
        while len(output) < MAX_TOKENS:
            mask = matcher.compute_bitmask()
            assert not matcher.is_error(), matcher.get_error()
            allowed = [
                token_id
                for token_id in range(self.tokenizer.vocab_size)
                if mask[token_id // 8] >> token_id % 8 & 1
            ]
            closing = [
                token_id
                for token_id in allowed
                if self.tokenizer.decode([token_id])[:1] in ('"', "}", "]", "<", "[")
            ]
            marked = [token_id for token_id in allowed if token_id in self.markers.ids.values()]
            if not allowed or (
                matcher.is_accepting() and rng.random() < 0.1 + len(output) / MAX_TOKENS
            ):
                return output
            leaning = marked if marked and rng.random() < 0.3 else closing
            drawn = rng.choice(
                leaning if leaning and rng.random() < 0.2 + len(output) / 100 else allowed
            )
            if drawn == END:
                return output
            assert matcher.try_consume_tokens([drawn]) == 1
            output.append(drawn)
        return output

    def read(self, output: list[int], *, single: bool) -> tuple[str, list[tuple[str, str]], bool]:
        """Content, calls, and whether the output came to an end."""
        text = OutputText(self.tokenizer, kept=self.markers.ids.values())
        parser = ToolParser(self.dialect, SCHEMAS, single=single)
        shown = text.feed(output).text + text.finish().text
        pieces = [parser.feed(shown), parser.finish()]
        calls: dict[int, tuple[str, str]] = {}
        for piece in (piece for parsed in pieces for piece in parsed.calls):
            name, arguments = calls.get(piece.index, (piece.name or "", ""))
            calls[piece.index] = (name, arguments + piece.arguments)
        return (
            "".join(parsed.content for parsed in pieces),
            list(calls.values()),
            len(output) < MAX_TOKENS,
        )


def valid(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        given = json.loads(arguments)
        assert isinstance(given, dict)
        validator: Any = jsonschema.Draft202012Validator(SCHEMAS[name])
        validator.validate(given)


@pytest.mark.slow
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize(("dialect", "special"), CASES)
def test_a_forced_answer_is_calls_and_nothing_else(
    tmp_path: Path, dialect: ToolDialect, special: bool, several: bool
) -> None:
    reader = Reader(tmp_path, dialect, special=special)
    grammar = reader.grammar(FUNCTIONS, forced=True, several=several)
    ended = 0
    names: set[str] = set()
    for seed in range(40):
        content, calls, ends = reader.read(
            reader.walk(grammar, random.Random(seed)), single=not several
        )
        if ends:
            ended += 1
            assert content == ""
            assert 1 <= len(calls) <= (100 if several and dialect.several else 1)
            valid(calls)
            names |= {name for name, _ in calls}
    assert ended >= 30
    assert len(names) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize(
    ("dialect", "special"), [case for case in CASES if case.id != "plain-spelled"]
)
def test_a_free_answer_may_hold_calls_and_those_are_right(
    tmp_path: Path, dialect: ToolDialect, special: bool, several: bool
) -> None:
    reader = Reader(tmp_path, dialect, special=special)
    grammar = reader.grammar(FUNCTIONS, forced=False, several=several)
    called = 0
    for seed in range(40):
        # A marker that is spelled, and an answer that is a call from its beginning, hardly come by
        # chance.
        begun = (
            ("", "hello ", THINK)[seed % 3] + dialect.opening
            if not dialect.unmarked
            else ("{", "", "the")[seed % 3]
        )
        content, calls, ends = reader.read(
            reader.walk(grammar, random.Random(seed), begun), single=False
        )
        if ends:
            valid(calls)
            called += len(calls)
            assert calls or (dialect.unmarked and content.startswith(begun))
    assert called >= 5


@pytest.mark.parametrize(("dialect", "special"), CASES)
def test_what_models_write_is_allowed(tmp_path: Path, dialect: ToolDialect, special: bool) -> None:
    reader = Reader(tmp_path, dialect, special=special)
    one = [("get_weather", '{"city": "Köln", "days": 3}')]
    wrong = [("get_weather", '{"city": 3}')]
    forced, free = (
        reader.grammar(FUNCTIONS, forced=forced, several=True) for forced in (True, False)
    )
    single = reader.grammar(FUNCTIONS, forced=True, several=False)
    for grammar in (forced, free, single):
        assert reader.allows(grammar, written_calls(dialect.name, one))
        assert not reader.allows(grammar, written_calls(dialect.name, wrong))
    assert reader.allows(forced, written_calls(dialect.name, one * 2)) == dialect.several
    assert not reader.allows(single, written_calls(dialect.name, one * 2))
    assert not reader.allows(forced, "It rains.")
    assert reader.allows(free, "It rains.\nNot in <Köln>, [1] {2}.")
    assert reader.allows(free, "")
    if not dialect.unmarked:
        assert reader.allows(free, THINK + "Let me see.\n" + written_calls(dialect.name, one))
        assert not reader.allows(free, "Let me see.\n" + written_calls(dialect.name, wrong))


def test_many_tools_are_compiled(tmp_path: Path) -> None:
    reader = Reader(tmp_path, HERMES, special=True)
    described = {"type": "string", "description": "what it is for"}
    schema = {
        "type": "object",
        "properties": {f"p{number}": described for number in range(10)},
        "required": ["p3"],
    }
    functions = [Function(name=f"function_{number}", parameters=schema) for number in range(128)]
    grammar = reader.grammar(functions, forced=True, several=True)
    assert reader.allows(grammar, written_calls("hermes", [("function_77", '{"p3": "x"}')] * 3))


def test_a_schema_that_cannot_be_held_to_is_named(tmp_path: Path) -> None:
    reader = Reader(tmp_path, HERMES, special=True)
    function = Function(name="f", parameters={"properties": {"x": {"not": {"type": "null"}}}})
    with pytest.raises(BadRequest, match="not"):
        compile_grammar(reader.lexicon, reader.grammar([function], forced=True, several=True))
