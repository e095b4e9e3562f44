"""A thousand nodes and five thousand models: lists stay small in the page, and an update is
short.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import URL

from pilotlight.common.testing import DatabaseSettingsOf, MakeContext
from pilotlight.gateway.admin.testing import ADMIN_KEY, emptied, settings_in
from pilotlight.gateway.edge.server import HttpServer
from pilotlight.gateway.serving.fleet import Seen, StartProgress
from pilotlight.gateway.ui.testing import ui_world
from pilotlight.policy.cluster import PEER_LINK, LinkSpeed, OriginKind
from pilotlight.policy.ids import ModelName, NodeId, WorkerId
from pilotlight.policy.model import Stage
from pilotlight.policy.testing import held, instance, model, node, worker

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.anyio]

NODES, MODELS, DEVICES, GROUPS = 1000, 5000, 2, 500
UPDATE_MS = 100.0
MAX_ROWS_IN_PAGE = 80


class Cluster:
    """Facts of a large cluster, all of which change with each step."""

    def __init__(self) -> None:
        self.step = 0
        self._models = {
            name: SimpleNamespace(model=replace(model(), name=ModelName(name)))
            for name in (f"org-{number % 50}/model-{number:04d}" for number in range(MODELS))
        }
        self._names = sorted(self._models)

    def nodes(self) -> tuple[Any, ...]:
        return tuple(
            replace(
                node(),
                node_id=NodeId(f"node-{number:04d}"),
                host=f"host-{number:04d}",
                pool_bytes=1 << 38,
                pool_free_bytes=(1 << 37) + self.step,
                links=(
                    LinkSpeed(
                        kind=OriginKind.PEER,
                        name=f"{PEER_LINK}node-{(number + 1) % NODES:04d}",
                        bytes_per_s=float((1 << 30) + self.step),
                    ),
                ),
            )
            for number in range(NODES)
        )

    def workers(self) -> tuple[Any, ...]:
        return tuple(
            replace(
                worker(0),
                worker_id=WorkerId(f"node-{number:04d}-w{device}"),
                node_id=NodeId(f"node-{number:04d}"),
                held=(replace(held(self._names[number]), in_flight=self.step % 7),),
                running_requests=(number + self.step) % 50,
            )
            for number in range(NODES)
            for device in range(DEVICES)
        )

    def instances(self, name: ModelName | None = None) -> tuple[Seen, ...]:
        if name is None:
            return tuple(self._group(number) for number in range(GROUPS))
        serving = Seen(replace(instance(), model=name), 1.0)
        return (serving,) if self.step % 2 else ()

    def _group(self, number: int) -> Seen:
        one = instance(self._names[number], f"inst-{number:04d}", in_flight=self.step)
        (lead,) = one.placements
        stages = (replace(lead, stage=Stage(0, 2)), replace(lead, stage=Stage(2, 4)))
        return Seen(replace(one, placements=stages), 1.0)

    def failed_start(self, name: ModelName, digest: Any) -> None:
        return None

    def progress(self, name: ModelName, digest: Any) -> StartProgress:
        return StartProgress(phase="fetch", fetched=0.5)

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def get(self, name: str) -> Any:
        return self._models.get(name)


@pytest.fixture
async def cluster(
    make_context: MakeContext,
    database_settings: DatabaseSettingsOf,
    module_database: URL,
    tmp_path: Path,
) -> AsyncIterator[tuple[Cluster, str]]:
    emptied(module_database)
    settings = settings_in(tmp_path, database_settings("gateway").database_url)
    context = make_context("gateway", settings)
    async with ui_world(context) as world:
        facts = Cluster()
        live = world.admin.parts.live
        live._fleet = live._models = facts
        server = HttpServer(
            world.edge, lambda _: None, context.background, host="127.0.0.1", port=0, drain_s=0.1
        )
        await server.start()
        yield facts, f"http://127.0.0.1:{server.port}"
        await live.stop()
        await server.stop()


async def drawn_ms(page: Any) -> float:
    """How long the last update took, from its first row to the last drawn one."""
    return await page.evaluate("() => performance.getEntriesByName('update').at(-1).duration")


async def updates_ms(page: Any, facts: Cluster, updates: int) -> list[float]:
    """Times of updates in which every row changes."""
    taken: list[float] = []
    for _ in range(updates):
        before = await page.get_attribute("body", "data-updates")
        facts.step += 1
        async with asyncio.timeout(60):
            while await page.get_attribute("body", "data-updates") == before:
                await page.wait_for_timeout(50)
        taken.append(await drawn_ms(page))
    return taken


async def test_a_thousand_nodes(cluster: tuple[Cluster, str], open_tab: Any) -> None:
    facts, url = cluster
    tab = await open_tab(url)
    page = tab.page
    await tab.sign_in(ADMIN_KEY)
    await page.wait_for_selector("#tile-nodes:text-is('1,000')")
    for name, rows in (("nodes", NODES), ("links", NODES), ("groups", GROUPS)):
        await page.wait_for_selector(f"#{name} table[aria-rowcount='{rows + 1}']")
        assert 0 < await page.locator(f"#{name} tr.row").count() <= MAX_ROWS_IN_PAGE
    # The machine may be busy: the shortest of some is the page's own time.
    assert min(await updates_ms(page, facts, 5)) < UPDATE_MS
    await page.fill("#nodes-find", "host-0777")
    await page.wait_for_selector("#nodes tr.row >> text=node-0777")
    assert await page.locator("#nodes tr.row").count() == 1


async def test_five_thousand_models(cluster: tuple[Cluster, str], open_tab: Any) -> None:
    facts, url = cluster
    tab = await open_tab(url)
    page = tab.page
    await tab.sign_in(ADMIN_KEY)
    await tab.open("/models")
    await page.wait_for_selector("#model-states >> text=all 5,000")
    assert await page.locator("#models tr.row").count() <= MAX_ROWS_IN_PAGE
    assert min(await updates_ms(page, facts, 3)) < UPDATE_MS
    region = page.locator("#models .list-scroll")
    await region.focus()
    await page.keyboard.press("End")
    await page.wait_for_selector("#models tr[aria-rowindex='5001']")
    assert await page.locator("#models tr.row").count() <= MAX_ROWS_IN_PAGE
    await page.fill("#models-find", "model-4321")
    await page.wait_for_selector("#models tr.row >> text=org-21/model-4321")
