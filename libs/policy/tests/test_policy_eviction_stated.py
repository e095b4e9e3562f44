"""What a scheduler expects to go: by what copies state, without a memory."""

from dataclasses import replace

import pytest
from evicted_copies import copy

from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.choice import POLICIES, expected_policy

NOW_S = 100.0


def stated(
    name: str, *, rate: float, penalty_s: float = 1.0, used_s: float = NOW_S, size: int = 1
) -> EvictionCandidate:
    made = copy(name, size, penalty_s)
    return replace(made, arrivals_per_s=rate, last_used_s=used_s)


@pytest.mark.parametrize(
    "copies",
    [
        (stated("a", rate=0.1), stated("b", rate=0.2)),
        (stated("a", rate=0.1, penalty_s=1.0), stated("b", rate=0.1, penalty_s=2.0)),
        (stated("a", rate=0.1, size=3), stated("b", rate=0.1, size=2)),
        (stated("a", rate=9.0, used_s=NOW_S - 50), stated("b", rate=1.0, used_s=NOW_S - 2)),
        (stated("a", rate=0.0, used_s=1.0), stated("b", rate=0.0, used_s=2.0)),
    ],
    ids=["asked less", "cheaper", "larger", "idle for longer than its rate says", "used before"],
)
def test_the_least_important_goes_first(copies: tuple[EvictionCandidate, ...]) -> None:
    policy = expected_policy("iam")
    assert policy.ordered(copies[::-1], NOW_S) == policy.ordered(copies, NOW_S)
    assert [one.subject for one in policy.ordered(copies, NOW_S)] == ["a", "b"]


@pytest.mark.parametrize("name", POLICIES)
def test_who_asks_again_gets_the_same_answer(name: str) -> None:
    copies = [stated(str(n), rate=n % 7 / 10, used_s=NOW_S - n % 5) for n in range(30)]
    asked_before = expected_policy(name)
    asked_before.ordered(copies[:10], NOW_S - 50)
    assert asked_before.ordered(copies, NOW_S) == expected_policy(name).ordered(copies, NOW_S)


def test_lru_is_expected_of_a_cache_that_evicts_by_it() -> None:
    dear = stated("dear", rate=0.5, penalty_s=90.0, used_s=NOW_S - 2)
    cheap = stated("cheap", rate=0.5, used_s=NOW_S - 1)
    assert expected_policy("lru").ordered([cheap, dear], NOW_S)[0] == dear
    assert expected_policy("gdsf").ordered([cheap, dear], NOW_S)[0] == cheap
