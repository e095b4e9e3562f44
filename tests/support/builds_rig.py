"""A materializer that runs, and workers and operators that ask it."""

from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from sqlalchemy import update

from pilotlight.common.bus import Bus
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.messages.artifacts import (
    ASK_MATERIALS_SUBJECT,
    CLAIM_BUILD_SUBJECT,
    END_BUILD_SUBJECT,
    FINISH_BUILD_SUBJECT,
    MATERIALIZE_SUBJECT,
    REPORT_BUILD_SUBJECT,
    ArtifactPublished,
    AskMaterials,
    BuildClaimed,
    BuildHeard,
    ClaimBuild,
    ClaimedBuild,
    EndBuild,
    FinishBuild,
    Materialize,
    Materials,
    ReportBuild,
)
from pilotlight.common.messages.codec import encode_json
from pilotlight.common.store import ObjectStore, artifact_key
from pilotlight.materializer.coordination import Upkeep
from pilotlight.policy.ids import Digest, WorkerId
from pilotlight.policy.materialized import (
    Artifact,
    Canary,
    DecodeTime,
    Layout,
    PrefillTime,
    Profile,
)
from pilotlight.policy.testing import environment, model

DEADLINE_S = 5.0
ROOM = 1 << 30
MODEL = model("a")


@dataclass(kw_only=True)
class Rig:
    """A materializer, and workers and operators that ask it."""

    bus: Bus
    store: ObjectStore
    database: Database
    upkeep: Upkeep

    async def claim(self, worker_id: str = "w1", **changes: Any) -> ClaimedBuild | None:
        message = ClaimBuild(
            worker_id=WorkerId(worker_id),
            environment=environment(**changes),
            room_bytes=ROOM,
        )
        found = await self.bus.request(
            CLAIM_BUILD_SUBJECT, message, BuildClaimed, deadline_s=DEADLINE_S
        )
        return found.build

    async def materialize(self) -> Materials:
        message = Materialize(model=MODEL.name)
        return await self.bus.request(
            MATERIALIZE_SUBJECT, message, Materials, deadline_s=DEADLINE_S
        )

    async def materials(self) -> Materials:
        message = AskMaterials(model=MODEL.name)
        return await self.bus.request(
            ASK_MATERIALS_SUBJECT, message, Materials, deadline_s=DEADLINE_S
        )

    async def report(self, claimed: ClaimedBuild, worker_id: str = "w1", **changes: Any) -> bool:
        message = ReportBuild(**{**of(claimed, worker_id), "step": "load", "share": 0.5, **changes})
        heard = await self.bus.request(
            REPORT_BUILD_SUBJECT, message, BuildHeard, deadline_s=DEADLINE_S
        )
        return heard.yours

    async def end(self, claimed: ClaimedBuild, worker_id: str = "w1", **changes: Any) -> bool:
        message = EndBuild(**{**of(claimed, worker_id), **changes})
        heard = await self.bus.request(
            END_BUILD_SUBJECT, message, BuildHeard, deadline_s=DEADLINE_S
        )
        return heard.yours

    async def finish(
        self, claimed: ClaimedBuild, worker_id: str = "w1", data: bytes = b"", **changes: Any
    ) -> ArtifactPublished:
        data = data or encode_json(artifact(claimed, **changes))
        digest = Digest(blake3(data).hexdigest())
        await self.report(claimed, worker_id, blobs=(digest,))
        await self.store.put_if_absent(artifact_key(digest), data)
        message = FinishBuild(
            **of(claimed, worker_id), manifest_digest=digest, size_bytes=len(data)
        )
        return await self.bus.request(
            FINISH_BUILD_SUBJECT, message, ArtifactPublished, deadline_s=DEADLINE_S
        )

    async def set(self, **values: Any) -> None:
        """What time would do."""
        async with self.database.unit_of_work() as work:
            await work.connection.execute(update(tables.builds).values(**values))


def of(claimed: ClaimedBuild, worker_id: str) -> dict[str, Any]:
    return {
        "fingerprint": claimed.fingerprint.digest,
        "worker_id": WorkerId(worker_id),
        "attempt": claimed.attempt,
    }


def artifact(claimed: ClaimedBuild, **changes: Any) -> Artifact:
    values: dict[str, Any] = {
        "format": 1,
        "fingerprint": claimed.fingerprint,
        "layout": Layout(
            device_bytes=10, parameter_bytes=5, kv_bytes_per_token=1, kv_capacity_tokens=5
        ),
        "profile": Profile(
            load_bytes_per_s=1.0,
            prefill=(PrefillTime(tokens=10, seconds=0.5),),
            decode=(DecodeTime(batch=1, context_tokens=8, seconds=0.1),),
            load_s=0.5,
            init_s=1.5,
            restore_s=0.25,
        ),
        "canary": Canary(prompt_ids=(1,), output_ids=(2,)),
        **changes,
    }
    return Artifact(**values)


async def claimed(rig: Rig) -> ClaimedBuild:
    await rig.materialize()
    one = await rig.claim()
    assert one is not None
    return one
