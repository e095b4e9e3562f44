import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import textwrap

import msgspec
import pytest

from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import BadRequest, CallerError, SourceChanged, SourceUnavailable
from pilotlight.common.messages.codec import frame
from pilotlight.common.messages.pool import Hello, Lease
from pilotlight.common.testing import until
from pilotlight.common.waiting import pause
from pilotlight.dataplane.pool_client import PoolClient
from pilotlight.dataplane.pool_server import PoolServer
from pilotlight.policy.ids import InstanceId, WorkerId

pytestmark = pytest.mark.anyio

WORKER = WorkerId("node-1-w0")
ONE = InstanceId("inst-1")


class Workers:
    """The workers that said hello, and those that are gone."""

    def __init__(self) -> None:
        self.present: dict[WorkerId, int] = {}
        self.changed = asyncio.Condition()
        self.goodbyes = 0

    def on_hello(self, hello: Hello) -> None:
        self.present[hello.worker_id] = hello.pid

    def on_goodbye(self, hello: Hello) -> None:
        self.present.pop(hello.worker_id, None)
        self.goodbyes += 1


@pytest.fixture
async def served(make_node, register, tmp_path):
    node = make_node()
    registered = node.add(register())
    workers = Workers()
    server = PoolServer(tmp_path / "pool.sock", node.pool, node.copies, workers)
    await server.start()
    yield node, registered, workers, server
    await server.stop()


def client_of(server: PoolServer, grace_s: float = 10.0) -> PoolClient:
    return PoolClient(server.path, SystemClock(), grace_s=grace_s)


async def test_a_lease_brings_parts_and_ends_with_its_connection(served) -> None:
    node, registered, _, server = served
    model = registered.model
    async with await client_of(server).lease(WORKER, ONE, model, (0, 1, 2, 3)) as lease:
        assert [part.part async for part in lease] == [0, 1, 2, 3]
        assert lease.pool_path == str(node.pool.path)
        assert lease.done
        assert lease.intact
        assert node.copies.drop([model.digest]) == ()
    await until(lambda: node.copies.copies("n")[0].leases == 0)
    assert node.copies.drop([model.digest]) == (model.digest,)


async def test_a_lease_is_asked_for_before_it_is_awaited(served) -> None:
    node, registered, _, server = served
    asked = client_of(server).lease(WORKER, ONE, registered.model, (0, 1))
    await until(lambda: [one.leases for one in node.copies.copies("n")] == [1])
    async with await asked as lease:
        assert [part.part async for part in lease] == [0, 1]
    await until(lambda: node.copies.copies("n")[0].leases == 0)


async def test_a_lease_that_nobody_awaits_ends(served) -> None:
    node, registered, _, server = served
    asked = client_of(server).lease(WORKER, ONE, registered.model, (0, 1))
    await until(lambda: [one.leases for one in node.copies.copies("n")] == [1])
    asked.close()
    del asked
    gc.collect()
    await until(lambda: node.copies.copies("n")[0].leases == 0)


async def test_a_lease_of_a_loader_that_goes_before_it_answers_is_the_next_ones(served) -> None:
    node, registered, workers, server = served
    await server.stop()
    gone = socket.socket(socket.AF_UNIX)
    gone.bind(str(server.path))
    gone.listen()
    asked = client_of(server).lease(WORKER, ONE, registered.model, (0, 1))
    gone.close()  # With the request, which it had not read.
    server.path.unlink()
    again = PoolServer(server.path, node.pool, node.copies, workers)
    await again.start()
    async with await asked as lease:
        assert [part.part async for part in lease] == [0, 1]
    await again.stop()


async def test_a_lease_whose_close_is_broken_off_ends_all_the_same(served) -> None:
    """``cancel_all`` asks a task again that takes long to end, as any does on a busy machine: that
    also meets one that is closing its lease.
    """
    node, registered, _, server = served
    lease = await client_of(server).lease(WORKER, ONE, registered.model, (0, 1))
    assert [part.part async for part in lease] == [0, 1]
    closing = asyncio.create_task(lease.close())
    await pause(0)
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled(), "it was broken off while it waited"
    await until(lambda: server.connections == 0)
    assert node.copies.copies("n")[0].leases == 0


async def test_a_lease_on_a_pool_that_cannot_be_found_is_not_kept(served) -> None:
    node, registered, _, server = served
    node.pool.path.rename(node.pool.path.with_suffix(".away"))
    with pytest.raises(SourceUnavailable, match="cannot be found") as caught:
        await client_of(server).lease(WORKER, ONE, registered.model, (0,))
    await until(lambda: server.connections == 0)
    assert caught.value.__traceback__ is not None, "while that is there, its frames are, too"


async def test_a_killed_process_holds_no_lease(served, tmp_path) -> None:
    node, registered, workers, server = served
    script = textwrap.dedent("""
        import asyncio, sys
        import msgspec
        from pathlib import Path
        from pilotlight.common.clock import SystemClock
        from pilotlight.dataplane.pool_client import PoolClient
        from pilotlight.policy.model import Model

        async def main():
            client = PoolClient(Path(sys.argv[1]), SystemClock())
            greeting = asyncio.create_task(client.hello("node-1-w0"))
            model = msgspec.json.decode(sys.argv[2], type=Model)
            lease = await client.lease("node-1-w0", "inst-1", model, (0, 1, 2, 3))
            async for part in lease:
                pass
            print("ready", flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
    """)
    encoded = msgspec.json.encode(registered.model).decode()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(server.path), encoded, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 20) == b"ready\n"
    await until(lambda: workers.present == {WORKER: process.pid})
    assert node.copies.drop([registered.model.digest]) == ()
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: not workers.present)
    await until(lambda: node.copies.copies("n")[0].leases == 0)
    assert node.copies.drop([registered.model.digest]) == (registered.model.digest,)
    await process.wait()


async def test_what_the_loader_cannot_have_reaches_the_worker_as_the_same_error(served) -> None:
    _, registered, _, server = served
    (registered.folder / "model.safetensors").unlink()
    async with await client_of(server).lease(WORKER, ONE, registered.model, (0, 1)) as lease:
        with pytest.raises(SourceChanged, match=r"model\.safetensors"):
            _ = [part async for part in lease]
    with pytest.raises(CallerError, match="parts 0 to 3"):
        await client_of(server).lease(WORKER, ONE, registered.model, (9,))


async def test_a_worker_greets_a_restarted_loader(served) -> None:
    node, _, workers, server = served
    client = client_of(server)
    greeting = asyncio.create_task(client.hello(WORKER, 4711))
    await until(lambda: workers.present == {WORKER: 4711})
    await server.stop()
    assert (workers.present, workers.goodbyes) == ({}, 1)
    again = PoolServer(server.path, node.pool, node.copies, workers)
    await again.start()
    await until(lambda: workers.present == {WORKER: 4711})
    greeting.cancel()
    await until(lambda: not workers.present)
    await again.stop()


async def test_a_worker_without_a_loader_gives_up_after_its_grace(tmp_path) -> None:
    client = PoolClient(tmp_path / "nobody.sock", SystemClock(), grace_s=0.05)
    async with asyncio.timeout(10):
        await client.hello(WORKER, 4711)
    assert not client.connected.is_set()


async def test_a_lease_outlives_a_loader_that_comes_back_with_its_pool(served) -> None:
    node, registered, workers, server = served
    client = client_of(server)
    async with await client.lease(WORKER, ONE, registered.model, (0, 1, 2, 3)) as lease:
        parts = aiter(lease)
        assert (await anext(parts)).part == 0
        await server.stop()
        await until(lambda: not node.copies._claims)
        again = PoolServer(server.path, node.pool, node.copies, workers)
        await again.start()
        assert [part.part async for part in parts] == [1, 2, 3]
        await until(lambda: node.copies.copies("n")[0].leases == 1)
        assert lease.intact
        await again.stop()


async def test_a_lease_whose_parts_were_given_up_meanwhile_is_not_intact(served) -> None:
    """They are in the pool again, perhaps in the same place, and for a while something else was
    there.
    """
    node, registered, workers, server = served
    async with await client_of(server).lease(WORKER, ONE, registered.model, (0, 1)) as lease:
        assert [part.part async for part in lease] == [0, 1]
        await server.stop()
        await until(lambda: not node.copies._claims)
        assert lease.intact, "they are kept until the next loader has been there for a while"
        assert node.copies.drop([registered.model.digest])
        again = PoolServer(server.path, node.pool, node.copies, workers)
        await again.start()
        await until(lambda: not lease.intact)
        await again.stop()


async def test_a_lease_whose_loader_stays_away_is_not_intact(served) -> None:
    _, registered, _, server = served
    async with await client_of(server, grace_s=0.05).lease(
        WORKER, ONE, registered.model, (0,)
    ) as lease:
        assert [part.part async for part in lease] == [0]
        await server.stop()
        await until(lambda: not lease.intact)


SAID = {
    "nothing": b"",
    "another protocol": b"GET / HTTP/1.0\r\n\r\n",
    "an unknown frame": frame({"type": "nothing"}),
    "half a frame": frame(Hello(worker_id=WORKER, pid=1))[:7],
    "a length out of bounds": b"\xff\xff\xff\xff",
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID.keys())
async def test_strangers_are_shown_the_door(served, said: bytes) -> None:
    node, _, workers, server = served
    reader, writer = await asyncio.open_unix_connection(server.path)
    writer.write(said)
    writer.write_eof()
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    await until(lambda: server.connections == 0)
    assert (workers.present, node.copies._claims) == ({}, {})


async def test_a_reader_that_does_not_read_loses_its_lease(served, tmp_path) -> None:
    node, registered, workers, _ = served
    server = PoolServer(tmp_path / "other.sock", node.pool, node.copies, workers, write_s=0.05)
    await server.start()
    slow = registered.model
    _, writer = await asyncio.open_unix_connection(server.path)
    big = Lease(worker_id=WORKER, instance_id=ONE, model=slow, parts=(0, 1, 2, 3))
    known = node.manifests.manifests[slow.digest]
    padded = tuple(
        msgspec.structs.replace(part, tensors=part.tensors * 20_000) for part in known.parts
    )
    node.manifests.manifests[slow.digest] = msgspec.structs.replace(known, parts=padded)
    transport = writer.transport
    transport.pause_reading()
    writer.write(frame(big))
    await writer.drain()
    await until(lambda: server.connections == 1)
    await until(lambda: server.connections == 0)
    assert node.copies.copies("n")[0].leases == 0
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    await server.stop()


async def test_the_socket_is_ours_alone_and_goes_with_the_loader(served) -> None:
    _, _, _, server = served
    assert server.path.stat().st_mode & 0o777 == 0o600
    await server.stop()
    assert not server.path.exists()


async def test_a_path_that_no_socket_can_have(make_node, tmp_path) -> None:
    node = make_node()
    server = PoolServer(tmp_path / ("x" * 100) / "pool.sock", node.pool, node.copies, Workers())
    with pytest.raises(BadRequest, match="PILOTLIGHT_RUN_DIR"):
        await server.start()
