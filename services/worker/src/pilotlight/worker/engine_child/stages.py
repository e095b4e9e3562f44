"""Loading stages in the engine child: parts from the host pool to their place, and what that
took.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.errors import BadCheckpoint
from pilotlight.common.faults import Faults
from pilotlight.common.messages.engine import LoadStage, PlacePart, StageLoaded
from pilotlight.common.messages.pipelines import ExtendStage
from pilotlight.common.phases import PhaseRecorder
from pilotlight.engine.results import PlacedPart, StageRoom
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Dtype, ModelSpec, Stage
from pilotlight.policy.phase import Phase, PhaseName
from pilotlight.worker.engine_child.graphs import GraphPlans
from pilotlight.worker.engine_child.inbox import Inbox
from pilotlight.worker.engine_child.kernels import KernelPlans
from pilotlight.worker.engine_child.pins import Pins
from pilotlight.worker.engine_child.restoring import Restoring

if TYPE_CHECKING:
    from pilotlight.engine.compute import GraphPlan
    from pilotlight.engine.device.parameters import Early

log = structlog.get_logger()

Source = tuple[Dtype, tuple[int, ...], memoryview]


class LoadingEngine(Protocol):
    """What loading asks of the engine."""

    def begin_load(
        self,
        instance_id: InstanceId,
        spec: ModelSpec,
        stage: Stage,
        dtype: Dtype,
        device_bytes: int,
        slot: int | None = None,
        plan: "GraphPlan | None" = None,
        *,
        may_grow: bool = False,
        early: "Early | None" = None,
    ) -> StageRoom: ...
    def extend(
        self, instance_id: InstanceId, stage: Stage, device_bytes: int, *, shorter: bool = False
    ) -> StageRoom: ...
    def place_part(
        self,
        instance_id: InstanceId,
        part: int,
        tensors: Mapping[str, Source],
        following: tuple[int, Mapping[str, Source]] | None = None,
    ) -> PlacedPart: ...


class _PartsPool:
    """The pool in which the parts of one load lie: the one that the load was told of, or else its
    first part. It is opened when it is known, which is behind the grant of their lease.
    """

    def __init__(self, opened: Callable[[str], mmap.mmap], path: str) -> None:
        self._opened = opened
        self._pool = opened(path) if path else None

    def sources(self, command: PlacePart) -> dict[str, Source]:
        """Where the tensors of a part are.

        Raises:
            BadCheckpoint: one lies outside the pool.
            OSError: the pool cannot be mapped.
        """
        if self._pool is None:
            self._pool = self._opened(command.pool_path)
        view = memoryview(self._pool)
        sources: dict[str, Source] = {}
        for place in command.tensors:
            end = place.offset + place.size_bytes
            if not 0 <= place.offset <= end <= len(view):
                raise BadCheckpoint(
                    f"{place.name} lies at [{place.offset}, {end}), outside the pool of {len(view)} bytes"
                )
            sources[place.name] = (place.dtype, place.shape, view[place.offset : end])
        return sources

    def early(self, parts: Iterable[PlacePart]) -> dict[int, dict[str, Source]]:
        """Those that can be read; of the others it is said when they are placed."""
        found: dict[int, dict[str, Source]] = {}
        for one in parts:
            with suppress(BadCheckpoint, OSError):
                found[one.part] = self.sources(one)
        return found

    def behind(
        self, instance_id: InstanceId, command: PlacePart | None
    ) -> tuple[int, Mapping[str, Source]] | None:
        """A part of the same stage; None where it is of another one, or cannot be read."""
        if command is None or command.instance_id != instance_id:
            return None
        with suppress(BadCheckpoint):  # Said when it is placed.
            return command.part, self.sources(command)
        return None


@dataclass(frozen=True, slots=True)
class _Early:
    """See ``engine.device.parameters.Early``."""

    pool: _PartsPool
    inbox: Inbox
    instance_id: InstanceId

    def first(self) -> dict[int, dict[str, Source]]:
        return self.pool.early(self.inbox.first_part_of(self.instance_id))

    def come(self) -> dict[int, dict[str, Source]]:
        return self.pool.early(self.inbox.parts_of(self.instance_id))


@dataclass(slots=True, kw_only=True)
class _Load:
    room: StageRoom
    pool: _PartsPool
    delayed: bool = False
    grows: bool = False
    """The stage is held already, and gets a longer range."""
    device_bytes: int = 0
    """Of its parts, what came from the device of a neighbour, ..."""
    pool_bytes: int = 0
    """... and what from the host pool."""


class StageLoads:
    """The stages that are being loaded."""

    def __init__(
        self,
        engine: LoadingEngine,
        clock: Clock,
        faults: Faults,
        phases: PhaseRecorder,
        pins: Pins | None = None,
    ) -> None:
        self._pins = pins
        self._engine = engine
        self._clock = clock
        self._faults = faults
        self._phases = phases
        self._loads: dict[InstanceId, _Load] = {}
        self.restoring = Restoring()
        self.graphs = GraphPlans()
        self.kernels = KernelPlans()
        self._pool: tuple[tuple[int, int, int], mmap.mmap] | None = None

    def __contains__(self, instance_id: InstanceId) -> bool:
        return instance_id in self._loads

    @property
    def any(self) -> bool:
        """Some stage is being loaded."""
        return bool(self._loads)

    def begin(
        self,
        command: LoadStage,
        sent_s: float,
        inbox: Inbox | None = None,
    ) -> StageRoom:
        """Set a stage up; what it has room for.

        Args:
            command: what was asked for.
            sent_s: when.
            inbox: may have parts of it, whose copies begin; None: they wait for their turn.

        Raises:
            EngineError: the engine cannot hold it.
            OSError: the pool cannot be mapped.
            RestoreFailed: its artifact does not fit what is here.
        """
        pool, instance_id = _PartsPool(self._map, command.pool_path), command.instance_id
        model = command.model
        room = self._engine.begin_load(
            command.instance_id,
            model.spec,
            command.stage,
            model.dtype,
            command.device_bytes,
            model.slot,
            self.graphs.plan_of(command),
            may_grow=command.may_grow,
            early=None if inbox is None else _Early(pool, inbox, instance_id),
        )
        # Beside the copies that have begun; the first of them is launched by a rehearsal.
        self.kernels.begin(command)
        name = PhaseName.INIT
        if command.artifact and command.stage == model.spec.whole:
            name = PhaseName.RESTORE
            self.restoring.begin(command.instance_id, command.artifact, command.device_bytes, room)
        self._phases.record(command.instance_id, name, sent_s)
        self._loads[command.instance_id] = _Load(room=room, pool=pool)
        return room

    def extend(self, command: ExtendStage, sent_s: float) -> None:
        """Give a stage a longer range, as asked at ``sent_s``.

        Raises:
            EngineError: the engine cannot hold it, or the stage cannot grow now.
            OSError: the pool cannot be mapped.
        """
        pool = _PartsPool(self._map, command.pool_path)
        room = self._engine.extend(
            command.instance_id, command.stage, command.device_bytes, shorter=command.shorter
        )
        self._phases.record(command.instance_id, PhaseName.INIT, sent_s)
        self._loads[command.instance_id] = _Load(room=room, pool=pool, grows=True)

    def grows(self, instance_id: InstanceId) -> bool:
        """Parts of a longer range of the stage are on their way."""
        return instance_id in self._loads and self._loads[instance_id].grows

    def grown(self, instance_id: InstanceId) -> tuple[Phase, ...]:
        """The stage has its longer range; what loading that took."""
        load = self._loads.pop(instance_id, None)
        if load is None:
            return ()
        log.info(
            "the parts of a longer range have come",
            action="parts_came",
            instance_id=instance_id,
            device_bytes=load.device_bytes,
            pool_bytes=load.pool_bytes,
        )
        return tuple(self._phases.take(instance_id).phases)

    def renamed(self, old_id: InstanceId, new_id: InstanceId) -> None:
        """A stage that has become whole is another instance's from now on."""
        self.graphs.rename(old_id, new_id)
        self.kernels.rename(old_id, new_id)

    def place(
        self, command: PlacePart, ready_s: float, following: PlacePart | None = None
    ) -> StageLoaded | bool:
        """Copy a part; the answer when it was the last of a load, else whether it is in place: one
        whose copies go on beside batches is to be placed again.

        Args:
            command: Of which stage and part.
            ready_s: Since when it is ready. What was done since then, such as a batch on the parts
                that are in place, is no loading of it.
            following: The next one that has come, of whatever stage: its copies may begin.

        Raises:
            EngineError: the tensors are not what the engine expects, or graphs not what was
                recorded.
            BadCheckpoint: a tensor lies outside the pool.
            OSError: recorded graphs cannot be written.
        """
        instance_id = command.instance_id
        load = self._loads[instance_id]
        start_s = self._phases.start_s(instance_id, ready_s)
        if not load.delayed:
            load.delayed = True
            pause_blocking(self._faults.delay_s("load"))
        placed = self._engine.place_part(
            instance_id,
            command.part,
            load.pool.sources(command),
            load.pool.behind(instance_id, following),
        )
        if placed.waits:
            return False
        self.graphs.placed(instance_id, command.part)
        if load.grows:
            _count(load, command, placed)
        if self._pins is not None and command.tensors:
            ends = [place.offset + place.size_bytes for place in command.tensors]
            self._pins.want(min(place.offset for place in command.tensors), max(ends))
        end_s = self._clock.monotonic_s()
        self._phases.record(instance_id, PhaseName.LOAD, start_s, end_s - placed.convert_s)
        if placed.convert_s > 0:
            self._phases.record(instance_id, PhaseName.CONVERT, end_s - placed.convert_s, end_s)
        if not placed.ready or load.grows:
            return True
        recorded = self.graphs.loaded(instance_id)
        del self._loads[instance_id]
        phases = tuple(self._phases.take(instance_id).phases)
        return StageLoaded(
            instance_id=instance_id,
            phases=phases,
            kv_capacity_tokens=load.room.kv_capacity_tokens,
            recorded=recorded,
        )

    def drop(self, instance_id: InstanceId) -> None:
        """Forget a load that failed or is not wanted any more, and what was recorded of it."""
        self._loads.pop(instance_id, None)
        self._phases.drop(instance_id)
        self.restoring.drop(instance_id)
        self.graphs.drop(instance_id)
        self.kernels.drop(instance_id)

    def _map(self, path: str) -> mmap.mmap:
        """The pool, read-only.

        The mapping is kept from load to load, as long as it is the same file of the same size.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino, status.st_size)
            if self._pool is None or self._pool[0] != identity:
                self._pool = (identity, mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
                if self._pins is not None:
                    self._pins.moved(memoryview(self._pool[1]))
        finally:
            os.close(descriptor)
        return self._pool[1]


def pause_blocking(seconds: float) -> None:
    """Stop this thread, as an injected fault does: the engine child has no event loop to wait
    in.
    """
    if seconds > 0:
        threading.Event().wait(seconds)


def _count(load: _Load, command: PlacePart, placed: PlacedPart) -> None:
    """Notes which way a part came to a stage that grows."""
    load.device_bytes += placed.by_device_bytes
    if not placed.by_device_bytes:
        load.pool_bytes += sum(place.size_bytes for place in command.tensors)
    if placed.why:
        log.info(
            "a part comes from the host pool, and not from a neighbour's device",
            action="part_not_lent",
            instance_id=command.instance_id,
            part=command.part,
            why=placed.why,
        )
