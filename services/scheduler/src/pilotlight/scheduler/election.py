"""Leader election.

Any number of schedulers stand by; the one that holds the lease leads, and stops at once when it
loses it.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.errors import DatabaseUnavailable, DeadlineExceeded, NotLeader
from pilotlight.common.service import Background
from pilotlight.common.waiting import Backoff, cancel_all, pause
from pilotlight.policy.ids import Epoch
from pilotlight.scheduler.lease import LEASE_S, RENEW_S, Lease

log = structlog.get_logger()

STAND_BY_S = 0.25
"""Between two looks at a lease that another process holds, at most; the next is not before it
expires, unless that is further away."""
SHORT_TERM_S = LEASE_S
"""A term that ended sooner could not do its work: the next is not tried at once."""
SHORTEST_LOOK_S = 0.01
RETRY_S = 0.2
"""Between two tries to renew while the database does not answer."""

TERM_ENDS_S = 6.0
"""Longer than a term takes to stop answering on its subjects, requests under way included."""

Lead = Callable[[Epoch], Coroutine[Any, Any, None]]


class Election:
    """A component: stands for the lease, and leads while it is held."""

    def __init__(
        self,
        lease: Lease,
        lead: Lead,
        epoch_seen: Callable[[], Epoch],
        clock: Clock,
        background: Background,
    ) -> None:
        self._lease = lease
        self._lead = lead
        self._epoch_seen = epoch_seen
        self._clock = clock
        self._background = background
        self._rng = random.Random()
        self._task: asyncio.Task[None] | None = None
        self._valid_until_s = 0.0
        """By this process's clock, a moment before the database's."""
        self.epoch: Epoch | None = None
        """Of the running term; None while another leads."""
        self.database_error: str | None = None
        """Why the database could not be asked the last time."""

    def check(self, epoch: Epoch) -> None:
        """Before anything is said to others: a process that was stopped for a while may have been
        replaced meanwhile.

        Raises:
            NotLeader: the term is over, or its lease has run out.
        """
        if epoch != self.epoch or self._clock.monotonic_s() >= self._valid_until_s:
            raise NotLeader(f"the lease of epoch {epoch} has run out")

    async def start(self) -> None:
        """Stand from now on."""
        if self._task is None:
            self._task = self._background.spawn("election", self._stand_for_ever())

    async def stop(self) -> None:
        """Lead no more, and give the lease back so that a standby need not wait for it."""
        task, self._task = self._task, None
        if task is None:
            return
        epoch = self.epoch
        await cancel_all((task,), again_s=TERM_ENDS_S)
        if epoch is not None:
            await self._give_back(epoch)

    async def _give_back(self, epoch: Epoch) -> None:
        try:
            await self._lease.give_back(epoch)
        except (DatabaseUnavailable, DeadlineExceeded) as error:
            log.warning(
                "the lease has to expire by itself",
                action="lease_not_given_back",
                error=error.message,
            )

    async def _stand_for_ever(self) -> None:
        backoff = Backoff(first_s=0.1, limit_s=2.0)
        failures, short_terms = 0, 0
        while True:
            asked_s = self._clock.monotonic_s()
            try:
                epoch = await self._lease.take(Epoch(self._epoch_seen() + 1))
            except (DatabaseUnavailable, DeadlineExceeded) as error:
                self._note(error.message)
                await pause(backoff.delay_s(failures, self._rng))
                failures += 1
                continue
            self._note(None)
            failures = 0
            if epoch is None:
                look_s = self._rng.uniform(STAND_BY_S / 2, STAND_BY_S)
                await pause(min(look_s, max(SHORTEST_LOOK_S, self._lease.left_s)))
                continue
            await self._serve_term(epoch, asked_s + LEASE_S)
            if self._clock.monotonic_s() - asked_s >= SHORT_TERM_S:
                short_terms = 0
                continue
            # Another scheduler need not wait for a lease that this process could not use.
            await self._give_back(epoch)
            await pause(backoff.delay_s(short_terms, self._rng))
            short_terms += 1

    async def _serve_term(self, epoch: Epoch, valid_until_s: float) -> None:
        log.info("leading", action="lease_taken", epoch=epoch)
        self.epoch, self._valid_until_s = epoch, valid_until_s
        term = asyncio.create_task(self._lead(epoch), name=f"term {epoch}")
        # A stop of this process may not wait for the term's end; then its outcome is never asked
        # for.
        term.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            await self._renew_while(term, epoch)
        finally:
            self.epoch = None
            await cancel_all((term,), again_s=TERM_ENDS_S)
        error = None if term.cancelled() else term.exception()
        if error is not None and not isinstance(error, NotLeader):
            raise error
        why = error.message if error is not None else "the lease is lost, or could not be renewed"
        log.warning("no longer leading", action="lease_lost", epoch=epoch, reason=why)

    async def _renew_while(self, term: asyncio.Task[None], epoch: Epoch) -> None:
        """Return when the term ended, the lease was lost, or it expired unseen because the database
        does not answer.
        """
        wait_s = RENEW_S
        while True:
            left_s = self._valid_until_s - self._clock.monotonic_s()
            done, _ = await asyncio.wait({term}, timeout=max(0.0, min(wait_s, left_s)))
            asked_s = self._clock.monotonic_s()
            if done or asked_s >= self._valid_until_s:
                return
            try:
                if not await self._lease.renew(epoch):
                    return
            except (DatabaseUnavailable, DeadlineExceeded) as error:
                self._note(error.message)
                wait_s = RETRY_S
                continue
            self._note(None)
            self._valid_until_s = asked_s + LEASE_S
            wait_s = RENEW_S

    def _note(self, error: str | None) -> None:
        if error is not None and self.database_error is None:
            log.warning("the database does not answer", action="database_unavailable", error=error)
        self.database_error = error
