"""A thousand nodes and five thousand models: lists stay small in the page, and an update is
short.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from played_cluster import PlayedCluster, Size, shown
from sqlalchemy import URL

from pilotlight.common.testing import DatabaseSettingsOf, MakeContext
from pilotlight.gateway.admin.testing import ADMIN_KEY, emptied, settings_in

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.anyio]

NODES, MODELS, GROUPS = 1000, 5000, 500
UPDATE_MS = 100.0
MAX_ROWS_IN_PAGE = 80


@pytest.fixture
async def cluster(
    make_context: MakeContext,
    database_settings: DatabaseSettingsOf,
    module_database: URL,
    tmp_path: Path,
) -> AsyncIterator[tuple[PlayedCluster, str]]:
    emptied(module_database)
    settings = settings_in(tmp_path, database_settings("gateway").database_url)
    facts = PlayedCluster(Size(nodes=NODES, models=MODELS, devices=2, groups=GROUPS))
    async with shown(facts, make_context("gateway", settings)) as url:
        yield facts, url


async def drawn_ms(page: Any) -> float:
    """How long the last update took, from its first row to the last drawn one."""
    return await page.evaluate("() => performance.getEntriesByName('update').at(-1).duration")


async def updates_ms(page: Any, facts: PlayedCluster, updates: int) -> list[float]:
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


async def test_a_thousand_nodes(cluster: tuple[PlayedCluster, str], open_tab: Any) -> None:
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


async def test_five_thousand_models(cluster: tuple[PlayedCluster, str], open_tab: Any) -> None:
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
