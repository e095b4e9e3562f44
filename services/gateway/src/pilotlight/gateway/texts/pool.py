"""The gateway's text helpers: which of them works on which job, and which jobs wait."""

import asyncio
import random
from dataclasses import dataclass
from functools import partial

import structlog

from pilotlight.common.errors import QueueFull
from pilotlight.common.waiting import Backoff, cancel_all, pause
from pilotlight.gateway.pacing import Pacing
from pilotlight.gateway.texts.bundles import Bundles
from pilotlight.gateway.texts.frames import Describe, Give, Hello, Job, Make, Reply, encoded
from pilotlight.gateway.texts.holders import Holders, Running, Spawner, helper_for, helper_without
from pilotlight.gateway.texts.process import HelperLost, HelperProcess, Launcher
from pilotlight.gateway.texts.strikes import Strikes
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
LOOK_S = 1.0
"""Between looks at what has waited for too long."""
TOGETHER = 16
"""Jobs that a helper is handed at once, at most: for the way there and back, which takes twice what
a short chat does."""
TOGETHER_BYTES = 4 * 1024
"""Of them. Larger ones are a millisecond's work and more, which another helper may do meanwhile."""
TOGETHER_IN_LINE = 8 * TOGETHER
"""So many at most, and of so much more, where twice ``TOGETHER`` wait for each helper: an answer is
taken once in a turn of the loop, and where a turn takes a third of a second, three times 16 prompts
are 150 a second, whatever the helpers can do.
"""
HOLD_S = 0.002
"""For so long since it began, a helper that works for the same client and model is waited for, and
no other is woken."""


_STOPPING = HelperLost("the gateway stops", blamed=False)


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


class HelperPool:
    """Keeps helpers running and gives them jobs; a component."""

    def __init__(
        self,
        launcher: Launcher,
        spawner: Spawner,
        bounds: PoolBounds,
        bundles: Bundles,
        strikes: Strikes,
    ) -> None:
        self._launcher = launcher
        self._spawner = spawner
        self._bounds = bounds
        self._idle: list[HelperProcess] = []
        self._running: dict[int, Running] = {}
        """By the number of the first job."""
        self._ending: set[asyncio.Task[None]] = set()
        """Of helpers that were lost, and their jobs."""
        self._waiting = WaitingJobs()
        self._holders = Holders(bundles, strikes, spawner, self._load)
        self._pacing: Pacing | None = None
        """Since jobs wait; None: none do."""
        self._limits = LaneBounds(jobs=MAX_WAITING, bytes=bounds.max_waiting_bytes)
        self._numbers = 0
        self._now_turn = 0
        self._lost = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._soon: asyncio.Handle | None = None
        """Has what waits begin, when all that came in this turn of the loop is there."""
        self._looking: asyncio.TimerHandle | None = None
        self._holding: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Begin to start helpers; jobs wait for the first."""
        if self._keeping is None:
            self._keeping = self._spawner.spawn("keep text helpers", self._keep())

    async def stop(self) -> None:
        """End every helper, whatever it does."""
        if self._keeping is not None:
            await cancel_all((self._keeping,))
            self._keeping = None
        for handle in (self._soon, self._looking, self._holding):
            if handle is not None:
                handle.cancel()
        self._soon = self._looking = self._holding = None
        for job in list(self._waiting):
            self._waiting.pop(job.lane.number)
            job.lose(_STOPPING)
        await self._holders.stop()
        running = list(self._running.values())
        for each in running:
            each.late.cancel()
        await cancel_all(self._ending)
        await asyncio.gather(*(each.helper.kill() for each in running))
        self._running.clear()
        for job in (job for each in running for job in each.jobs):
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
        waiting = self._made(job, owner, model, give)
        self._queue(waiting)
        if waiting.single:
            self._begin_soon()
        elif self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._begin_soon)
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self._waiting.pop(waiting.lane.number)
            raise

    def wait_s(self, owner: str) -> float:
        """How long one more job of an owner's would wait, in seconds, as far as the pace is known
        at which jobs have been done of late.
        """
        if self._pacing is None:
            return 0.0
        pace = self._pacing.pace(asyncio.get_running_loop().time())
        return pace.wait_s(self._waiting.ahead_of_new(owner)) or 0.0

    def _begin_soon(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._dispatch()
        if self._waiting and self._looking is None:
            loop = asyncio.get_running_loop()
            self._looking = loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Jobs have waited for as long as they may; those that run have a time of their own."""
        self._looking = None
        loop = asyncio.get_running_loop()
        for job in list(self._waiting):
            if loop.time() - job.came_s >= MAX_WAIT_S:
                self._waiting.pop(job.lane.number)
                job.lose(
                    QueueFull(
                        f"no process could prepare this prompt within {MAX_WAIT_S:g} s",
                        retry_after_s=RETRY_AFTER_S,
                    )
                )
        # A bundle that could not be loaded is tried again, though nothing else happens.
        self._begin_soon()

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
            came_s=(loop := asyncio.get_running_loop()).time(),
            answer=loop.create_future(),
        )

    def _queue(self, job: TextJob) -> None:
        # Where nothing waits, any may.
        if self._waiting and not admit_job(
            self._waiting.load(job.lane.owner), self._limits, self._waiting.size_bytes(job)
        ):
            raise QueueFull(
                f"{len(self._waiting)} prompts with {self._waiting.bytes} bytes wait to be prepared; no more are taken now",
                retry_after_s=RETRY_AFTER_S,
            )
        if not self._waiting:
            self._pacing = Pacing(job.came_s)
        self._waiting.add(job)

    def _dispatch(self) -> None:
        if not self._waiting:
            return
        self._let_go()
        while self._idle and self._waiting and len(self._running) < self._bounds.helpers:
            heads = self._waiting.heads()
            if self._running:
                heads = [head for head in heads if not self._held_back(head)]
                running = self._running.values()
                heads = self._holders.going(heads, self._idle, running, self._next)
            chosen = self._next(heads)
            if chosen is None:
                return
            helper = helper_for(chosen.model, self._idle)
            # One that lacks the bundle would ask for it with each of them.
            most = self._together() if chosen.model in helper.held else 1
            jobs = self._waiting.alike(chosen, most, TOGETHER_BYTES * max(1, most // TOGETHER))
            for job in jobs:
                self._waiting.pop(job.lane.number)
            self._begin(jobs, helper)
            self._paced(len(jobs))

    def _together(self) -> int:
        """How many go to one helper, at most."""
        for_each = len(self._waiting) // self._bounds.helpers
        return TOGETHER if for_each < 2 * TOGETHER else min(for_each, TOGETHER_IN_LINE)

    def _paced(self, turns: int) -> None:
        """So many have had their turn."""
        if not self._waiting:
            self._pacing = None
        elif self._pacing is not None:
            self._pacing.turn(asyncio.get_running_loop().time(), turns)

    async def _load(self, give: Give) -> Reply | None:
        """Give a bundle to an idle helper, with no client's job behind it. None: none may have it
        now.

        Raises:
            HelperLost: the helper ended over it.
        """
        job = self._made(Hello(), "", give.digest, give)
        helper = helper_without(give.digest, self._idle)
        if helper is None or self._next([job.lane]) is None:
            return None
        self._begin([job], helper)
        return await job.answer

    def _held_back(self, head: LaneJob) -> bool:
        """Whether it goes with those that come next, to a helper that will be free soon."""
        if head.long:
            return False
        loop = asyncio.get_running_loop()
        for each in self._running.values():
            lane = each.jobs[0].lane
            if (
                lane.owner == head.owner
                and lane.model == head.model
                and not each.jobs[0].single
                and loop.time() - each.began_s < HOLD_S
            ):
                break
        else:
            return False
        if self._waiting.fills(self._waiting.alike(head, TOGETHER, TOGETHER_BYTES), TOGETHER):
            return False
        if self._holding is None:
            self._holding = loop.call_later(HOLD_S, self._hold_no_more)
        return True

    def _hold_no_more(self) -> None:
        self._holding = None
        self._dispatch()

    def _let_go(self) -> None:
        """Of idle helpers that have ended."""
        for helper in [*self._idle]:
            if not helper.line.gone:
                continue
            self._idle.remove(helper)
            self._spawner.spawn("bury a text helper", helper.kill())
            self._lost.set()

    def _next(self, waiting: list[LaneJob]) -> LaneJob | None:
        running = [each.jobs[0].lane for each in self._running.values()]
        return next_job(waiting, running, self._bounds.helpers)

    def _begin(self, jobs: list[TextJob], helper: HelperProcess) -> None:
        job = jobs[0]
        self._now_turn = max(self._now_turn, jobs[-1].lane.turn)
        self._idle.remove(helper)
        deadline_s = WALL_FACTOR * (job.give_cpu_s + job.cpu_s)
        loop = asyncio.get_running_loop()
        late = loop.call_later(deadline_s, self._end, jobs, helper, deadline_s)
        self._running[job.lane.number] = Running(jobs, helper, late, loop.time())
        held = job.lane.model in helper.held
        frames = [frame for each in jobs for frame in each.frames(held=held)]
        helper.begin(frames, partial(self._heard, jobs, helper), len(jobs))

    def _heard(
        self, jobs: list[TextJob], helper: HelperProcess, what: list[Reply] | Exception
    ) -> None:
        if isinstance(what, Exception):
            self._end(jobs, helper)
            return
        self._running.pop(jobs[0].lane.number).late.cancel()
        self._idle.append(helper)
        for job, reply in zip(jobs, what, strict=True):
            self._holders.note(helper, job, reply)
            if not job.answer.done():
                job.answer.set_result(reply)
        self._dispatch()

    def _end(self, jobs: list[TextJob], helper: HelperProcess, late_s: float | None = None) -> None:
        """A helper has ended, or has not answered within ``late_s``: it is of no use."""
        helper.hear_no_more()
        self._running[jobs[0].lane.number].late.cancel()
        task = self._spawner.spawn("bury a text helper", self._bury(jobs, helper, late_s))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _bury(self, jobs: list[TextJob], helper: HelperProcess, late_s: float | None) -> None:
        job, again = jobs[0], False
        try:
            lost = await (helper.lost() if late_s is None else helper.late(late_s))
            log.warning(
                "a text helper was lost",
                action="text_helper_lost",
                job=job.kind,
                jobs=len(jobs),
                job_bytes=sum(len(each.data) for each in jobs),
                owner=job.lane.owner,
                text_digest=job.lane.model,
                reason=lost.reason,
                blamed=lost.blamed,
            )
            lost.long = job.lane.long
            self._lost.set()
            if len(jobs) > 1:
                # Any of them may have done it, and none has been answered: each has its own turn.
                again = True
                for each in jobs:
                    each.alone = True
                    if not each.answer.done():
                        self._waiting.add(each)
            else:
                job.lose(lost)
        finally:
            if not again:
                for each in jobs:
                    each.lose(_STOPPING)
            self._running.pop(job.lane.number, None)
            self._begin_soon()

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
