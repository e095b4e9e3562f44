"""Words that somebody else writes are awaited, in memory alone and not for ever."""

import ctypes
import threading
from ctypes import c_int32
from itertools import count

import pytest

from pilotlight.native.arrivals import await_words
from pilotlight.native.building import compiler
from pilotlight.native.library import unavailable

pytestmark = pytest.mark.skipif(
    compiler() is None and bool(unavailable()), reason="there is no C++ compiler, and no library"
)
ABSENT, LONG_S, SHORT_S = -7, 60.0, 0.001


def awaited(words: ctypes.Array[c_int32], patience_s: float) -> bool:
    return await_words(ctypes.addressof(words), len(words), ABSENT, patience_s)


@pytest.mark.parametrize("values", [(), (0,), (5, -1, 2**31 - 1)])
def test_what_is_there_is_not_waited_for(values: tuple[int, ...]) -> None:
    assert awaited((c_int32 * len(values))(*values), SHORT_S)
    assert awaited((c_int32 * len(values))(*values), 0.0)


@pytest.mark.parametrize("place", range(3))
def test_one_that_never_comes_is_given_up(place: int) -> None:
    words = (c_int32 * 3)(1, 1, 1)
    words[place] = ABSENT
    assert not awaited(words, SHORT_S)
    assert list(words).count(ABSENT) == 1, "nothing is written"


def test_it_returns_when_the_last_is_written_and_gives_the_lock_away_meanwhile() -> None:
    words = (c_int32 * 3)(*3 * (ABSENT,))
    looked = threading.Event()
    found: list[bool] = []

    def wait() -> None:
        looked.set()
        found.append(awaited(words, LONG_S))

    thread = threading.Thread(target=wait)
    thread.start()
    assert looked.wait(LONG_S)
    for place, value in zip((2, 0, 1), count(3), strict=False):
        assert not found
        words[place] = value
    thread.join(LONG_S)
    assert found == [True]
