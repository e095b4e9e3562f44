"""Grammars that an engine refuses, and a word of the reason for each."""

import json

from pilotlight.policy.request import GrammarKind


def refs(count: int) -> str:
    """A schema that doubles with every reference."""
    doubled = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(count)
    }
    return json.dumps(
        {
            "$defs": {**doubled, f"d{count}": {"type": "string", "pattern": "a"}},
            "$ref": "#/$defs/d0",
        }
    )


BOMBS = {
    "memory": (GrammarKind.JSON_SCHEMA, refs(25), "too large"),
    "time": (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(6000)}}),
        "grammar",
    ),
    # Too complex; on a busy machine the time is over before that is found out.
    "lexer": (GrammarKind.REGEX, "((a{1000}){1000}){1000}", "too "),
    "nested": (GrammarKind.JSON_SCHEMA, '{"items":' * 1000 + "{}" + "}" * 1000, "recursion"),
    "no regex": (GrammarKind.REGEX, "(?=a)b", "look-around"),
    "no lark": (GrammarKind.LARK, "start: nothing", "nothing"),
    "no schema": (GrammarKind.JSON_SCHEMA, '{"not": {}}', "not"),
    "no json": (GrammarKind.JSON_SCHEMA, "{", "not valid"),
    "no guidance": (GrammarKind.JSON_SCHEMA, '{"x-guidance": 3}', "x-guidance"),
    "no choice": (GrammarKind.CHOICE, "[]", "at least one"),
}
