"""The workers of a node: spawned, watched, started again when they end, taken over from an earlier
loader.

::

    for each worker    adopt, or spawn  ->  it says hello  ->  it ends  ->  wait a little longer each time  ->  spawn
"""

import asyncio
import os
import random
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.messages.pool import Hello
from pilotlight.common.service import Background
from pilotlight.common.waiting import Backoff, cancel_all, pause
from pilotlight.loader.metrics import LoaderMetrics
from pilotlight.loader.processes import Process, ProcessFile
from pilotlight.loader.reports import Changes
from pilotlight.loader.workers_ahead import WorkersAhead
from pilotlight.policy.ids import WorkerId

log = structlog.get_logger()

STABLE_AFTER_S = 30.0
"""A worker that ran for this long is started again at once."""
TERMINATE_S = 6.0
"""Between SIGTERM and SIGKILL, when the loader stops: within the deadline of a component's stop."""
LOOK_S = 1.0
STOPPED_S = 10.0
"""A worker that a signal or a debugger has stopped for this long is ended. Other services take it
for dead after three seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """How to run one worker."""

    worker_id: WorkerId
    command: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path
    pid_path: Path


@dataclass(slots=True, kw_only=True)
class WorkerSupervisor:
    """Keeps workers running. Their processes outlive it: the next loader adopts them."""

    plans: Sequence[WorkerPlan]
    handover: bool
    """At stop, leave the workers to the next loader."""
    changes: Changes
    metrics: LoaderMetrics
    clock: Clock
    background: Background
    rng: random.Random = field(default_factory=random.Random)
    ahead: WorkersAhead = field(default_factory=WorkersAhead)
    """Workers that have begun already: for the first process of each."""
    terminate_s: float = TERMINATE_S
    stopped_s: float = STOPPED_S
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.1, limit_s=30.0))
    record_backoff: Backoff = field(default_factory=lambda: Backoff(first_s=1.0, limit_s=15.0))
    """Until it is tried again to write down which process a worker is."""
    _connected: dict[WorkerId, int] = field(default_factory=dict[WorkerId, int])
    _dead: set[WorkerId] = field(default_factory=set[WorkerId])
    _processes: dict[WorkerId, Process] = field(default_factory=dict[WorkerId, Process])
    _unrecorded: set[WorkerId] = field(default_factory=set[WorkerId])
    """Workers of which no file says which process they are: the disk is full, or can only be read.
    """
    _tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    async def start(self) -> None:
        """Keep every worker running from now on. They say themselves when they are ready."""
        if not self._tasks:
            for worker_id in self.ahead.names - {plan.worker_id for plan in self.plans}:
                self._give_up(worker_id)
            self._tasks = [
                self.background.spawn(f"keep {plan.worker_id}", self._keep(plan))
                for plan in self.plans
            ]

    async def stop(self) -> None:
        """End the workers in order, or leave them to the next loader."""
        if not self._tasks:
            return
        tasks, self._tasks = self._tasks, []
        await cancel_all(tasks)
        running = [plan for plan in self.plans if plan.worker_id in self._processes]
        # One that the next loader could not find would be there twice.
        ending = [
            plan
            for plan in running
            if not (self.handover and self._record(plan, self._processes[plan.worker_id]))
        ]
        await asyncio.gather(*(self._end(plan) for plan in ending))
        for process in self._processes.values():
            process.release()
        if self.handover:
            log.info(
                "workers left to the next loader",
                action="workers_handed_over",
                workers=len(self._processes),
            )
        self._processes.clear()

    @property
    def dead_workers(self) -> frozenset[WorkerId]:
        """Workers that have not said hello since their process or connection ended, or since this
        loader found no process of theirs.
        """
        return frozenset(self._dead)

    def on_hello(self, hello: Hello) -> None:
        process = self._processes.get(hello.worker_id)
        if process is not None and process.record.pid != hello.pid:
            _end_twin(hello.worker_id, hello.pid)
            return
        self._connected[hello.worker_id] = hello.pid
        self._dead.discard(hello.worker_id)
        self.metrics.workers.set(len(self._connected))
        self.changes.note()

    def on_goodbye(self, hello: Hello) -> None:
        # A worker that connects anew may be here already when its old connection is found closed.
        if self._connected.get(hello.worker_id) == hello.pid:
            del self._connected[hello.worker_id]
        self._note_dead(hello.worker_id)

    async def _keep(self, plan: WorkerPlan) -> None:
        attempt = 0
        while True:
            started_s = self.clock.monotonic_s()
            process = self._adopt(plan)
            if process is None:
                # Whoever had its name has ended, perhaps with an earlier loader: what was planned
                # for it need not wait until its silence is noticed.
                self._note_dead(plan.worker_id)
                process = self._spawn(plan)
            if process is not None:
                self._processes[plan.worker_id] = process
                # One that said hello before it was known which process the worker is.
                said = self._connected.get(plan.worker_id)
                if said is not None and said != process.record.pid:
                    _end_twin(plan.worker_id, said)
                await self._until_ended(plan, process)
                self._forget(plan, process)
            attempt = 0 if self.clock.monotonic_s() - started_s > STABLE_AFTER_S else attempt + 1
            delay_s = self.backoff.delay_s(attempt, self.rng) if attempt else 0.0
            log.warning(
                "worker ended",
                action="worker_ended",
                worker_id=plan.worker_id,
                exit_code=process.exit_code if process is not None else None,
                again_in_s=round(delay_s, 3),
                log=str(plan.log_path),
            )
            await pause(delay_s)

    def _adopt(self, plan: WorkerPlan) -> Process | None:
        record = ProcessFile(plan.pid_path).read()
        process = Process.adopt(record) if record is not None else None
        if process is not None:
            self._give_up(plan.worker_id)
            log.info(
                "worker adopted",
                action="worker_adopted",
                worker_id=plan.worker_id,
                pid=process.record.pid,
            )
        return process

    def _spawn(self, plan: WorkerPlan) -> Process | None:
        # On the event loop: between the start of a process and its record no task can be cancelled,
        # and no process is lost.
        try:
            pid = self.ahead.take(plan.worker_id, plan.environment)
            self._give_up(plan.worker_id)
            process = (
                Process.spawn(plan.command, plan.environment, plan.log_path)
                if pid is None
                else Process.begun(pid)
            )
        except OSError as error:
            log.error(
                "worker cannot be started",
                action="worker_spawn_failed",
                worker_id=plan.worker_id,
                error=str(error),
            )
            return None
        self._unrecorded.add(plan.worker_id)
        self.metrics.worker_starts.inc()
        log.info(
            "worker started",
            action="worker_started",
            worker_id=plan.worker_id,
            pid=process.record.pid,
            ahead=pid is not None,
        )
        return process

    def _give_up(self, worker_id: WorkerId) -> None:
        """A worker that has begun already is not wanted, or is not there any more."""
        pid = self.ahead.give_up(worker_id)
        if pid is not None:
            process = Process.begun(pid)
            process.kill_session()
            self.background.spawn(f"await the end of {worker_id}", process.ended())

    def _record(self, plan: WorkerPlan, process: Process) -> bool:
        """Write down which process the worker is, where that has not been done; whether it is
        written down now.
        """
        if plan.worker_id not in self._unrecorded:
            return True
        try:
            ProcessFile(plan.pid_path).write(process.record)
        except OSError as error:
            # The worker serves all the same; only the next loader would not find it.
            self.metrics.write_failures.inc()
            log.error(
                "which process a worker is cannot be written down",
                action="worker_unrecorded",
                worker_id=plan.worker_id,
                pid=process.record.pid,
                error=str(error),
            )
            return False
        self._unrecorded.discard(plan.worker_id)
        return True

    async def _until_ended(self, plan: WorkerPlan, process: Process) -> None:
        """Return when it has ended; meanwhile write down what was not, and end it if it does not go
        on after a stop.
        """
        attempt, stopped_looks = 0, 0
        record_s = self.clock.monotonic_s()
        while True:
            if plan.worker_id in self._unrecorded and self.clock.monotonic_s() >= record_s:
                self._record(plan, process)
                record_s = self.clock.monotonic_s() + self.record_backoff.delay_s(attempt, self.rng)
                attempt += 1
            try:
                async with asyncio.timeout(LOOK_S):
                    return await process.ended()
            except TimeoutError:
                stopped_looks = stopped_looks + 1 if process.stopped else 0
            if stopped_looks * LOOK_S >= self.stopped_s:
                # Its requests have long gone on elsewhere; without it, the device can be used
                # again.
                log.error(
                    "a worker was stopped and is ended",
                    action="worker_stopped",
                    worker_id=plan.worker_id,
                )
                process.kill_session()
                stopped_looks = 0

    async def _end(self, plan: WorkerPlan) -> None:
        process = self._processes[plan.worker_id]
        process.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.terminate_s):
                await process.ended()
        except TimeoutError:
            log.error(
                "worker did not end in time", action="worker_killed", worker_id=plan.worker_id
            )
            process.signal(signal.SIGKILL)
            await process.ended()
        self._forget(plan, process)

    def _forget(self, plan: WorkerPlan, process: Process) -> None:
        # Its engine ends by itself when the worker does; one that hangs must not keep the device
        # from the next worker.
        process.kill_session()
        try:
            ProcessFile(plan.pid_path).remove()
        except OSError as error:
            log.warning(
                "a worker's file stays",
                action="worker_file_kept",
                worker_id=plan.worker_id,
                error=str(error),
            )
        self._unrecorded.discard(plan.worker_id)
        self._processes.pop(plan.worker_id, None)
        self._connected.pop(plan.worker_id, None)
        self._note_dead(plan.worker_id)

    def _note_dead(self, worker_id: WorkerId) -> None:
        if worker_id not in self._connected:
            self._dead.add(worker_id)
            self.metrics.workers.set(len(self._connected))
            self.changes.note()


def _end_twin(worker_id: WorkerId, pid: int) -> None:
    """Ends a process that says to be a worker which another process is: an earlier loader was
    killed before it could write it down.
    """
    log.error("two processes are one worker", action="worker_twice", worker_id=worker_id, pid=pid)
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGTERM)
