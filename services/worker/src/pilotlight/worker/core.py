"""What the parts of one worker share."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.phases import PhaseRecorder
from pilotlight.common.service import Background
from pilotlight.policy.ids import NodeId, WorkerId
from pilotlight.policy.materialized import Environment
from pilotlight.worker.engines.switch import EngineSwitch
from pilotlight.worker.metrics import WorkerMetrics
from pilotlight.worker.requests import RequestTable
from pilotlight.worker.vocabularies import Vocabularies


def _nothing() -> None:
    pass


@dataclass(slots=True, kw_only=True)
class WorkerCore:
    """One worker's identity, its engine, its requests, and what it needs of its process."""

    worker_id: WorkerId
    node_id: NodeId
    device_bytes: int
    """Memory for models. Of a GPU for which none is set it is known when the engine has opened it:
    0 before."""
    engine: EngineSwitch
    table: RequestTable
    bus: Bus
    clock: Clock
    background: Background
    metrics: WorkerMetrics
    phases: PhaseRecorder
    vocabularies: Vocabularies
    environment: Environment | None = None
    """What the engine runs on, once it is up; None: it uses no artifacts."""
    make_way: Callable[[], None] = _nothing
    """Called when there is demand: what runs because there was time ends at once."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set on every change of what is held: it is reported at once."""
    room_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set on every change of what takes device memory, or wants more: for ``Lending``."""
