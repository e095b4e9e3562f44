"""The gateway's text helpers: which of them works on which job, and which jobs wait."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from pilotlight.common.errors import QueueFull
from pilotlight.common.waiting import Backoff, cancel_all, pause
from pilotlight.gateway.texts.frames import Describe, Give, Job, Make, Reply, encoded, header
from pilotlight.gateway.texts.process import HelperLost, HelperProcess, Launcher
from pilotlight.policy.ids import Digest
from pilotlight.policy.lanes import LaneJob, next_job, turn_of

log = structlog.get_logger()

LONG_BYTES = 32 * 1024
"""A longer job is a long one. So is looking at a whole bundle."""
MAX_WAITING = 256
MAX_WAIT_S = 30.0
RETRY_AFTER_S = 1.0
WALL_FACTOR = 3.0
"""A job is ended after this multiple of the processor time that it may take: a busy machine is not
its fault."""


_STOPPING = HelperLost("the gateway stops", blamed=False)


class Spawner(Protocol):
    """Owner of what runs in the background (``Background``)."""

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBounds:
    """How much may be done at a time."""

    helpers: int
    """Jobs at a time, at least 2. One helper more is started, so that no job waits while a lost one
    is replaced."""
    short_cpu_s: float
    """Processor time that a short job may take."""
    long_cpu_s: float
    max_waiting_bytes: int
    """Of all jobs that wait, and of the bundles that they bring, each once."""


@dataclass(slots=True, kw_only=True)
class _Job:
    lane: LaneJob
    kind: str
    data: bytes
    give: Give | None
    cpu_s: float
    give_cpu_s: float
    """For loading the bundle."""
    answer: "asyncio.Future[Reply]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def lose(self, lost: HelperLost) -> None:
        """There will be no answer, unless there is one."""
        if not self.answer.done():
            self.answer.set_exception(lost)
            self.answer.exception()  # Looked at: the caller may have left.

    def frames(self) -> list[bytes]:
        frames: list[bytes] = []
        if self.give is not None:
            given = encoded(self.give)
            frames += [header(given, self.give_cpu_s), given]
        return [*frames, header(self.data, self.cpu_s), self.data]


class HelperPool:
    """Keeps helpers running and gives them jobs; a component."""

    def __init__(self, launcher: Launcher, spawner: Spawner, bounds: PoolBounds) -> None:
        self._launcher = launcher
        self._spawner = spawner
        self._bounds = bounds
        self._idle: list[HelperProcess] = []
        self._running: dict[int, tuple[_Job, asyncio.Task[None]]] = {}
        self._waiting: dict[int, _Job] = {}
        self._waiting_bytes = 0
        self._gives: dict[Digest, Give] = {}
        """Bundles that jobs wait with: all that bring the same one share its bytes."""
        self._given: Counter[Digest] = Counter()
        """How many jobs bring it."""
        self._numbers = 0
        self._now_turn = 0
        self._lost = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to start helpers; jobs wait for the first."""
        if self._keeping is None:
            self._keeping = self._spawner.spawn("keep text helpers", self._keep())

    async def stop(self) -> None:
        """End every helper, whatever it does."""
        if self._keeping is not None:
            await cancel_all((self._keeping,))
            self._keeping = None
        await cancel_all([task for _, task in self._running.values()])
        for number in list(self._waiting):
            job = self._forget(number)
            assert job is not None
            job.lose(_STOPPING)
        idle, self._idle = self._idle, []
        for helper in idle:
            await asyncio.to_thread(self._launcher.take_back, helper.leave())

    async def do(self, job: Job, *, owner: str, model: str = "", give: Give | None = None) -> Reply:
        """Have a job done.

        Args:
            job: what to do.
            owner: the client that the job is for: owners take turns.
            model: the digest of the bundle whose code runs; empty for none.
            give: that bundle, where the helper has said that it lacks it.

        Raises:
            QueueFull: too much waits already, or it waited for too long.
            HelperLost: the helper ended before it answered.
        """
        waiting = self._queued(job, owner, model, give)
        number = waiting.lane.number
        self._dispatch()
        try:
            await asyncio.wait((waiting.answer,), timeout=MAX_WAIT_S)
            if number in self._waiting:
                raise QueueFull(
                    f"nobody could prepare this prompt within {MAX_WAIT_S:g} s",
                    retry_after_s=RETRY_AFTER_S,
                )
            return await waiting.answer
        finally:
            self._forget(number)

    def _queued(self, job: Job, owner: str, model: str, give: Give | None) -> _Job:
        data = encoded(job)
        lanes = [other.lane for other in self._waiting.values()]
        long = len(data) > LONG_BYTES or isinstance(job, (Make, Describe))
        lane = LaneJob(
            number=self._numbers,
            owner=owner,
            model=model,
            long=long,
            turn=turn_of(owner, lanes, self._now_turn),
        )
        if give is not None:
            # Read twice, the same bundle may stand twice in memory: one is kept.
            give = self._gives.get(give.digest, give)
        queued = _Job(
            lane=lane,
            kind=type(job).__name__.lower(),
            data=data,
            give=give,
            cpu_s=self._bounds.long_cpu_s if long else self._bounds.short_cpu_s,
            give_cpu_s=self._bounds.long_cpu_s if give is not None else 0.0,
        )
        size_bytes = self._waiting_bytes + len(data)
        if give is not None and give.digest not in self._gives:
            size_bytes += len(give.bundle)
        own = sum(other.owner == owner for other in lanes)
        # A single job is taken whatever its size: bodies and checkpoints have bounds of their own.
        if (
            len(lanes) >= MAX_WAITING
            or own >= MAX_WAITING // 2
            or (lanes and size_bytes > self._bounds.max_waiting_bytes)
        ):
            raise QueueFull(
                f"{len(lanes)} prompts with {self._waiting_bytes} bytes wait to be prepared; no more are taken now",
                retry_after_s=RETRY_AFTER_S,
            )
        self._numbers += 1
        self._waiting[lane.number] = queued
        self._waiting_bytes = size_bytes
        if give is not None:
            self._gives[give.digest] = give
            self._given[give.digest] += 1
        return queued

    def _forget(self, number: int) -> _Job | None:
        job = self._waiting.pop(number, None)
        if job is None:
            return None
        self._waiting_bytes -= len(job.data)
        if job.give is not None:
            self._given[job.give.digest] -= 1
            if not self._given[job.give.digest]:
                del self._given[job.give.digest], self._gives[job.give.digest]
                self._waiting_bytes -= len(job.give.bundle)
        return job

    def _dispatch(self) -> None:
        gone = [helper for helper in self._idle if helper.gone]
        for helper in gone:
            self._idle.remove(helper)
            self._spawner.spawn("bury a text helper", helper.kill())
            self._lost.set()
        while self._idle and self._waiting:
            running = [job.lane for job, _ in self._running.values()]
            chosen = next_job(
                [job.lane for job in self._waiting.values()], running, self._bounds.helpers
            )
            if chosen is None:
                return
            job = self._forget(chosen.number)
            assert job is not None
            self._now_turn = max(self._now_turn, chosen.turn)
            helper = next(
                (one for one in reversed(self._idle) if chosen.model in one.held), self._idle[-1]
            )
            self._idle.remove(helper)
            self._running[chosen.number] = (
                job,
                self._spawner.spawn("text job", self._run(job, helper)),
            )

    async def _run(self, job: _Job, helper: HelperProcess) -> None:
        try:
            reply = await helper.ask(job.frames(), WALL_FACTOR * (job.give_cpu_s + job.cpu_s))
        except HelperLost as lost:
            log.warning(
                "a text helper was lost",
                action="text_helper_lost",
                job=job.kind,
                job_bytes=len(job.data),
                owner=job.lane.owner,
                text_digest=job.lane.model,
                reason=lost.reason,
                blamed=lost.blamed,
            )
            lost.long = job.lane.long
            self._lost.set()
            job.lose(lost)
        else:
            if job.give is not None:
                helper.held.add(job.lane.model)
            self._idle.append(helper)
            if not job.answer.done():
                job.answer.set_result(reply)
        finally:
            job.lose(_STOPPING)
            del self._running[job.lane.number]
            self._dispatch()

    async def _keep(self) -> None:
        """Start helpers, and others in place of those that are lost."""
        backoff, failures, rng = Backoff(), 0, random.Random()
        while True:
            while len(self._idle) + len(self._running) <= self._bounds.helpers:
                try:
                    helper = await HelperProcess.start(self._launcher)
                except HelperLost as lost:
                    log.error(
                        "a text helper could not be started",
                        action="text_helper_failed",
                        reason=lost.reason,
                    )
                    await pause(backoff.delay_s(failures, rng))
                    failures += 1
                    continue
                failures = 0
                self._idle.append(helper)
                self._dispatch()
            self._lost.clear()
            await self._lost.wait()
