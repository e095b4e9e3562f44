"""Reasoning: what templates know of it, and how it is read from a stream."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pilotlight.text.reasoning import (
    FAMILIES,
    ReasoningParser,
    TemplateReasoning,
    template_reasoning,
)

THINK = FAMILIES[0]


def read(pieces, tags=THINK, *, begun=False):
    parser = ReasoningParser(tags, begun=begun)
    thoughts = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return (
        "".join(thought.reasoning for thought in thoughts),
        "".join(thought.content for thought in thoughts),
    )


@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "content"),
    [
        ("<think>\nfirst\n</think>\n\nIt is 4.", False, "first", "It is 4."),
        ("first\n</think>\n\nIt is 4.", True, "first", "It is 4."),
        ("It is 4.", False, "", "It is 4."),
        ("  It is 4. ", False, "", "  It is 4. "),
        ("  <think>a</think> b ", False, "a", "b "),
        ("<think>\n\n</think>\n\nb", False, "", "b"),
        ("<think>cut short  ", False, "cut short", ""),
        ("cut short </thi", True, "cut short </thi", ""),
        ("It is 4. <think>later</think>", False, "", "It is 4. <think>later</think>"),
        ("<thin", False, "", "<thin"),
        ("a < b </think>", True, "a < b", ""),
        ("", True, "", ""),
        ("  ", False, "", "  "),
    ],
)
def test_an_answer(text, begun, reasoning, content):
    assert read([text], begun=begun) == (reasoning, content)
    assert read(list(text), begun=begun) == (reasoning, content)


@pytest.mark.parametrize("tags", FAMILIES)
def test_every_family(tags):
    text = f"{tags.opening}why{tags.closing}because"
    assert read(list(text), tags) == ("why", "because")


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "</th", "<", " ", "\n", "a"])).map(
        "".join
    ),
    cuts=st.lists(st.integers(0, 60)),
    begun=st.booleans(),
)
def test_pieces_change_nothing_and_nothing_is_lost(text, cuts, begun):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(edges)]
    reasoning, content = read(pieces, begun=begun)
    assert (reasoning, content) == read([text], begun=begun)
    both = (THINK.opening, THINK.closing)
    left = reasoning + content
    for tag in both:
        text, left = text.replace(tag, ""), left.replace(tag, "")
    assert "".join(left.split()) == "".join(text.split())


def test_what_templates_know():
    qwen = (
        "{% if enable_thinking is defined and enable_thinking is false %}"
        "{{ '<think></think>' }}{% endif %}"
    )
    assert template_reasoning(qwen) == TemplateReasoning(tags=THINK, switches=("enable_thinking",))
    deepseek = "{% if thinking %}<think>{% else %}</think>{% endif %}"
    assert template_reasoning(deepseek).switches == ("thinking",)
    effort = "{{ reasoning_effort }} thinking {{ 'enable_thinking' }} {{ message.thinking }}"
    assert template_reasoning(effort) == TemplateReasoning(switches=("reasoning_effort",))
    assert template_reasoning(None) == template_reasoning("{{ x }}") == TemplateReasoning()
