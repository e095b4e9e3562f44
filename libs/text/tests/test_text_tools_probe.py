"""What templates do with tools; markers that are special tokens."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer

from pilotlight.common.clock import ManualClock
from pilotlight.text.bundle import TextBundle
from pilotlight.text.stream import OutputText
from pilotlight.text.template import ChatTemplate
from pilotlight.text.testing import byte_fallback_json, byte_level_json, unigram_json
from pilotlight.text.tokenizer import TextTokenizer
from pilotlight.text.tools.probe import TemplateTools, template_tools
from pilotlight.text.tools.testing import HERMES_TEMPLATE, LLAMA_TEMPLATE, TEMPLATES

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PYTHON_TAG = "<|python_tag|>"


def found(source, *tokens):
    bundle = TextBundle(tokenizer_json=with_tokens(byte_level_json(), *tokens))
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, ManualClock())
    return template_tools(template, TextTokenizer(bundle))


def with_tokens(tokenizer_json, *tokens, special=True):
    made = Tokenizer.from_str(tokenizer_json)
    made.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    return made.to_str()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_dialect_is_known_by_what_its_template_writes(name):
    tools = found(TEMPLATES[name], PYTHON_TAG)
    assert tools.dialect is not None
    assert tools.dialect.name == name
    assert tools.describes
    assert tools.writes_calls
    assert tools.writes_results
    assert not tools.arguments_as_text


def test_a_marker_that_no_token_is_is_not_looked_for_where_calls_need_none():
    assert found(LLAMA_TEMPLATE, PYTHON_TAG).dialect.opening == PYTHON_TAG
    assert found(LLAMA_TEMPLATE).dialect.opening == ""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, TemplateTools()),
        ("{{ raise_exception('no') }}", TemplateTools()),
        # A role is just a word to it, and calls are left out.
        (CHATML, TemplateTools(writes_results=True)),
        # It tells of tools, and writes calls in an unknown way.
        (
            CHATML
            + "{{ tools | tojson if tools }}{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}"
            "<call:{{ c.function.name }}>{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
            TemplateTools(describes=True, writes_calls=True, writes_results=True),
        ),
        (
            CHATML + "{% for m in messages if m.tool_calls %}<c>{{ m.tool_calls[0].function.name }}"
            "{% for k, v in m.tool_calls[0].function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}{% endfor %}",
            TemplateTools(writes_calls=True, writes_results=True),
        ),
    ],
)
def test_what_other_templates_do(source, expected):
    assert found(source) == expected


def test_a_template_may_want_arguments_as_text():
    tools = found(
        HERMES_TEMPLATE.replace("call.function.arguments | tojson", "'' + call.function.arguments")
    )
    assert tools.arguments_as_text
    assert tools.dialect.name == "hermes"


def test_a_dialect_of_another_kind_between_the_same_markers_is_not_mistaken():
    source = HERMES_TEMPLATE.replace(
        '{"name": "\' + call.function.name + \'", "arguments": \'',
        "<function=' + call.function.name + '>'",
    )
    assert source != HERMES_TEMPLATE
    tools = found(source)
    assert (tools.describes, tools.dialect, tools.writes_calls) == (True, None, True)


@pytest.mark.parametrize("make", [byte_level_json, byte_fallback_json, unigram_json])
@pytest.mark.parametrize("special", [True, False])
def test_markers_survive_decoding(make, special):
    tokenizer = TextTokenizer(
        TextBundle(tokenizer_json=with_tokens(make(), "[TOOL_CALLS]", PYTHON_TAG, special=special))
    )
    marker = tokenizer.added_tokens["[TOOL_CALLS]"]
    text = "the fox[TOOL_CALLS] [" + json.dumps({"name": "f"}) + "]"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert token_ids.count(marker) == 1
    token_ids.insert(3, tokenizer.added_tokens[PYTHON_TAG])
    output = OutputText(tokenizer, kept=[marker])
    shown = "".join(output.feed([token_id]).text for token_id in token_ids) + output.finish().text
    assert "[TOOL_CALLS]" in shown
    assert '{"name": "f"}]' in shown
    # Other special tokens are left out as ever.
    assert (PYTHON_TAG in shown) != special
    output = OutputText(tokenizer)
    plain = "".join(output.feed([token_id]).text for token_id in token_ids) + output.finish().text
    assert ("[TOOL_CALLS]" in plain) != special
