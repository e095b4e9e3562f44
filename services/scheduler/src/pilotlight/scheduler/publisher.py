"""The bucket ``instances``: what gateways route by.

Written after the rows, brought level until it is.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import structlog

from pilotlight.common.buckets import Bucket
from pilotlight.common.clock import Clock, moment_of
from pilotlight.common.errors import BusUnavailable
from pilotlight.common.waiting import Backoff, pause, woken
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.instance import ENDED
from pilotlight.policy.plan import Instance
from pilotlight.scheduler.effects import Effects

log = structlog.get_logger()

REMOVE_AFTER_S = 2.0
"""An ended instance is shown so long, so that watchers see why it ended."""
TICK_S = 0.5
AT_ONCE = 32
"""Writes under way together: each waits for the server's word, and between two of them a whole tick
of the leader may run."""

Written = Callable[[], None]


@dataclass(slots=True)
class _Pending:
    instance: Instance
    written: list[Written]


class InstancePublisher:
    """Writes instances to the bucket; the last state wins, failures are tried again."""

    def __init__(self, bucket: Bucket, clock: Clock, effects: Effects) -> None:
        self._bucket = bucket
        self._clock = clock
        self._effects = effects
        self._pending: dict[InstanceId, _Pending] = {}
        self._removals: dict[InstanceId, float] = {}
        self._wake = asyncio.Event()
        self._rng = random.Random()

    def publish(self, instance: Instance, written: Written | None = None) -> None:
        """Show an instance's new state; ``written`` is called when the bucket has it."""
        pending = self._pending.get(instance.instance_id)
        callbacks = [
            *(pending.written if pending is not None else ()),
            *((written,) if written is not None else ()),
        ]
        self._pending[instance.instance_id] = _Pending(instance, callbacks)
        self._removals.pop(instance.instance_id, None)
        self._wake.set()

    async def run(self) -> None:
        """Keep the bucket level for ever.

        Raises:
            NotLeader: the lease has run out.
        """
        backoff = Backoff()
        failures = 0
        while True:
            await woken(self._wake, TICK_S)
            try:
                await self._write()
                failures = 0
            except BusUnavailable as error:
                log.warning(
                    "the bucket lags behind", action="instances_deferred", error=error.message
                )
                self._wake.set()
                await pause(backoff.delay_s(failures, self._rng))
                failures += 1

    async def sweep(self) -> None:
        """Watch the bucket for ever. What belongs to no instance is removed: a leader that died
        left it there. What an older leader wrote late, or removed, is shown again.
        """
        await self._bucket.watch(Instance, self._on_value)

    async def _on_value(self, key: str, value: Instance | None) -> None:
        instance_id = InstanceId(key)
        instance = self._effects.instance(instance_id)
        if instance is None:
            if value is not None:
                self._removals.setdefault(instance_id, self._clock.monotonic_s())
                self._wake.set()
        elif instance_id not in self._pending and _differs(value, instance):
            self.publish(instance)

    async def _write(self) -> None:
        while self._pending:
            batch = list(islice(self._pending.items(), AT_ONCE))
            await _all(self._show(instance_id, pending) for instance_id, pending in batch)
        now_s = self._clock.monotonic_s()
        due = [key for key, due_s in self._removals.items() if due_s <= now_s]
        for at in range(0, len(due), AT_ONCE):
            await _all(map(self._remove, due[at : at + AT_ONCE]))

    async def _show(self, instance_id: InstanceId, pending: _Pending) -> None:
        self._effects.check()
        await self._bucket.put(instance_id, pending.instance, sent=moment_of(self._clock))
        if self._pending.get(instance_id) is pending:
            del self._pending[instance_id]
        if pending.instance.state in ENDED:
            self._removals[instance_id] = self._clock.monotonic_s() + REMOVE_AFTER_S
        for callback in pending.written:
            callback()

    async def _remove(self, instance_id: InstanceId) -> None:
        self._effects.check()
        await self._bucket.delete(instance_id)
        self._removals.pop(instance_id, None)


async def _all(writes: Iterable[Awaitable[None]]) -> None:
    """Wait for all of some writes, then say what became of the first that failed."""
    for outcome in await asyncio.gather(*writes, return_exceptions=True):
        if outcome is not None:
            raise outcome


def _differs(shown: Instance | None, instance: Instance) -> bool:
    if shown is None:
        return instance.state not in ENDED
    return (shown.epoch, shown.generation, shown.state) != (
        instance.epoch,
        instance.generation,
        instance.state,
    )
