"""What an engine child tells of places in shorter pipelines."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from pilotlight.common.messages.pipelines import ConnectStage, RingUnformed, StageAddress
from pilotlight.engine.errors import BadRequest, EngineError, PeerLost
from pilotlight.engine.results import LostPipeline, StepResult
from pilotlight.policy.ids import InstanceId, NodeId
from pilotlight.policy.model import Stage
from pilotlight.worker.engine_child.neighbours import Joined
from pilotlight.worker.engine_child.pipelines import Pipelines

INSTANCE, RANGE = InstanceId("i"), Stage(0, 4)
COMMAND = ConnectStage(
    instance_id=INSTANCE,
    stage=RANGE,
    behind=StageAddress(node_id=NodeId("n2"), stage=Stage(4, 8), host="h", port=7),
    timeout_s=1.0,
    shorter=True,
)


@dataclass
class End:
    """One end of a channel."""

    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass
class Parts:
    """The engine, its loads and its neighbours, as far as they are asked."""

    made: list[Joined] = field(default_factory=list)
    refusal: EngineError | None = None
    places: list[Any] = field(default_factory=list)
    said: list[Any] = field(default_factory=list)

    def take(self) -> tuple[Joined, ...]:
        made, self.made = tuple(self.made), []
        return made

    def serves(self, instance_id: InstanceId) -> bool:
        return False

    def shorten(self, *place: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.places.append(place)


def pipelines(parts: Parts) -> Pipelines:
    def told(error: EngineError) -> tuple[str, str]:
        return error.code, error.message

    return Pipelines(parts, parts, parts, parts.said.append, told)


def test_a_stage_gets_its_place_by_the_channels_that_were_made() -> None:
    """Nothing is told of it: the pipeline that it is in goes on."""
    parts, ends = Parts(), (End(), End())
    parts.made = [Joined(COMMAND, ends)]
    pipelines(parts).join()
    assert parts.places == [(INSTANCE, RANGE, *ends)]
    assert parts.said == []


@pytest.mark.parametrize("refused", [True, False])
def test_where_there_is_none_that_is_said(refused: bool) -> None:
    parts, ends = Parts(), (End(), End())
    if refused:
        parts.refusal = BadRequest("it is in no pipeline")
    parts.made = [Joined(COMMAND, ends if refused else PeerLost("it is gone"))]
    pipelines(parts).join()
    (told,) = parts.said
    assert isinstance(told, RingUnformed)
    assert (told.instance_id, bool(told.code), bool(told.message)) == (INSTANCE, True, True)
    assert [end.closed for end in ends] == [refused] * 2


def test_a_ring_that_breaks_before_it_runs_is_told() -> None:
    parts = Parts()
    lost = LostPipeline(instance_id=INSTANCE, code="worker_lost", message="it hung up")
    step = StepResult(
        produced=(), waiting=0, running=0, kv_free_tokens=0, step_time_s=0.0, unformed=(lost,)
    )
    pipelines(parts).after(step)
    assert parts.said == [
        RingUnformed(instance_id=INSTANCE, code="worker_lost", message="it hung up")
    ]
