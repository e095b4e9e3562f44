"""Free device memory lent to KV and to builds: the cache divides it, and tells workers.

Level-triggered: a loan is said again until the worker's report shows it, and nothing of it is
written down. A cache that has just been started finds in the reports what is lent; while there is
none, workers keep what they have and get no more.
"""

from dataclasses import dataclass

from pilotlight.cache.books import Books
from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.messages.room import Lend, lend_subject
from pilotlight.policy.cluster import HeldStage, HeldState, WorkerFacts
from pilotlight.policy.ids import WorkerId
from pilotlight.policy.lending import Borrower, LendingRules, Loan, divide, lend_build

REPEAT_S = 1.0
"""Until a loan that no report shows is said again, and until a worker is looked at again of which
nothing new is reported."""
BORROWING = frozenset({HeldState.LOADING, HeldState.READY, HeldState.DRAINING})


@dataclass(frozen=True, slots=True)
class _Told:
    loans: tuple[Loan, ...]
    build_bytes: int
    at_s: float
    since_s: float
    """When they were last others."""


@dataclass(frozen=True, slots=True)
class _Look:
    facts: tuple[tuple[object, ...], ...] | None
    at_s: float


def _seen(held: HeldStage) -> tuple[object, ...]:
    """What of a stage can change loans at once."""
    loan = held.loan
    return (
        held.instance_id,
        held.state,
        held.device_bytes,
        loan.offered_bytes,
        loan.most_bytes,
        loan.wanted_bytes > loan.offered_bytes,
    )


def _seen_build(worker: WorkerFacts) -> tuple[object, ...]:
    """The same of a build on it."""
    return worker.build.wanted_bytes, worker.build.offered_bytes


class Lender:
    """Owns what workers were told of loans; ``Books`` has all that follows from."""

    def __init__(self, books: Books, bus: Bus, clock: Clock, rules: LendingRules) -> None:
        """Has told no worker anything.

        Args:
            books: grants, reports, and how often models are asked for.
            bus: to workers.
            clock: for repetitions.
            rules: figures.
        """
        self._books = books
        self._bus = bus
        self._clock = clock
        self._rules = rules
        self._told: dict[WorkerId, _Told] = {}
        self._looked: dict[WorkerId, _Look] = {}
        self.changes = 0
        """Times that loans of a worker became others."""

    @property
    def lent_bytes(self) -> int:
        """KV beyond grants that stages have, by the last reports."""
        return sum(
            one.loan.lent_bytes
            for view in self._books.roster.workers.values()
            for one in view.facts.held
        )

    @property
    def offered_bytes(self) -> int:
        """What they may have."""
        return sum(loan.num_bytes for told in self._told.values() for loan in told.loans)

    async def hear(self, worker_id: WorkerId) -> None:
        """``follow`` if its report says something new of loans, or the last look is some time ago.

        Raises:
            BusUnavailable: as ``follow``.
        """
        worker, now_s = self._books.worker(worker_id), self._clock.monotonic_s()
        facts = (_seen_build(worker), *map(_seen, worker.held)) if worker is not None else None
        last = self._looked.get(worker_id)
        if last is not None and last.facts == facts and now_s - last.at_s < REPEAT_S:
            return
        self._looked[worker_id] = _Look(facts, now_s)
        if facts is None:
            del self._looked[worker_id]
        await self.follow(worker_id)

    async def follow(self, worker_id: WorkerId) -> None:
        """Tell a worker its loans if they are not what it says they are.

        Raises:
            BusUnavailable: it cannot be told now; the next report has it told again.
        """
        worker = self._books.worker(worker_id)
        if worker is None:
            self._told.pop(worker_id, None)
            return
        now_s = self._clock.monotonic_s()
        told = self._told.get(worker_id)
        settled_s = now_s - told.since_s if told is not None else float("inf")
        loans, build_bytes = self._loans(worker, settled_s)
        shown = {one.instance_id: one.loan.offered_bytes for one in worker.held}
        agrees = (
            worker.build.offered_bytes == build_bytes
            # A report may be older than what was told last: a start waits for this.
            and (told is None or told.build_bytes == build_bytes)
            and all(shown.get(loan.instance_id, 0) == loan.num_bytes for loan in loans)
            and not (
                {one for one, num_bytes in shown.items() if num_bytes}
                - {loan.instance_id for loan in loans}
            )
        )
        moved = told is None or told.loans != loans
        changed = told is None or moved or told.build_bytes != build_bytes
        if agrees or (told is not None and not changed and now_s - told.at_s < REPEAT_S):
            return
        since_s = now_s if told is None or moved else told.since_s
        self._told[worker_id] = _Told(loans, build_bytes, now_s, since_s)
        self.changes += moved
        message = Lend(worker_id=worker_id, loans=loans, build_bytes=build_bytes)
        await self._bus.publish(lend_subject(worker_id), message)

    def _loans(self, worker: WorkerFacts, settled_s: float) -> tuple[tuple[Loan, ...], int]:
        """What its stages may have, and what a build may have of that."""
        memory_bytes, wanted_bytes = worker.device.memory_bytes, worker.build.wanted_bytes
        borrowers = [
            self._borrower(one)
            for one in worker.held
            if one.state in BORROWING and one.loan.most_bytes
        ]
        if not borrowers and not wanted_bytes:
            return (), 0
        granted_bytes = memory_bytes - self._books.device_free_bytes(worker)
        build_bytes = 0
        if wanted_bytes and worker.node_id not in self._books.draining:
            build_bytes = lend_build(memory_bytes, granted_bytes, borrowers, wanted_bytes)
        return (
            divide(memory_bytes, granted_bytes, borrowers, settled_s, self._rules),
            build_bytes,
        )

    def _borrower(self, held: HeldStage) -> Borrower:
        arrivals, now_s = self._books.arrivals.recent(), self._clock.monotonic_s()
        return Borrower(
            instance_id=held.instance_id,
            offered_bytes=held.loan.offered_bytes,
            wanted_bytes=held.loan.wanted_bytes,
            most_bytes=held.loan.most_bytes,
            weight=arrivals.rate_per_s(held.model, now_s),
        )
