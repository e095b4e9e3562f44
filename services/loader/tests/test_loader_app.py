"""A loader's settings, its bucket and its workers."""

import asyncio
import os
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from pilotlight.common.buckets import NODES
from pilotlight.common.errors import HostPoolFull, MachineUnfit, UriNotAllowed
from pilotlight.common.testing import ReconnectingBus
from pilotlight.dataplane.pool_pages import PoolPages
from pilotlight.loader import app
from pilotlight.loader.devices import FoundGpus
from pilotlight.loader.testing import ALL, Cluster
from pilotlight.policy.cluster import NodeFacts

pytestmark = pytest.mark.anyio

AGES_S = 3600.0


async def test_models_outside_the_roots_are_never_read(cluster: Cluster) -> None:
    model = cluster.register()
    await cluster.start(model_roots=str(cluster.folder / "elsewhere"))
    with pytest.raises(UriNotAllowed):
        await cluster.lease(model)


async def test_a_pool_that_is_full(cluster: Cluster) -> None:
    model = cluster.register(vocab_size=60_000)
    await cluster.start(pool_bytes=1024 * 1024)
    with pytest.raises(HostPoolFull):
        await cluster.lease(model)


async def test_late_joiners_find_the_node(cluster: Cluster) -> None:
    model = cluster.register()
    await cluster.start()
    await cluster.lease(model)
    seen: asyncio.Queue[NodeFacts | None] = asyncio.Queue()

    async def on_change(key: str, value: NodeFacts | None) -> None:
        assert key == cluster.node_id
        seen.put_nowait(value)

    watching = asyncio.create_task((await cluster.bus.bucket(NODES)).watch(NodeFacts, on_change))
    async with asyncio.timeout(10):
        while True:
            facts = await seen.get()
            assert facts is not None
            if [copy.parts for copy in facts.copies] == [ALL]:
                break
    watching.cancel()


async def test_the_nodes_state_is_written_again_after_a_reconnect(cluster: Cluster) -> None:
    reconnecting = cluster.bus = ReconnectingBus(cluster.bus)
    await cluster.start()
    bucket = await cluster.bus.bucket(NODES)
    seen: asyncio.Queue[NodeFacts | None] = asyncio.Queue()

    async def on_change(_: str, value: NodeFacts | None) -> None:
        seen.put_nowait(value)

    watching = asyncio.create_task(bucket.watch(NodeFacts, on_change))
    async with asyncio.timeout(10):
        assert await seen.get() is not None
        await bucket.delete(cluster.node_id)
        while await seen.get() is not None:
            pass
        await reconnecting.reconnect()
        assert await seen.get() is not None
    watching.cancel()


async def test_a_worker_is_spawned_and_is_dead_at_once_when_killed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the place of the worker: a module of that name which only says hello.
    package = tmp_path / "stand_in" / "pilotlight"
    package.mkdir(parents=True)
    (package / "worker.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand_in"))
    monkeypatch.setenv("HF_TOKEN", "for the loader alone")
    running = await cluster.start(workers=1)
    worker_id = f"{cluster.node_id}-w0"
    log = cluster.folder / "logs" / "worker-0.log"
    await running.counts("pilotlight_node_workers")
    state = cluster.folder / "state"
    assert log.read_text() == f"{worker_id} {cluster.node_id} cpu 1 {state} None\n"
    pid = int(msgspec.json.decode((state / "workers" / "0.json").read_bytes())["pid"])
    await cluster.heard.report(lambda report: report.dead_workers == ())
    os.kill(pid, 9)
    await cluster.heard.report(lambda report: report.dead_workers == (worker_id,))
    await cluster.heard.report(lambda report: report.dead_workers == ())
    await running.stop()
    final = await cluster.heard.report(lambda report: report.facts.draining)
    assert final.dead_workers == (worker_id,)
    assert not (cluster.folder / "pool").exists()


async def test_a_worker_is_dead_until_it_says_hello_where_no_process_of_it_is_found(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was planned for one of an earlier loader need not wait until its silence is noticed."""
    package = tmp_path / "stand_in" / "pilotlight"
    package.mkdir(parents=True)
    (package / "worker.py").write_text(f"import time\ntime.sleep({AGES_S})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand_in"))
    await cluster.start(workers=1)
    report = await cluster.heard.report(lambda report: report.dead_workers)
    assert report.dead_workers == (f"{cluster.node_id}-w0",)


STAND_IN = """
import asyncio, os
from pathlib import Path
from pilotlight.common.clock import SystemClock
from pilotlight.dataplane.pool_client import PoolClient
names = ("WORKER_ID", "NODE_ID", "DEVICE", "WORKERS", "STATE_DIR")
print(*(os.environ["PILOTLIGHT_" + name] for name in names), os.environ.get("HF_TOKEN"), flush=True)
client = PoolClient(Path(os.environ["PILOTLIGHT_POOL_SOCKET"]), SystemClock())
asyncio.run(client.hello(os.environ["PILOTLIGHT_WORKER_ID"]))
"""


class Pages(PoolPages):
    """Says when it begins and that it was stopped."""

    begun: ClassVar[asyncio.Event] = asyncio.Event()
    stops: ClassVar[list[bool]] = []

    async def start(self) -> None:
        self.begun.set()
        await super().start()

    async def stop(self) -> None:
        self.stops.append(self.begun.is_set())
        await super().stop()


@pytest.mark.parametrize(
    ("asked", "gpus", "early", "ends"),
    [
        ({"pool_ahead": True, "worker_kind": "cpu"}, 0, True, False),
        ({"worker_kind": "auto"}, 1, True, True),
        ({"worker_kind": "auto"}, 0, False, True),
        ({"worker_kind": "cpu"}, 1, False, True),
    ],
)
async def test_a_pool_gets_its_memory_while_it_is_not_known_yet_which_gpus_there_are(
    asked: dict[str, Any],
    gpus: int,
    early: bool,
    ends: bool,
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    for index in range(gpus):
        (devices / f"nvidia{index}").touch()

    async def find_none(*_: object, **__: object) -> FoundGpus:
        if early:
            async with asyncio.timeout(10):
                await Pages.begun.wait()
        return FoundGpus(why_none="the driver has none")

    monkeypatch.setattr(Pages, "begun", asyncio.Event())
    monkeypatch.setattr(Pages, "stops", [])
    monkeypatch.setattr(app, "PoolPages", Pages)
    monkeypatch.setattr(app, "DEVICES", devices)
    monkeypatch.setattr(app, "find_gpus", find_none)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    await cluster.start(workers=0, **asked)
    assert Pages.begun.is_set() is early
    assert bool(Pages.stops) is ends, "workers on cores need no pool so soon"


async def test_it_ends_where_gpus_cannot_be_told(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> FoundGpus:
        async with asyncio.timeout(10):
            await Pages.begun.wait()
        return FoundGpus(why_none="the driver hangs", untold=True)

    monkeypatch.setattr(Pages, "begun", asyncio.Event())
    monkeypatch.setattr(Pages, "stops", [])
    monkeypatch.setattr(app, "PoolPages", Pages)
    monkeypatch.setattr(app, "find_gpus", fail)
    with pytest.raises(MachineUnfit, match="the driver hangs"):
        await cluster.start(pool_ahead=True, worker_kind="auto", workers=1)
    assert Pages.stops == [True]
