"""How much of a leader's time its ticks have."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pilotlight.common.clock import Clock, busy_s
from pilotlight.common.waiting import pause, woken
from pilotlight.policy.control.pace import LEAST, next_starts
from pilotlight.policy.control.plan import ControlFacts, ControlRules, Memory, Plan
from pilotlight.policy.control.tick import tick

REST_S = 0.02
"""After a tick others run for as long as it took, at most for this long, however much is new: rows,
reports and commands take more of the processor than ticks do."""
QUIET_S = 0.03
"""So long a tick waits for starts that have their room, until their commands are sent."""


class Pressing:
    """Starts that have their room, and whose commands are not sent yet. A tick in the midst of that
    is most of what a command waits for.
    """

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()

    @property
    def has_one(self) -> bool:
        """There is one, and no other."""
        return self._count == 1

    @contextmanager
    def one(self) -> Generator[None]:
        """From a start's room to its command."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._none.set()

    async def none(self, at_most_s: float) -> bool:
        """Wait until there are none; False when that took too long."""
        self._none.clear()
        return not self._count or await woken(self._none, at_most_s)


@dataclass(slots=True)
class Pacing:
    """Of one term's ticks."""

    clock: Clock
    rules: ControlRules
    starts_at_once: int = field(init=False)
    """Starts that the next tick begins at most."""
    tick_s: float = 0.0
    """What the last one took."""
    _decided_s: float = 0.0

    def __post_init__(self) -> None:
        self.starts_at_once = self.rules.starts_at_once

    def tick(self, facts: ControlFacts, memory: Memory) -> Plan:
        """Decide, and take note of what that took."""
        began_s, began_busy_s = self.clock.monotonic_s(), busy_s()
        plan = tick(facts, memory, self.rules)
        self._decided_s = self.clock.monotonic_s()
        self.tick_s = self._decided_s - began_s
        took_s = busy_s() - began_busy_s
        self.starts_at_once = next_starts(self.starts_at_once, len(plan.start), took_s, LEAST)
        return plan

    async def rest(self, pressing: Pressing) -> None:
        """After a turn: rows and commands of starts go on between ticks alone; while the turn
        waited for its own they did.
        """
        rested_s = self.clock.monotonic_s() - self._decided_s
        await pause(max(self.tick_s / 4, min(self.tick_s, REST_S) - rested_s))
        await pressing.none(QUIET_S)
