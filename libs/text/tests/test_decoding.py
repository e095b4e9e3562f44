"""The part of a tokenizer that decodes: it does as the whole one, and its work is bounded."""

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from pilotlight.common.errors import BadCheckpoint, TextFailed
from pilotlight.text.decoding import MAX_DECODED_CHARS, TokenDecoder, decoder_json
from pilotlight.text.testing import CORPUS, byte_fallback_json, byte_level_json


def changed(**fields: Any) -> Tokenizer:
    return Tokenizer.from_str(json.dumps({**json.loads(byte_level_json()), **fields}))


@pytest.mark.parametrize("skip", [True, False])
def test_decodes_as_the_whole_tokenizer(tokenizer, skip):
    decoder = TokenDecoder.of(
        decoder_json(tokenizer.raw), tokenizer.eos_token_ids, tokenizer.added_tokens
    )
    rng = random.Random(1)
    ids = range(tokenizer.vocab_size + 3)
    samples = [rng.choices(ids, k=rng.randrange(40)) for _ in range(500)]
    samples += [tokenizer.encode(text, add_special_tokens=True) for text in CORPUS]
    for sample in samples:
        assert decoder.decode(sample, skip_special_tokens=skip) == tokenizer.decode(
            sample, skip_special_tokens=skip
        )
    assert decoder.vocab_size == tokenizer.vocab_size
    assert decoder.added_tokens == tokenizer.added_tokens
    assert decoder.eos_token_ids == tokenizer.eos_token_ids
    for token_id in ids:
        assert decoder.is_byte(token_id) == tokenizer.is_byte(token_id)
        assert decoder.is_visible(token_id) == tokenizer.is_visible(token_id)


def test_it_can_only_decode(tokenizer):
    described = json.loads(decoder_json(tokenizer.raw))
    assert (
        described["normalizer"] is described["pre_tokenizer"] is described["post_processor"] is None
    )
    assert described["model"]["type"] == "WordLevel"


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * MAX_DECODED_CHARS}
REGEX = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}


@pytest.mark.parametrize(
    "decoder",
    [
        REPLACE,
        REGEX,
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, REGEX]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 17},
        {"type": "Sequence", "decoders": [{**REPLACE, "content": "a" * 20}] * 8},
    ],
)
def test_decoders_without_a_bound_are_refused(decoder):
    with pytest.raises(BadCheckpoint, match="decoder"):
        decoder_json(changed(decoder=decoder))


def test_huge_tokens_are_refused():
    tokenizer = changed()
    tokenizer.add_tokens(["a" * (MAX_DECODED_CHARS + 1)])
    with pytest.raises(BadCheckpoint, match="longest token"):
        decoder_json(tokenizer)


def test_what_panics_fails():
    described = json.loads(byte_fallback_json())
    blank = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    # Of a blank alone it takes one more than there is.
    described["decoder"] = {
        "type": "Sequence",
        "decoders": [blank, {"type": "Strip", "content": " ", "start": 1, "stop": 1}],
    }
    decoder = TokenDecoder.of(decoder_json(Tokenizer.from_str(json.dumps(described))), (), {})
    token_id = described["model"]["vocab"]["▁"]
    with pytest.raises(TextFailed):
        decoder.decode([token_id])
    with pytest.raises(TextFailed):
        decoder.token_bytes(token_id)


def test_what_cannot_be_used_is_a_bad_checkpoint():
    with pytest.raises(BadCheckpoint, match="decoder"):
        TokenDecoder.of("{}", (), {})


def test_bytes_that_are_no_text_are_decoded_as_the_library_does():
    described = json.loads(byte_level_json())
    taken = {token["id"] for token in described["added_tokens"]}
    first = max([*taken, *described["model"]["vocab"].values()]) + 1
    for number, text in enumerate(("é", "<|end of Ωtext|>", "€ and Ã©", "plain")):
        described["added_tokens"].append(
            {
                "id": first + number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": number % 2 == 1,
            }
        )
    whole = Tokenizer.from_str(json.dumps(described))
    ours = TokenDecoder(whole, (), {})
    rng = random.Random(20)
    for _ in range(3000):
        ids = [rng.randrange(first + 6) for _ in range(rng.randrange(12))]
        assert ours.decode(ids, skip_special_tokens=False) == whole.decode(
            ids, skip_special_tokens=False
        )
