"""Incremental detokenization: in any pieces, the same text, never half a character."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotlight.text.detokenize import AT_ONCE_TOKENS, KEPT_TOKENS, WINDOW_TOKENS, Detokenizer
from pilotlight.text.testing import CORPUS

TEXT = st.text(max_size=40) | st.lists(
    st.sampled_from([*CORPUS, "é", "👩‍👩‍👧", " ", "你好", "\n", "a"]), max_size=8
).map("".join)
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(tokenizer, token_ids) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed([token_id]) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", CORPUS)
def test_a_text_comes_back_in_pieces(tokenizer, text):
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    # What is whole is not held back: only a run of byte-fallback tokens makes the output lag.
    assert (
        sum(map(bool, pieces)) > sum(not tokenizer.is_byte(token_id) for token_id in token_ids) / 8
    )


def test_a_character_of_several_tokens_comes_with_its_last_one(byte_level):
    token_ids = byte_level.encode("a🦀b", add_special_tokens=False)
    assert len(token_ids) > 3
    pieces = stream(byte_level, token_ids)
    assert [piece for piece in pieces if piece] == ["a", "🦀", "b"]
    assert pieces[-2] == "b"


def test_an_unfinished_character_comes_out_at_the_end_as_decode_shows_it(byte_level):
    token_ids = byte_level.encode("a🦀", add_special_tokens=False)[:-1]
    assert stream(byte_level, token_ids)[-1] == byte_level.decode(token_ids)[1:] != ""


@pytest.mark.slow
@settings(relaxed, max_examples=400)
@given(st.data())
def test_any_ids_in_any_pieces_give_what_decode_gives(tokenizer, data):
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=120))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=5)))
    detokenizer = Detokenizer(tokenizer)
    pieces = [
        detokenizer.feed(token_ids[a:b])
        for a, b in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)
    ]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(token_ids)


@pytest.mark.slow
@settings(relaxed, max_examples=400)
@given(st.data())
def test_bytes_and_spaces_in_any_order_give_what_decode_gives(tokenizer, data):
    """The hard ids alone: single bytes, spaces, special tokens."""
    hard = [i for i in range(tokenizer.vocab_size) if len(tokenizer.decode([i]).strip()) <= 1]
    token_ids = data.draw(st.lists(st.sampled_from(hard), max_size=120))
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.slow
@settings(relaxed, max_examples=400)
@given(TEXT)
def test_any_text_comes_in_whole_characters(tokenizer, text):
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    whole = tokenizer.decode(token_ids)
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == whole
    if "\N{REPLACEMENT CHARACTER}" not in whole:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_the_window_stays_short(tokenizer):
    """Also under endless invalid bytes, which never end in a whole character."""

    class Counting:
        longest = 0
        spelled_tokens = 0

        def decode(self, token_ids, **options):
            self.longest = max(self.longest, len(token_ids))
            return tokenizer.decode(token_ids, **options)

        def spelled(self, token_ids):
            self.spelled_tokens += len(token_ids)
            return tokenizer.spelled(token_ids)

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    invalid = next(
        i
        for i in range(tokenizer.vocab_size)
        if tokenizer.decode([i]) == "\N{REPLACEMENT CHARACTER}"
    )
    word = tokenizer.encode("fox", add_special_tokens=False)[-1]
    counting = Counting()
    detokenizer = Detokenizer(counting)
    for token_ids in ([word] * 200, [invalid, word] * 100, [invalid] * 10, [word] * 100):
        detokenizer.feed(token_ids)
    if not tokenizer.is_byte(invalid):
        detokenizer.feed([invalid] * 500)
    if tokenizer.spells:
        assert (counting.spelled_tokens, counting.longest) == (1010, 0)
        assert len(detokenizer._unfinished) < 4
        return
    more = AT_ONCE_TOKENS if tokenizer.byte_level else 11
    assert KEPT_TOKENS < counting.longest <= WINDOW_TOKENS + more
