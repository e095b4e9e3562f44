"""Reading tool calls: the same however the text is cut, nothing lost, JSON as Python's own reader
sees it.
"""

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pilotlight.text.tools.dialects import DIALECTS, HERMES, LLAMA, MISTRAL, PLAIN
from pilotlight.text.tools.parser import ToolParser
from pilotlight.text.tools.scan import MAX_DEPTH, ObjectScanner
from pilotlight.text.tools.testing import written_calls

NAMES = ("f", "get_weather")
BY_NAME = {dialect.name: dialect for dialect in (*DIALECTS, PLAIN)}
PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "<tool",
        "_call>",
        "</",
        "<",
        "[TOOL",
        "<|",
    ),
    *(
        '{"name": "f"',
        ', "arguments": ',
        '"parameters": ',
        '{"x": 1}',
        '{"x": "}"',
        "}",
        "{",
        "[",
        "]",
        ",",
        ";",
        ":",
        '"',
    ),
    *(
        " ",
        "\n",
        "\t ",
        "text",
        "é",
        "\\",
        "1e5",
        "-",
        "null",
        "nope",
        '"name": "zz"',
        '"id": "a"',
        "f",
    ),
    '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    '{"arguments": {"x": [{}, "\\""]}, "name": "get_weather"}',
    '[TOOL_CALLS] [{"name": "f", "arguments": {}}, ',
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=20)


def read(dialect, pieces, *, single=False, names=NAMES):
    """Content and calls of an answer that comes in these pieces."""
    parser = ToolParser(dialect, names, single=single)
    content, calls = "", []
    for parsed in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        content += parsed.content
        for piece in parsed.calls:
            if piece.name is not None:
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            name, arguments = calls[piece.index]
            calls[piece.index] = (name, arguments + piece.arguments)
    assert parser.called == len(calls)
    return content, calls


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(sorted(BY_NAME)),
    TEXTS,
    st.booleans(),
    st.lists(st.integers(0, 400), max_size=30),
)
@example("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}\n</tool_call> end', False, [1])
def test_the_same_however_it_is_cut(name, text, single, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    dialect = BY_NAME[name]
    whole = read(dialect, [text], single=single)
    assert read(dialect, [text[a:b] for a, b in itertools.pairwise(edges)], single=single) == whole
    assert read(dialect, list(text), single=single) == whole


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(BY_NAME)), TEXTS)
def test_nothing_is_lost(name, text):
    content, calls = read(BY_NAME[name], [text])
    if not calls:
        assert content == text
    # With calls too: what is left out are markers, names and the like, never what a call carries.
    assert all(arguments in text for _, arguments in calls)
    missing = len("".join(text.split())) - len(
        "".join((content + "".join(arguments for _, arguments in calls)).split())
    )
    assert missing >= 0


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=3)
LAYOUTS = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "indent": st.sampled_from([None, 0, 2]),
        "separators": st.sampled_from([(",", ":"), (", ", ": ")]),
    }
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(["hermes", "mistral", "llama", "plain"]),
    st.lists(st.tuples(st.sampled_from(NAMES), OBJECTS, LAYOUTS), min_size=1, max_size=3),
    st.sampled_from(["", "Let me see.\n", "a < b [T] {x}\n\n"]),
)
def test_what_a_model_writes_is_read(name, made, content):
    calls = [(function, json.dumps(arguments, **layout)) for function, arguments, layout in made]
    if name in ("llama", "plain"):
        content = ""
    text = written_calls(name, calls, content)
    assert read(BY_NAME[name], list(text)) == (content.rstrip(), calls)
    assert read(BY_NAME[name], [text], single=True) == (content.rstrip(), calls[:1])


def loads(text):
    """What Python's reader makes of it, without what JSON does not have."""

    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


@settings(max_examples=1000, deadline=None)
@given(
    OBJECTS,
    LAYOUTS,
    st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from(list('{}[]",:\\ue019.-+ \nxtnf\x01'))),
        max_size=3,
    ),
)
@example({"a": 1}, {}, [(5, "0")])
def test_json_is_recognised_as_pythons_reader_does(value, layout, changes):
    text = json.dumps(value, **layout)
    for place, char in changes:
        text = text[: place % (len(text) + 1)] + char + text[place % (len(text) + 1) + 1 :]
    text = text.rstrip(" \n")
    scanner = ObjectScanner()
    taken = all(scanner.push(char) for char in text) and scanner.done
    try:
        valid = isinstance(loads(text), dict)
    except ValueError:
        valid = False
    assert taken == valid, text


def test_depth_is_bounded():
    scanner = ObjectScanner()
    text = '{"a":' * MAX_DEPTH
    assert all(scanner.push(char) for char in text)
    assert not scanner.push("{")


def call(arguments='{"x": 1}', name="f", key="arguments"):
    return f'{{"name": "{name}", "{key}": {arguments}}}'


F = [("f", '{"x": 1}')]


@pytest.mark.parametrize(
    ("dialect", "text", "content", "calls"),
    [
        (HERMES, "no call at all \n", "no call at all \n", []),
        (HERMES, f"Sure.\n<tool_call>\n{call()}\n</tool_call>\n", "Sure.", F),
        (
            HERMES,
            f"<tool_call>{call()}</tool_call> and <tool_call>{call()}</tool_call> end",
            "and end",
            F * 2,
        ),
        # The last brace, or the closing marker, is missing: models do that.
        (HERMES, f"<tool_call>{call()[:-1]}\n</tool_call>", "", F),
        (HERMES, f"<tool_call>{call()}", "", F),
        (HERMES, f"<tool_call>{call()}\n<tool_call>{call()}", "", F * 2),
        (HERMES, f"<tool_call>{call()}\n</tool_c", "", F),
        # Cut off by max_tokens.
        (HERMES, f"<tool_call>{call()[:-3]}", "", [("f", '{"x": ')]),
        (HERMES, '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        (HERMES, "a <tool_ca", "a <tool_ca", []),
        # No calls, though they begin like ones.
        (
            HERMES,
            '<tool_call>{"name": "f"}</tool_call>',
            '<tool_call>{"name": "f"}</tool_call>',
            [],
        ),
        (
            HERMES,
            f"<tool_call>{call('[1]')}</tool_call>",
            f"<tool_call>{call('[1]')}</tool_call>",
            [],
        ),
        (
            HERMES,
            f"<tool_call>{call(name='')}</tool_call>",
            f"<tool_call>{call(name='')}</tool_call>",
            [],
        ),
        (HERMES, "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
        (HERMES, f"<tool_call>\n<tool_call>{call()}</tool_call>", "<tool_call>", F),
        # A marker says that a call is meant, whatever it is of.
        (HERMES, f"<tool_call>{call(name='other')}</tool_call>", "", [("other", '{"x": 1}')]),
        # Wrong only after it was made.
        (
            HERMES,
            "<tool_call>" + call('{"x": nope}') + "</tool_call> end",
            "end",
            [("f", '{"x": nope}}')],
        ),
        (MISTRAL, f"[TOOL_CALLS] [{call()}, {call()}]", "", F * 2),
        (MISTRAL, f"[TOOL_CALLS][{call()[:-1]}, " + '"id": "abcdefghi"}]', "", F),
        (MISTRAL, f"[1] [TOOL_CALLS][{call()}", "[1]", F),
        (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
        (LLAMA, call(key="parameters"), "", F),
        (LLAMA, f"<|python_tag|>{call(key='parameters')}; {call()}", "", F * 2),
        (LLAMA, '{"type": "function", ' + call()[1:], "", F),
        (LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (LLAMA, f"Use {call()}", f"Use {call()}", []),
        # Without a marker, an object that is no call of a known function is the answer.
        (LLAMA, call(name="other"), call(name="other"), []),
        (LLAMA, '{"a": {"name": "f"}} ', '{"a": {"name": "f"}} ', []),
        (PLAIN, call(), "", F),
    ],
)
def test_what_is_a_call(dialect, text, content, calls):
    assert read(dialect, list(text)) == (content, calls)


def test_arguments_come_while_they_are_written():
    parser = ToolParser(HERMES, NAMES)
    assert parser.feed('Hi\n<tool_call>\n{"name": "f", "argu').content == "Hi"
    (made,) = parser.feed('ments": {"ci').calls
    assert (made.index, made.name, made.arguments) == (0, "f", '{"ci')
    (more,) = parser.feed('ty": "Oslo"').calls
    assert (more.index, more.name, more.arguments) == (0, None, 'ty": "Oslo"')


def test_a_json_answer_is_not_held_back():
    parser = ToolParser(LLAMA, NAMES)
    assert parser.feed('{"answer": "').content == '{"answer": "'


def test_a_single_call_ends_the_answer():
    parser = ToolParser(HERMES, NAMES, single=True)
    text = f"<tool_call>{call()}</tool_call>"
    parser.feed(text[:-1])
    assert not parser.ended
    parser.feed(text[-1] + "more")
    assert parser.ended
    assert parser.finish().content == ""
