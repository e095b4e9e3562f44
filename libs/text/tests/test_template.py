"""Chat templates: as transformers renders them, and within bounds when they are hostile."""

import datetime
import tracemalloc

import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import BadCheckpoint, BadRequest, TooLarge
from pilotlight.text import template as under_test
from pilotlight.text.template import ChatTemplate, check_template

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": 'Hi <b>"there"</b> & 你好'}
SYSTEM = {"role": "system", "content": " Be brief. "}
ASSISTANT = {"role": "assistant", "content": "Hello!"}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"ä": {"type": "string"}}},
    },
}

CHATML = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MIXED = """\
{% macro turn(message) %}[{{ message.role }}] {{ message.content }}{{ eos_token }}
{% endmacro %}
{% set ns = namespace(count=0, text='') %}
{% for message in messages if message.role != 'system' %}
    {% set ns.count = ns.count + 1 %}
    {% if ns.count > 3 %}{% break %}{% endif %}
    {% set ns.text = ns.text ~ turn(message) ~ loop.index * 2 %}
    {% if loop.last %}last {{ loop.length }} {% endif %}
{% endfor %}
{{ ns.text }}{{ dict(a=1, b=messages[0].missing is defined) | tojson }}{{ "ab" * 3 }}{{ undefined_name }}
{% set block %}{% for i in range(2) %}<{{ i }}>{% endfor %}{% endset %}{{ block | upper }}{{ [1, none, true] }}
{%- if tools %}{{ tools | tojson }}{% endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mixed": MIXED}
CHATS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, USER],
}


def render(source, messages=(USER,), clock=None, **options):
    return ChatTemplate(source, SPECIALS, clock or ManualClock()).render(list(messages), **options)


@pytest.fixture(scope="session")
def reference():
    from transformers.utils import chat_template_utils

    return chat_template_utils


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_parity_with_transformers(reference, name, chat, tools, add_generation_prompt):
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    (expected,), _ = reference.render_jinja_template(
        [CHATS[chat]], chat_template=TEMPLATES[name], **options, **SPECIALS
    )
    assert render(TEMPLATES[name], CHATS[chat], **options) == expected


ENDS = ("Hello", "Hello! ", "\n 你好", "", "  ", "CONTINUE_FINAL_MESSAGE_TAG")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chatml", "llama3"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_message_is_continued_as_transformers_would(reference, name, end, tools):
    chat = [SYSTEM, USER, ASSISTANT, USER, {"role": "assistant", "content": end}]
    (expected,), _ = reference.render_jinja_template(
        [chat],
        chat_template=TEMPLATES[name],
        tools=tools,
        continue_final_message=True,
        add_generation_prompt=False,
        **SPECIALS,
    )
    options = {"tools": tools, "continue_final_message": True, "add_generation_prompt": False}
    assert render(TEMPLATES[name], chat, **options) == expected
    assert chat[-1]["content"] == end


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{{ messages[-1].content | upper }}",
        "{{ messages[-1].content[:3] }}",
    ],
)
def test_a_template_that_does_not_write_the_last_message_cannot_continue_it(source):
    with pytest.raises(BadRequest, match="cannot be continued") as caught:
        render(source, [USER, ASSISTANT], continue_final_message=True, add_generation_prompt=False)
    assert caught.value.param == "continue_final_message"


def test_chatml():
    assert render(CHATML, [USER]).startswith(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi <b>"
    )
    assert render(CHATML, [USER], add_generation_prompt=False).endswith("你好<|im_end|>\n")


def test_blocks_take_their_line_with_them():
    assert render("{% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_the_date_is_the_clocks():
    clock = ManualClock(wall=datetime.datetime(2031, 2, 3, tzinfo=datetime.UTC))
    assert render("{{ strftime_now('%d %b %Y') }}", clock=clock) == "03 Feb 2031"


def test_variables_add_to_what_a_template_knows_and_replace_nothing():
    source = "{{ enable_thinking }} {{ bos_token }} {{ messages | length }}"
    assert (
        render(source, variables={"enable_thinking": False, "bos_token": "x", "messages": []})
        == "False <s> 1"
    )


def test_a_model_without_a_template_points_to_completions():
    with pytest.raises(BadRequest, match="/v1/completions"):
        render(None)


def test_a_template_may_refuse_messages():
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ a b }}",
        "{% unknown %}",
        "{{ '" + "9" * 5000 + "' }}{{ " + "9" * 5000 + " }}",
        "(" * 10 + "{{ " + "(" * 2000,
    ],
)
def test_a_broken_template_is_a_bad_checkpoint(source):
    with pytest.raises(BadCheckpoint, match="not valid"):
        check_template(source)


def test_a_long_template_is_a_bad_checkpoint():
    with pytest.raises(BadCheckpoint, match="characters"):
        check_template("a" * (under_test.MAX_TEMPLATE_CHARS + 1))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ messages | nothing }}",
        "{{ messages + 1 }}",
        "{{ missing.attribute.x }}",
        "{% include 'other' %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ dict.update(messages[0], {'role': 'x'}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(__html__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ lipsum(n=3) }}",
        "{{ raise_exception() }}",
        "{{ strftime_now(1) }}",
        "{{ missing | tojson }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_bad_request(source):
    messages = [dict(USER)]
    with pytest.raises((BadRequest, BadCheckpoint)):
        render(source, messages)
    assert messages == [USER]


HUGE = "{% for i in range(100000) %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        HUGE * 3 + "{% endfor %}" * 3,
        HUGE + "{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
        HUGE + "x" * 1000 + "{% endfor %}",
        HUGE + "{{ messages }}" * 10 + "{% endfor %}",
        "{% macro m() %}" + HUGE + "x" * 1000 + "{% endfor %}{% endmacro %}{% set a = m() %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}"
        + "{{ "
        + "twice(" * 60
        + "'aa'"
        + ")" * 60
        + " }}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * 'a' }}",
        "{{ [0] * 10000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_a_hostile_template_is_stopped(source):
    with pytest.raises((BadRequest, TooLarge)):
        render(source)


def test_time_is_bounded_as_well_as_steps():
    class Slow(ManualClock):
        def monotonic_s(self):
            self.advance(1.0)
            return super().monotonic_s()

    assert render("{% for i in range(5) %}{{ i }}{% endfor %}", clock=Slow()) == "01234"
    with pytest.raises(BadRequest, match="too long"):
        render("{% for i in range(6) %}{{ i }}{% endfor %}", clock=Slow())


def test_each_rendering_has_a_meter_of_its_own(monkeypatch):
    monkeypatch.setattr(under_test, "MAX_STEPS", 3)
    template = ChatTemplate("{% for m in messages %}x{% endfor %}", {}, ManualClock())
    assert [template.render([USER] * 3) for _ in range(5)] == ["xxx"] * 5
    with pytest.raises(BadRequest, match="too long"):
        template.render([USER] * 4)


def test_compiling_computes_nothing():
    """A constant call of a filter would be folded while compiling, when no meter runs."""
    tracemalloc.start()
    try:
        check_template("{{ 'x'|center(400000000) }}{{ ('x' * 9) ~ 'y'|center(400000000) }}")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10_000_000
