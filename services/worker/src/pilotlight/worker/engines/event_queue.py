"""What an engine says, on its way to the one task that listens."""

from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import cast

from pilotlight.common.envelope import Timed
from pilotlight.common.messages.engine import StepDone
from pilotlight.common.waiting import Flag, Signal
from pilotlight.worker.engines.client import EngineEvent


class EventQueue:
    """Events in order, so many at most: past them the engine waits.

    An engine says something with every step, so this costs little where nobody has to wait: what
    came together is taken together, without a turn of the loop for each.
    """

    def __init__(self, at_most: int) -> None:
        """Has nothing yet, and room for ``at_most`` events."""
        self._at_most = at_most
        self._said: deque[Timed[EngineEvent] | None] = deque()
        """None: the end."""
        self._news = Flag()
        self._room = Signal()

    @property
    def has_room(self) -> bool:
        """What is put now has not to wait."""
        return len(self._said) < self._at_most

    def put_now(self, event: Timed[EngineEvent]) -> None:
        """Say something, where there is room."""
        self._said.append(event)
        self._news.set()

    async def put(self, event: Timed[EngineEvent]) -> None:
        """Say something, when there is room."""
        while not self.has_room:
            await self._room.wait()
        self.put_now(event)

    def put_all_now(self, events: Iterable[Timed[EngineEvent]]) -> None:
        """Say several things, where there is room for all."""
        self._said.extend(events)
        self._news.set()

    @property
    def room(self) -> int:
        """As many may be put now."""
        return self._at_most - len(self._said)

    def steps_now(self) -> list[Timed[StepDone]]:
        """The steps that are heard next and are there already: ``events`` does not have them."""
        said, was_full, steps = self._said, not self.has_room, list[Timed[EngineEvent]]()
        while said and (first := said[0]) is not None and type(first.message) is StepDone:
            steps.append(first)
            said.popleft()
        if steps and was_full:
            self._room.send()
        return cast("list[Timed[StepDone]]", steps)

    def end(self) -> None:
        """What was not heard yet is forgotten, and there is nothing more."""
        self.clear()
        self._said.append(None)
        self._news.set()

    def clear(self) -> None:
        """What was not heard yet is forgotten."""
        self._said.clear()
        self._room.send()

    async def events(self) -> AsyncIterator[Timed[EngineEvent]]:
        """Everything that is said, up to the end. For one task at a time."""
        said = self._said
        while True:
            while said:
                event = said.popleft()
                if len(said) == self._at_most - 1:
                    self._room.send()
                if event is None:
                    return
                yield event
            self._news.clear()
            await self._news.wait()
