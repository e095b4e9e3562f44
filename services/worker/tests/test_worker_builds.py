"""A worker with time builds an artifact, makes way for demand, and restores what it built."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from pilotlight.common.artifact_signing import sign
from pilotlight.common.messages.artifacts import (
    CLAIM_BUILD_SUBJECT,
    END_BUILD_SUBJECT,
    FIND_ARTIFACTS_SUBJECT,
    FINISH_BUILD_SUBJECT,
    REPORT_BUILD_SUBJECT,
    ArtifactInfo,
    ArtifactPublished,
    ArtifactsFound,
    BuildClaimed,
    BuildHeard,
    ClaimBuild,
    ClaimedBuild,
    EndBuild,
    FindArtifacts,
    FinishBuild,
    ReportBuild,
)
from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.common.store import ObjectStore, artifact_key
from pilotlight.common.testing import until
from pilotlight.policy.builds import needed_bytes
from pilotlight.policy.cluster import BuildLoan, HeldState
from pilotlight.policy.ids import Digest
from pilotlight.policy.materialized import Artifact, Canary, Fingerprint, Layout, Profile
from pilotlight.policy.phase import PhaseName
from pilotlight.worker.artifacts import MANIFEST
from pilotlight.worker.builds import Builds
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.process import ProcessEngine
from pilotlight.worker.testing import CLUSTER_KEY, MakeRig, Rig

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

BUILD_S = 120.0
ROOM_BYTES = 1 << 26


class Materializer:
    """What a worker hears from the materializer."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.store: ObjectStore = rig.worker.core.vocabularies._store
        self.wanted = True
        self.leases = True
        """It is of a release that knows of leases."""
        self.asked: list[ClaimBuild] = []
        self.reports: list[ReportBuild] = []
        self.ends: list[EndBuild] = []
        self.finished: list[FinishBuild] = []
        self.yours = True
        self.info: ArtifactInfo | None = None
        self.nearest: Fingerprint | None = None

    async def serve(self, connect_bus: Any) -> None:
        bus = await connect_bus("materializer")
        await bus.serve(CLAIM_BUILD_SUBJECT, ClaimBuild, self.claim)
        await bus.serve(REPORT_BUILD_SUBJECT, ReportBuild, self.report)
        await bus.serve(END_BUILD_SUBJECT, EndBuild, self.end)
        await bus.serve(FINISH_BUILD_SUBJECT, FinishBuild, self.finish)
        await bus.serve(FIND_ARTIFACTS_SUBJECT, FindArtifacts, self.find)

    async def claim(self, request: ClaimBuild) -> BuildClaimed:
        if not self.wanted:
            return BuildClaimed()
        needed = needed_bytes(self.rig.model, request.environment)
        self.asked.append(request)
        if self.leases and needed > (request.leased_bytes or 0):
            return BuildClaimed(needed_bytes=needed)
        self.wanted = False
        fingerprint = Fingerprint.of(request.environment, self.rig.model)
        return BuildClaimed(
            build=ClaimedBuild(
                model=self.rig.model, fingerprint=fingerprint, attempt=1, lease_s=2.0
            )
        )

    async def report(self, report: ReportBuild) -> BuildHeard:
        self.reports.append(report)
        return BuildHeard(yours=self.yours)

    async def end(self, ended: EndBuild) -> BuildHeard:
        self.ends.append(ended)
        return BuildHeard()

    async def finish(self, finished: FinishBuild) -> ArtifactPublished:
        data = await self.store.get(artifact_key(finished.manifest_digest))
        self.info = signed(finished.fingerprint, data)
        self.finished.append(finished)
        return ArtifactPublished(artifact=self.info)

    async def find(self, request: FindArtifacts) -> ArtifactsFound:
        return ArtifactsFound(
            artifacts=() if self.info is None else (self.info,), nearest=self.nearest
        )

    async def lists(self, artifact: Artifact) -> None:
        """An artifact that it signed."""
        data = encode_json(artifact)
        self.info = signed(artifact.fingerprint.digest, data)
        await self.store.put_if_absent(artifact_key(self.info.blob_digest), data)


def signed(fingerprint: Digest, data: bytes) -> ArtifactInfo:
    digest = Digest(blake3(data).hexdigest())
    fields: Any = {
        "fingerprint": fingerprint,
        "kind": MANIFEST,
        "blob_digest": digest,
        "size_bytes": len(data),
    }
    return ArtifactInfo(**fields, signature=sign(CLUSTER_KEY.encode(), **fields))


@pytest.fixture
async def rig(make_rig: MakeRig) -> Rig:
    made = await make_rig(process=True)
    made.worker.core.device_bytes = ROOM_BYTES
    await made.lend_builds()
    return made


@pytest.fixture
async def materializer(rig: Rig, connect_bus: Any) -> Materializer:
    made = Materializer(rig)
    await made.serve(connect_bus)
    return made


@pytest.fixture
async def builds(
    rig: Rig, materializer: Materializer, leases: Any, tmp_path: Path
) -> AsyncIterator[Builds]:
    options = ChildOptions(threads=1, log_path=tmp_path / "build.log")
    artifacts = rig.worker.artifacts
    assert artifacts is not None
    made = Builds(
        rig.worker.core,
        lambda: rig.worker.stages.held,
        rig.worker.stages.lending,
        leases,
        lambda **made_for: ProcessEngine(replace(options, **made_for)),
        artifacts,
        materializer.store,
        0.01,
    )
    await made.start()
    yield made
    await made.stop()


def restores(rig: Rig) -> dict[tuple[str, str], float]:
    (family,) = rig.worker.core.metrics.restores.collect()
    return {
        (sample.labels["outcome"], sample.labels["field"]): sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
    }


async def loaded(rig: Rig) -> set[PhaseName]:
    """The phases of a start, a token with it."""
    await rig.command(rig.a_hold())
    await rig.state(HeldState.READY)
    assert (await rig.submit("req-1")).accepted
    await rig.finish_of("req-1")
    await rig.until(lambda: PhaseName.PREFILL in rig.phases)
    return set(rig.phases)


async def test_what_was_built_is_restored(
    rig: Rig, materializer: Materializer, builds: Builds
) -> None:
    await until(lambda: materializer.finished, deadline_s=BUILD_S)
    assert not materializer.ends
    needed = needed_bytes(rig.model, materializer.asked[0].environment)
    assert [one.leased_bytes for one in materializer.asked] == [0, needed]
    await rig.until(lambda: rig.facts is not None and rig.facts.build == BuildLoan())
    info = materializer.info
    assert info is not None
    artifact = decode_json(await materializer.store.get(artifact_key(info.blob_digest)), Artifact)
    environment = rig.worker.core.environment
    assert environment is not None
    assert artifact.fingerprint == Fingerprint.of(environment, rig.model)
    assert [one.tokens for one in artifact.profile.prefill] == [16, 64]
    assert {one.batch for one in artifact.profile.decode} == {1, 2, 4, 8, 16}
    assert all(one.seconds > 0 for one in artifact.profile.decode)
    assert len(artifact.canary.output_ids) == 6
    profile = artifact.profile
    measured = (profile.load_s, profile.init_s, profile.restore_s)
    assert min(measured) > 0, measured
    assert profile.load_s + profile.init_s < BUILD_S
    assert info.blob_digest in {blob for one in materializer.reports for blob in one.blobs}
    shares = [one.share for one in materializer.reports]
    assert shares == sorted(shares)
    found = await loaded(rig)
    assert PhaseName.RESTORE in found
    assert PhaseName.INIT not in found
    assert restores(rig) == {("found", ""): 1.0}


async def test_demand_ends_a_build_at_once(
    rig: Rig, materializer: Materializer, builds: Builds
) -> None:
    await until(lambda: materializer.reports, deadline_s=BUILD_S)
    assert rig.worker.stages.lending.build.taken_bytes > 0
    await rig.command(rig.a_hold(size=ROOM_BYTES))
    await until(lambda: materializer.ends)
    (ended,) = materializer.ends
    assert ended.yielded
    assert not materializer.finished
    await rig.state(HeldState.READY)
    assert rig.worker.stages.lending.build.fact == BuildLoan(), "its room is the start's"


async def test_the_cache_takes_the_room_of_a_build_back(
    rig: Rig, materializer: Materializer, builds: Builds
) -> None:
    await until(lambda: materializer.reports, deadline_s=BUILD_S)
    await rig.lend()
    await until(lambda: materializer.ends)
    assert [one.yielded for one in materializer.ends] == [True]
    await rig.until(lambda: rig.facts is not None and rig.facts.build.taken_bytes == 0)


async def test_a_build_that_a_release_without_leases_gives_has_room_all_the_same(
    rig: Rig, materializer: Materializer, builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    materializer.leases = False
    await until(lambda: materializer.reports, deadline_s=BUILD_S)
    assert rig.worker.stages.lending.build.taken_bytes > 0
    materializer.yours = False
    await until(lambda: materializer.ends, deadline_s=BUILD_S)
    await rig.until(lambda: rig.facts is not None and rig.facts.build == BuildLoan())


async def test_a_build_that_is_anothers_by_now_ends(
    rig: Rig, materializer: Materializer, builds: Builds
) -> None:
    materializer.yours = False
    await until(lambda: materializer.ends, deadline_s=BUILD_S)
    assert not materializer.finished


def an_artifact(rig: Rig, **changes: Any) -> Artifact:
    """One that fits, but for the changes, and a canary that no model gives."""
    environment = rig.worker.core.environment
    assert environment is not None
    spec, model = rig.model.spec, rig.model
    made = Artifact(
        format=1,
        fingerprint=Fingerprint.of(environment, model),
        layout=Layout(
            device_bytes=1 << 40,
            parameter_bytes=model.device_bytes(spec.whole),
            kv_bytes_per_token=spec.kv_bytes_per_token(spec.whole, model.dtype),
            kv_capacity_tokens=1 << 30,
        ),
        profile=Profile(load_bytes_per_s=1.0, prefill=(), decode=()),
        canary=Canary(prompt_ids=(1, 2, 3), output_ids=(96, 96, 96, 96)),
    )
    return replace(made, **changes)


async def test_a_canary_that_differs_ends_the_engine_and_the_next_start_is_a_normal_one(
    rig: Rig, materializer: Materializer
) -> None:
    await materializer.lists(an_artifact(rig))
    found = await loaded(rig)
    assert PhaseName.RESTORE in found
    held = await rig.until(lambda: (one := rig.held()) and one.state is HeldState.FAILED and one)
    assert held.reason.startswith("restore_failed: the engine ended: the canary of inst-1 gave")
    await rig.command()
    rig.phases.clear()
    await until(lambda: rig.worker.core.engine.alive, deadline_s=BUILD_S)
    await rig.command(rig.a_hold("inst-2"))
    await rig.state(HeldState.READY, "inst-2")
    await rig.until(lambda: PhaseName.LOAD in rig.phases)
    assert PhaseName.RESTORE not in rig.phases
    assert restores(rig) == {("found", ""): 1.0, ("failed", ""): 1.0, ("distrusted", ""): 1.0}
