"""Tokenizers of each kind, made once."""

import pytest

from pilotlight.text.bundle import TextBundle
from pilotlight.text.testing import byte_fallback_json, byte_level_json, unigram_json
from pilotlight.text.tokenizer import TextTokenizer

KINDS = {
    "byte-level": byte_level_json,
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
