"""Builds of artifacts, as rows: whose each is, and what comes of it.

Several materializers share the rows: every move is one conditional statement, by the database's
clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, delete, func, literal, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from pilotlight.common.db import tables
from pilotlight.common.db.mapping import from_row_json, to_row_json
from pilotlight.common.db.model_rows import ModelRows
from pilotlight.common.db.session import Database
from pilotlight.common.messages.artifacts import (
    ArtifactInfo,
    EndBuild,
    FinishBuild,
    Materials,
    ReportBuild,
)
from pilotlight.materializer.build_rows import (
    artifact_of,
    build_of,
    fact_of,
    model_of,
    owned,
    told,
    waiting_row,
)
from pilotlight.policy.builds import (
    Build,
    BuildEvent,
    BuildState,
    Listed,
    NextBuild,
    Wanted,
    sources,
)
from pilotlight.policy.ids import Digest, ModelName, WorkerId
from pilotlight.policy.materialized import Artifact, Fingerprint
from pilotlight.policy.model import Model

MANIFEST = "manifest"
"""The kind of artifact that names all others of its fingerprint."""

_builds, _artifacts, _wants = tables.builds, tables.artifacts, tables.wants
_profiles = tables.profiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a choice goes by. Times are seconds of the database's clock."""

    now_s: float
    wanted: tuple[Wanted, ...]
    builds: dict[Digest, Build]
    listed: tuple[Listed, ...]


class BuildRepository:
    """Rows of ``builds``, ``wants`` and ``profiles``, and the artifacts that builds come to."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._models = ModelRows(model_of)

    async def facts(self) -> Facts:
        """What there is."""
        async with self._database.reading() as connection:
            now_s = await _now_s(connection)
            models = await self._models.read(connection)
            asked = {
                row.model: row.asked_at.timestamp()
                for row in await connection.execute(select(_wants))
            }
            builds = [build_of(row, now_s) for row in await connection.execute(select(_builds))]
            listed = tuple(
                Listed(
                    fingerprint=Digest(row.fingerprint),
                    model_digest=Digest(row.model_digest),
                    device_name=row.device_name,
                    size_bytes=row.size_bytes,
                    created_s=row.created_at.timestamp(),
                )
                for row in await connection.execute(
                    select(_artifacts).where(_artifacts.c.kind == MANIFEST)
                )
            )
        return Facts(
            now_s=now_s,
            wanted=tuple(
                Wanted(model=model, policy=policy, asked_s=asked.get(model.name))
                for model, policy in models
            ),
            builds={build.fingerprint: build for build in builds},
            listed=listed,
        )

    async def claim(
        self, model: Model, fingerprint: Digest, worker_id: WorkerId, lease_s: float
    ) -> int | None:
        """Give a build to a worker; the number of the attempt, None where another one was faster.

        Args:
            model: what is built.
            fingerprint: for which environment.
            worker_id: whose it is.
            lease_s: until it is renewed.
        """
        until = _in(lease_s)
        values = {
            "fingerprint": fingerprint,
            "model": model.name,
            "model_digest": model.digest,
            "state": BuildState.BUILDING.value,
            "worker_id": worker_id,
            "step": "",
            "share": 0.0,
            "reason": "",
        }
        statement = insert(_builds).values(
            **values, attempt=1, leased_until=until, changed_at=func.now(), blobs=[]
        )
        # What an attempt before it announced stays named until it is known to be of no use.
        free = _builds.c.state.in_([one.value for one in sources(BuildEvent.CLAIM)])
        lapsed = (_builds.c.state == BuildState.BUILDING.value) & (
            _builds.c.leased_until < func.now()
        )
        changed = {name: statement.excluded[name] for name in values}
        statement = statement.on_conflict_do_update(
            index_elements=["fingerprint"],
            set_={
                **changed,
                "attempt": _builds.c.attempt + 1,
                "leased_until": until,
                "changed_at": func.now(),
            },
            where=free | lapsed,
        ).returning(_builds.c.attempt)
        async with self._database.unit_of_work() as work:
            attempt = (await work.connection.execute(statement)).scalar_one_or_none()
            if attempt is not None:
                work.emit(
                    "build_claimed",
                    fingerprint,
                    {"model": model.name, "worker_id": worker_id, "attempt": attempt},
                )
        return attempt

    async def wait(
        self, waiting: Sequence[NextBuild], worker_id: WorkerId, room_bytes: int, read_s: float
    ) -> None:
        """Write that builds wait for room on a worker that has time.

        Args:
            waiting: which.
            worker_id: that has time.
            room_bytes: that it could have for them.
            read_s: when it was read that they may begin; ones that moved since stay.
        """
        # Two names of one checkpoint are one build.
        of = {one.fingerprint.digest: waiting_row(one, worker_id, room_bytes) for one in waiting}
        statement = insert(_builds).values([*of.values()])
        new = statement.excluded
        may_wait = _builds.c.state.in_([one.value for one in sources(BuildEvent.NO_ROOM)])
        as_read = _builds.c.changed_at <= func.to_timestamp(read_s)
        statement = statement.on_conflict_do_update(
            index_elements=["fingerprint"],
            set_={name: new[name] for name in ("state", "worker_id", "reason", "changed_at")},
            where=may_wait & as_read & (_builds.c.reason != new.reason),
        )
        async with self._database.unit_of_work() as work:
            await work.connection.execute(statement)

    async def renew(self, report: ReportBuild, lease_s: float) -> bool:
        """A worker's word of its build; False where it is not its own any more."""
        values: dict[str, Any] = {
            "step": report.step,
            "share": report.share,
            "leased_until": _in(lease_s),
        }
        if report.blobs:
            values["blobs"] = _builds.c.blobs.concat(
                literal(list(report.blobs), tables.builds.c.blobs.type)
            )
        async with self._database.unit_of_work() as work:
            done = await work.connection.execute(
                update(_builds).where(owned(report)).values(**values)
            )
        return done.rowcount == 1

    async def end(self, ended: EndBuild) -> bool:
        """A build ended without an artifact; False where it was not that worker's any more."""
        state = BuildState.WAITING if ended.yielded else BuildState.FAILED
        reason = f"{ended.code}: {ended.message}" if ended.code else ""
        async with self._database.unit_of_work() as work:
            done = await work.connection.execute(
                update(_builds)
                .where(owned(ended))
                .values(state=state.value, reason=reason, changed_at=func.now())
            )
            if done.rowcount:
                kind = "build_yielded" if ended.yielded else "build_failed"
                work.emit(kind, ended.fingerprint, {"reason": reason})
        return done.rowcount == 1

    async def finish(
        self, finished: FinishBuild, artifact: Artifact, infos: Iterable[ArtifactInfo]
    ) -> bool:
        """List what a build came to, and end it, at once; False where it was not that worker's any
        more: then nothing is listed.

        Args:
            finished: whose build.
            artifact: its manifest.
            infos: of all its objects, signed.
        """
        environment = artifact.fingerprint.environment
        rows = [
            {
                "fingerprint": info.fingerprint,
                "kind": info.kind,
                "blob_digest": info.blob_digest,
                "size_bytes": info.size_bytes,
                "signature": info.signature,
                "created_at": func.now(),
                "model_digest": artifact.fingerprint.model_digest,
                "device_name": environment.device_name,
                "body": to_row_json(artifact) if info.kind == MANIFEST else None,
            }
            for info in infos
        ]
        async with self._database.unit_of_work() as work:
            done = await work.connection.execute(
                update(_builds)
                .where(owned(finished))
                .values(state=BuildState.BUILT.value, step="", share=1.0, changed_at=func.now())
                .returning(_builds.c.model)
            )
            model = done.scalar_one_or_none()
            if model is None:
                return False
            of = _artifacts.c.fingerprint == finished.fingerprint
            await work.connection.execute(delete(_artifacts).where(of))
            for row in rows:
                await work.connection.execute(insert(_artifacts).values(**row))
            profile = insert(_profiles).values(
                fingerprint=finished.fingerprint,
                model=model,
                device_kind=environment.device_kind.value,
                body=to_row_json(artifact.profile),
                created_at=func.now(),
            )
            await work.connection.execute(
                profile.on_conflict_do_update(
                    index_elements=["fingerprint"],
                    set_={
                        name: profile.excluded[name]
                        for name in ("model", "device_kind", "body", "created_at")
                    },
                )
            )
            work.emit(
                "artifact_published",
                finished.fingerprint,
                {"kind": MANIFEST, "blob_digest": finished.manifest_digest, "model": model},
            )
        return True

    async def expire(self) -> int:
        """Builds whose workers renew no lease wait again; the number of them."""
        lapsed = (_builds.c.state == BuildState.BUILDING.value) & (
            _builds.c.leased_until < func.now()
        )
        async with self._database.unit_of_work() as work:
            done = await work.connection.execute(
                update(_builds)
                .where(lapsed)
                .values(state=BuildState.WAITING.value, changed_at=func.now())
                .returning(_builds.c.fingerprint)
            )
            gone = [row.fingerprint for row in done]
            for fingerprint in gone:
                work.emit("build_expired", fingerprint, {})
        return len(gone)

    async def ask(self, model: ModelName) -> None:
        """An operator asks for a model's artifact."""
        statement = insert(_wants).values(model=model, asked_at=func.now())
        async with self._database.unit_of_work() as work:
            await work.connection.execute(
                statement.on_conflict_do_update(
                    index_elements=["model"], set_={"asked_at": statement.excluded.asked_at}
                )
            )

    async def materials(self, model: ModelName) -> Materials:
        """Artifacts and builds of a registered model, the newest first; of none, nothing."""
        async with self._database.reading() as connection:
            digests = select(tables.models.c.digest).where(tables.models.c.name == model)
            asked_at = (
                await connection.execute(select(_wants.c.asked_at).where(_wants.c.model == model))
            ).scalar_one_or_none()
            builds = await connection.execute(
                select(_builds)
                .where(_builds.c.model_digest.in_(digests))
                .order_by(_builds.c.changed_at.desc())
            )
            artifacts = await connection.execute(
                select(_artifacts)
                .where(_artifacts.c.model_digest.in_(digests))
                .order_by(_artifacts.c.created_at.desc(), _artifacts.c.kind)
            )
            return Materials(
                model=model,
                asked_at=told(asked_at),
                builds=tuple(fact_of(row) for row in builds),
                artifacts=tuple(artifact_of(row) for row in artifacts),
            )

    async def nearest(self, model_digest: Digest) -> Fingerprint | None:
        """What the newest artifact of a model was made for."""
        newest = (
            select(_artifacts.c.body)
            .where(_artifacts.c.model_digest == model_digest, _artifacts.c.kind == MANIFEST)
            .order_by(_artifacts.c.created_at.desc())
            .limit(1)
        )
        async with self._database.reading() as connection:
            body = (await connection.execute(newest)).scalar_one_or_none()
        return None if body is None else from_row_json(body, Artifact).fingerprint

    async def collect(self, fingerprints: Iterable[Digest]) -> tuple[Digest, ...]:
        """Strike artifacts and what belongs to them; the digests of objects that no row names any
        more.
        """
        gone = list(fingerprints)
        async with self._database.unit_of_work() as work:
            connection = work.connection
            blobs: set[str] = set()
            for fingerprint in gone:
                work.emit("artifact_collected", fingerprint, {})
            if gone:
                rows = await connection.execute(
                    delete(_artifacts)
                    .where(_artifacts.c.fingerprint.in_(gone))
                    .returning(_artifacts.c.blob_digest)
                )
                blobs |= {row.blob_digest for row in rows}
                await connection.execute(delete(_profiles).where(_profiles.c.fingerprint.in_(gone)))
                rows = await connection.execute(
                    delete(_builds)
                    .where(
                        _builds.c.fingerprint.in_(gone),
                        _builds.c.state != BuildState.BUILDING.value,
                    )
                    .returning(_builds.c.blobs)
                )
                blobs |= {digest for row in rows for digest in row.blobs}
            # Built, and yet nothing is listed: somebody removed it.
            await connection.execute(
                delete(_builds).where(
                    _builds.c.state == BuildState.BUILT.value,
                    _builds.c.fingerprint.not_in(select(_artifacts.c.fingerprint)),
                )
            )
            # What ended builds announced and did not come to: looked for where nothing is written.
            idle = (_builds.c.state != BuildState.BUILDING.value) & (
                func.jsonb_array_length(_builds.c.blobs) > 0
            )
            locked = select(_builds.c.fingerprint, _builds.c.blobs).where(idle).with_for_update()
            found = (await connection.execute(locked)).all()
            blobs |= {digest for row in found for digest in row.blobs}
            if found:
                await connection.execute(
                    update(_builds)
                    .where(_builds.c.fingerprint.in_([row.fingerprint for row in found]))
                    .values(blobs=[])
                )
            kept = await connection.execute(select(_artifacts.c.blob_digest))
            named = {row.blob_digest for row in kept}
            announced = await connection.execute(
                select(_builds.c.blobs).where(_builds.c.state == BuildState.BUILDING.value)
            )
            named |= {digest for row in announced for digest in row.blobs}
        return tuple(Digest(one) for one in sorted(blobs - named))


def _in(seconds: float) -> ColumnElement[datetime]:
    return func.now() + text(f"interval '{seconds:g} seconds'")


async def _now_s(connection: AsyncConnection) -> float:
    return (await connection.execute(select(func.now()))).scalar_one().timestamp()
