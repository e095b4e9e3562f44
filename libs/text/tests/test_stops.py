"""Stop strings: the streamed answer equals a search in the whole text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pilotlight.common.errors import BadRequest
from pilotlight.text.stops import MAX_STOP_CHARS, MAX_STOPS, StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


def stream(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        found = matcher.feed(piece)
        shown += found.text
        if found.stop is not None:
            assert matcher.feed("more").text == ""
            return shown, found.stop
    last = matcher.flush()
    return shown + last.text, last.stop


@pytest.mark.slow
@given(st.lists(st.text("abc", max_size=6), max_size=8), STOPS)
@example(["abc"], ["abcd", "bc"])
@example(["abcx"], ["abcd", "bc"])
@example(["abcd"], ["abcd", "bc"])
@example(["abab", "ac"], ["abac"])
def test_pieces_give_what_a_search_in_the_whole_text_gives(pieces, stops):
    assert stream(pieces, stops) == naive("".join(pieces), stops)


@given(st.text("ab", max_size=20), STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(text, stops):
    matcher = StopMatcher(stops)
    shown = ""
    for end, char in enumerate(text, 1):
        found = matcher.feed(char)
        shown += found.text
        if found.stop is not None:
            return
        held = text[len(shown) : end]
        assert held == "" or any(stop.startswith(held) or stop in held for stop in stops)


def test_without_stop_strings_everything_is_shown_at_once():
    matcher = StopMatcher([])
    assert matcher.feed("anything").text == "anything"
    assert matcher.flush().text == ""


def test_what_may_become_a_stop_string_is_held_back():
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.feed("hi\n").text == "hi"
    assert matcher.feed("\nUs").text == ""
    assert matcher.feed("a").text == "\n\nUsa"


@pytest.mark.parametrize(
    "stops", [[""], ["a", ""], ["a"] * (MAX_STOPS + 1), ["a" * (MAX_STOP_CHARS + 1)]]
)
def test_bounds(stops):
    with pytest.raises(BadRequest) as caught:
        StopMatcher(stops)
    assert caught.value.param == "stop"


def test_a_hostile_stop_string_costs_no_more_than_another():
    """One step a character: with the text and the stop strings below, a naive search takes ten
    million.
    """
    stops = ["a" * (MAX_STOP_CHARS - 1 - number) + "b" for number in range(MAX_STOPS)]
    matcher = StopMatcher(stops)
    shown = sum(len(matcher.feed("aaaa").text) for _ in range(1000))
    assert 4000 - MAX_STOP_CHARS <= shown < 4000
