"""Chunks that go from the pool to the disk in a thread of their own."""

import os
from pathlib import Path

import pytest
from disk_tiers import Tier, content_of

from pilotlight.checkpoint.digests import UNIT_BYTES, chunk_digest
from pilotlight.common.clock import SystemClock
from pilotlight.dataplane.disk_tier import DiskEvent
from pilotlight.dataplane.disk_writer import DiskWriter
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.ids import Digest

MODEL = Digest("ab" * 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


class TestWriter:
    @pytest.fixture
    def pool(self, tmp_path: Path) -> Path:
        path = tmp_path / "pool"
        path.write_bytes(content_of(0, 2 * UNIT_BYTES + 100))
        return path

    def test_chunks_come_from_the_pool_to_the_disk(self, folder: Path, pool: Path):
        one = Tier(folder, 8 * UNIT_BYTES)
        writer = DiskWriter(one.tier, pool, SystemClock(), lambda event: one.events.update([event]))
        whole = pool.read_bytes()
        digests = [
            chunk_digest(whole[start:stop]) for start, stop in ((0, 4096), (4096, len(whole)))
        ]
        writer.keep(digests[0], 0, 4096, OriginKind.SOURCE, MODEL)
        writer.keep(digests[1], 4096, len(whole) - 4096, OriginKind.PEER, MODEL)
        writer.keep(digests[0], 4096, 4096, OriginKind.SOURCE, MODEL)
        writer.keep(chunk_digest(b"other"), 0, 4096, OriginKind.SOURCE, MODEL)
        writer.keep(chunk_digest(b"on disk"), 0, 4096, OriginKind.DISK, MODEL)
        writer.keep(chunk_digest(b"beyond"), len(whole) - 10, 4096, OriginKind.SOURCE, MODEL)
        writer.start()
        while writer.waiting:
            os.sched_yield()
        writer.stop()
        assert one.read(digests[0], 4096) == whole[:4096]
        assert one.read(digests[1], len(whole) - 4096) == whole[4096:]
        assert len(list(folder.rglob("*.chunk"))) == 2
        assert one.events[DiskEvent.OVERTAKEN] == 2
        assert not list(folder.rglob("*.part"))

    def test_more_than_can_wait_is_dropped(self, folder: Path, pool: Path):
        one = Tier(folder)
        writer = DiskWriter(
            one.tier, pool, SystemClock(), lambda event: one.events.update([event]), queue_chunks=2
        )
        for number in range(5):
            writer.keep(chunk_digest(bytes(number)), 0, 64, OriginKind.SOURCE, MODEL)
        assert one.events == {DiskEvent.DROPPED: 3}
        writer.stop()

    def test_a_thread_that_waits_for_its_turn_is_stopped_at_once(self, folder: Path, pool: Path):
        """And it runs with the least priority there is."""
        one = Tier(folder, 8 * UNIT_BYTES)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        seen: list[int] = []

        def count(event: DiskEvent) -> None:
            seen.append(os.getpriority(os.PRIO_PROCESS, 0))

        one.tier._count = count
        writer = DiskWriter(one.tier, pool, SystemClock(), count)
        writer.start()
        writer.keep(
            chunk_digest(pool.read_bytes()[:UNIT_BYTES]), 0, UNIT_BYTES, OriginKind.SOURCE, MODEL
        )
        while not seen:
            os.sched_yield()
        writer.stop()
        assert seen == [19]
        assert os.getpriority(os.PRIO_PROCESS, 0) == own, (
            "the priority of the thread that made it is its own"
        )
