"""Pages look as they were looked at: pictures of them are compared with stored ones.

``PILOTLIGHT_WRITE_PICTURES=FOLDER`` stores them anew, and puts them there whole: look at each
before it is committed. They are stored and compared at a quarter of their size, so that another
version of a browser or a font may draw letters otherwise; a card, a colour or a row that is
elsewhere is seen.
"""

import base64
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from played_cluster import PlayedCluster, Size, shown
from sqlalchemy import URL, Connection, create_engine, delete, insert
from sqlalchemy.pool import NullPool

from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext
from pilotlight.gateway.admin.testing import ADMIN_KEY, emptied, settings_in
from pilotlight.policy.testing import model

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.anyio]

STORED = Path(__file__).parent / "pictures"
WRITE = os.environ.get("PILOTLIGHT_WRITE_PICTURES")
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
MAX_SHARE = 0.004
"""Of a picture's points that may be another colour: two lines of text."""
QUARTER = """async (data) => {
  const image = new Image();
  image.src = `data:image/png;base64,${data}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.ceil(image.width / 4), Math.ceil(image.height / 4)];
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL().split(",")[1];
}"""
DIFFERENCE = """async ([one, other]) => {
  const pixels = async (data) => {
    const image = new Image();
    image.src = `data:image/png;base64,${data}`;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.width, image.height];
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
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
    "cold-start-group": ("/cold-starts/inst-0002", ".crumbs"),
    "model": ("/models/org-1/model-0001", "#main:has(#attainment .empty):has(#ttft canvas)"),
    "node": ("/nodes/node-0001", "#main table"),
    "traces": ("/traces", "h1"),
    "trace": (f"/traces/{'a' * 32}", ".waterfall"),
    "events": ("/events?kind=decisions", "#events-part tr"),
    "keys": ("/keys", "h1"),
    "usage": ("/usage", "h1"),
    "simulations": ("/simulations", "h1"),
    "playground": ("/playground", "#prompt"),
}
"""Of each page its path, and what is there once it is drawn."""
FIGURES = {"f-ttft": "1.2 s", "f-tokens": "12", "f-rate": "31.4", "f-total": "1.6 s"}
STILL = """(figures) => {
  for (const last of document.querySelectorAll("#keys-part td:nth-of-type(8)"))
    last.textContent = "never";
  for (const [id, text] of Object.entries(figures)) {
    const shown = document.getElementById(id);
    if (/\\d/.test(shown?.textContent ?? "")) shown.textContent = text;
  }
}"""
"""What depends on how fast it was: when a key was used last, and how fast an answer came."""
ANSWER = "A pilot light is a small flame that stays on, so that the burner lights at once."
EVENTS = [
    *({"choices": [{"delta": {"content": f"{word} "}}]} for word in ANSWER.split()),
    {"choices": [], "usage": {"completion_tokens": 12}},
]
SIMULATED = [
    {
        "policy": policy,
        "load_s_per_request": load_s,
        "hit_ratio": hits,
        "p99_load_s": 25.0,
        "reloads": 1271,
        "reload_s_per_request": load_s,
        "first_loads": 7,
        "evictions": 764,
        "requests": 2389,
        "capacity_bytes": 2098960000,
        "workload": "paper large random",
    }
    for policy, load_s, hits in (("lru", 9.1, 0.46), ("iam", 7.4, 0.58))
]


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


def lane(start: int) -> dict[str, str]:
    return {"lane": f"{start}-{start + 16}"}


PHASES = [
    phase("gateway", "queue", 40.0, 42.1),
    phase("scheduler", "decide", 40.02, 40.05),
    phase("loader", "fetch", 40.06, 41.4),
    phase("worker", "load", 40.2, 41.7),
    phase("worker", "prefill", 41.2, 42.0),
]


GROUP_PHASES = [
    phase("gateway", "queue", 40.0, 40.3),
    phase("scheduler", "decide", 40.02, 40.06),
    phase("loader", "fetch", 40.08, 40.9) | lane(0),
    phase("worker", "load", 40.2, 41.0) | lane(0),
    phase("worker", "prefill", 41.0, 41.1) | lane(0),
    phase("loader", "fetch", 40.08, 40.8) | lane(16),
    phase("worker", "load", 40.2, 41.0) | lane(16),
    phase("worker", "prefill", 41.1, 41.2) | lane(16),
]
GROUP = {
    "predicted_ttft_s": 1.4,
    "predicted_tpot_s": 0.021,
    "placements": [
        {
            "worker_id": f"node-000{number}-w0",
            "node_id": f"node-000{number}",
            "stage": {"start": 16 * number, "stop": 16 * number + 16},
            "device_bytes": 8 << 30,
            "upstreams": [],
        }
        for number in range(2)
    ],
}
SPANS = [
    ("a", "", "POST /v1/chat/completions", "gateway", 0, 2200),
    ("b", "a", "queue", "gateway", 10, 1300),
    ("c", "b", "place", "scheduler", 20, 60),
    ("d", "a", "answer", "worker", 1300, 2150),
]


def write_a_trace(connection: Connection) -> None:
    """As services report one."""
    began = NOW - timedelta(seconds=60)
    for span_id, parent_id, name, service, start_ms, end_ms in SPANS:
        connection.execute(
            insert(tables.spans).values(
                trace_id="a" * 32,
                span_id=span_id,
                parent_id=parent_id,
                name=name,
                service=service,
                start_at=began + timedelta(milliseconds=start_ms),
                end_at=began + timedelta(milliseconds=end_ms),
                status="ok",
                attributes={} if parent_id else {"request_id": "req-0001"},
            )
        )


def write_a_model(connection: Connection) -> None:
    """As it is registered."""
    made = replace(model(part_bytes=5 << 29), name="org-1/model-0001", uri="hf://org-1/model-0001")
    connection.execute(
        insert(tables.models).values(
            name=made.name,
            digest=made.digest,
            body=to_row_json(made),
            created_at=NOW - timedelta(days=3),
            updated_at=NOW - timedelta(days=3),
        )
    )


def write_cold_starts(connection: Connection) -> None:
    """As a scheduler writes them, with their decisions: one of one worker, and one of two."""
    for table in (tables.cold_starts, tables.decisions, tables.evictions):
        connection.execute(delete(table))
    for number, phases, scheme in ((1, PHASES, None), (2, GROUP_PHASES, GROUP)):
        at = NOW - timedelta(seconds=60 * number)
        first_token_s = 42.0 if number == 1 else 41.2
        connection.execute(
            insert(tables.cold_starts).values(
                instance_id=f"inst-000{number}",
                model=f"org-{number}/model-000{number}",
                decision_id=f"dec-000{number}",
                trace_id="t" * 32,
                status="done",
                demand_seen_at=at,
                dispatched_s=40.0,
                first_token_s=first_token_s,
                wall_offset_s=NOW.timestamp() - 100,
                ttft_s=first_token_s - 39.9,
                coverage=0.97,
                phases=phases,
                created_at=at,
                finished_at=at + timedelta(seconds=3),
            )
        )
        connection.execute(
            insert(tables.decisions).values(
                decision_id=f"dec-000{number}",
                kind="cold_start",
                model=f"org-{number}/model-000{number}",
                epoch=1,
                at=at,
                inputs={},
                outcome={"scheme": scheme, "meets_slo": True},
                reasons=[
                    "3 requests wait",
                    "two workers meet the SLO" if scheme else "one worker meets the SLO",
                ],
            )
        )


def write_records(url: URL) -> None:
    """What pages show that no played cluster has."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        write_cold_starts(connection)
        write_a_model(connection)
        write_a_trace(connection)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Takes pictures of one browser and compares them."""

    theme: str
    page: Any
    """Where they are compared: a page of nobody."""

    async def share_off(self, taken: bytes, name: str) -> float:
        """The share of points in which a picture differs from the stored one."""
        stored = base64.b64encode((STORED / f"{self.theme}-{name}.png").read_bytes()).decode()
        return await self.page.evaluate(DIFFERENCE, [stored, await self._quarter(taken)])

    async def _quarter(self, taken: bytes) -> str:
        """A picture at a quarter of its size, in base64."""
        return await self.page.evaluate(QUARTER, base64.b64encode(taken).decode())

    async def compared(self, taken: bytes, name: str, folder: Path) -> str:
        """Nothing, or what is wrong and where the picture lies."""
        if WRITE is not None:
            file = f"{self.theme}-{name}.png"
            (Path(WRITE) / file).write_bytes(taken)
            (STORED / file).write_bytes(base64.b64decode(await self._quarter(taken)))
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
    write_records(module_database)
    settings = settings_in(tmp_path, database_settings("gateway").database_url)
    cluster = PlayedCluster(Size(nodes=4, models=12, devices=2, groups=2))
    context = make_context("gateway", settings, clock=StoppedCalendar())
    async with shown(cluster, context) as at:
        yield at


async def answered(tab: Any, _: Path) -> None:
    """The playground with an answer."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS)
    headers = {"content-type": "text/event-stream", "x-trace-id": "a" * 32}
    await tab.page.route("**/ui/chat", lambda route: route.fulfill(body=body, headers=headers))
    await tab.open("/playground")
    await tab.page.fill("#prompt", "What is a pilot light?")
    await tab.page.press("#prompt", "Enter")
    await tab.page.wait_for_selector("#f-tokens:text-is('12')")
    await tab.page.wait_for_selector("#send:visible")


async def read(tab: Any, folder: Path) -> None:
    """Results of a simulation."""
    file = folder / "results.jsonl"
    file.write_text("\n".join(map(json.dumps, SIMULATED)))
    await tab.open("/simulations")
    await tab.page.set_input_files("#s-file", file)
    await tab.page.wait_for_selector("#s-table tbody tr:nth-child(2)")


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
        await page.evaluate(STILL, FIGURES)
        wrong.append(await pictures.compared(await page.screenshot(), name, tmp_path))
    for name, made in (("chat", answered), ("simulation", read)):
        await made(tab, tmp_path)
        await page.evaluate(STILL, FIGURES)
        wrong.append(await pictures.compared(await page.screenshot(), name, tmp_path))
    assert [one for one in wrong if one] == []


async def test_a_card_that_is_missing_is_seen(url: str, open_tab: Any) -> None:
    tab = await open_tab(url)
    pictures = Pictures("light", (await open_tab("about:blank")).page)
    await tab.sign_in(ADMIN_KEY)
    await tab.page.wait_for_selector("#groups tr.row")
    await tab.page.evaluate("() => document.querySelector('section.card').remove()")
    assert await pictures.share_off(await tab.page.screenshot(), "fleet") > MAX_SHARE
