"""The gateway's text helpers: which of them works on which job, and which jobs wait."""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
import structlog

from pilotlight.common.errors import QueueFull
from pilotlight.common.waiting import Backoff, cancel_all, pause
from pilotlight.gateway.texts.frames import Describe, Give, Job, Make, Reply, encoded
from pilotlight.gateway.texts.process import HelperLost, HelperProcess, Launcher
from pilotlight.gateway.texts.waiting_jobs import TextJob, WaitingJobs
from pilotlight.policy.lanes import LaneBounds, LaneJob, admit_job, next_job, turn_of

log = structlog.get_logger()

LONG_BYTES = 32 * 1024
"""A longer job is a long one. So is looking at a whole bundle."""
MAX_WAITING = 8192
"""Jobs: one client alone may have as many waiting as a gateway serves requests by default."""
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


class _Running(msgspec.Struct, frozen=True):
    """A job at work."""

    job: TextJob
    helper: HelperProcess
    late: asyncio.TimerHandle
    """Ends it at its deadline."""


class HelperPool:
    """Keeps helpers running and gives them jobs; a component."""

    def __init__(self, launcher: Launcher, spawner: Spawner, bounds: PoolBounds) -> None:
        self._launcher = launcher
        self._spawner = spawner
        self._bounds = bounds
        self._idle: list[HelperProcess] = []
        self._running: dict[int, _Running] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """Of helpers that were lost, and their jobs."""
        self._waiting = WaitingJobs()
        self._limits = LaneBounds(jobs=MAX_WAITING, bytes=bounds.max_waiting_bytes)
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
        for job in list(self._waiting):
            self._waiting.pop(job.lane.number)
            job.lose(_STOPPING)
        running = list(self._running.values())
        for each in running:
            each.late.cancel()
        await cancel_all(self._ending)
        await asyncio.gather(*(each.helper.kill() for each in running))
        self._running.clear()
        for each in running:
            each.job.lose(_STOPPING)
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
        waiting = self._made(job, owner, model, give)
        number = waiting.lane.number
        if self._waiting or not self._begun(waiting):
            self._queue(waiting)
            self._dispatch()
        if number not in self._waiting:
            # It has begun: its helper has a deadline.
            return await waiting.answer
        loop = asyncio.get_running_loop()
        late = loop.call_later(MAX_WAIT_S, self._refuse, waiting)
        try:
            return await waiting.answer
        finally:
            late.cancel()
            self._waiting.pop(number)

    def _refuse(self, waiting: TextJob) -> None:
        """A job has waited for as long as it may; one that runs has a time of its own."""
        if self._waiting.pop(waiting.lane.number) is not None and not waiting.answer.done():
            words = f"no process could prepare this prompt within {MAX_WAIT_S:g} s"
            waiting.answer.set_exception(QueueFull(words, retry_after_s=RETRY_AFTER_S))

    def _made(self, job: Job, owner: str, model: str, give: Give | None) -> TextJob:
        data = encoded(job)
        long = len(data) > LONG_BYTES or isinstance(job, (Make, Describe))
        self._numbers += 1
        return TextJob(
            lane=LaneJob(
                number=self._numbers,
                owner=owner,
                model=model,
                long=long,
                turn=turn_of(owner, self._waiting.latest_of(owner), self._now_turn),
            ),
            kind=type(job).__name__.lower(),
            data=data,
            give=self._waiting.shared(give) if give is not None else None,
            cpu_s=self._bounds.long_cpu_s if long else self._bounds.short_cpu_s,
            give_cpu_s=self._bounds.long_cpu_s if give is not None else 0.0,
        )

    def _queue(self, job: TextJob) -> None:
        load = self._waiting.load(job.lane.owner)
        if not admit_job(load, self._limits, self._waiting.size_bytes(job)):
            raise QueueFull(
                f"{len(self._waiting)} prompts with {self._waiting.bytes} bytes wait to be prepared; no more are taken now",
                retry_after_s=RETRY_AFTER_S,
            )
        self._waiting.add(job)

    def _begun(self, job: TextJob) -> bool:
        """Where nothing waits: whether it could begin at once."""
        self._let_go()
        if not self._idle or self._next([job.lane]) is None:
            return False
        self._begin(job)
        return True

    def _dispatch(self) -> None:
        if not self._waiting:
            return
        self._let_go()
        while self._idle and self._waiting and len(self._running) < self._bounds.helpers:
            chosen = self._next(self._waiting.heads())
            if chosen is None:
                return
            job = self._waiting.pop(chosen.number)
            assert job is not None
            self._begin(job)

    def _let_go(self) -> None:
        """Of idle helpers that have ended."""
        for helper in [*self._idle]:
            if not helper.line.gone:
                continue
            self._idle.remove(helper)
            self._spawner.spawn("bury a text helper", helper.kill())
            self._lost.set()

    def _next(self, waiting: list[LaneJob]) -> LaneJob | None:
        running = [each.job.lane for each in self._running.values()]
        return next_job(waiting, running, self._bounds.helpers)

    def _begin(self, job: TextJob) -> None:
        self._now_turn = max(self._now_turn, job.lane.turn)
        helper = self._idle[-1]
        if job.lane.model not in helper.held:
            holders = (one for one in reversed(self._idle) if job.lane.model in one.held)
            helper = next(holders, helper)
        self._idle.remove(helper)
        deadline_s = WALL_FACTOR * (job.give_cpu_s + job.cpu_s)
        late = asyncio.get_running_loop().call_later(deadline_s, self._end, job, helper, deadline_s)
        self._running[job.lane.number] = _Running(job, helper, late)
        helper.begin(job.frames(), partial(self._heard, job, helper))

    def _heard(self, job: TextJob, helper: HelperProcess, what: Reply | Exception) -> None:
        if isinstance(what, Exception):
            self._end(job, helper)
            return
        self._running.pop(job.lane.number).late.cancel()
        if job.give is not None:
            helper.held.add(job.lane.model)
        self._idle.append(helper)
        if not job.answer.done():
            job.answer.set_result(what)
        self._dispatch()

    def _end(self, job: TextJob, helper: HelperProcess, late_s: float | None = None) -> None:
        """A job's helper has ended, or has not answered within ``late_s``: it is of no use."""
        helper.hear_no_more()
        self._running[job.lane.number].late.cancel()
        task = self._spawner.spawn("bury a text helper", self._bury(job, helper, late_s))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _bury(self, job: TextJob, helper: HelperProcess, late_s: float | None) -> None:
        try:
            lost = await (helper.lost() if late_s is None else helper.late(late_s))
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
        finally:
            job.lose(_STOPPING)
            self._running.pop(job.lane.number, None)
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
