"""Tokenizers of each kind, made once."""

import json

import pytest

from pilotlight.text.bundle import TextBundle
from pilotlight.text.testing import byte_fallback_json, byte_level_json, unigram_json
from pilotlight.text.tokenizer import TextTokenizer


def in_a_sequence() -> str:
    """A byte-level tokenizer whose decoder is a list of one: what it does alone is not asked."""
    described = json.loads(byte_level_json())
    described["decoder"] = {"type": "Sequence", "decoders": [described["decoder"]]}
    return json.dumps(described)


KINDS = {
    "byte-level": byte_level_json,
    "byte-level in a sequence": in_a_sequence,
    "byte-fallback": byte_fallback_json,
    "unigram": unigram_json,
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="session", params=KINDS)
def tokenizer(request) -> TextTokenizer:
    return TextTokenizer(
        TextBundle(tokenizer_json=KINDS[request.param](), special_tokens=SPECIAL_TOKENS)
    )


@pytest.fixture(scope="session")
def byte_level() -> TextTokenizer:
    return TextTokenizer(
        TextBundle(tokenizer_json=byte_level_json(), special_tokens=SPECIAL_TOKENS)
    )
