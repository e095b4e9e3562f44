"""Workers that have refused a request for want of a place, and who waits for one (``policy.full``).

The bound is a worker's, not an instance's: what ends of one model makes room for another.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pilotlight.common.clock import Clock
from pilotlight.policy.full import FORGET_S, FullWorker, freed, refused, sent, taken
from pilotlight.policy.ids import ModelName, WorkerId

LOOK_AFTER_S = 1.0
"""Where a worker does not say when to come again."""


@dataclass(slots=True)
class _Known:
    full: FullWorker
    denied: dict[ModelName, None] = field(default_factory=dict[ModelName, None])
    """Models whose line waits for it, the first to be let in first."""
    timer: asyncio.TimerHandle | None = None
    """For those."""


class FullWorkers:
    """Those of which this gateway knows."""

    def __init__(self, clock: Clock) -> None:
        """None is full."""
        self._clock = clock
        self._known: dict[WorkerId, _Known] = {}
        self.on_room: Callable[[ModelName], None] = lambda _: None
        """Called with a model whose line waited for a place that there is now."""

    def __len__(self) -> int:
        """Workers of which something is remembered."""
        return len(self._known)

    def may_take(self, worker_id: WorkerId, model: ModelName) -> bool:
        """Whether a worker may be sent one more request; if not, the model is called for when it
        may.
        """
        known = self._of(worker_id)
        if known is None or known.full.takes(self._clock.monotonic_s()):
            return True
        known.denied[model] = None
        self._await(worker_id, known)
        return False

    def refused(self, worker_id: WorkerId, retry_after_s: float | None) -> None:
        """It had no place for one."""
        for other in tuple(self._known):
            self._of(other)  # Nobody asks for one that has gone in order.
        known, now_s = self._known.get(worker_id), self._clock.monotonic_s()
        # Behind that nothing is known of it, and who waits must not go on waiting.
        after_s = min(retry_after_s or LOOK_AFTER_S, FORGET_S)
        full = refused(known.full if known else None, now_s, after_s)
        if known is None:
            self._known[worker_id] = _Known(full)
        else:
            known.full = full

    def sent(self, worker_id: WorkerId) -> None:
        """A submit is under way."""
        if (known := self._of(worker_id)) is not None:
            known.full = sent(known.full, self._clock.monotonic_s(), LOOK_AFTER_S)

    def accepted(self, worker_id: WorkerId) -> None:
        """It was."""
        if (known := self._of(worker_id)) is not None:
            known.full = taken(known.full)
            self._let_in(known)

    def freed(self, worker_id: WorkerId) -> None:
        """A request that it had has ended, or one that was meant for it is not sent."""
        if (known := self._of(worker_id)) is not None:
            known.full = freed(known.full)
            self._let_in(known)

    def forget(self, worker_id: WorkerId) -> None:
        """The worker is gone, or has room."""
        known = self._known.pop(worker_id, None)
        if known is not None and known.timer is not None:
            known.timer.cancel()

    def _of(self, worker_id: WorkerId) -> _Known | None:
        known = self._known.get(worker_id)
        if known is not None and known.full.forgotten(self._clock.monotonic_s()):
            self.forget(worker_id)
            for model in known.denied:
                self.on_room(model)
            return None
        return known

    def _let_in(self, known: _Known) -> None:
        while known.denied and known.full.takes(self._clock.monotonic_s()):
            model = next(iter(known.denied))
            del known.denied[model]
            self.on_room(model)

    def _await(self, worker_id: WorkerId, known: _Known) -> None:
        """Whoever is denied is called for when one may go to see, whatever is heard until then."""
        if known.timer is None:
            left_s = max(0.0, known.full.look_at_s - self._clock.monotonic_s())
            known.timer = asyncio.get_running_loop().call_later(left_s, self._due, worker_id)

    def _due(self, worker_id: WorkerId) -> None:
        known = self._known.get(worker_id)
        if known is None:
            return
        known.timer = None
        self._let_in(known)
        if known.denied:
            # The time has not come: the worker refused again, or the loop's timers came early.
            self._await(worker_id, known)
