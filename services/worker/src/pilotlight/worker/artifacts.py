"""Artifacts for starts: found while the parts are leased, checked, and remembered.

An artifact is executable input: one that this cluster did not sign, or that differs in one field or
byte from what is asked for, is refused by the name of that, counted, told as an event, and the
start computes everything itself.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from pilotlight.common.errors import PilotlightError, RestoreFailed
from pilotlight.common.ids import new_event_id
from pilotlight.common.messages.artifacts import (
    FIND_ARTIFACTS_SUBJECT,
    ArtifactsFound,
    FindArtifacts,
)
from pilotlight.common.messages.codec import decode_json
from pilotlight.common.messages.events import Event, event_subject
from pilotlight.common.messages.graphs import GraphWays, RangeFile, StageGraphs, StageKernels
from pilotlight.common.messages.hold import Hold
from pilotlight.common.store import ObjectStore, artifact_key
from pilotlight.common.waiting import within
from pilotlight.policy.ids import Digest, InstanceId, ModelName
from pilotlight.policy.materialized import Artifact, Blob, Fingerprint, first_difference
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.found import Found, blobs_of, has_a_range, is_whole, may_grow
from pilotlight.worker.graph_files import GraphFiles, WrongArchive
from pilotlight.worker.graph_uses import GraphUses
from pilotlight.worker.manifests import Refused, checked

log = structlog.get_logger()

MANIFEST = "manifest"
FIND_S = 0.5
"""A start waits no longer than this for its artifact."""
GRAPHS_S = 0.3
"""And no longer for its graphs, which come behind it: captured ones cost 10 ms each."""
KERNELS_S = 1.0
"""And for its compiled kernels: compiling them takes seconds."""
SUSPECTED = 2
"""Engines that ended before an artifact's kernels had given a token: then they are not used."""
REMEMBERED = 64
"""Manifests that are kept, of a few kilobytes each."""


@dataclass(slots=True)
class _Stage:
    """One that was told where its graphs are."""

    fingerprint: Digest
    model: ModelName
    counted: bool = False
    """Its graphs come back."""
    refused: bool = False
    """Its graphs do not."""
    unsettled: bool = False
    """It has compiled kernels that have given nothing yet."""
    told: bool = False
    """It has told of some of what it used."""


class Artifacts:
    """What one worker knows of artifacts."""

    def __init__(
        self,
        core: WorkerCore,
        store: ObjectStore,
        cluster_key: str | None,
        *,
        graphs: bool = False,
        launch_lists: bool = False,
        ways: GraphWays | None = None,
        uses: GraphUses | None = None,
    ) -> None:
        """Knows of none yet.

        Args:
            core: the worker's.
            store: where artifacts lie.
            cluster_key: their signatures'; without it nothing is found, for none can be checked.
            graphs: engines restore those of artifacts, and their compiled kernels.
            launch_lists: steps do not wait for those graphs.
            ways: how they restore graphs.
            uses: how often graphs were used; None: it is known for as long as this is.
        """
        self._with_graphs, self._ways = graphs, ways or GraphWays()
        self.launch_lists = launch_lists
        self._core = core
        self._store = store
        self._cluster_key = cluster_key.encode() if cluster_key is not None else None
        self._known: OrderedDict[Digest, bytes] = OrderedDict()
        self._given: set[Digest] = set()
        """Fingerprints of which the engine that runs has restored stages."""
        self._distrusted: dict[Digest, None] = {}
        self._files = GraphFiles()
        self._fetching: dict[Digest, asyncio.Task[None]] = {}
        self._stages: OrderedDict[InstanceId, _Stage] = OrderedDict()
        """Those that were told where their graphs or kernels are."""
        self._uses = uses or GraphUses(core.background)
        self._suspected: dict[Digest, int] = {}
        """Engines that ended with an artifact's kernels unsettled."""

    def at_once(self, hold: Hold) -> Found | None:
        """As ``of``, where nothing has to be waited for, as in a start of a model that was here
        before; None of any other.
        """
        wanted = self._wanted(hold)
        if wanted is None:
            return Found()
        digest = wanted.digest
        known = self._known.get(digest)
        if not known or digest in self._distrusted:
            return None
        if not self._with_graphs:
            self._give(digest, known)
            return Found(known)
        blobs = [blob for blob, _, _ in self._blobs_of(hold, digest, known)]
        paths = ["" if blob is None else self._files.path_of(blob) for blob in blobs]
        uses = self._uses.known(digest) if any(paths) else {}
        late = any(blob and not path for blob, path in zip(blobs, paths, strict=True))
        if uses is None or late:
            return None
        self._give(digest, known)
        return self._found(hold, digest, known, paths, uses)

    async def of(self, hold: Hold) -> Found:
        """What a stage is restored from."""
        wanted = self._wanted(hold)
        if wanted is None or self._cluster_key is None:
            return Found()
        digest = wanted.digest
        if digest in self._distrusted:
            self._count("distrusted")
            return Found()
        known = self._known.get(digest)
        if known is None:
            known = await self._look(hold, wanted, self._cluster_key)
        if not known:
            return Found()
        self._give(digest, known)
        if not self._with_graphs:
            return Found(known)
        paths = await asyncio.gather(
            *(self._file_of(hold, digest, *blob) for blob in self._blobs_of(hold, digest, known))
        )
        uses = await self._uses.of(digest) if any(paths) else {}
        return self._found(hold, digest, known, paths, uses)

    def close(self) -> None:
        """Give the memory of archives back: no engine reads them any more."""
        self._files.close()

    def on_restored(self, told: StageGraphs | StageKernels) -> None:
        """An engine says what became of what a stage is restored from."""
        if isinstance(told, StageGraphs):
            self.on_graphs(told)
        else:
            self.on_kernels(told)

    def on_graphs(self, told: StageGraphs) -> None:
        """An engine says how far the graphs of a stage are."""
        stage = self._stages.get(told.instance_id)
        if stage is None:
            return
        if told.uses:
            self._uses.add(stage.fingerprint, told.uses, again=stage.told)
            stage.told = True
        elif told.refused and not stage.refused:
            stage.refused = True
            self._refuse(stage.fingerprint, stage.model, told.instance_id, told.refused)
        elif told.ready and not stage.counted:
            stage.counted = True
            self._count("graphs")

    def on_kernels(self, told: StageKernels) -> None:
        """An engine says what became of the compiled kernels of a stage."""
        stage = self._stages.get(told.instance_id)
        if stage is None:
            return
        if told.settled:
            stage.unsettled = False
            self._suspected.pop(stage.fingerprint, None)
        elif told.refused:
            stage.unsettled = False
            self._refuse(stage.fingerprint, stage.model, told.instance_id, told.refused)
        else:
            self._count("kernels")

    def on_renamed(self, old_id: InstanceId, new_id: InstanceId) -> None:
        """A stage is another instance's from now on."""
        if (stage := self._stages.pop(old_id, None)) is not None:
            self._stages[new_id] = stage

    def on_engine_died(self, code: str) -> None:
        """The engine has ended.

        If a restore ended it, what it was restored from is not used again.
        """
        given, self._given = self._given, set()
        for instance_id, stage in self._stages.items():
            if stage.unsettled:
                times = self._suspected[stage.fingerprint] = 1 + self._suspected.get(
                    stage.fingerprint, 0
                )
                if times == SUSPECTED:
                    self._refuse(stage.fingerprint, stage.model, instance_id, "engine_died")
        while len(self._suspected) > REMEMBERED:
            del self._suspected[next(iter(self._suspected))]
        self._stages.clear()
        if code != RestoreFailed.code:
            return
        for digest in given:
            self._known.pop(digest, None)
            self._distrusted[digest] = None
            self._tell("restore_failed", digest, {})
        while len(self._distrusted) > REMEMBERED:
            del self._distrusted[next(iter(self._distrusted))]
        self._count("failed")

    def forget(self, digest: Digest) -> None:
        """An artifact was built anew: it is looked for again."""
        self._known.pop(digest, None)
        self._distrusted.pop(digest, None)
        self._suspected.pop(digest, None)

    async def _look(self, hold: Hold, wanted: Fingerprint, key: bytes) -> bytes:
        try:
            return await within(FIND_S, self._find(wanted, key), "finding an artifact")
        except Refused as refused:
            self._refuse(wanted.digest, hold.model.name, hold.instance_id, refused.field)
        except PilotlightError as error:
            self._count("unreachable")
            log.info("no artifact", action="artifact_unreachable", error=error.message)
        return b""

    async def _find(self, wanted: Fingerprint, key: bytes) -> bytes:
        message = FindArtifacts(fingerprint=wanted.digest, model_digest=wanted.model_digest)
        found = await self._core.bus.request(
            FIND_ARTIFACTS_SUBJECT, message, ArtifactsFound, deadline_s=FIND_S
        )
        info = next((one for one in found.artifacts if one.kind == MANIFEST), None)
        if info is None:
            field = None if found.nearest is None else first_difference(wanted, found.nearest)
            if field is not None:
                raise Refused(field)
            self._count("none")
            return b""
        data = await self._store.get(artifact_key(info.blob_digest))
        checked(info, data, wanted, key)
        return data

    def _wanted(self, hold: Hold) -> Fingerprint | None:
        """Of what artifacts a stage is restored; None: of none."""
        environment = self._core.environment
        graphs = self._with_graphs and (may_grow(hold) or has_a_range(hold))
        if environment is None or self._cluster_key is None or not (is_whole(hold) or graphs):
            return None
        return Fingerprint.of(environment, hold.model)

    def _give(self, digest: Digest, manifest: bytes) -> None:
        self._remember(digest, manifest)
        self._given.add(digest)
        self._count("found")

    def _blobs_of(
        self, hold: Hold, digest: Digest, manifest: bytes
    ) -> tuple[tuple[Blob | None, str, float], ...]:
        """The whole model's graphs of an artifact, those of the stage's range, and its compiled
        kernels: each with its name, and how long it is waited for.
        """
        blobs = blobs_of(decode_json(manifest, Artifact), hold)
        kernels = None if self._suspected.get(digest, 0) >= SUSPECTED else blobs.kernels
        # Those of ranges are restored in the usual way alone.
        ranged = blobs.ranged if self._ways == GraphWays() else None
        return (
            (blobs.graphs, "graphs", GRAPHS_S),
            (ranged, "range_graphs", GRAPHS_S),
            (kernels, "kernels", KERNELS_S),
        )

    def _found(
        self,
        hold: Hold,
        digest: Digest,
        manifest: bytes,
        paths: Sequence[str],
        uses: dict[int, int],
    ) -> Found:
        """What a stage is given, where the blobs of ``_blobs_of`` are there."""
        graphs, ranged, kernels = paths
        if any(paths):
            self._stages[hold.instance_id] = _Stage(
                digest, hold.model.name, unsettled=bool(kernels)
            )
            while len(self._stages) > REMEMBERED:
                self._stages.popitem(last=False)
        elif not is_whole(hold):
            return Found()  # all that is left is of whole models
        ranges = (RangeFile(layers=hold.stage, path=ranged),) if ranged else ()
        return Found(manifest, graphs, kernels, ranges, uses, self._ways)

    async def _file_of(
        self, hold: Hold, digest: Digest, blob: Blob | None, name: str, wait_s: float
    ) -> str:
        """Where an archive is; empty where it is not here in time: then it is for the next
        start.
        """
        if blob is None:
            return ""
        path = self._files.path_of(blob)
        if not path:
            fetching = self._fetching.get(blob.digest)
            if fetching is None:
                fetching = self._core.background.spawn(
                    f"{name} of {hold.model.name}", self._fetch(hold, digest, blob)
                )
                self._fetching[blob.digest] = fetching
            with suppress(PilotlightError):
                await within(wait_s, asyncio.shield(fetching), f"fetching {name}")
            path = self._files.path_of(blob)
        if not path:
            self._count(f"{name}_late")
        return path

    async def _fetch(self, hold: Hold, digest: Digest, blob: Blob) -> None:
        try:
            self._files.keep(blob, await self._store.get(artifact_key(blob.digest)))
        except WrongArchive as wrong:
            self._refuse(digest, hold.model.name, hold.instance_id, wrong.field)
        except (PilotlightError, OSError) as error:
            log.warning(
                "no archive", action="archive_unreachable", kind=blob.kind, error=str(error)
            )
        finally:
            del self._fetching[blob.digest]

    def _refuse(self, digest: Digest, model: ModelName, instance_id: InstanceId, name: str) -> None:
        """What an artifact has is not used, for the reason of that name."""
        self._core.metrics.restores.labels(outcome="refused", field=name).inc()
        log.warning(
            "artifact refused",
            action="artifact_refused",
            instance_id=instance_id,
            model=model,
            field=name,
        )
        self._tell("restore_refused", digest, {"model": model, "field": name})

    def _remember(self, digest: Digest, data: bytes) -> None:
        self._known[digest] = data
        self._known.move_to_end(digest)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def _count(self, outcome: str) -> None:
        self._core.metrics.restores.labels(outcome=outcome, field="").inc()

    def _tell(self, kind: str, digest: Digest, data: dict[str, str]) -> None:
        self._core.background.spawn(f"event {kind}", self._publish(kind, digest, data))

    async def _publish(self, kind: str, digest: Digest, data: dict[str, str]) -> None:
        """An event is a notification: without a stream there is none."""
        event = Event(
            event_id=new_event_id(),
            kind=kind,
            entity=digest,
            at=self._core.clock.wall().isoformat(),
            data={**data, "worker_id": self._core.worker_id},
        )
        try:
            await self._core.bus.publish_event(event_subject("worker", kind), event.event_id, event)
        except PilotlightError as error:
            log.info("event not stored", action="event_lost", kind=kind, error=error.message)
