"""Bounds on tokens: never more than there are, and of use where they are known."""

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from pilotlight.text.bounds import UNKNOWN, bound_of
from pilotlight.text.testing import CORPUS, byte_fallback_json, byte_level_json, unigram_json

KINDS = {
    "byte-level": byte_level_json,
    "byte-fallback": byte_fallback_json,
    "unigram": unigram_json,
}
NFC = {"type": "NFC"}
STRIPPING = {
    "id": 500,
    "content": "<end>",
    "single_word": False,
    "lstrip": True,
    "rstrip": True,
    "normalized": False,
    "special": True,
}


def changed(kind: str, **fields: Any) -> Tokenizer:
    return Tokenizer.from_str(json.dumps({**json.loads(KINDS[kind]()), **fields}))


def texts() -> list[str]:
    rng = random.Random(1)
    alphabet = "a  bé😀你\n\t\u1fbe\u0308\u0301K한글<s><end>▁"
    made = ["".join(rng.choices(alphabet, k=rng.randrange(200))) for _ in range(200)]
    return [
        *made,
        *CORPUS,
        " " * 5000,
        "a" * 5000,
        "\u1fbe\u0308\u0301" * 999,
        "K" * 999,
        "<s>" * 999,
        " <end> " * 999,
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stripping", [False, True])
def test_no_text_has_fewer_tokens_than_said(kind, stripping):
    added = json.loads(KINDS[kind]())["added_tokens"]
    if stripping:
        added.append({**STRIPPING, "id": max(token["id"] for token in added) + 1})
    tokenizer = changed(kind, added_tokens=added)
    bound = bound_of(tokenizer)
    assert bound.longest > 0
    assert bound.blanks != stripping
    for text in texts():
        assert bound.least_tokens(text) <= len(
            tokenizer.encode(text, add_special_tokens=False).ids
        ), text


def test_normalizing_is_allowed_for():
    tokenizer = changed("byte-level", normalizer=NFC)
    bound = bound_of(tokenizer)
    assert bound.longest > bound_of(changed("byte-level")).longest
    for text in texts():
        assert bound.least_tokens(text) <= len(
            tokenizer.encode(text, add_special_tokens=False).ids
        ), text


@pytest.mark.parametrize("kind", KINDS)
def test_blanks_count(kind):
    assert bound_of(changed(kind)).least_tokens(" " * 1_000_000) > 10_000


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("byte-level", {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}),
        (
            "byte-level",
            {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}},
        ),
        ("byte-level", {"pre_tokenizer": {"type": "Whitespace"}}),
        (
            "byte-fallback",
            {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}},
        ),
        ("unigram", {"pre_tokenizer": {"type": "WhitespaceSplit"}}),
    ],
)
def test_nothing_is_said_of_tokenizers_that_drop_text(kind, fields):
    assert bound_of(changed(kind, **fields)) is UNKNOWN
    assert UNKNOWN.least_tokens("a" * 1000) == 0
