"""Election with a lease that the tests decide over: leading begins, ends and begins anew."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pilotlight.common.clock import ManualClock, SystemClock
from pilotlight.common.errors import DatabaseUnavailable, NotLeader
from pilotlight.common.service import Background
from pilotlight.policy.ids import Epoch
from pilotlight.scheduler.election import Election
from pilotlight.scheduler.lease import LEASE_S

pytestmark = pytest.mark.anyio


class DecidedLease:
    """Answers as the test says."""

    holder = "me"

    def __init__(self) -> None:
        self.down = False
        self.free = True
        self.renewed = asyncio.Event()
        self.given_back: list[Epoch] = []
        self._epoch = 0
        self.left_s = 0.0

    async def take(self, at_least: Epoch) -> Epoch | None:
        self._check()
        if not self.free:
            return None
        self._epoch = max(self._epoch + 1, at_least)
        return Epoch(self._epoch)

    async def renew(self, epoch: Epoch) -> bool:
        self.renewed.set()
        self._check()
        return self.free

    async def give_back(self, epoch: Epoch) -> None:
        self.given_back.append(epoch)

    def _check(self) -> None:
        if self.down:
            raise DatabaseUnavailable


class Leading:
    """What is led, and how often."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []
        self.began = asyncio.Event()
        self.ended = asyncio.Event()
        self.fail = False

    async def lead(self, epoch: Epoch) -> None:
        self.epochs.append(epoch)
        self.ended.clear()
        self.began.set()
        try:
            if self.fail:
                self.fail = False
                raise NotLeader
            await asyncio.Event().wait()
        finally:
            self.began.clear()
            self.ended.set()


async def seen(event: asyncio.Event) -> None:
    async with asyncio.timeout(5):
        await event.wait()


def stand(
    lease: DecidedLease,
    leading: Leading,
    clock: ManualClock | None = None,
    epoch_seen: Callable[[], Epoch] = lambda: Epoch(0),
) -> tuple[Election, Background]:
    background = Background()
    lead: Callable[[Epoch], Awaitable[None]] = leading.lead
    return Election(lease, lead, epoch_seen, clock or SystemClock(), background), background


async def test_the_lease_is_led_under_and_given_back() -> None:
    lease, leading = DecidedLease(), Leading()
    election, _ = stand(lease, leading, epoch_seen=lambda: Epoch(6))
    await election.start()
    await seen(leading.began)
    assert election.epoch == 7
    await election.stop()
    assert leading.ended.is_set()
    assert lease.given_back == [7]
    assert election.epoch is None


async def test_a_lost_lease_ends_the_term_and_another_may_begin() -> None:
    lease, leading = DecidedLease(), Leading()
    election, background = stand(lease, leading)
    await election.start()
    await seen(leading.began)
    lease.free = False
    await seen(leading.ended)
    assert election.epoch is None
    lease.free = True
    await seen(leading.began)
    assert leading.epochs == [1, 2]
    await election.stop()
    assert not background.failed.done()


async def test_a_term_that_ends_by_itself_is_followed_by_another() -> None:
    lease, leading = DecidedLease(), Leading()
    leading.fail = True
    election, background = stand(lease, leading)
    await election.start()
    await seen(leading.ended)
    await seen(leading.began)
    assert leading.epochs == [1, 2]
    assert lease.given_back == [1], "it ended too soon to be of use: another may do better"
    await election.stop()
    assert not background.failed.done()


async def test_a_leader_that_was_stopped_for_too_long_says_nothing_more() -> None:
    """Its lease is asked for by its own clock before anything is said: others may lead by now."""
    lease, leading, clock = DecidedLease(), Leading(), ManualClock()
    election, _ = stand(lease, leading, clock)
    await election.start()
    await seen(leading.began)
    assert election.epoch is not None
    election.check(election.epoch)
    with pytest.raises(NotLeader):
        election.check(Epoch(election.epoch - 1))
    clock.advance(LEASE_S)
    with pytest.raises(NotLeader):
        election.check(election.epoch)
    await election.stop()


async def test_a_database_that_does_not_answer_ends_the_term_when_the_lease_has_run_out() -> None:
    lease, leading, clock = DecidedLease(), Leading(), ManualClock()
    election, _ = stand(lease, leading, clock)
    await election.start()
    await seen(leading.began)
    lease.down = True
    await seen(lease.renewed)
    assert not leading.ended.is_set(), "the lease is still its own"
    assert election.database_error
    clock.advance(LEASE_S)
    await seen(leading.ended)
    lease.down = False
    await seen(leading.began)
    assert election.database_error is None
    await election.stop()
