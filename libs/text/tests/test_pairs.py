"""Texts and pairs for models that read: what a tokenizer puts around them, and how they are cut."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pilotlight.common.errors import BadRequest
from pilotlight.text.bundle import TextBundle
from pilotlight.text.pairs import Frame, encode_text
from pilotlight.text.tokenizer import TextTokenizer

WORDS = ("[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d")
CLS, SEP, A, B, C, D = 1, 2, 3, 4, 5, 6


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    """As BERT's, in a checkpoint whose generation would begin with nothing."""
    raw = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    bundle = TextBundle(
        tokenizer_json=json.dumps(json.loads(raw.to_str())),
        chat_template=None,
        special_tokens={},
        add_bos_token=False,
    )
    return TextTokenizer(bundle)


def test_special_tokens_stand_around_texts(tokenizer):
    assert encode_text(tokenizer, "a b", None, None) == ([CLS, A, B, SEP], None)
    assert encode_text(tokenizer, "a", "b c", None) == ([CLS, A, SEP, B, C, SEP], 3)


@pytest.mark.parametrize(
    ("second", "most", "expected"),
    [
        (None, 5, ([CLS, A, B, C, SEP], None)),
        (None, 4, ([CLS, A, B, SEP], None)),
        (None, 3, ([CLS, A, SEP], None)),
        ("d d d", 9, ([CLS, A, B, C, SEP, D, D, D, SEP], 5)),
        ("d d d", 7, ([CLS, A, B, C, SEP, D, SEP], 5)),
    ],
)
def test_a_text_is_cut_at_its_end_and_keeps_its_special_tokens(tokenizer, second, most, expected):
    assert encode_text(tokenizer, "a b c", second, most) == expected


@pytest.mark.parametrize(("second", "most"), [(None, 2), ("d", 6), ("d", 1)])
def test_nothing_is_cut_to_nothing(tokenizer, second, most):
    with pytest.raises(BadRequest, match="nothing would be left"):
        encode_text(tokenizer, "a b c", second, most)


def test_a_frame_stands_in_the_place_of_special_tokens(tokenizer):
    frame = Frame("d d", "d")
    assert encode_text(tokenizer, "a b c", None, None, frame) == ([D, D, A, B, C, D], None)
    assert encode_text(tokenizer, "a b c", None, 5, frame) == ([D, D, A, B, D], None)


def test_halves_of_characters_are_no_text(tokenizer):
    with pytest.raises(BadRequest):
        encode_text(tokenizer, "a \ud800", None, None)
