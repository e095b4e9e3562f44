"""Loading stages in the engine child: parts from the host pool to their place, and what that took."""

import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pilotlight.common.clock import Clock, moment_of
from pilotlight.common.errors import BadCheckpoint
from pilotlight.common.faults import Faults
from pilotlight.common.messages.engine import LoadStage, PlacePart, StageLoaded
from pilotlight.engine.results import PlacedPart, StageRoom
from pilotlight.policy.coverage import departed_s
from pilotlight.policy.types import Dtype, InstanceId, ModelSpec, Moment, Phase, PhaseName, Stage
from pilotlight.worker.child_pins import Pins

MERGE_GAP_S = 0.001
"""Intervals of one phase that are closer than this are one: the gap is our own loop."""
PROCESS = "worker"

Source = tuple[Dtype, tuple[int, ...], memoryview]


class LoadingEngine(Protocol):
    """What loading asks of the engine."""

    def begin_load(
        self, instance_id: InstanceId, spec: ModelSpec, stage: Stage, dtype: Dtype, device_bytes: int
    ) -> StageRoom: ...
    def place_part(self, instance_id: InstanceId, part: int, tensors: Mapping[str, Source]) -> PlacedPart: ...


@dataclass(slots=True, kw_only=True)
class Intervals:
    """Active intervals in order, each a phase's."""

    wall_offset_s: float
    phases: list[Phase] = field(default_factory=list[Phase])

    def start_s(self, sent: Moment | None, received_s: float) -> float:
        """When the next interval begins: with the word that led to it, but not before the end of the last one."""
        begun_s = departed_s(sent, Moment(at_s=received_s, wall_offset_s=self.wall_offset_s))
        return max(begun_s, self.phases[-1].end_s) if self.phases else begun_s

    def add(self, name: PhaseName, start_s: float, end_s: float, *, apart: bool = False) -> None:
        """Add an interval; it prolongs the last one when they are of one phase and nearly touch, unless it is set ``apart``."""
        if end_s <= start_s:
            return
        last = self.phases[-1] if self.phases and not apart else None
        if last is not None and last.name is name and start_s - last.end_s < MERGE_GAP_S:
            self.phases.pop()
            start_s = last.start_s
        self.phases.append(
            Phase(name=name, start_s=start_s, end_s=end_s, wall_offset_s=self.wall_offset_s, process=PROCESS, detail="engine")
        )


@dataclass(slots=True, kw_only=True)
class _Load:
    command: LoadStage
    room: StageRoom
    pool: mmap.mmap
    intervals: Intervals
    delayed: bool = False
    ran_until_s: float = 0.0
    """When a batch on the parts that are in place last ran: a part that came meanwhile is loaded from then on."""


class StageLoads:
    """The stages that are being loaded."""

    def __init__(self, engine: LoadingEngine, clock: Clock, faults: Faults, pins: Pins | None = None) -> None:
        self._pins = pins
        self._engine = engine
        self._clock = clock
        self._faults = faults
        self._loads: dict[InstanceId, _Load] = {}
        self._pool: tuple[tuple[int, int, int], mmap.mmap] | None = None

    def __contains__(self, instance_id: InstanceId) -> bool:
        return instance_id in self._loads

    @property
    def any(self) -> bool:
        """Some stage is being loaded."""
        return bool(self._loads)

    def begin(self, command: LoadStage) -> StageRoom:
        """Set a stage up; what it has room for.

        Raises:
            EngineError: the engine cannot hold it.
            OSError: the pool cannot be mapped.
        """
        begun = moment_of(self._clock)
        intervals = Intervals(wall_offset_s=begun.wall_offset_s)
        start_s = intervals.start_s(command.sent, begun.at_s)
        pool = self._map(command.pool_path)
        model = command.model
        room = self._engine.begin_load(command.instance_id, model.spec, command.stage, model.dtype, command.device_bytes)
        intervals.add(PhaseName.INIT, start_s, self._clock.monotonic_s())
        self._loads[command.instance_id] = _Load(command=command, room=room, pool=pool, intervals=intervals)
        return room

    def place(self, command: PlacePart) -> StageLoaded | None:
        """Copy a part; the answer when it was the last.

        Raises:
            EngineError: the tensors are not what the engine expects.
            BadCheckpoint: a tensor lies outside the pool.
        """
        load = self._loads[command.instance_id]
        loaded_s = load.intervals.start_s(command.ready, self._clock.monotonic_s())
        start_s = max(loaded_s, load.ran_until_s)
        if not load.delayed:
            load.delayed = True
            pause_blocking(self._faults.delay_s("load"))
        placed = self._engine.place_part(command.instance_id, command.part, _sources(load.pool, command))
        if self._pins is not None and command.tensors:
            ends = [place.offset + place.size_bytes for place in command.tensors]
            self._pins.want(min(place.offset for place in command.tensors), max(ends))
        end_s = self._clock.monotonic_s()
        load.intervals.add(PhaseName.LOAD, start_s, end_s - placed.convert_s, apart=start_s > loaded_s)
        load.intervals.add(PhaseName.CONVERT, end_s - placed.convert_s, end_s)
        if not placed.ready:
            return None
        del self._loads[command.instance_id]
        return StageLoaded(
            instance_id=command.instance_id,
            phases=tuple(load.intervals.phases),
            kv_capacity_tokens=load.room.kv_capacity_tokens,
        )

    def ran(self, instance_id: InstanceId, start_s: float) -> float:
        """A batch of a stage that is being loaded has run until now; when it began, which was with the end of the last part if it
        began right after that.
        """
        load = self._loads.get(instance_id)
        if load is None:
            return start_s
        load.ran_until_s = self._clock.monotonic_s()
        placed_s = load.intervals.phases[-1].end_s if load.intervals.phases else start_s
        return placed_s if 0 <= start_s - placed_s < MERGE_GAP_S else start_s

    def drop(self, instance_id: InstanceId) -> None:
        """Forget a load that failed or is not wanted any more."""
        self._loads.pop(instance_id, None)

    def _map(self, path: str) -> mmap.mmap:
        """The pool, read-only. The mapping is kept from load to load, as long as it is the same file of the same size."""
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
    """Stop this thread, as an injected fault does: the engine child has no event loop to wait in."""
    if seconds > 0:
        threading.Event().wait(seconds)


def _sources(pool: mmap.mmap, command: PlacePart) -> dict[str, Source]:
    view = memoryview(pool)
    sources: dict[str, Source] = {}
    for place in command.tensors:
        end = place.offset + place.size_bytes
        if not 0 <= place.offset <= end <= len(view):
            raise BadCheckpoint(f"{place.name} lies at [{place.offset}, {end}), outside the pool of {len(view)} bytes")
        sources[place.name] = (place.dtype, place.shape, view[place.offset : end])
    return sources
