"""Tokenizers: special tokens exactly once, whatever the checkpoint's files say about them."""

import json

import pytest

from pilotlight.checkpoint.generation import GenerationDefaults
from pilotlight.common.errors import BadCheckpoint, BadRequest
from pilotlight.text.bundle import TextBundle
from pilotlight.text.testing import CORPUS, byte_level_json
from pilotlight.text.tokenizer import TextTokenizer

BOS = 0
WITHOUT_BOS = json.dumps({**json.loads(byte_level_json()), "post_processor": None})


def made(tokenizer_json=None, **fields) -> TextTokenizer:
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    return TextTokenizer(
        TextBundle(
            tokenizer_json=tokenizer_json or byte_level_json(), special_tokens=specials, **fields
        )
    )


@pytest.mark.parametrize("text", CORPUS)
def test_round_trip(byte_level, text):
    assert byte_level.decode(byte_level.encode(text, add_special_tokens=True)) == text


@pytest.mark.parametrize("text", CORPUS)
def test_the_bytes_of_tokens_are_the_texts(tokenizer, text):
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode().removeprefix(
        " "
    ) == tokenizer.decode(token_ids)


def test_bytes_of_odd_tokens(tokenizer):
    added = tokenizer.added_tokens
    assert tokenizer.token_bytes(added["<|im_end|>"]) == b"<|im_end|>"
    assert tokenizer.token_bytes(added["<tool>"]) == b"<tool>"
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize(
    ("tokenizer_json", "add_bos_token", "begins_with_bos"),
    [
        (None, None, True),
        (None, True, True),
        (None, False, False),
        (WITHOUT_BOS, None, False),
        (WITHOUT_BOS, True, True),
        (WITHOUT_BOS, False, False),
    ],
)
def test_a_plain_prompt_begins_as_the_checkpoint_says(
    tokenizer_json, add_bos_token, begins_with_bos
):
    tokenizer = made(tokenizer_json, add_bos_token=add_bos_token)
    token_ids = tokenizer.encode("hello", add_special_tokens=True)
    assert token_ids.count(BOS) == begins_with_bos
    assert tokenizer.encode("hello", add_special_tokens=False) == token_ids[begins_with_bos:]


def test_a_chat_prompt_gets_no_second_bos():
    token_ids = made(add_bos_token=True).encode(
        "<s><|im_start|>hello<|im_end|>", add_special_tokens=False
    )
    assert token_ids.count(BOS) == 1


def test_end_tokens_of_generation_configuration_and_tokenizer():
    assert made().eos_token_ids == (1,)
    assert made(generation=GenerationDefaults(eos_token_ids=(3, 1))).eos_token_ids == (3, 1)
    assert made(generation=GenerationDefaults(eos_token_ids=(3,))).eos_token_ids == (3, 1)


def test_special_and_unknown_ids_are_invisible(byte_level):
    assert byte_level.vocab_size == 401
    hello = byte_level.encode("hello", add_special_tokens=True)
    assert [
        byte_level.is_visible(token_id) for token_id in (hello[0], hello[1], 400, 401, 100_000)
    ] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert byte_level.decode([*hello, 100_000]) == "hello"
    assert byte_level.decode(hello, skip_special_tokens=False) == "<s>hello"


def test_byte_tokens_are_told_by_what_they_decode_to(tokenizer, byte_level):
    byte_tokens = [
        token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_byte(token_id)
    ]
    assert len(byte_tokens) in (0, 256)
    assert not any(byte_level.is_byte(token_id) for token_id in range(byte_level.vocab_size))


def test_truncation_and_padding_of_a_training_run_are_switched_off():
    settings = json.loads(byte_level_json())
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    settings["padding"] = {
        "strategy": {"Fixed": 512}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>",
    }  # fmt: skip
    text = CORPUS[0]
    assert made(json.dumps(settings)).encode(text, add_special_tokens=True) == made().encode(
        text, add_special_tokens=True
    )


def test_what_is_no_text_is_refused(byte_level):
    with pytest.raises(BadRequest, match="Unicode"):
        byte_level.encode("\ud800", add_special_tokens=False)
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json"):
        made("{}")
