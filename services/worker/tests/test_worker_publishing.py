"""What a builder has built is listed, or kept for as long as nobody takes it."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from artifact_listing import HERE
from blake3 import blake3

from pilotlight.common.errors import BadRequest, Conflict, PilotlightError, SourceUnavailable
from pilotlight.common.messages.artifacts import (
    CLAIM_BUILD_SUBJECT,
    END_BUILD_SUBJECT,
    FINISH_BUILD_SUBJECT,
    REPORT_BUILD_SUBJECT,
    ArtifactInfo,
    ArtifactPublished,
    BuildClaimed,
    BuildHeard,
    ClaimBuild,
    ClaimedBuild,
    EndBuild,
    FinishBuild,
    ReportBuild,
)
from pilotlight.common.store import ObjectStore, artifact_key
from pilotlight.common.testing import until
from pilotlight.policy.ids import Digest
from pilotlight.policy.materialized import Fingerprint
from pilotlight.worker import builds as builds_module
from pilotlight.worker.build_steps import Built
from pilotlight.worker.builds import Builds
from pilotlight.worker.testing import MakeRig, Rig

pytestmark = pytest.mark.anyio

LEASE_S = 0.3
MANIFEST, GRAPHS = b"a manifest", b"graphs of it"


def digest_of(data: bytes) -> Digest:
    return Digest(blake3(data).hexdigest())


class Materializer:
    """Gives a build away as often as it is wanted, and refuses what comes of it as told."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.store: ObjectStore = rig.worker.core.vocabularies._store
        self.wanted = 1
        self.attempts = 0
        self.refusals: list[PilotlightError] = []
        self.away = False
        self.reports: list[ReportBuild] = []
        self.ends: list[EndBuild] = []
        self.tries = 0
        self.finished: list[FinishBuild] = []

    async def claim(self, request: ClaimBuild) -> BuildClaimed:
        if not self.wanted:
            return BuildClaimed()
        self.wanted -= 1
        self.attempts += 1
        return BuildClaimed(
            build=ClaimedBuild(
                model=self.rig.model,
                fingerprint=Fingerprint.of(HERE, self.rig.model),
                attempt=self.attempts,
                lease_s=LEASE_S,
            )
        )

    async def report(self, report: ReportBuild) -> BuildHeard:
        if self.away:
            raise SourceUnavailable("away")
        self.reports.append(report)
        return BuildHeard()

    async def end(self, ended: EndBuild) -> BuildHeard:
        self.ends.append(ended)
        return BuildHeard()

    async def finish(self, finished: FinishBuild) -> ArtifactPublished:
        self.tries += 1
        if self.refusals:
            raise self.refusals.pop(0)
        self.finished.append(finished)
        info = ArtifactInfo(
            fingerprint=finished.fingerprint,
            kind="manifest",
            blob_digest=finished.manifest_digest,
            size_bytes=finished.size_bytes,
            signature="",
        )
        return ArtifactPublished(artifact=info)


@pytest.fixture
async def rig(make_rig: MakeRig) -> Rig:
    made = await make_rig()
    made.worker.core.environment = HERE
    made.worker.core.device_bytes = 1 << 26
    await made.lend_builds()
    return made


@pytest.fixture
async def materializer(rig: Rig, connect_bus: Any) -> Materializer:
    made = Materializer(rig)
    bus = await connect_bus("materializer")
    await bus.serve(CLAIM_BUILD_SUBJECT, ClaimBuild, made.claim)
    await bus.serve(REPORT_BUILD_SUBJECT, ReportBuild, made.report)
    await bus.serve(END_BUILD_SUBJECT, EndBuild, made.end)
    await bus.serve(FINISH_BUILD_SUBJECT, FinishBuild, made.finish)
    return made


@pytest.fixture
async def built(
    rig: Rig, materializer: Materializer, leases: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[ClaimedBuild]]:
    """The builds that were made, of a builder that looks all the time."""
    made: list[ClaimedBuild] = []

    async def build(
        claimed: ClaimedBuild, make_session: object, told: object, ways: object, *, ranges: bool
    ) -> Built:
        assert (ways, ranges) == (None, False), "no graphs are wanted"
        made.append(claimed)
        return Built(MANIFEST, {digest_of(GRAPHS): GRAPHS})

    monkeypatch.setattr(builds_module, "build", build)
    monkeypatch.setattr(builds_module, "KEPT_LOOK_S", 0.01)
    monkeypatch.setattr(builds_module, "LOOK_S", 0.01)
    artifacts = rig.worker.artifacts
    assert artifacts is not None

    def make_engine(**_: Any) -> Any:
        raise AssertionError("nothing is built with an engine here")

    builds = Builds(
        rig.worker.core,
        lambda: rig.worker.stages.held,
        rig.worker.stages.lending,
        leases,
        make_engine,
        artifacts,
        materializer.store,
        0.01,
    )
    await builds.start()
    yield made
    await builds.stop()


async def test_all_objects_are_announced_and_written_before_they_are_listed(
    materializer: Materializer, built: list[ClaimedBuild]
) -> None:
    await until(lambda: materializer.finished)
    assert len(built) == 1
    assert materializer.finished[0].manifest_digest == digest_of(MANIFEST)
    for data in (MANIFEST, GRAPHS):
        assert await materializer.store.get(artifact_key(digest_of(data))) == data
        assert digest_of(data) in {blob for one in materializer.reports for blob in one.blobs}
    assert not materializer.ends


async def test_a_builder_tries_again_while_it_has_its_lease(
    materializer: Materializer, built: list[ClaimedBuild]
) -> None:
    materializer.refusals = [SourceUnavailable("away") for _ in range(3)]
    await until(lambda: materializer.finished)
    assert (materializer.tries, len(built), materializer.attempts) == (4, 1, 1)


async def test_what_nobody_took_within_the_lease_is_kept_for_the_next_claim(
    materializer: Materializer, built: list[ClaimedBuild]
) -> None:
    materializer.away = True
    await until(lambda: materializer.ends, deadline_s=20.0)
    assert materializer.ends[0].yielded, "it is taken up again at once"
    assert not materializer.finished
    materializer.away, materializer.wanted = False, 1
    await until(lambda: materializer.finished)
    assert (materializer.attempts, len(built)) == (2, 1), "nothing is built twice"
    assert materializer.finished[0].attempt == 2


@pytest.mark.parametrize(("error", "builds"), [(Conflict("another's"), 1), (BadRequest("no"), 2)])
async def test_what_is_refused_for_itself_is_built_anew_and_what_is_anothers_is_kept(
    materializer: Materializer, built: list[ClaimedBuild], error: PilotlightError, builds: int
) -> None:
    materializer.refusals, materializer.wanted = [error], 2
    await until(lambda: materializer.finished)
    assert len(built) == builds
    assert [one.yielded for one in materializer.ends] == [builds == 1]
