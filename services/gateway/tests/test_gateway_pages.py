"""Open routes: health, readiness, metrics of every service on the machine."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.parser import text_string_to_metric_families

from pilotlight.common.buckets import GATEWAYS
from pilotlight.common.clock import ManualClock, SystemClock
from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.health import HealthServer
from pilotlight.common.messages.reports import GatewayInfo
from pilotlight.common.testing import ReconnectingBus, until
from pilotlight.gateway.presence import GONE_AFTER_S, Presence
from pilotlight.gateway.records import scrape
from pilotlight.gateway.settings import GatewaySettings

pytestmark = pytest.mark.anyio


class Up:
    connected = True

    @staticmethod
    def ready():
        return None


async def test_metrics_of_neighbours(world, tmp_path):
    registry = CollectorRegistry()
    Counter(
        "pilotlight_decisions", 'Decisions, "quoted"\nand more.', ["kind"], registry=registry
    ).labels(kind='a"b\\c').inc(3)
    Histogram("pilotlight_step_seconds", "Steps.", registry=registry).observe(0.2)
    neighbours = [
        HealthServer(tmp_path / name, registry, Up(), Up())
        for name in ("scheduler-77.sock", "worker-78.sock")
    ]
    for neighbour in neighbours:
        await neighbour.start()
    (tmp_path / "cache-79.sock").touch()
    (tmp_path / "pool.sock").touch()
    await world.worker()
    await world.http.post("/v1/completions", json={"model": "fox", "prompt": "x"})
    page = (await world.http.get("/metrics")).text
    for neighbour in neighbours:
        await neighbour.stop()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    totals = [
        sample
        for sample in families["pilotlight_decisions"].samples
        if sample.name.endswith("_total")
    ]
    assert {(sample.labels["service"], sample.labels["process"]) for sample in totals} == {
        ("scheduler", "77"),
        ("worker", "78"),
    }
    assert all((sample.labels["kind"], sample.value) == ('a"b\\c', 3.0) for sample in totals)
    (done,) = [
        sample
        for sample in families["pilotlight_requests"].samples
        if sample.name.endswith("_total")
    ]
    assert (done.labels["status"], done.labels["service"]) == ("ok", "gateway")
    assert page.count("# TYPE pilotlight_step_seconds histogram") == 1


async def test_a_silent_neighbour_holds_nobody_up(tmp_path):
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(silent, tmp_path / "scheduler-1.sock"):
        page = await scrape.collect(CollectorRegistry(), tmp_path, 4711)
    assert page == b""


async def test_the_dashboard_is_found_without_its_slash(world):
    answer = await world.http.get("/ui")
    assert (answer.status_code, answer.headers["location"]) == (307, "/ui/")


async def test_health_and_readiness(world):
    assert (await world.http.get("/healthz")).text == "ok\n"
    assert (await world.http.get("/readyz")).status_code == 200


class CountedPresence(Presence):
    """Knows how often it was put."""

    said = 0

    async def _say(self):
        await super()._say()
        self.said += 1


async def test_presence(bus, make_context):
    seen = {}
    changed = asyncio.Event()

    async def note(key, value):
        seen[key] = value
        changed.set()

    watching = asyncio.create_task((await bus.bucket(GATEWAYS)).watch(GatewayInfo, note))
    reconnecting = ReconnectingBus(bus)
    background = make_context("gateway", GatewaySettings()).background
    presence = CountedPresence(
        reconnecting, SystemClock(), background, "gw-1", lambda: "http://127.0.0.1:8000"
    )
    await presence.start()
    await presence.start()
    # What repeats it begins at once: that would put back what is deleted before it.
    await until(lambda: presence.said == 2)
    await changed.wait()
    changed.clear()
    assert seen["gw-1"].url == "http://127.0.0.1:8000"
    await (await bus.bucket(GATEWAYS)).delete("gw-1")
    await until(lambda: seen["gw-1"] is None)
    await reconnecting.reconnect()
    await until(lambda: seen["gw-1"] is not None)
    changed.clear()
    await presence.stop()
    await presence.stop()
    await changed.wait()
    assert seen["gw-1"] is None
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize(
    ("clients", "status"), [("", 200), ("10.0.0.0/8, 127.0.0.1", 200), ("10.0.0.0/8", 403)]
)
async def test_a_setting_says_who_reads_the_metrics(make_world, clients, status):
    world = await make_world(metrics_clients=clients)
    # A key changes nothing about it.
    for headers in ({}, {"authorization": ""}):
        answer = await world.http.get("/metrics", headers=headers)
        assert answer.status_code == status
        assert ("pilotlight_" in answer.text) == (status == 200)
    assert (await world.http.get("/healthz")).status_code == 200


def test_a_client_of_the_metrics_is_an_address():
    with pytest.raises(SettingsInvalid, match="METRICS_CLIENTS"):
        GatewaySettings(metrics_clients="somewhere")


async def test_a_gateway_that_was_killed_is_removed_by_another(bus, make_context):
    clock, seen = ManualClock(), {}

    async def note(key, value):
        seen[key] = value

    bucket = await bus.bucket(GATEWAYS)
    watching = asyncio.create_task(bucket.watch(GatewayInfo, note))
    await bucket.put("gw-killed", GatewayInfo(gateway_id="gw-killed", url=""))
    background = make_context("gateway", GatewaySettings()).background
    presence = Presence(bus, clock, background, "gw-1", lambda: "")
    await presence.start()
    await until(lambda: "gw-killed" in presence._heard_s)
    clock.advance(GONE_AFTER_S - 1)
    await bucket.put("gw-2", GatewayInfo(gateway_id="gw-2", url=""))
    await until(lambda: "gw-2" in presence._heard_s)
    await presence.remove_silent()
    assert seen["gw-killed"] is not None
    clock.advance(2)
    await presence.remove_silent()
    await until(lambda: seen["gw-killed"] is None)
    assert seen["gw-2"] is not None
    await presence.stop()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
