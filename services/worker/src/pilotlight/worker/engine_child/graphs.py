"""Graphs of the stages in an engine child: restored from an archive, or recorded into one."""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from blake3 import blake3
from msgspec.structs import asdict

from pilotlight.common.errors import PilotlightError, RestoreFailed
from pilotlight.common.messages.codec import decode_json
from pilotlight.common.messages.engine import LoadStage
from pilotlight.common.messages.graphs import (
    ArchiveRecorded,
    GraphsRecorded,
    GraphWays,
    RangeFile,
    RangeRecorded,
    StageGraphs,
)
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.policy.materialized import GRAPHS, Artifact, Blob, GraphLayout, range_kind
from pilotlight.policy.model import Stage

if TYPE_CHECKING:
    from pilotlight.engine.compute import GraphPlan
    from pilotlight.engine.cuda.fitting import RestoreNews
    from pilotlight.engine.cuda.recording import GraphRecorder
    from pilotlight.engine.cuda.restored import RestoredGraphs
    from pilotlight.engine.device.memory import StageMemory

log = structlog.get_logger()


USES_TOLD_AFTER = 64
"""Turns of the loop after which a stage first tells what it has used; then after twice as many, and
so on: who ends without a word has told half of it, in a few messages."""


@dataclass(slots=True)
class _Restored:
    plan: "RestoredGraphs"
    told: "RestoreNews"
    prove: bool
    trigger: Callable[[], None]
    awaited: set[int]
    """Parts that are in place before it triggers kernels; none: nothing triggers any."""
    archive: "ArchiveFile | None" = None
    """Of the whole model's graphs, where their kernels come from images, ..."""
    layout: GraphLayout | None = None
    """... how they lie, ..."""
    uses_before: Mapping[int, int] = field(default_factory=dict[int, int])
    """... and how often each was used before."""
    told_uses: dict[int, int] = field(default_factory=dict[int, int])
    turns: int = 0
    due: int = USES_TOLD_AFTER

    def turn(self) -> dict[int, int]:
        """A turn of the loop is over: what was used since it was told last, if that is due."""
        self.turns += 1
        if self.turns < self.due:
            return {}
        self.due *= 2
        return self.untold()

    def untold(self) -> dict[int, int]:
        """How often each size was used since this was asked last."""
        before, now = self.told_uses, self.plan.uses
        self.told_uses = now
        return {size: n for size in now if (n := now[size] - before.get(size, 0)) > 0}


class GraphPlans:
    """What is to become of each stage's graphs."""

    def __init__(self) -> None:
        self._restored: dict[InstanceId, _Restored] = {}
        self._recorders: dict[InstanceId, _Recorder] = {}
        self._gone: list[StageGraphs] = []

    def plan_of(self, command: LoadStage) -> "GraphPlan | None":
        """What a load is to do about graphs; None: nothing but capture them as they are used.

        Raises:
            RestoreFailed: the artifact cannot be read.
        """
        if command.record:
            return self._recorder(command)
        if command.artifact and (command.graphs or command.precomputed.ranges):
            return self._restorer(command)
        return None

    def placed(self, instance_id: InstanceId, part: int) -> None:
        """A part of the stage is in place: its first layer may run now, to trigger kernels."""
        restored = self._restored.get(instance_id)
        if restored is None or part not in restored.awaited:
            return
        restored.awaited.discard(part)
        if not restored.awaited:
            restored.trigger()

    def loaded(self, instance_id: InstanceId) -> GraphsRecorded | None:
        """The stage's parts are all in place: records or proves its graphs, if that is wanted.

        Raises:
            OSError: the archive cannot be written.
            EngineError: a graph is not what was recorded.
        """
        if (restored := self._restored.get(instance_id)) is not None and restored.prove:
            restored.plan.prove()
        recorder = self._recorders.pop(instance_id, None)
        return None if recorder is None else recorder.record()

    def news(self) -> list[StageGraphs]:
        """What has changed since the last time."""
        said, self._gone = self._gone, []
        for instance_id, one in self._restored.items():
            if uses := one.turn():
                said.append(StageGraphs(instance_id=instance_id, uses=uses))
            now = one.plan.news
            if now == one.told:
                continue
            one.told = now
            said.append(
                StageGraphs(
                    instance_id=instance_id,
                    ready=now.ready,
                    proved=now.proved,
                    refused=now.refused,
                    message=now.message,
                )
            )
        return said

    def take_archive(self, instance_id: InstanceId) -> "RestoredArchive | None":
        """What a stage's graphs came from, once; None: they came in another way, or from nothing,
        or it was taken.
        """
        one = self._restored.get(instance_id)
        if one is None or one.archive is None or one.layout is None or one.plan.memory is None:
            return None
        archive, one.archive = one.archive, None
        uses = Counter(one.uses_before) + Counter(one.plan.uses)
        sizes = sorted(one.layout.digests, key=lambda size: (-uses[size], size))
        return RestoredArchive(
            archive.blob, archive.data, tuple(sizes), one.plan.memory, one.layout.pool_bytes
        )

    def rename(self, old_id: InstanceId, new_id: InstanceId) -> None:
        """The stage is another instance's from now on."""
        if (restored := self._restored.pop(old_id, None)) is not None:
            self._restored[new_id] = restored

    def drop(self, instance_id: InstanceId) -> None:
        """The stage is held no longer: what is to be remembered of its graphs is told."""
        restored = self._restored.pop(instance_id, None)
        if restored is not None and (uses := restored.untold()):
            self._gone.append(StageGraphs(instance_id=instance_id, uses=uses))
        self._recorders.pop(instance_id, None)

    def _recorder(self, command: LoadStage) -> "GraphRecorder":
        from pilotlight.engine.cuda.recording import GraphRecorder
        from pilotlight.engine.cuda.tracing import TracingRecorder

        ways, made = command.precomputed.ways, GraphRecorder()
        if ways.pointers == "indirect":
            witness = Path(ways.witness).read_bytes() if ways.witness else None
            made = TracingRecorder(witness)
        self._recorders[command.instance_id] = _Recorder(
            made, command.record, command.precomputed.ranges
        )
        return made

    def _restorer(self, command: LoadStage) -> "RestoredGraphs | None":
        try:
            artifact = decode_json(command.artifact, Artifact)
        except PilotlightError as error:
            raise RestoreFailed(f"the artifact cannot be read: {error.message}") from error
        from pilotlight.engine.cuda.fitting import RestoreNews

        whole = command.stage == command.model.spec.whole
        made, trigger, archive, blob = None, None, None, artifact.graphs_blob
        if command.graphs and artifact.graphs is not None and blob is not None:
            archive = ArchiveFile(command.graphs, blob)
            made, trigger = _restoring(command, artifact.graphs, archive, later=not whole)
        made = _of_range(command, artifact, made) or made
        if made is None:
            return None
        awaited = {0, 1} if trigger is not None else set[int]()
        self._restored[command.instance_id] = _Restored(
            made, RestoreNews(), command.prove, trigger or (lambda: None), awaited
        )
        if archive is not None and whole and command.precomputed.ways == GraphWays():
            restored = self._restored[command.instance_id]
            restored.archive, restored.uses_before = archive, command.precomputed.uses
            restored.layout = artifact.graphs
        return made


@dataclass(frozen=True, slots=True)
class _Recorder:
    plan: "GraphRecorder"
    path: str
    ranges: tuple[RangeFile, ...]

    def record(self) -> GraphsRecorded:
        """What comes of the whole model's graphs; if any does, of those of ranges, too.

        Raises:
            OSError: an archive cannot be written.
        """
        came = self._recorded(None, self.path, GRAPHS)
        ranges = self.ranges if came.blob is not None else ()
        of_ranges = (
            (one.layers, self._recorded(one.layers, one.path, range_kind(one.layers)))
            for one in ranges
        )
        return GraphsRecorded(
            **asdict(came),
            ranges=tuple(RangeRecorded(layers=layers, **asdict(one)) for layers, one in of_ranges),
        )

    def _recorded(self, layers: Stage | None, path: str, kind: str) -> ArchiveRecorded:
        from pilotlight.engine.cuda.recording import NotRecorded

        try:
            made = self.plan.record(layers)
        except NotRecorded as error:
            facts = {"field": error.field, "kind": kind}
            log.warning("graphs not recorded", action="graphs_not_recorded", **facts)
            return ArchiveRecorded(refused=error.field, message=str(error))
        Path(path).write_bytes(made.archive)
        blob = Blob(kind=kind, digest=digest_of(made.archive), size_bytes=len(made.archive))
        return ArchiveRecorded(layout=made.layout, blob=blob)


def _of_range(
    command: LoadStage, artifact: Artifact, behind: "RestoredGraphs | None"
) -> "RestoredGraphs | None":
    """What restores the graphs of a stage's own range; None: it is given none.

    Args:
        command: the load.
        artifact: what the stage is restored from.
        behind: restores the whole model's, should the stage become it.
    """
    layers, precomputed = command.stage, command.precomputed
    path = next((one.path for one in precomputed.ranges if one.layers == layers), "")
    found = artifact.graphs_of(layers) if path else None
    if found is None:
        return None
    from pilotlight.engine.cuda.restored import RestoredGraphs

    layout, blob = found
    return RestoredGraphs(
        layout,
        ArchiveFile(path, blob).read,
        layers=layers,
        behind=behind,
        launch_lists=precomputed.launch_lists,
        uses=precomputed.uses,
    )


def _restoring(
    command: LoadStage, layout: GraphLayout, archive: "ArchiveFile", *, later: bool
) -> "tuple[RestoredGraphs, Callable[[], None] | None]":
    """What restores a stage's graphs, in the way that is asked for; and what triggers its kernels,
    if anything does: of a stage that is to grow they come from images.
    """
    from pilotlight.engine.cuda.restored import RestoredGraphs

    ways, uses = command.precomputed.ways, command.precomputed.uses
    if ways == GraphWays():
        lists = command.precomputed.launch_lists
        made = RestoredGraphs(layout, archive.read, later=later, launch_lists=lists, uses=uses)
        return made, None
    from pilotlight.engine.cuda.graph_device import ArchiveOnDevice
    from pilotlight.engine.cuda.indirect import Anywhere
    from pilotlight.engine.cuda.triggering import TriggeredGraphs
    from pilotlight.native.handles import SymbolKernels

    indirect = ways.pointers == "indirect"
    if ways.kernels == "trigger" and not later:
        made = TriggeredGraphs(layout, archive.read, anywhere=indirect, uses=uses)
        return made, made.trigger
    kernels = SymbolKernels if ways.kernels == "symbol" else None
    if not indirect:
        opened = partial(ArchiveOnDevice, kernels=kernels)
        plan = RestoredGraphs(layout, archive.read, open_archive=opened, later=later, uses=uses)
        return plan, None
    way = Anywhere(kernels)
    plan = RestoredGraphs(
        layout, archive.read, open_archive=way.open, fit=way.fit, later=later, uses=uses
    )
    return plan, None


@dataclass(frozen=True, slots=True)
class RestoredArchive:
    """What a whole model's graphs came from."""

    blob: Blob
    data: bytes
    sizes: tuple[int, ...]
    """Of its graphs, those first that were used most."""
    memory: "StageMemory"
    """Of the stage."""
    pool_bytes: int
    """Of the graph pool, what its graphs use."""


class ArchiveFile:
    """An archive that the worker has put somewhere; it is open from now on."""

    def __init__(self, path: str, blob: Blob) -> None:
        self.blob = blob
        self.data = b""
        """Its bytes, once they were read."""
        self._failed = ""
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._failed = str(error)

    def __del__(self) -> None:
        self._close()

    def read(self) -> bytes:
        """All of it, once.

        Raises:
            GraphsRefused: kind and ``file``, ``size`` or ``digest``: it is not what the artifact
                says.
        """
        from pilotlight.engine.cuda.fitting import GraphsRefused

        if self._descriptor < 0:
            raise GraphsRefused(f"{self.blob.holds}_file", self._failed)
        size_bytes = os.fstat(self._descriptor).st_size
        kind = self.blob.holds
        if size_bytes != self.blob.size_bytes or size_bytes > self.blob.most_bytes:
            raise GraphsRefused(
                f"{kind}_size", f"{size_bytes} bytes, and the artifact says {self.blob.size_bytes}"
            )
        with os.fdopen(self._descriptor, "rb", buffering=0) as file:
            self._descriptor = -1
            data = file.readall()
        if digest_of(data) != self.blob.digest:
            raise GraphsRefused(f"{kind}_digest", "the bytes are not those of the artifact")
        self.data = data
        return data

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def digest_of(data: bytes) -> Digest:
    """Of an archive."""
    return Digest(blake3(data).hexdigest())
