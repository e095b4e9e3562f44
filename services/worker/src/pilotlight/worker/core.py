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


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSteps:
    """Which steps of a start go on beside each other; off, one waits for the other (ParaServe,
    Fig. 9).
    """

    prefetch: bool = True
    """Parts come while the engine's process and its device get ready."""
    stream: bool = True
    """A part is placed as soon as it is on the node, while others come."""
    overlap: bool = True
    """Prompts run, and stages are joined, while parts come."""


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
    steps: StartSteps = StartSteps()
    """Of starts; those of a measurement wait for each other."""
    make_way: Callable[[], None] = _nothing
    """Called when there is demand: what runs because there was time ends at once."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set on every change of what is held: it is reported at once."""
    room_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set on every change of what takes device memory, or wants more: for ``Lending``."""
