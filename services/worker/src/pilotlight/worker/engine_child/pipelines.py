"""The engine child's stages in pipelines: joining, growing, resizing, and what is told of it.

The loop has the commands obeyed here that concern more than one stage's load.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from pilotlight.common.messages.engine import (
    FromEngine,
    LeaveRoom,
    ResizeStage,
    RoomLeft,
    StageOpened,
    StageRefused,
    StageResized,
)
from pilotlight.common.messages.pipelines import (
    ConnectStage,
    DoorOpened,
    ExtendStage,
    OpenDoor,
    PipelineLeft,
    RenameStage,
    RingUnformed,
    StageConnected,
    StageGrown,
    StageRenamed,
    VouchStage,
)
from pilotlight.engine.channel.channel import Channel
from pilotlight.engine.errors import EngineError
from pilotlight.engine.results import StageRoom, StepResult
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Stage
from pilotlight.worker.engine_child.neighbours import Joined, Neighbours
from pilotlight.worker.engine_child.stages import StageLoads

log = structlog.get_logger()

PipelineCommand = (
    OpenDoor | ConnectStage | ExtendStage | ResizeStage | LeaveRoom | VouchStage | RenameStage
)


class LeavingArena(Protocol):
    """What is asked of the device's memory."""

    def leave(self, num_bytes: int) -> None: ...


class PipelineEngine(Protocol):
    """What is asked of the engine for it."""

    @property
    def arena(self) -> LeavingArena: ...
    @property
    def channels(self) -> Sequence[Channel]: ...
    def connect(
        self, instance_id: InstanceId, before: Channel, behind: Channel, *, vouched: bool = True
    ) -> None: ...
    def shorten(
        self, instance_id: InstanceId, stage: Stage, before: Channel, behind: Channel
    ) -> None: ...
    def vouch(self, instance_id: InstanceId) -> None: ...
    def serves(self, instance_id: InstanceId) -> bool: ...
    def kv_capacity_tokens(self, instance_id: InstanceId) -> int: ...
    def call_off(self, instance_id: InstanceId) -> bool: ...
    def rename(self, instance_id: InstanceId, new_id: InstanceId) -> None: ...
    def resize(
        self,
        instance_id: InstanceId,
        device_bytes: int,
        *,
        must: bool = False,
        target_bytes: int = 0,
    ) -> StageRoom: ...


class Pipelines:
    """Tells the worker what becomes of stages in pipelines."""

    def __init__(
        self,
        engine: PipelineEngine,
        loads: StageLoads,
        neighbours: Neighbours,
        send: Callable[[FromEngine], None],
        told: Callable[[Exception], tuple[str, str]],
    ) -> None:
        """Nothing is done before a command comes.

        Args:
            engine: what holds the stages.
            loads: the parts that are on their way.
            neighbours: what makes channels.
            send: tells the worker.
            told: code and sentence of an error for the worker.
        """
        self._engine = engine
        self._loads = loads
        self._neighbours = neighbours
        self._send = send
        self._told = told
        self._opening: set[InstanceId] = set()
        """Stages that wait for the others of their pipeline."""

    def obey(self, command: PipelineCommand, sent_s: float) -> None:
        """Does what the worker asked at ``sent_s``, or says why not."""
        try:
            match command:
                case OpenDoor():
                    self._send(DoorOpened(port=self._neighbours.open_door(command)))
                case ConnectStage():
                    self._neighbours.connect(command)
                case LeaveRoom():
                    self._send(self._left(command.device_bytes))
                case VouchStage():
                    self._engine.vouch(command.instance_id)
                case ExtendStage():
                    self._loads.extend(command, sent_s)
                case ResizeStage():
                    room = self._engine.resize(
                        command.instance_id,
                        command.device_bytes,
                        must=command.must,
                        target_bytes=command.target_bytes,
                    )
                    self._send(
                        StageResized(
                            instance_id=command.instance_id,
                            kv_capacity_tokens=room.kv_capacity_tokens,
                            device_bytes=room.device_bytes,
                        )
                    )
                case RenameStage():
                    self._engine.rename(command.instance_id, command.new_id)
                    self._loads.renamed(command.instance_id, command.new_id)
                    self._send(
                        StageRenamed(
                            instance_id=command.new_id,
                            old_id=command.instance_id,
                            kv_capacity_tokens=self._engine.kv_capacity_tokens(command.new_id),
                        )
                    )
        except Exception as error:  # noqa: BLE001 - what cannot be done to one stage must not end the others
            of_none = isinstance(command, OpenDoor | LeaveRoom)
            self.refuse(None if of_none else command.instance_id, error)

    def _left(self, num_bytes: int) -> RoomLeft:
        """Leaves memory to another process, as far as the device lets it."""
        try:
            self._engine.arena.leave(num_bytes)
        except EngineError as error:
            return RoomLeft(device_bytes=num_bytes, refused=error.message)
        return RoomLeft(device_bytes=num_bytes)

    def refuse(self, instance_id: InstanceId | None, error: Exception) -> None:
        """Says why a stage stays what it was."""
        code, message = self._told(error)
        log.warning(
            "stage refused",
            action="stage_refused",
            instance_id=instance_id,
            code=code,
            error=message,
        )
        self._send(StageRefused(instance_id=instance_id, code=code, message=message))

    def join(self) -> None:
        """Connects the stages whose channels are made."""
        for joined in self._neighbours.take():
            instance_id = joined.command.instance_id
            if joined.command.shorter:
                self._shorten(joined)
                continue
            if isinstance(joined.channels, EngineError):
                self.refuse(instance_id, joined.channels)
                continue
            try:
                self._engine.connect(instance_id, *joined.channels, vouched=joined.command.proven)
            except EngineError as error:
                for channel in joined.channels:
                    channel.close()
                self.refuse(instance_id, error)
                continue
            self._opening.add(instance_id)
            self._send(StageConnected(instance_id=instance_id))

    def _shorten(self, joined: Joined) -> None:
        """Gives a stage its place in a shorter pipeline."""
        command, channels = joined.command, joined.channels
        if isinstance(channels, EngineError):
            self._unformed(command.instance_id, channels)
            return
        try:
            self._engine.shorten(command.instance_id, command.stage, *channels)
        except EngineError as error:
            for channel in channels:
                channel.close()
            self._unformed(command.instance_id, error)

    def _unformed(self, instance_id: InstanceId, error: EngineError) -> None:
        log.info(
            "no shorter pipeline forms yet",
            action="ring_unformed",
            instance_id=instance_id,
            code=error.code,
            error=error.message,
        )
        self._send(RingUnformed(instance_id=instance_id, code=error.code, message=error.message))

    def drop(self, instance_id: InstanceId) -> None:
        """The stage is held no longer."""
        self._opening.discard(instance_id)

    def after(self, result: StepResult) -> None:
        """Tells what a step changed."""
        for instance_id in [one for one in self._opening if self._engine.serves(one)]:
            self._opening.discard(instance_id)
            self._open(instance_id)
        for lost in result.lost:
            self._opening.discard(lost.instance_id)
            self._send(
                PipelineLeft(instance_id=lost.instance_id, code=lost.code, message=lost.message)
            )
        for instance_id in result.left:
            self._opening.discard(instance_id)
            self._send(PipelineLeft(instance_id=instance_id))
        for instance_id in (*(one.instance_id for one in result.lost), *result.left):
            if self._engine.serves(instance_id):
                self._open(instance_id)
        for one in result.unformed:
            self._send(
                RingUnformed(instance_id=one.instance_id, code=one.code, message=one.message)
            )
        for grown in result.grown:
            # First: a worker that hears of the longer range has requests for it at once.
            if self._engine.serves(grown.instance_id):
                self._open(grown.instance_id)
            self._send(
                StageGrown(
                    instance_id=grown.instance_id,
                    stage=grown.stage,
                    kv_capacity_tokens=grown.kv_capacity_tokens,
                    phases=self._loads.grown(grown.instance_id),
                )
            )

    def _open(self, instance_id: InstanceId) -> None:
        capacity_tokens = self._engine.kv_capacity_tokens(instance_id)
        self._send(StageOpened(instance_id=instance_id, kv_capacity_tokens=capacity_tokens))
