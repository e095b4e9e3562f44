"""How many go to a worker that has refused one."""

import heapq
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.full import FORGET_S, GROWTH, freed, refused, sent, taken

RETRY_AFTER_S = 1.0


def test_one_goes_for_each_that_ends() -> None:
    full = refused(None, 10.0, RETRY_AFTER_S)
    assert not full.takes(10.5)
    full = freed(full)
    assert full.takes(10.5)
    full = taken(sent(full, 10.5, RETRY_AFTER_S))
    assert (full.places, full.takes(10.5)) == (0, False), "what was taken says nothing of others"


def test_one_goes_to_see_and_then_more_each_time() -> None:
    full = refused(None, 10.0, RETRY_AFTER_S)
    assert full.takes(11.0)
    full = sent(full, 11.0, RETRY_AFTER_S)
    assert not full.takes(11.0), "one at a time"
    assert full.takes(12.0), "its answer may be lost"
    full = taken(full)
    assert full.places == GROWTH
    for _ in range(GROWTH):
        full = sent(full, 11.1, RETRY_AFTER_S)
    assert not full.takes(11.1)
    for _ in range(GROWTH):
        full = taken(full)
    assert full.places == GROWTH**2
    full = refused(full, 11.2, RETRY_AFTER_S)
    assert not full.takes(11.2), "they were hoped for"
    full = refused(freed(full), 11.3, RETRY_AFTER_S)
    full = taken(sent(freed(full), 11.3, RETRY_AFTER_S))
    assert full.places == 1, "one was heard of, and it looks no more"


def test_nothing_is_known_after_a_while() -> None:
    full = refused(None, 10.0, RETRY_AFTER_S)
    assert not full.forgotten(10.0 + FORGET_S - 0.1)
    assert full.forgotten(10.0 + FORGET_S)


@given(
    st.lists(st.sampled_from(("refused", "sent", "taken", "freed")), max_size=60),
    st.floats(0.0, 3.0),
)
def test_places_are_never_less_than_none(moves: list[str], step_s: float) -> None:
    now_s, full = 0.0, refused(None, 0.0, RETRY_AFTER_S)
    for move in moves:
        now_s += step_s
        match move:
            case "refused":
                full = refused(full, now_s, RETRY_AFTER_S)
            case "sent" if full.takes(now_s):
                full = sent(full, now_s, RETRY_AFTER_S)
            case "taken":
                full = taken(full)
            case "freed":
                full = freed(full)
            case _:
                pass
        assert full.places >= 0
        assert full.takes(full.look_at_s), "nobody waits for ever"


def served(senders: int, places: int, takes_s: float, seconds: float, seed: int) -> Counter[str]:
    """A worker with so many places, and senders that always have more to send; an answer takes each
    a millisecond.
    """
    dice, now_s = random.Random(seed), 0.0
    known = [refused(None, 0.0, RETRY_AFTER_S) for _ in range(senders)]
    events = [(RETRY_AFTER_S, one, "look", one) for one in range(senders)]
    running, number, counts = 0, senders, Counter[str]()

    def later(in_s: float, what: str, who: int) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (now_s + in_s, number, what, who))

    while events and events[0][0] <= seconds:
        now_s, _, what, who = heapq.heappop(events)
        match what:
            case "arrives" if running < places:
                running += 1
                counts["taken"] += 1
                known[who] = taken(known[who])
                later(takes_s * dice.uniform(0.5, 1.5), "ends", who)
            case "arrives":
                counts["refused"] += 1
                known[who] = refused(known[who], now_s, RETRY_AFTER_S)
                later(RETRY_AFTER_S, "look", who)
            case "ends":
                running -= 1
                known[who] = freed(known[who])
            case _:
                pass
        while known[who].takes(now_s):
            known[who] = sent(known[who], now_s, RETRY_AFTER_S)
            later(0.001, "arrives", who)
    return counts


@pytest.mark.parametrize("senders", [1, 4])
def test_a_worker_with_a_line_before_it_is_kept_full(senders: int) -> None:
    """Places times seconds over a request's time are as many as it could take."""
    counts = served(senders, places=256, takes_s=0.35, seconds=20.0, seed=3)
    could = 256 * 20.0 / 0.35
    assert counts["taken"] > 0.9 * could
    assert counts["refused"] < 0.1 * counts["taken"]


def test_a_place_that_another_senders_request_leaves_is_found() -> None:
    """All ends at once, and nobody else sends: it is full again within a few looks."""
    counts = served(1, places=64, takes_s=30.0, seconds=4.0, seed=3)
    assert counts["taken"] == 64
    assert counts["refused"] < 2 * 64, "once as many again, when there is no more"
