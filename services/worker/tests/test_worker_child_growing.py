"""What the engine child says of the way that parts came to a stage that grows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from pilotlight.common.clock import SystemClock
from pilotlight.common.faults import Faults
from pilotlight.common.messages.engine import PlacePart
from pilotlight.common.messages.pipelines import ExtendStage
from pilotlight.common.messages.pool import TensorPlace
from pilotlight.common.phases import PhaseRecorder
from pilotlight.engine.results import PlacedPart, StageRoom
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Dtype, Stage
from pilotlight.worker.engine_child.stages import StageLoads

INSTANCE = InstanceId("i")
ROOM = StageRoom(parts=(3, 4), parameter_bytes=0, kv_bytes_per_token=1, kv_capacity_tokens=16)


class Engine:
    """Places parts as it is told."""

    def __init__(self, *placed: PlacedPart) -> None:
        self._placed = list(placed)

    def begin_load(self, *given: Any, **named: Any) -> StageRoom:
        return ROOM

    def extend(self, *given: Any, **named: Any) -> StageRoom:
        return ROOM

    def place_part(
        self, instance_id: InstanceId, part: int, tensors: Mapping[str, Any], following: Any = None
    ) -> PlacedPart:
        return self._placed.pop(0)


def test_bytes_are_counted_by_their_way_and_each_part_that_was_not_lent_says_why(
    tmp_path: Path,
) -> None:
    pool = tmp_path / "pool"
    pool.write_bytes(bytes(64))
    engine = Engine(
        PlacedPart(copy_s=0.0, convert_s=0.0, ready=False, waits=True),
        PlacedPart(copy_s=0.0, convert_s=0.0, ready=False, by_device_bytes=24),
        PlacedPart(copy_s=0.0, convert_s=0.0, ready=True, why="it was late"),
    )
    clock = SystemClock()
    loads = StageLoads(engine, clock, Faults(), PhaseRecorder(clock, "worker", "engine"))
    loads.extend(
        ExtendStage(
            instance_id=INSTANCE, stage=Stage(0, 4), device_bytes=1 << 20, pool_path=str(pool)
        ),
        0.0,
    )
    tensor = TensorPlace(name="a", dtype=Dtype.FLOAT32, shape=(6,), offset=0, size_bytes=24)
    parts = [
        PlacePart(instance_id=INSTANCE, part=part, tensors=(tensor,) * (part - 2))
        for part in (3, 3, 4)
    ]
    with structlog.testing.capture_logs() as logs:
        assert [loads.place(part, 0.0) for part in parts] == [False, True, True]
        loads.grown(INSTANCE)
        assert loads.grown(INSTANCE) == ()
    (refused,) = [line for line in logs if line["action"] == "part_not_lent"]
    assert (refused["part"], refused["why"]) == (4, "it was late")
    (came,) = [line for line in logs if line["action"] == "parts_came"]
    assert (came["device_bytes"], came["pool_bytes"]) == (24, 48)
