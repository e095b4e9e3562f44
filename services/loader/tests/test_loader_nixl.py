"""Loaders that read models out of each other's memory: real processes, by NIXL where it is
installed and by a stand-in for it.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chaos.engine_reads import RIGHT, expected_of, read_model
from loader_processes import MIB, LoaderProcess, LoaderProcesses, fetch_of
from nixl_ways import WAYS, Way, needs_nixl, stand_in, ucx

from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.bus import Bus
from pilotlight.common.settings import BusSettings
from pilotlight.common.testing import until
from pilotlight.dataplane.link.nixl_process import has_rdma
from pilotlight.policy.model import Model

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
FILES = tiny_files(
    tiny_config(hidden_size=512, intermediate_size=4096, vocab_size=512, num_hidden_layers=4)
)
"""46 MiB, with layers of several chunks."""
POOL_BYTES = str(96 * MIB)


@pytest.fixture
async def cluster(
    tmp_path: Path, bus: Bus, bus_settings: BusSettings
) -> AsyncIterator[LoaderProcesses]:
    built = LoaderProcesses(tmp_path, bus, bus_settings)
    await built.listen()
    yield built
    await built.stop()


async def start(
    cluster: LoaderProcesses, name: str, way: Way, transport: str = "nixl"
) -> LoaderProcess:
    changes = {
        "PILOTLIGHT_LINK_TRANSPORT": transport,
        "PILOTLIGHT_POOL_BYTES": POOL_BYTES,
        "PILOTLIGHT_STALL_TIMEOUT_S": "16.0",
        **way,
    }
    return await cluster.start(name, **changes)


async def has_it_right(loader: LoaderProcess, cluster: LoaderProcesses, model: Model) -> None:
    """Every byte of it is what the safetensors library reads in the files."""
    await cluster.has(loader, model, deadline_s=60.0)
    read = await read_model(
        loader.socket, loader.home.name, model, expected_of(FILES), grace_s=10.0
    )
    assert (read.outcome, read.wrong, read.message) == (RIGHT, [], "")


def taken_bytes(loader: LoaderProcess) -> int:
    """What its host pool takes of memory."""
    return (loader.home / "pool").stat().st_blocks * 512


def mapped_by(loader: LoaderProcess) -> list[int]:
    """Processes that have its host pool mapped."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(loader.home / "pool") in (entry / "maps").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("way", WAYS)
async def test_a_model_goes_from_memory_to_memory(cluster: LoaderProcesses, way: Way) -> None:
    model = cluster.register(FILES)
    first, second, third = [
        await start(cluster, name, way) for name in ("first", "second", "third")
    ]
    for loader in (first, second, third):
        await until(lambda loader=loader: len(loader.said("link_by_nixl")) == 2, deadline_s=60.0)
    await cluster.order(first, fetch_of(first, model))
    await cluster.has(first, model)
    (cluster.folder / "models" / "m").rename(cluster.folder / "models" / "gone")
    await cluster.order(third, fetch_of(third, model, cluster.peer(second), cluster.peer(first)))
    await cluster.order(second, fetch_of(second, model, cluster.peer(first)))
    for loader in (second, third):
        await has_it_right(loader, cluster, model)
        assert not loader.said("origin_set_aside")
        assert not loader.said("link_nixl_failed")


@pytest.mark.parametrize(
    ("way", "seed"),
    [
        pytest.param(stand_in(), 1, id="stand-in"),
        *(
            pytest.param(ucx("tcp"), seed, id=f"NIXL over TCP {seed}", marks=needs_nixl)
            for seed in range(3)
        ),
        *(
            pytest.param(
                ucx("sysv,posix,cma,self,tcp"),
                seed,
                id=f"NIXL over shared memory {seed}",
                marks=needs_nixl,
            )
            for seed in range(3)
        ),
    ],
)
async def test_a_sender_is_killed_while_it_is_read(
    cluster: LoaderProcesses, way: Way, seed: int
) -> None:
    model = cluster.register(FILES)
    slow = {**way, "STAND_IN_NIXL": f"waits:12:{cluster.folder / 'now'}"}
    first, second = await start(cluster, "first", way), await start(cluster, "second", slow)
    await cluster.order(first, fetch_of(first, model))
    await cluster.has(first, model)
    await until(lambda: second.said("link_by_nixl"), deadline_s=60.0)
    before = taken_bytes(second)
    await cluster.order(second, fetch_of(second, model, cluster.peer(first)))
    await until(lambda: taken_bytes(second) - before >= (1 + 8 * seed) * MIB)
    first.signal(signal.SIGKILL)
    await has_it_right(second, cluster, model)
    (cluster.folder / "now").touch()
    # What was under way when it died reaches no request.
    await has_it_right(second, cluster, model)
    await first.ended()
    # The process that read for it has ended with it, and holds no memory; the next loader adopts
    # the pool.
    await until(lambda: not mapped_by(first), deadline_s=20.0)
    await cluster.begin(first)
    assert cluster.is_held(first, model) or await has_it_right(first, cluster, model) is None


@pytest.mark.parametrize("whose", ["sender's", "receiver's"])
@pytest.mark.parametrize("way", WAYS)
async def test_the_process_that_reads_is_killed(
    cluster: LoaderProcesses, way: Way, whose: str
) -> None:
    model = cluster.register(FILES)
    slow = {**way, "STAND_IN_NIXL": f"waits:9:{cluster.folder / 'now'}"}
    first, second = await start(cluster, "first", way), await start(cluster, "second", slow)
    await cluster.order(first, fetch_of(first, model))
    await cluster.has(first, model)
    await until(lambda: second.said("link_by_nixl"), deadline_s=60.0)
    (cluster.folder / "models" / "m").rename(cluster.folder / "models" / "gone")
    before = taken_bytes(second)
    await cluster.order(second, fetch_of(second, model, cluster.peer(first)))
    await until(lambda: taken_bytes(second) - before >= 5 * MIB)
    loader = first if whose == "sender's" else second
    assert loader.child is not None
    readers = [pid for pid in mapped_by(loader) if pid != loader.child.pid]
    assert len(readers) == 1
    os.kill(readers[0], signal.SIGKILL)
    await has_it_right(second, cluster, model)
    assert not second.said("origin_set_aside")
    assert loader.is_alive
    await until(lambda: len(loader.said("nixl_up")) == 2, deadline_s=60.0)


async def test_where_there_is_no_nixl_the_loader_says_so_once_and_goes_on(
    cluster: LoaderProcesses,
) -> None:
    model = cluster.register(FILES)
    first, second = (
        await start(cluster, "first", stand_in()),
        await start(cluster, "second", stand_in("missing")),
    )
    await until(lambda: second.said("nixl_down"), deadline_s=60.0)
    await cluster.order(first, fetch_of(first, model))
    await cluster.has(first, model)
    (cluster.folder / "models" / "m").rename(cluster.folder / "models" / "gone")
    await cluster.order(second, fetch_of(second, model, cluster.peer(first)))
    await has_it_right(second, cluster, model)
    assert len(second.said("nixl_down")) == 1
    assert not second.said("origin_set_aside")


@pytest.mark.parametrize("transport", ["tcp", "auto"])
async def test_no_process_is_started_unless_it_is_wanted(
    cluster: LoaderProcesses, transport: str
) -> None:
    if transport == "auto" and has_rdma():
        pytest.skip("this host has an RDMA device")
    first, second = [
        await start(cluster, name, stand_in(), transport) for name in ("first", "second")
    ]
    await until(lambda: first.said("link_up") and second.said("link_up"))
    assert first.child is not None
    assert await asyncio.to_thread(mapped_by, first) == [first.child.pid]
    assert not first.said("nixl_up")
