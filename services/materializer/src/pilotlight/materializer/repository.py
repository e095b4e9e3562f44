"""Rows of schema ``materializer``."""

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert

from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.messages.artifacts import ArtifactInfo
from pilotlight.policy.ids import Digest


class ArtifactRepository:
    """Artifacts by fingerprint and kind."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, artifact: ArtifactInfo) -> None:
        """Insert an artifact, or replace the one of the same fingerprint and kind."""
        values = {
            "fingerprint": artifact.fingerprint,
            "kind": artifact.kind,
            "blob_digest": artifact.blob_digest,
            "size_bytes": artifact.size_bytes,
            "signature": artifact.signature,
        }
        statement = insert(tables.artifacts).values(**values, created_at=func.now())
        changed = {
            key: statement.excluded[key]
            for key in ("blob_digest", "size_bytes", "signature", "created_at")
        }
        async with self._database.unit_of_work() as work:
            await work.connection.execute(
                statement.on_conflict_do_update(
                    index_elements=["fingerprint", "kind"], set_=changed
                )
            )
            work.emit(
                "artifact_published",
                artifact.fingerprint,
                {"kind": artifact.kind, "blob_digest": artifact.blob_digest},
            )

    async def of(self, fingerprint: Digest) -> tuple[ArtifactInfo, ...]:
        """Every artifact of a fingerprint, by kind."""
        table = tables.artifacts
        async with self._database.reading() as connection:
            rows = await connection.execute(
                select(table).where(table.c.fingerprint == fingerprint).order_by(table.c.kind)
            )
            return tuple(
                ArtifactInfo(
                    fingerprint=Digest(row.fingerprint),
                    kind=row.kind,
                    blob_digest=Digest(row.blob_digest),
                    size_bytes=row.size_bytes,
                    signature=row.signature,
                )
                for row in rows
            )
