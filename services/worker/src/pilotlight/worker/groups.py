"""Joins the stages of pipeline groups: tells the engine where its neighbours are, as soon as all of
them are known.

Level-triggered, as holds are: whatever is missing or was refused is looked at again with the next
command or report.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import structlog

from pilotlight.common.errors import EngineFailed
from pilotlight.common.messages.engine import StageRefused
from pilotlight.common.messages.hold import Hold
from pilotlight.common.messages.pipelines import ConnectStage, OpenDoor, PipelineLeft, StageAddress
from pilotlight.policy.cluster import HeldState, Member
from pilotlight.policy.ids import Generation, InstanceId, WorkerId
from pilotlight.policy.remaining import remaining
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.held import Held

log = structlog.get_logger()

CONNECT_TIMEOUT_S = 10.0
"""For each channel. The neighbours hear of each other within a report and a command."""
REJOIN_AFTER_S = 1.0
"""After a pipeline broke, its stages wait so long before they look for the same neighbours again.
If one of them is lost, another is told of sooner than that, and looking for one that is gone takes
as long as a channel may take."""


class Groups:
    """Which of the worker's stages are joined, and where its engine listens."""

    def __init__(self, core: WorkerCore, host: str, secrets_dir: Path | None) -> None:
        """Nothing is opened before a stage of a group is held.

        Args:
            core: the worker's.
            host: the address at which the engine listens.
            secrets_dir: the folder of the cluster's key; without one no stage is joined to others.
        """
        self._core = core
        self._host = host
        self._secrets_dir = secrets_dir
        self.port = 0
        """Where the engine listens; 0: nowhere."""
        self._asked_door = False
        self._joined: set[InstanceId] = set()
        """Asked for, or done."""
        self._closing: dict[InstanceId, Generation] = {}
        """Those that have been asked to take their place in a shorter pipeline, and when."""
        self._begun: set[InstanceId] = set()
        """The engine knows of these, though parts of them may still come."""
        self._broken: dict[InstanceId, tuple[float, frozenset[WorkerId]]] = {}
        """When pipelines broke, and whose they were."""

    def on_begun(self, instance_id: InstanceId, stages: Iterable[Held]) -> None:
        """The engine makes room for a stage: it can be joined from now on."""
        self._begun.add(instance_id)
        self.follow(stages)

    def follow(self, stages: Iterable[Held]) -> None:
        """Do what can be done now for the stages that are held."""
        stages = list(stages)
        self._begun.intersection_update(held.hold.instance_id for held in stages)
        stages = [held for held in stages if len(held.hold.members) > 1]
        self._joined.intersection_update(held.hold.instance_id for held in stages)
        there = {held.hold.instance_id for held in stages}
        self._broken = {one: broke for one, broke in self._broken.items() if one in there}
        self._closing = {one: asked for one, asked in self._closing.items() if one in there}
        if not stages or not self._core.engine.alive or self._secrets_dir is None:
            return
        if not self._asked_door:
            self._asked_door = True
            command = OpenDoor(
                node_id=self._core.node_id, host=self._host, secrets_dir=str(self._secrets_dir)
            )
            self._core.background.spawn("open the door of stages", self._open(command))
        for held in stages:
            loads = held.state is HeldState.LOADING and held.hold.instance_id in self._begun
            waits = self._waits(held)
            if held.joined and held.state is HeldState.READY and not self._broke(held):
                self._close_ring(held)
            elif (held.idle or loads) and held.hold.instance_id not in self._joined and not waits:
                self._join(held, held.hold, held.hold.members)

    def on_door(self, port: int) -> None:
        """The engine listens."""
        self.port = port
        self._core.changed.set()

    def on_refused(self, refused: StageRefused) -> None:
        """A stage was not joined, or no door could be opened: the next look tries again."""
        if refused.instance_id is None:
            self._asked_door = False
        else:
            self._joined.discard(refused.instance_id)

    def on_unformed(self, instance_id: InstanceId) -> None:
        """A stage has no place in a shorter pipeline: the next look asks again."""
        self._closing.pop(instance_id, None)

    def on_left(self, left: PipelineLeft, held: Held | None) -> None:
        """A stage is joined no more. One whose layers were taken over need not be again."""
        if left.code:
            self._joined.discard(left.instance_id)
            self._closing.pop(left.instance_id, None)
            if held is not None:
                broke_s = self._core.clock.monotonic_s()
                self._broken[left.instance_id] = broke_s, _workers_of(held)

    def on_engine_died(self, instances: frozenset[InstanceId] | None = None) -> None:
        """Channels went with it: those of these instances, or all. The door is the main
        engine's.
        """
        if instances is None or not self._core.engine.alive:
            self.port, self._asked_door = 0, False
        self._joined = set() if instances is None else self._joined - instances
        self._begun = set() if instances is None else self._begun - instances
        gone = self._closing.keys() if instances is None else instances
        self._closing = {one: at for one, at in self._closing.items() if one not in gone}

    def _broke(self, held: Held) -> bool:
        """Its pipeline broke, and it has not been joined since."""
        name = held.hold.instance_id
        return name in self._broken and name not in self._joined

    def _waits(self, held: Held) -> bool:
        """Its pipeline has just broken, and it has no other neighbours yet."""
        broken = self._broken.get(held.hold.instance_id)
        if broken is None:
            return False
        broke_s, workers = broken
        soon = self._core.clock.monotonic_s() - broke_s < REJOIN_AFTER_S
        return soon and workers == _workers_of(held)

    def _close_ring(self, held: Held) -> None:
        """The group is to be a shorter pipeline: a stage that remains gets its neighbours there."""
        hold = held.growing or held.hold
        kept = remaining([member.stage for member in hold.members])
        if kept and self._closing.get(hold.instance_id) != hold.generation:
            members = tuple(hold.members[at] for at in kept)
            if self._join(held, hold, members, shorter=True):
                self._closing[hold.instance_id] = hold.generation

    def _join(
        self, held: Held, hold: Hold, members: Sequence[Member], *, shorter: bool = False
    ) -> bool:
        """Have the engine look for its neighbours, if all are known; whether it was asked.

        Args:
            held: the stage.
            hold: what it is, or is about to be.
            members: of the ring.
            shorter: beside the pipeline that it is in.
        """
        mine = [index for index, one in enumerate(members) if one.stage == hold.stage]
        if (
            not mine
            or not _is_pipeline(members)
            or not all(one.host and one.port for one in members)
        ):
            return False
        behind = members[(mine[0] + 1) % len(members)]
        command = ConnectStage(
            instance_id=hold.instance_id,
            stage=hold.stage,
            behind=_address_of(behind),
            timeout_s=CONNECT_TIMEOUT_S,
            proven=held.idle,
            shorter=shorter,
        )
        self._joined.add(hold.instance_id)
        self._core.background.spawn(f"join {hold.instance_id}", self._connect(command))
        return True

    async def _open(self, command: OpenDoor) -> None:
        try:
            await self._core.engine.open_door(command)
        except EngineFailed as error:
            log.warning("no door is opened", action="door_not_opened", error=error.message)

    async def _connect(self, command: ConnectStage) -> None:
        try:
            await self._core.engine.connect_stage(command)
        except EngineFailed as error:
            log.warning(
                "a stage is not joined",
                action="stage_not_joined",
                instance_id=command.instance_id,
                error=error.message,
            )


def _workers_of(held: Held) -> frozenset[WorkerId]:
    return frozenset(member.worker_id for member in held.hold.members)


def _is_pipeline(members: Sequence[Member]) -> bool:
    """Each stage follows on the one before it.

    While one has a longer range, nothing is joined anew.
    """
    return all(one.stage.stop == behind.stage.start for one, behind in pairwise(members))


def _address_of(member: Member) -> StageAddress:
    return StageAddress(
        node_id=member.node_id, stage=member.stage, host=member.host, port=member.port
    )
