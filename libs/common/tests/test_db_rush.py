"""Transactions that come alone wait for nobody."""

from pilotlight.common.db.rush import MANY, Rush


def test_there_is_a_rush_while_many_transactions_follow_each_other() -> None:
    rush = Rush(within_s=1.0)
    assert rush.since_last_s(0.0) == float("inf")
    for at in range(MANY):
        assert not rush.is_on(at * 0.125)
        rush.ended(at * 0.125)
    last_s = (MANY - 1) * 0.125
    assert rush.since_last_s(last_s + 0.25) == 0.25
    assert rush.is_on(last_s)
    assert not rush.is_on(1.0)


def test_those_that_come_now_and_then_are_no_rush() -> None:
    rush = Rush(within_s=1.0)
    for at in range(20):
        rush.ended(at * 0.375)
        assert not rush.is_on(at * 0.375 + 0.001)
