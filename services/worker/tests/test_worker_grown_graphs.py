"""Stages of groups that have the memory of the whole model: they are given its compiled kernels and
its graphs, which come back when the stage is whole; everything else of an artifact is of whole
models.
"""

from typing import Any

import msgspec
import pytest
from artifact_listing import Listing, an_artifact, listing_of, restores, rig_with_graphs
from blake3 import blake3
from restored_rig import RestoredRig
from scripted_engine import ScriptedEngine

from pilotlight.common.messages.codec import encode_json
from pilotlight.common.messages.engine import LoadStage, StageLoaded
from pilotlight.common.messages.graphs import StageGraphs
from pilotlight.common.messages.hold import Hold
from pilotlight.common.store import artifact_key
from pilotlight.policy.cluster import Member
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import Digest, InstanceId, NodeId, WorkerId
from pilotlight.policy.materialized import GRAPHS, Artifact, Blob, GraphLayout, GraphPlace, Trial
from pilotlight.policy.model import Model, Stage
from pilotlight.policy.phase import PhaseName
from pilotlight.worker.engine_child.graphs import GraphPlans
from pilotlight.worker.found import Found
from pilotlight.worker.testing import WORKER, MakeRig, Rig

ARCHIVE = b"archive" * 100
BLOB = Blob(kind=GRAPHS, digest=Digest(blake3(ARCHIVE).hexdigest()), size_bytes=len(ARCHIVE))
LAYOUT = GraphLayout(
    slot=3,
    places=(GraphPlace(name="logits", address=1),),
    pool_bytes=1 << 20,
    trials=(Trial(rows=1, digest="a"),),
)
OLD, NEW = InstanceId("inst-1"), InstanceId("inst-1-0")


def with_graphs(model: Model, layout: GraphLayout = LAYOUT) -> Artifact:
    return an_artifact(model, blobs=(BLOB,), graphs=layout)


@pytest.fixture
async def rig(make_rig: MakeRig) -> Rig:
    return await rig_with_graphs(make_rig)


@pytest.fixture
async def listing(rig: Rig, connect_bus: Any) -> Listing:
    made = await listing_of(rig, connect_bus)
    await made.store.put_if_absent(artifact_key(BLOB.digest), ARCHIVE)
    return made


def of_a_group(rig: Rig, device_bytes: int) -> Hold:
    """The first of two stages."""
    spec = rig.model.spec
    first, rest = Stage(0, 1), Stage(1, spec.num_layers)
    workers = ((WORKER, first), (WorkerId("other"), rest))
    members = tuple(
        Member(worker_id=worker, node_id=NodeId(f"node-{worker}"), stage=stage, host="h", port=7)
        for worker, stage in workers
    )
    return msgspec.structs.replace(
        rig.a_hold(), stage=first, members=members, device_bytes=device_bytes
    )


@pytest.mark.anyio
async def test_a_stage_that_can_become_whole_is_given_the_whole_models_graphs(
    rig: Rig, listing: Listing
) -> None:
    artifacts, whole = rig.worker.artifacts, rig.model.spec.whole
    assert artifacts is not None
    await listing.lists(with_graphs(rig.model))
    enough = stage_room(rig.model, whole).least_bytes
    assert await artifacts.of(of_a_group(rig, enough - 1)) == Found(), "it stays a stage"
    found = await artifacts.of(of_a_group(rig, enough))
    assert found.graphs
    artifacts.on_renamed(OLD, NEW)
    artifacts.on_renamed(InstanceId("nobody"), InstanceId("nobody-0"))
    artifacts.on_graphs(StageGraphs(instance_id=OLD, refused="slot"))
    assert ("refused", "slot") not in restores(rig), "nobody has that name any more"
    artifacts.on_graphs(StageGraphs(instance_id=NEW, ready=3))
    assert restores(rig)["graphs", ""] == 1.0
    artifacts._with_graphs = False
    assert await artifacts.of(of_a_group(rig, enough)) == Found()


@pytest.mark.anyio
async def test_an_artifact_without_graphs_is_nothing_to_a_stage_of_a_group(
    rig: Rig, listing: Listing
) -> None:
    artifacts = rig.worker.artifacts
    assert artifacts is not None
    await listing.lists(an_artifact(rig.model))
    assert await artifacts.of(of_a_group(rig, 1 << 40)) == Found()


def test_a_stage_of_a_group_begins_as_without_an_artifact(
    start_child: Any, scripted: ScriptedEngine, pool: Any
) -> None:
    """Room and canary are those of whole models."""
    parent = start_child()
    artifact = encode_json(an_artifact(pool.model))
    load = msgspec.structs.replace(pool.load(), stage=Stage(0, 1), artifact=artifact)
    parent.send(load, *pool.places())
    loaded = parent.until(StageLoaded)
    assert PhaseName.INIT in {phase.name for phase in loaded.phases}


def test_a_childs_graphs_have_the_name_of_their_stage(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rig, asked = RestoredRig(), RestoredRig(), list[bool]()

    def made(layout: GraphLayout, read: Any, later: bool, **others: Any) -> Any:
        asked.append(later)
        return (rig if later else before).begin()

    monkeypatch.setattr("pilotlight.engine.cuda.restored.RestoredGraphs", made)
    plans, artifact = GraphPlans(), encode_json(with_graphs(model, rig.layout))
    for stage in (model.spec.whole, Stage(0, 1)):
        load = LoadStage(
            instance_id=OLD,
            model=model,
            stage=stage,
            device_bytes=1 << 20,
            pool_path="/nowhere",
            artifact=artifact,
            graphs="/x",
        )
        assert plans.plan_of(load) is not None
    before.end()
    assert asked == [False, True]
    plans.rename(OLD, NEW)
    plans.rename(InstanceId("nobody"), InstanceId("nobody-0"))
    rig.device.go()
    assert rig.plan is not None
    assert rig.plan._thread is not None
    rig.plan._thread.join()
    assert [(one.instance_id, one.ready) for one in plans.news()] == [(NEW, 3)]
    rig.end()
