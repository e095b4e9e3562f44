"""The one protocol between a worker and whatever runs its models.

Implementations: ``ProcessEngine`` (the native engine in a child process) and ``SimEngine`` (timings
without computation). ``EngineSwitch`` chooses between them for each model.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from pilotlight.common.envelope import Timed
from pilotlight.common.errors import EngineFailed
from pilotlight.common.messages.engine import (
    Abort,
    EngineUp,
    FromEngine,
    LeaveRoom,
    LoadStage,
    PlacePart,
    ResizeStage,
    Run,
    StepDone,
    UnloadStage,
)
from pilotlight.common.messages.pipelines import (
    CallOffExtend,
    ConnectStage,
    ExtendStage,
    OpenDoor,
    RenameStage,
    VouchStage,
)
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.phase import Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDied:
    """The engine ended: everything that it held is gone, and nothing more comes from it until it is
    started again.
    """

    reason: str
    code: str = EngineFailed.code
    """Of the error taxonomy."""
    hung: bool = False
    """It was ended because it had come to nothing for too long."""
    instances: frozenset[InstanceId] | None = None
    """Those that it had, where the worker has other engines; None: all."""


EngineEvent = FromEngine | EngineDied


class EngineClient(Protocol):
    """An engine that may die and be started again.

    Commands are answered by events, in the order of the commands.

    Commands raise ``EngineFailed`` when the engine is not running or does not take them in time; it
    then dies, if it has not yet, and ``EngineDied`` follows in the events.
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

    async def load_stage(self, command: LoadStage, sent: Moment | None = None) -> None:
        """Make room; ``StageLoaded`` follows the last part, ``StageFailed`` the first trouble.

        ``sent`` is for the frame's envelope; None: now.
        """
        ...

    async def place_part(self, command: PlacePart, ready: Moment | None = None) -> None:
        """Copy a part to its place. ``ready``, since when it can be, is for the frame's
        envelope.
        """
        ...

    async def unload_stage(self, command: UnloadStage) -> None:
        """Free a stage, whether it is held or not; ``StageUnloaded`` follows."""
        ...

    async def open_door(self, command: OpenDoor) -> None:
        """Listen for the engines of other stages; ``DoorOpened`` follows, or ``StageRefused``
        without an instance.
        """
        ...

    async def connect_stage(self, command: ConnectStage) -> None:
        """Join a pipeline; ``StageConnected`` follows, and ``StageOpened`` where it leads, or
        ``StageRefused``.
        """
        ...

    async def extend_stage(self, command: ExtendStage) -> None:
        """Give a stage more layers; ``StageGrown`` follows the last part, ``StageRefused`` the
        first trouble.
        """
        ...

    async def vouch_stage(self, command: VouchStage) -> None:
        """What a stage computes may go to the other stages of its pipeline."""
        ...

    async def call_off_extend(self, command: CallOffExtend) -> None:
        """Give an extension up; ``StageRefused`` follows if the stage serves its old range on, else
        ``StageFailed``.
        """
        ...

    async def rename_stage(self, command: RenameStage) -> None:
        """Have a stage that has become whole be another instance's; ``StageRenamed`` or
        ``StageRefused`` follows.
        """
        ...

    async def resize_stage(self, command: ResizeStage) -> None:
        """Give a stage more bytes or fewer; ``StageResized`` or ``StageRefused`` follows."""
        ...

    async def leave_room(self, command: LeaveRoom) -> None:
        """Leave memory of the device to another process; ``RoomLeft`` follows."""
        ...

    async def run(self, command: Run) -> None:
        """Take a request in; it gets exactly one output with a finish, unless the engine dies."""
        ...

    def run_soon(self, command: Run) -> bool:
        """As ``run``, from where nothing can be waited for; False: ``run`` is to be called."""
        ...

    async def abort(self, command: Abort) -> None:
        """End a request within one step; nothing, if it has ended."""
        ...

    def events(self) -> AsyncIterator[Timed[EngineEvent]]:
        """Everything that it says and when it did, over all its lives, until ``stop``.

        For one reader.
        """
        ...

    def steps_now(self) -> list[Timed[StepDone]]:
        """The steps that come next among ``events`` and are there already, for the same reader:
        they are taken out.
        """
        ...

    async def kill(self, reason: str, code: str = "") -> None:
        """End it now: it hangs, or its device has failed. ``EngineDied`` follows, with the code of
        that, if there is one. A start that is under way raises.
        """
        ...

    async def stop(self) -> None:
        """End it in order, for good. Ends ``events``."""
        ...
