"""Verifications over the admin API: a node is asked, the same one for the same model, and asked
again how far it is.
"""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pilotlight.common.errors import NotFound
from pilotlight.common.messages.reports import LoaderReport, loader_report_subject
from pilotlight.common.messages.verify import (
    AskVerification,
    Verification,
    VerificationStatus,
    Verify,
    verification_subject,
    verify_subject,
)
from pilotlight.common.testing import until
from pilotlight.gateway.admin.testing import (
    AdminWorld,
    checkpoint_files,
    write_folder,
)
from pilotlight.policy.ids import Epoch, NodeId
from pilotlight.policy.testing import node

pytestmark = pytest.mark.anyio
NODES = tuple(NodeId(f"node-{number}") for number in range(3))


@pytest.fixture
async def world(fresh_admin: AdminWorld) -> AsyncIterator[AdminWorld]:
    await fresh_admin.fleet.start()
    yield fresh_admin
    await fresh_admin.fleet.stop()


async def report(world: AdminWorld, *node_ids: NodeId, draining: bool = False) -> None:
    for node_id in node_ids:
        facts = replace(node(), node_id=node_id, draining=draining)
        loader = LoaderReport(facts=facts, incarnation="a", epoch_seen=Epoch(0))
        await world.context.bus.publish(loader_report_subject(node_id), loader)
    await until(
        lambda: (
            {one.node_id for one in world.fleet.nodes() if one.draining is draining}
            >= set(node_ids)
        )
    )


async def test_a_node_reads_the_model_and_is_asked_how_far_it_is(world: AdminWorld) -> None:
    asked: list[tuple[NodeId, object]] = []

    async def serve(node_id: NodeId) -> None:
        async def on_verify(message: Verify) -> Verification:
            asked.append((node_id, message))
            return state(node_id, VerificationStatus.RUNNING)

        async def on_ask(message: AskVerification) -> Verification:
            if message.verification_id != f"{node_id}.check":
                raise NotFound("no such verification")
            return state(
                node_id, VerificationStatus.DONE, differences=("part 1",), difference_count=1
            )

        await world.context.bus.serve(verify_subject(node_id), Verify, on_verify)
        await world.context.bus.serve(verification_subject(node_id), AskVerification, on_ask)

    # A name that ends like an action must not be taken for one.
    folder = write_folder(world.models / "tiny", checkpoint_files())
    assert (await world.register(folder, "org/verify")).status_code == 201
    for node_id in NODES:
        await serve(node_id)
    await report(world, *NODES)
    found = await world.http.post("/models/org/verify/verify", json={"deadline_s": 60})
    assert found.status_code == 202, found.text
    [(chosen, message)] = asked
    assert isinstance(message, Verify)
    assert (message.model.name, message.deadline_s) == ("org/verify", 60.0)
    assert (found.json()["verification_id"], found.json()["status"]) == (
        f"{chosen}.check",
        "running",
    )
    assert (await world.http.post("/models/org/verify/verify")).status_code == 202
    assert [node_id for node_id, _ in asked] == [chosen, chosen]
    ended = (await world.http.get(f"/verifications/{chosen}.check")).json()
    assert (ended["status"], ended["differences"]) == ("done", ["part 1"])
    assert (await world.http.get("/models/org/verify")).status_code == 200
    for unknown in (f"{chosen}.other", "nobody.check", "check"):
        answer = await world.http.get(f"/verifications/{unknown}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), unknown
    for wrong in ({"deadline_s": 0}, {"deadline_s": 1e9}, {"deadline_s": "soon"}, {"until": 3}):
        answer = await world.http.post("/models/org/verify/verify", json=wrong)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "unprocessable"), wrong


def state(node_id: NodeId, status: VerificationStatus, **changes: object) -> Verification:
    return Verification(
        verification_id=f"{node_id}.check",
        node_id=node_id,
        model="org/verify",
        status=status,
        done_bytes=1,
        total_bytes=2,
        **changes,
    )


async def test_without_a_node_it_is_said_at_once(world: AdminWorld) -> None:
    assert (await world.http.post("/models/none/verify")).status_code == 404
    await world.register(write_folder(world.models / "tiny", checkpoint_files()))
    answer = await world.http.post("/models/tiny/verify")
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        503,
        "control_plane_unavailable",
    )
    await report(world, NODES[0], draining=True)
    assert (await world.http.post("/models/tiny/verify")).status_code == 503
    await report(world, NODES[1])
    answer = await world.http.post("/models/tiny/verify")
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        503,
        "control_plane_unavailable",
    )
    assert NODES[1] in answer.json()["error"]["message"], "it reports, and does not answer"
