"""Rows of builds and artifacts, as what they say."""

from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, func

from pilotlight.common.db import tables
from pilotlight.common.db.mapping import from_row_json
from pilotlight.common.errors import NoRoom
from pilotlight.common.messages.artifacts import (
    ArtifactFact,
    BuildFact,
    EndBuild,
    FinishBuild,
    ReportBuild,
)
from pilotlight.policy.builds import Build, BuildState, MaterializePolicy, NextBuild
from pilotlight.policy.ids import Digest, ModelName, WorkerId
from pilotlight.policy.materialized import Artifact
from pilotlight.policy.model import Model


def model_of(row: Any) -> tuple[Model, MaterializePolicy]:
    """A registered model, and when its artifacts are built."""
    return from_row_json(row["body"], Model), MaterializePolicy(row["materialize"])


def build_of(row: Any, now_s: float) -> Build:
    """What a choice goes by."""
    return Build(
        fingerprint=Digest(row.fingerprint),
        model=ModelName(row.model),
        model_digest=Digest(row.model_digest),
        state=BuildState(row.state),
        attempt=row.attempt,
        changed_s=row.changed_at.timestamp(),
        lease_left_s=row.leased_until.timestamp() - now_s,
    )


def fact_of(row: Any) -> BuildFact:
    """What is told of a build."""
    return BuildFact(
        fingerprint=Digest(row.fingerprint),
        state=row.state,
        step=row.step,
        share=row.share,
        attempt=row.attempt,
        worker_id=WorkerId(row.worker_id),
        reason=row.reason,
        changed_at=told(row.changed_at),
    )


def waiting_row(one: NextBuild, worker_id: WorkerId, room_bytes: int) -> dict[str, Any]:
    """The row of a build that waits for room."""
    needs = f"{one.needed_bytes} bytes of {worker_id}, which could have {room_bytes}"
    return {
        "fingerprint": one.fingerprint.digest,
        "model": one.model.name,
        "model_digest": one.model.digest,
        "state": BuildState.WAITING.value,
        "worker_id": worker_id,
        "attempt": 0,
        "step": "",
        "share": 0.0,
        "reason": f"{NoRoom.code}: waiting for room: {needs}",
        "blobs": [],
        "leased_until": func.now(),
        "changed_at": func.now(),
    }


def artifact_of(row: Any) -> ArtifactFact:
    """What is told of an artifact."""
    artifact = None if row.body is None else from_row_json(row.body, Artifact)
    fact = ArtifactFact(
        fingerprint=Digest(row.fingerprint),
        kind=row.kind,
        size_bytes=row.size_bytes,
        created_at=told(row.created_at),
    )
    if artifact is None:
        return fact
    profile = artifact.profile
    longest = max(profile.prefill, key=lambda one: one.tokens, default=None)
    rate = longest.tokens / longest.seconds if longest and longest.seconds > 0 else 0.0
    return msgspec.structs.replace(
        fact,
        made_for=artifact.fingerprint,
        prefill_tokens_per_s=round(rate, 1),
        load_bytes_per_s=round(profile.model_bytes_per_s(artifact.layout.parameter_bytes), 1),
        init_s=round(profile.init_s, 6),
        restore_s=round(profile.restore_s, 6),
    )


def owned(of: ReportBuild | EndBuild | FinishBuild) -> ColumnElement[bool]:
    """The row is still that worker's attempt. A lease that has lapsed and that nobody took is."""
    return (
        (tables.builds.c.fingerprint == of.fingerprint)
        & (tables.builds.c.worker_id == of.worker_id)
        & (tables.builds.c.attempt == of.attempt)
        & (tables.builds.c.state == BuildState.BUILDING.value)
    )


def told(moment: datetime | None) -> str:
    """A moment in a message; empty: there is none."""
    return "" if moment is None else moment.isoformat()
