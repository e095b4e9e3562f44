"""Starts as pages show them: a group's waterfall by stage and node while it fetches, and how far a
model's own page says that it is.
"""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from sqlalchemy import URL, NullPool, create_engine, delete, insert

from pilotlight.common.buckets import INSTANCES
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.messages.reports import LoaderReport, loader_report_subject
from pilotlight.common.testing import MakeContext, until
from pilotlight.gateway.admin.testing import checkpoint_files, write_folder
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.ui.testing import UiWorld, ui_world
from pilotlight.policy.cluster import Transfer
from pilotlight.policy.ids import Digest, Epoch, ModelName, NodeId
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import instance, node

pytestmark = pytest.mark.anyio

GROUP = [
    {
        "worker_id": f"n{number}-w",
        "node_id": f"n{number}",
        "stage": {"start": 4 * number, "stop": 4 * number + 4},
        "device_bytes": 10,
        "upstreams": [],
    }
    for number in range(2)
]
SCHEME = {"predicted_ttft_s": 1.0, "predicted_tpot_s": 0.1, "placements": GROUP}


@pytest.fixture
async def world(
    make_context: MakeContext, emptied_settings: GatewaySettings
) -> AsyncIterator[UiWorld]:
    async with ui_world(make_context("gateway", emptied_settings)) as made:
        await made.admin.fleet.start()
        await made.sign_in()
        yield made
        await made.admin.fleet.stop()


async def fetching(world: UiWorld, name: str, done_bytes: int, digest: str = "d") -> None:
    """A node's loader says what it fetches."""
    transfer = Transfer(
        digest=Digest(digest),
        source="folder",
        done_bytes=done_bytes,
        total_bytes=100,
        model=ModelName("m"),
        age_s=2.0,
    )
    facts = replace(node(), node_id=NodeId(name), transfers=(transfer,))
    report = LoaderReport(facts=facts, incarnation="a", epoch_seen=Epoch(0))
    await world.admin.context.bus.publish(loader_report_subject(facts.node_id), report)
    await until(lambda: any(one.node_id == name for one in world.admin.fleet.nodes()))


def write(url: URL, world: UiWorld, outcome: object) -> None:
    """A start that goes on, and its decision, as the scheduler keeps them."""
    at = world.admin.context.clock.wall()
    loaded = {
        "name": "load",
        "process": "worker",
        "start_s": 0.0,
        "end_s": 1.0,
        "wall_offset_s": at.timestamp(),
        "detail": "",
        "lane": "4-8",
    }
    start = {
        "instance_id": "ins-0",
        "model": "m",
        "decision_id": "dec-0",
        "trace_id": "t" * 32,
        "status": "open",
        "demand_seen_at": at,
        "phases": [loaded],
        "created_at": at,
    }
    decision = {
        "decision_id": "dec-0",
        "kind": "cold_start",
        "model": "m",
        "epoch": 1,
        "at": at,
        "inputs": {},
        "outcome": outcome,
        "reasons": [],
    }
    with create_engine(url, poolclass=NullPool).begin() as connection:
        for table in (tables.cold_starts, tables.decisions):
            connection.execute(delete(table))
        connection.execute(insert(tables.cold_starts).values(start))
        connection.execute(insert(tables.decisions).values(decision))


def lanes(page: str) -> list[str]:
    """The waterfall's rows, and the stages above them."""
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.DOTALL)
    texts = [re.sub(r"<svg.*?</svg>|<[^>]+>", " ", row, flags=re.DOTALL) for row in rows]
    return [" ".join(text.split()) for text in texts]


async def test_the_stages_of_a_start_are_told_apart_by_node(
    world: UiWorld, module_database: URL
) -> None:
    write(module_database, world, {"scheme": SCHEME})
    await fetching(world, "n0", 40)
    await fetching(world, "n1", 70)
    # It fetches the same model, and has no part in this start.
    await fetching(world, "n2", 10)
    for path in ("cold-starts", "parts/cold-starts"):
        page = (await world.http.get(f"/ui/{path}/ins-0")).text
        rows = [re.sub(r" [\d.,]+ (ms|s|µs)$", "", row) for row in lanes(page)]
        assert rows == [
            "Stage 1 of 2, layers 0-4 on n0",
            "loader fetch 40 % so far",
            "Stage 2 of 2, layers 4-8 on n1",
            "loader fetch 70 % so far",
            "worker load",
        ]
        assert 'href="/ui/nodes/n1"' in page


async def test_a_decision_that_is_not_kept_leaves_the_layers(
    world: UiWorld, module_database: URL
) -> None:
    write(module_database, world, {"scheme": None})
    page = (await world.http.get("/ui/cold-starts/ins-0")).text
    assert lanes(page)[0] == "Layers 4-8"


async def test_a_models_page_says_how_far_its_start_is(
    world: UiWorld, module_database: URL
) -> None:
    folder = write_folder(world.admin.models / "tiny", checkpoint_files())
    digest = (await world.admin.register(folder, "m")).json()["digest"]
    page = "/ui/parts/models/m"
    assert "start-progress" not in (await world.http.get(page)).text
    started = instance("m", "ins-1", state=InstanceState.FETCHING, digest=digest)
    at = world.admin.context.clock.wall()
    row = {
        "instance_id": "ins-1",
        "model": "m",
        "digest": digest,
        "state": "fetching",
        "generation": 1,
        "epoch": 1,
        "body": to_row_json(started),
        "created_at": at,
        "updated_at": at,
    }
    with create_engine(module_database, poolclass=NullPool).begin() as connection:
        connection.execute(insert(tables.instances).values(row))
    bucket = await world.admin.context.bus.bucket(INSTANCES)
    await bucket.put("ins-1", started)
    await until(lambda: bool(world.admin.fleet.instances(ModelName("m"))))
    shown = (await world.http.get(page)).text
    assert ("Starting: fetch<" in shown, "progress of the start" in shown) == (True, False)
    await fetching(world, "n0", 40, digest)
    shown = (await world.http.get(page)).text
    assert "Starting: fetch, 40 % fetched" in shown
    assert 'aria-label="progress of the start"' in shown


async def test_the_playground_offers_models_that_chat(world: UiWorld) -> None:
    for name in ("chats", "embeds"):
        folder = write_folder(world.admin.models / name, checkpoint_files())
        if name == "embeds":
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
            kinds = ["Transformer", "Pooling"]
            modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
            (folder / "modules.json").write_text(json.dumps(modules))
        answer = await world.admin.register(folder, name)
        assert answer.status_code == 201, answer.text
    page = (await world.http.get("/ui/playground")).text
    assert (">chats</option>" in page, "embeds" in page) == (True, False)
    assert "embeds" in (await world.http.get("/ui/models/embeds")).text
