"""Pages look as they were looked at: pictures of them are compared with stored ones.

``PILOTLIGHT_WRITE_PICTURES=1`` stores them anew: look at each before it is committed. They are
compared at a quarter of their size, so that another version of a browser or a font may draw letters
otherwise; a card, a colour or a row that is elsewhere is seen.
"""

import base64
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from played_cluster import PlayedCluster, Size, shown
from sqlalchemy import URL, create_engine, delete, insert
from sqlalchemy.pool import NullPool

from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext
from pilotlight.gateway.admin.testing import ADMIN_KEY, emptied, settings_in

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.anyio]

STORED = Path(__file__).parent / "pictures"
WRITE = bool(os.environ.get("PILOTLIGHT_WRITE_PICTURES"))
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
MAX_SHARE = 0.004
"""Of a picture's points that may be another colour: two lines of text."""
DIFFERENCE = """async ([one, other]) => {
  const pixels = async (data) => {
    const image = new Image();
    image.src = `data:image/png;base64,${data}`;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [Math.ceil(image.width / 4), Math.ceil(image.height / 4)];
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    return context.getImageData(0, 0, canvas.width, canvas.height);
  };
  const [left, right] = [await pixels(one), await pixels(other)];
  if (left.width !== right.width || left.height !== right.height) return 1;
  let others = 0;
  for (let at = 0; at < left.data.length; at += 4)
    if ([0, 1, 2].some((of) => Math.abs(left.data[at + of] - right.data[at + of]) > 24)) others++;
  return others / (left.data.length / 4);
}"""
PAGES = {
    "fleet": ("/", "#groups tr.row"),
    "models": ("/models", "#models tr.row"),
    "cold-starts": ("/cold-starts", "tr.row"),
    "cold-start": ("/cold-starts/inst-0001", ".crumbs"),
    "keys": ("/keys", "h1"),
    "usage": ("/usage", "h1"),
    "simulations": ("/simulations", "h1"),
    "playground": ("/playground", "#prompt"),
}
"""Of each page its path, and what is there once it is drawn."""


class StoppedCalendar(SystemClock):
    """Everything happened as long ago as it did when the pictures were taken."""

    def wall(self) -> datetime:
        return NOW


def phase(process: str, name: str, start_s: float, end_s: float) -> dict[str, Any]:
    return {
        "process": process,
        "name": name,
        "start_s": start_s,
        "end_s": end_s,
        "wall_offset_s": NOW.timestamp() - 100,
        "detail": "",
    }


PHASES = [
    phase("gateway", "queue", 40.0, 42.1),
    phase("scheduler", "decide", 40.02, 40.05),
    phase("loader", "fetch", 40.06, 41.4),
    phase("worker", "load", 40.2, 41.7),
    phase("worker", "prefill", 41.2, 42.0),
]


def write_a_cold_start(url: URL) -> None:
    """As a scheduler writes one, with its decision."""
    at = NOW - timedelta(seconds=60)
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        for table in (tables.cold_starts, tables.decisions, tables.evictions):
            connection.execute(delete(table))
        connection.execute(
            insert(tables.cold_starts).values(
                instance_id="inst-0001",
                model="org-1/model-0001",
                decision_id="dec-0001",
                trace_id="t" * 32,
                status="done",
                demand_seen_at=at,
                dispatched_s=40.0,
                first_token_s=42.0,
                wall_offset_s=NOW.timestamp() - 100,
                ttft_s=2.1,
                coverage=0.97,
                phases=PHASES,
                created_at=at,
                finished_at=at + timedelta(seconds=3),
            )
        )
        connection.execute(
            insert(tables.decisions).values(
                decision_id="dec-0001",
                kind="cold_start",
                model="org-1/model-0001",
                epoch=1,
                at=at,
                inputs={},
                outcome={"scheme": None},
                reasons=["3 requests wait", "one worker meets the SLO"],
            )
        )


@dataclass(frozen=True, slots=True)
class Pictures:
    """Takes pictures of one browser and compares them."""

    theme: str
    page: Any
    """Where they are compared: a page of nobody."""

    async def share_off(self, taken: bytes, name: str) -> float:
        """The share of points in which a picture differs from the stored one."""
        stored = (STORED / f"{self.theme}-{name}.png").read_bytes()
        return await self.page.evaluate(
            DIFFERENCE, [base64.b64encode(one).decode() for one in (stored, taken)]
        )

    async def compared(self, taken: bytes, name: str, folder: Path) -> str:
        """Nothing, or what is wrong and where the picture lies."""
        if WRITE:
            STORED.mkdir(exist_ok=True)
            (STORED / f"{self.theme}-{name}.png").write_bytes(taken)
            return ""
        off = await self.share_off(taken, name)
        if off <= MAX_SHARE:
            return ""
        file = folder / f"{self.theme}-{name}.png"
        file.write_bytes(taken)
        return f"{100 * off:.1f} % of {name} is another colour: {file}"


@pytest.fixture
async def url(
    make_context: MakeContext,
    database_settings: DatabaseSettingsOf,
    module_database: URL,
    tmp_path: Path,
) -> AsyncIterator[str]:
    emptied(module_database)
    write_a_cold_start(module_database)
    settings = settings_in(tmp_path, database_settings("gateway").database_url)
    cluster = PlayedCluster(Size(nodes=4, models=12, devices=2, groups=2))
    context = make_context("gateway", settings, clock=StoppedCalendar())
    async with shown(cluster, context) as at:
        yield at


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_pages_look_as_they_did(url: str, open_tab: Any, theme: str, tmp_path: Path) -> None:
    tab = await open_tab(url, theme)
    page = tab.page
    await page.clock.set_fixed_time(NOW)
    pictures = Pictures(theme, (await open_tab("about:blank")).page)
    await page.goto(f"{url}/ui/")
    wrong = [await pictures.compared(await page.screenshot(), "sign-in", tmp_path)]
    await tab.sign_in(ADMIN_KEY)
    for name, (path, drawn) in PAGES.items():
        await tab.open(path)
        await page.wait_for_selector(drawn)
        await page.evaluate("() => document.fonts.ready")
        wrong.append(await pictures.compared(await page.screenshot(), name, tmp_path))
    assert [one for one in wrong if one] == []


async def test_a_card_that_is_missing_is_seen(url: str, open_tab: Any) -> None:
    tab = await open_tab(url)
    pictures = Pictures("light", (await open_tab("about:blank")).page)
    await tab.sign_in(ADMIN_KEY)
    await tab.page.wait_for_selector("#groups tr.row")
    await tab.page.evaluate("() => document.querySelector('section.card').remove()")
    assert await pictures.share_off(await tab.page.screenshot(), "fleet") > MAX_SHARE
