"""The pool's memory is taken ahead: behind fetches, and only what nothing else has."""

import threading
from pathlib import Path

import pytest

from pilotlight.checkpoint.free_memory import MemoryFacts
from pilotlight.common.clock import SystemClock
from pilotlight.dataplane.file_reads import native_reads
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_pages import LEFT_BYTES, STEP_BYTES, PoolPages
from pilotlight.native.building import compiler

LIBRARY = native_reads()
pytestmark = [
    pytest.mark.skipif(
        LIBRARY is None and compiler() is None, reason="there is no C++ compiler, and no library"
    ),
    pytest.mark.anyio,
]
PLENTY = MemoryFacts(None, unused_bytes=1 << 40)
POOL_BYTES = 4 * STEP_BYTES


@pytest.fixture
def pool(tmp_path: Path):
    made = HostPool.open(tmp_path / "pool", POOL_BYTES, SystemClock())
    yield made
    made.close(remove=True)


def taken_bytes(pool: HostPool) -> int:
    return pool.path.stat().st_blocks * 512


@pytest.mark.parametrize("threads", [1, 3])
async def test_all_of_it_is_taken_and_nothing_of_it_changes(pool: HostPool, threads: int) -> None:
    assert LIBRARY is not None
    with pool.memory(STEP_BYTES + 5, 3) as memory:
        memory[:] = b"abc"
    pages = PoolPages(pool, LIBRARY, lambda: False, lambda: PLENTY, threads)
    await pages.start()
    await pages.start()
    assert pages.join(30)
    assert pages.given_bytes == POOL_BYTES <= taken_bytes(pool)
    with pool.memory(STEP_BYTES + 4, 5) as memory:
        assert bytes(memory) == b"\0abc\0"
    await pages.stop()


async def test_it_ends_where_files_would_have_to_go(pool: HostPool) -> None:
    assert LIBRARY is not None
    left = [LEFT_BYTES + 2 * STEP_BYTES, LEFT_BYTES + STEP_BYTES, LEFT_BYTES]
    facts = iter([MemoryFacts(None, unused_bytes=unused_bytes) for unused_bytes in left])
    pages = PoolPages(pool, LIBRARY, lambda: False, lambda: next(facts))
    await pages.start()
    assert pages.join(30)
    assert pages.given_bytes == 2 * STEP_BYTES


async def test_threads_leave_what_others_are_at(pool: HostPool) -> None:
    assert LIBRARY is not None
    unused = MemoryFacts(None, unused_bytes=LEFT_BYTES + 2 * STEP_BYTES)
    pages = PoolPages(pool, LIBRARY, lambda: False, lambda: unused, threads=3)
    await pages.start()
    assert pages.join(30)
    assert pages.given_bytes == 0


async def test_a_container_has_what_its_limit_leaves(pool: HostPool) -> None:
    assert LIBRARY is not None
    facts = MemoryFacts(
        None, limit_bytes=LEFT_BYTES, used_bytes=5, files_bytes=5, unused_bytes=1 << 40
    )
    pages = PoolPages(pool, LIBRARY, lambda: False, lambda: facts)
    await pages.start()
    assert pages.join(30)
    assert pages.given_bytes == 0


async def test_it_takes_nothing_while_a_fetch_goes_on(pool: HostPool) -> None:
    assert LIBRARY is not None
    looks = threading.Semaphore(0)
    fetching = True

    def is_busy() -> bool:
        looks.release()
        return fetching

    pages = PoolPages(pool, LIBRARY, is_busy, lambda: PLENTY)
    await pages.start()
    for _ in range(3):
        assert looks.acquire(timeout=30)
    assert pages.given_bytes == 0
    fetching = False
    assert pages.join(30)
    assert pages.given_bytes == POOL_BYTES


async def test_it_stops_while_it_waits(pool: HostPool) -> None:
    assert LIBRARY is not None
    pages = PoolPages(pool, LIBRARY, lambda: True, lambda: PLENTY)
    await pages.start()
    await pages.stop()
    assert pages.join(0)
    assert pages.given_bytes == 0
