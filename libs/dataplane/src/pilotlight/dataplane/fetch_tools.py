"""What every fetch of a node works with, and what hears of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pilotlight.checkpoint.manifest import Manifest
from pilotlight.common.clock import Clock
from pilotlight.common.errors import PilotlightError
from pilotlight.common.faults import Faults
from pilotlight.common.phases import PhaseRecorder
from pilotlight.common.waiting import Signal
from pilotlight.dataplane.chunk_fetch import Distrusted, OriginObserver
from pilotlight.dataplane.lanes import Lanes
from pilotlight.dataplane.origin import Keeper, Nearby
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.readers import Readers
from pilotlight.dataplane.source_origin import OpenSource
from pilotlight.native.library import Library
from pilotlight.policy.ids import Digest
from pilotlight.policy.model import Model


class Manifests(Protocol):
    """Where manifests come from and what was learned about chunks goes to."""

    async def get(self, model: Model) -> Manifest:
        """The manifest, with some of the chunk digests that are recorded.

        Raises:
            SourceUnavailable: it cannot be read.
        """
        ...

    async def latest(self, model: Model) -> Manifest:
        """The manifest with every chunk digest that is recorded by now. Raises what ``get``
        raises.
        """
        ...

    def learned(
        self,
        model: Model,
        part: int,
        digests: tuple[Digest, ...],
        disputed: Callable[[PilotlightError], None],
    ) -> None:
        """Record the digests of a part's chunks, which were read for the first time.

        Args:
            model: The model.
            part: Number of the part, from 0.
            digests: One for each chunk of the part, in order.
            disputed: Called when another node was first, and read other bytes.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTools:
    """What every fetch of a node works with."""

    pool: HostPool
    readers: Readers
    manifests: Manifests
    open_source: OpenSource
    lanes: Lanes
    distrusted: Distrusted
    faults: Faults
    clock: Clock
    phases: PhaseRecorder
    native: Library | None = None
    """Reads files of this machine; None: it cannot be had, and they are read in Python."""
    nearby: tuple[Nearby, ...] = ()
    """What knows of origins that are nearer than a model's source, the nearest first."""
    keepers: tuple[Keeper, ...] = ()
    """What is told of verified chunks, to have them nearer next time."""
    moved: Signal = field(default_factory=Signal)
    """Sent when a chunk is begun or entered, and when a fetch begins or ends: for senders that pass
    chunks on."""


class FetchListener(OriginObserver, Protocol):
    """Hears how a fetch gets on. Calls come within the event loop and must not block."""

    def on_ready(self) -> None:
        """A part is ready."""
        ...

    def on_disputed(self, error: PilotlightError) -> None:
        """Another node read other bytes of this model before: what is in the pool is worth nothing.

        May come after the fetch.
        """
        ...
