import mmap
import os
import threading
from pathlib import Path

import pytest
from blake3 import blake3

from pilotlight.checkpoint.digests import chunk_digest
from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import Conflict, HostPoolFull, HostPoolTaken, StaleCommand
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_images import PartImage
from pilotlight.dataplane.table import (
    ENTRY_BYTES,
    HEADER_BYTES,
    ChunkEntry,
    ChunkTable,
    read_changes,
)
from pilotlight.policy.ids import Digest, Epoch

POOL_BYTES = 4 * 1024 * 1024
CHUNK_BYTES = 4096
FIRST = Digest("11" * 32)
SECOND = Digest("22" * 32)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def fill(pool: HostPool, digest: Digest, part: int, chunks: int = 3) -> PartImage:
    image = pool.reserve(digest, part, chunks * CHUNK_BYTES, chunks)
    for index in range(chunks):
        enter(pool, image, index)
    return image


def enter(pool: HostPool, image: PartImage, index: int) -> None:
    content = blake3(f"{image.digest} {image.part} {index}".encode()).digest(CHUNK_BYTES)
    start = index * CHUNK_BYTES
    with pool.view(image, start, CHUNK_BYTES) as view:
        view[:] = content
    pool.enter_chunk(image, (start, start + CHUNK_BYTES), chunk_digest(content))


def held(pool: HostPool) -> dict[Digest, tuple[int, ...]]:
    return {copy.digest: copy.parts for copy in pool.copies()}


def test_a_pool_is_adopted_with_what_was_ready(path: Path, clock: ManualClock) -> None:
    pool = HostPool.open(path, POOL_BYTES, clock)
    places = {
        (digest, part): pool.file_offset(fill(pool, digest, part))
        for digest in (FIRST, SECOND)
        for part in (0, 1, 5)
    }
    unfinished = pool.reserve(FIRST, 2, 2 * CHUNK_BYTES, 2)
    enter(pool, unfinished, 0)
    pool.raise_epoch(Epoch(7))
    pool.close(remove=False)

    adopted = HostPool.open(path, POOL_BYTES, clock)
    assert held(adopted) == {FIRST: (0, 1, 5), SECOND: (0, 1, 5)}
    for (digest, part), offset in places.items():
        image = adopted.find(digest, part)
        assert image is not None
        assert adopted.file_offset(image) == offset
    assert adopted.find(FIRST, 2) is None
    assert adopted.highest_epoch == 7
    for digest in (FIRST, SECOND):
        adopted.drop(digest)
    assert adopted.free_bytes == POOL_BYTES, "what was unfinished leaks"
    adopted.close(remove=True)


def test_a_worker_reads_what_the_table_says(path: Path, clock: ManualClock) -> None:
    pool = HostPool.open(path, POOL_BYTES, clock)
    image = fill(pool, FIRST, 0)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), pool.geometry.file_bytes, access=mmap.ACCESS_READ) as mapped,
    ):
        start = pool.file_offset(image)
        assert mapped[start : start + CHUNK_BYTES] == blake3(f"{FIRST} 0 0".encode()).digest(
            CHUNK_BYTES
        )
    assert path.stat().st_mode & 0o777 == 0o600
    pool.close(remove=True)


class CrashError(Exception):
    """The process ends here."""


class CrashingMap:
    """Lets a number of writes through, then none; a write of many bytes counts as two, for a crash
    may tear it.
    """

    def __init__(self, mapped: mmap.mmap, writes: int) -> None:
        self.mapped = mapped
        self.writes = writes

    def __getitem__(self, key):
        return self.mapped[key]

    def __setitem__(self, key, value) -> None:
        if isinstance(key, slice):
            middle = (key.start + key.stop) // 2
            self._write(slice(key.start, middle), value[: middle - key.start])
            self._write(slice(middle, key.stop), value[middle - key.start :])
        else:
            self._write(key, value)

    def _write(self, key, value) -> None:
        if self.writes == 0:
            raise CrashError
        self.writes -= 1
        self.mapped[key] = value


@pytest.mark.parametrize("writes", range(22))
def test_a_crash_at_any_write_leaves_only_whole_parts(
    path: Path, clock: ManualClock, writes: int
) -> None:
    pool = HostPool.open(path, POOL_BYTES, clock)
    fill(pool, FIRST, 0)
    old = fill(pool, SECOND, 0)
    pool._table = ChunkTable(CrashingMap(pool._mapped, writes), pool.geometry.slots)
    try:
        # Drop one model and write another over it: three writes free the old entries, two count
        # that, and each new entry takes three. Six say that it is used, and count it.
        pool.discard(old)
        image = pool.reserve(FIRST, 1, 3 * CHUNK_BYTES, 3)
        assert image.extent == old.extent
        for index in range(3):
            enter(pool, image, index)
    except CrashError:
        assert writes < 20
    finished = [1] if pool.find(FIRST, 1) else []
    assert bool(finished) == (writes >= 14)
    pool.close(remove=False)

    adopted = HostPool.open(path, POOL_BYTES, clock)
    copies = held(adopted)
    assert copies.pop(FIRST) == (0, *finished)
    # A model is whole or not there: until its first entry is freed nothing has happened to it.
    assert copies == ({SECOND: (0,)} if writes == 0 else {})
    adopted.close(remove=True)


def test_what_is_adopted_is_verified_on_several_cores(
    path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's starts wait for it."""
    pool = HostPool.open(path, POOL_BYTES, clock)
    fill(pool, FIRST, 0, chunks=2)
    pool.close(remove=False)
    both = threading.Barrier(2, timeout=10.0)
    digest_of = HostPool._digest_of

    def together(pool: HostPool, entry: ChunkEntry) -> Digest:
        both.wait()
        return digest_of(pool, entry)

    monkeypatch.setattr(HostPool, "_digest_of", together)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    adopted = HostPool.open(path, POOL_BYTES, clock)
    assert held(adopted) == {FIRST: (0,)}
    adopted.close(remove=True)


def test_bytes_that_are_not_what_was_verified_are_not_adopted(
    path: Path, clock: ManualClock
) -> None:
    pool = HostPool.open(path, POOL_BYTES, clock)
    fill(pool, FIRST, 0)
    image = fill(pool, SECOND, 0)
    offset = pool.file_offset(image) + 2 * CHUNK_BYTES + 17
    pool.close(remove=False)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff\x00\xff", offset)
    adopted = HostPool.open(path, POOL_BYTES, clock)
    assert held(adopted) == {FIRST: (0,)}
    adopted.close(remove=True)


def test_a_pool_of_another_size_is_made_anew_and_keeps_the_epoch(
    path: Path, clock: ManualClock
) -> None:
    pool = HostPool.open(path, POOL_BYTES, clock)
    fill(pool, FIRST, 0)
    pool.raise_epoch(Epoch(3))
    inode = path.stat().st_ino
    pool.close(remove=False)
    larger = HostPool.open(path, 2 * POOL_BYTES, clock)
    assert (larger.copies(), larger.free_bytes, larger.highest_epoch) == ((), 2 * POOL_BYTES, 3)
    assert path.stat().st_ino != inode
    larger.close(remove=True)


def test_another_boots_pool_is_made_anew(path: Path, clock: ManualClock) -> None:
    pool = HostPool.open(path, POOL_BYTES, clock)
    fill(pool, FIRST, 0)
    pool.close(remove=False)
    content = path.read_bytes()
    path.write_bytes(
        content.replace(Path("/proc/sys/kernel/random/boot_id").read_bytes().strip(), b"0" * 36, 1)
    )
    adopted = HostPool.open(path, POOL_BYTES, clock)
    assert adopted.copies() == ()
    adopted.close(remove=True)


@pytest.mark.parametrize("content", [b"", b"something else", b"\0" * 100_000])
def test_a_file_that_is_no_pool_is_replaced(path: Path, clock: ManualClock, content: bytes) -> None:
    path.write_bytes(content)
    pool = HostPool.open(path, POOL_BYTES, clock)
    assert pool.free_bytes == POOL_BYTES
    pool.close(remove=True)


def test_one_loader_a_pool(path: Path, clock: ManualClock) -> None:
    pool = HostPool.open(path, POOL_BYTES, clock)
    with pytest.raises(HostPoolTaken, match="another loader"):
        HostPool.open(path, POOL_BYTES, clock)
    with pytest.raises(HostPoolTaken, match="another loader"):
        HostPool.open(path, 2 * POOL_BYTES, clock)
    pool.close(remove=True)
    assert not path.exists()
    assert list(path.parent.iterdir()) == []


def test_older_epochs_are_refused(path: Path, clock: ManualClock) -> None:
    pool = HostPool.open(path, POOL_BYTES, clock)
    pool.raise_epoch(Epoch(5))
    pool.raise_epoch(Epoch(5))
    with pytest.raises(StaleCommand):
        pool.raise_epoch(Epoch(4))
    pool.close(remove=True)


def test_a_full_pool_says_so_and_stays_as_it_was(path: Path, clock: ManualClock) -> None:
    pool = HostPool.open(path, POOL_BYTES, clock)
    image = pool.reserve(FIRST, 0, POOL_BYTES - 64 * 1024, 1)
    with pytest.raises(HostPoolFull, match="65536 bytes free"):
        pool.reserve(FIRST, 1, 65537, 1)
    with pytest.raises(HostPoolFull):
        pool.reserve(FIRST, 1, 1, 1000)
    with pytest.raises(Conflict):
        pool.reserve(FIRST, 0, 1, 1)
    pool.discard(image)
    assert pool.free_bytes == POOL_BYTES
    pool.close(remove=True)


def test_a_loader_that_comes_again_knows_what_was_used_last(path: Path, clock: ManualClock) -> None:
    pool = HostPool.open(path, POOL_BYTES, clock)
    for part in (0, 1):
        fill(pool, FIRST, part)
    clock.advance(1)
    fill(pool, SECOND, 0)
    pool.reserve(SECOND, 1, 0, 0)  # A part without parameters has no entry.
    clock.advance(1)
    pool.touch(FIRST)
    pool.touch(Digest("33" * 32))
    before = [(copy.digest, copy.last_used_s) for copy in pool.copies()]
    assert before == [(SECOND, 1001.0), (FIRST, 1002.0)]
    pool.close(remove=False)

    clock.advance(60)
    adopted = HostPool.open(path, POOL_BYTES, clock)
    assert [(copy.digest, copy.last_used_s) for copy in adopted.copies()] == before
    adopted.close(remove=False)
    # As from a container whose clock began elsewhere: never later than now.
    adopted = HostPool.open(path, POOL_BYTES, ManualClock(1001.5))
    assert [copy.last_used_s for copy in adopted.copies()] == [1001.0, 1001.5]
    adopted.close(remove=True)


def test_what_an_older_loader_left_is_used_when_it_is_adopted(
    path: Path, clock: ManualClock
) -> None:
    """It wrote 117 bytes of an entry's 128, and counted no changes."""
    pool = HostPool.open(path, POOL_BYTES, clock)
    image = fill(pool, FIRST, 0)
    for slot in image.slots:
        start = HEADER_BYTES + slot * ENTRY_BYTES
        pool._mapped[start + 117 : start + ENTRY_BYTES] = bytes(ENTRY_BYTES - 117)
    pool.close(remove=False)
    clock.advance(5)
    adopted = HostPool.open(path, POOL_BYTES, clock)
    assert [(copy.digest, copy.last_used_s) for copy in adopted.copies()] == [(FIRST, 1005.0)]
    adopted.close(remove=True)


def test_where_an_entry_says_when_its_image_was_used(path: Path, clock: ManualClock) -> None:
    """Every release reads it there."""
    pool = HostPool.open(path, POOL_BYTES, clock)
    first, second = fill(pool, FIRST, 0).slots[:2]
    clock.advance(0.25)
    pool.touch(FIRST)
    said = [
        bytes(pool._mapped[start + 117 : start + 128])
        for start in (HEADER_BYTES + first * 128, HEADER_BYTES + second * 128)
    ]
    assert said == [bytes(3) + (1_000_250_000_000).to_bytes(8, "little"), bytes(11)]
    pool.close(remove=True)


def test_who_reads_along_sees_what_came_and_went(path: Path, clock: ManualClock) -> None:
    pool = HostPool.open(path, POOL_BYTES, clock)
    seen = [read_changes(pool._mapped)]
    image = pool.reserve(FIRST, 0, 2 * CHUNK_BYTES, 2)
    enter(pool, image, 0)
    assert read_changes(pool._mapped) == seen[-1] > 0, "it is not ready yet"
    enter(pool, image, 1)
    seen.append(read_changes(pool._mapped))
    pool.touch(FIRST)
    assert read_changes(pool._mapped) == seen[-1], "nothing came"
    pool.drop(FIRST)
    seen.append(read_changes(pool._mapped))
    pool.close(remove=False)
    adopted = HostPool.open(path, POOL_BYTES, clock)
    seen.append(read_changes(adopted._mapped))
    assert seen == sorted(set(seen)), "another number each time"
    adopted.close(remove=True)


def test_copies_come_least_recently_used_first(path: Path, clock: ManualClock) -> None:
    pool = HostPool.open(path, POOL_BYTES, clock)
    fill(pool, FIRST, 0)
    clock.advance(1)
    fill(pool, SECOND, 0)
    assert [copy.digest for copy in pool.copies()] == [FIRST, SECOND]
    clock.advance(1)
    pool.touch(FIRST)
    assert [(copy.digest, copy.last_used_s) for copy in pool.copies()] == [
        (SECOND, 1001.0),
        (FIRST, 1002.0),
    ]
    pool.close(remove=True)
