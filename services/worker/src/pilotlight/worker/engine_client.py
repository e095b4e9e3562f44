"""The one protocol between a worker and whatever runs its models.

Implementations: ``ProcessEngine`` (the native engine in a child process) and ``SimEngine`` (timings without computation).
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from pilotlight.common.errors import EngineFailed
from pilotlight.common.messages.engine import Abort, EngineUp, FromEngine, LoadStage, PlacePart, Run, UnloadStage


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDied:
    """The engine ended: everything that it held is gone, and nothing more comes from it until it is started again."""

    reason: str
    code: str = EngineFailed.code
    """Of the error taxonomy."""
    hung: bool = False
    """It was ended because it had come to nothing for too long."""


EngineEvent = FromEngine | EngineDied


class EngineClient(Protocol):
    """An engine that may die and be started again. Commands are answered by events, in the order of the commands.

    Commands raise ``EngineFailed`` when the engine is not running or does not take them in time; it then dies, if it has not yet,
    and ``EngineDied`` follows in the events.
    """

    @property
    def alive(self) -> bool:
        """Started, and not known to be dead."""
        ...

    async def start(self) -> EngineUp:
        """Start it, also after its death. Does nothing new when it runs.

        Raises:
            EngineFailed: it ended, or was not ready in time.
        """
        ...

    async def load_stage(self, command: LoadStage) -> None:
        """Make room; ``StageLoaded`` follows the last part, ``StageFailed`` the first trouble."""
        ...

    async def place_part(self, command: PlacePart) -> None:
        """Copy a part to its place."""
        ...

    async def unload_stage(self, command: UnloadStage) -> None:
        """Free a stage, whether it is held or not; ``StageUnloaded`` follows."""
        ...

    async def run(self, command: Run) -> None:
        """Take a request in; it gets exactly one output with a finish, unless the engine dies."""
        ...

    async def abort(self, command: Abort) -> None:
        """End a request within one step; nothing, if it has ended."""
        ...

    def events(self) -> AsyncIterator[EngineEvent]:
        """Everything that it says, over all its lives, until ``stop``. For one reader."""
        ...

    async def kill(self, reason: str, code: str = "") -> None:
        """End it now: it hangs, or its device has failed. ``EngineDied`` follows, with the code of that, if there is one. A start that is
        under way raises.
        """
        ...

    async def stop(self) -> None:
        """End it in order, for good. Ends ``events``."""
        ...
