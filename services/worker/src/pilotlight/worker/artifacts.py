"""Artifacts for starts: found while the parts are leased, checked, and remembered.

An artifact is executable input: one that this cluster did not sign, or that differs in one field or
byte from what is asked for, is refused by the name of that, counted, told as an event, and the
start computes everything itself.
"""

from collections import OrderedDict

import structlog
from blake3 import blake3

from pilotlight.common.artifact_signing import is_signed
from pilotlight.common.errors import PilotlightError, RestoreFailed
from pilotlight.common.ids import new_event_id
from pilotlight.common.messages.artifacts import (
    FIND_ARTIFACTS_SUBJECT,
    ArtifactInfo,
    ArtifactsFound,
    FindArtifacts,
)
from pilotlight.common.messages.codec import decode_json
from pilotlight.common.messages.events import Event, event_subject
from pilotlight.common.messages.hold import Hold
from pilotlight.common.store import ObjectStore, artifact_key
from pilotlight.common.waiting import within
from pilotlight.policy.ids import Digest
from pilotlight.policy.materialized import FORMAT, Artifact, Fingerprint, first_difference
from pilotlight.worker.core import WorkerCore

log = structlog.get_logger()

MANIFEST = "manifest"
FIND_S = 0.5
"""A start waits no longer than this for its artifact."""
REMEMBERED = 64
"""Manifests that are kept, of a few kilobytes each."""
MAX_MANIFEST_BYTES = 1 << 20


class Refused(Exception):
    """An artifact is not used; ``field`` says what is wrong with it."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


def checked(info: ArtifactInfo, data: bytes, wanted: Fingerprint, cluster_key: bytes) -> Artifact:
    """The manifest, if it is this cluster's, whole, and of the fingerprint that is wanted.

    Args:
        info: what is listed of it.
        data: its bytes.
        wanted: what it must have been made for.
        cluster_key: what it must be signed with.

    Raises:
        Refused: by the name of what is wrong: ``signature``, ``size``, ``digest``, ``manifest``,
            ``format``, or a field of the fingerprint.
    """
    signed = is_signed(
        cluster_key,
        info.signature,
        fingerprint=info.fingerprint,
        kind=info.kind,
        blob_digest=info.blob_digest,
        size_bytes=info.size_bytes,
    )
    if not signed:
        raise Refused("signature")
    if len(data) != info.size_bytes or len(data) > MAX_MANIFEST_BYTES:
        raise Refused("size")
    if blake3(data).hexdigest() != info.blob_digest:
        raise Refused("digest")
    try:
        artifact = decode_json(data, Artifact)
    except PilotlightError as error:
        raise Refused("manifest") from error
    if artifact.format != FORMAT:
        raise Refused("format")
    if field := first_difference(wanted, artifact.fingerprint):
        raise Refused(field)
    if info.fingerprint != wanted.digest:
        raise Refused("fingerprint")
    return artifact


class Artifacts:
    """What one worker knows of artifacts."""

    def __init__(self, core: WorkerCore, store: ObjectStore, cluster_key: str | None) -> None:
        """Finds nothing without the cluster's key: signatures cannot be checked then."""
        self._core = core
        self._store = store
        self._cluster_key = cluster_key.encode() if cluster_key is not None else None
        self._known: OrderedDict[Digest, bytes] = OrderedDict()
        self._given: set[Digest] = set()
        """Fingerprints of which the engine that runs has restored stages."""
        self._distrusted: dict[Digest, None] = {}

    async def of(self, hold: Hold) -> bytes:
        """The manifest that a stage is restored from; empty where there is none that is valid."""
        environment = self._core.environment
        whole = hold.stage == hold.model.spec.whole and len(hold.members) <= 1
        if environment is None or self._cluster_key is None or not whole:
            return b""
        wanted = Fingerprint.of(environment, hold.model)
        digest = wanted.digest
        if digest in self._distrusted:
            self._count("distrusted")
            return b""
        known = self._known.get(digest)
        if known is None:
            known = await self._look(hold, wanted, self._cluster_key)
        if known:
            self._remember(digest, known)
            self._given.add(digest)
            self._count("found")
        return known

    def on_engine_died(self, code: str) -> None:
        """The engine has ended.

        If a restore ended it, what it was restored from is not used again.
        """
        given, self._given = self._given, set()
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

    async def _look(self, hold: Hold, wanted: Fingerprint, key: bytes) -> bytes:
        try:
            return await within(FIND_S, self._find(wanted, key), "finding an artifact")
        except Refused as refused:
            self._core.metrics.restores.labels(outcome="refused", field=refused.field).inc()
            log.warning(
                "artifact refused",
                action="artifact_refused",
                instance_id=hold.instance_id,
                model=hold.model.name,
                field=refused.field,
            )
            data = {"model": hold.model.name, "field": refused.field}
            self._tell("restore_refused", wanted.digest, data)
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
