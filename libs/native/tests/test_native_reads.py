"""Files read into memory and hashed there: what comes is what the files hold, whatever they do,
and nothing comes after a cancel.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.native.building import compiler
from pilotlight.native.library import Library, NativeUnavailable, library
from pilotlight.native.reads import (
    Backing,
    FileRead,
    FileSpan,
    FileTooShort,
    NoMemory,
    NotResident,
    ReadCancelled,
    blake3_of,
    populate,
)

UNIT = 64 * 1024
CONTENT = os.urandom(5 * UNIT + 777)


@pytest.fixture(scope="module")
def native() -> Library:
    try:
        return library()
    except NativeUnavailable:
        if compiler() is not None:
            raise
        pytest.skip("there is no C++ compiler, and no library")


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(CONTENT)
    found = os.open(tmp_path / "file", os.O_RDWR)
    yield found
    os.close(found)


def memory_of(size_bytes: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, size_bytes))
    memory[:] = b"\xee" * size_bytes
    return memory


def digests_of(data: bytes) -> tuple[bytes, ...]:
    return tuple(blake3(data[at : at + UNIT]).digest() for at in range(0, len(data), UNIT))


@settings(max_examples=200, deadline=None)
@given(
    size_bytes=st.one_of(
        st.integers(1, 70_000), st.integers(1, 1024).map(lambda chunks: 1024 * chunks)
    ),
    seed=st.integers(0, 255),
)
def test_the_digest_is_blake3s(native: Library, size_bytes: int, seed: int) -> None:
    data = (bytes(range(seed, 256)) + bytes(range(seed + 1)))[:251] * (size_bytes // 251 + 1)
    assert blake3_of(native, data[:size_bytes]) == blake3(data[:size_bytes]).digest()


def test_every_instruction_set_gives_the_same(native: Library) -> None:
    data = os.urandom(16 * 1024)
    found: dict[str, bytes] = {}
    for kind in ("portable", "sse2", "sse41", "avx2", "avx512"):
        values = ctypes.create_string_buffer(16 * 32)
        if not native.get("blake3_chunks", kind.encode(), data, values):
            found[kind] = values.raw
    assert "portable" in found
    assert found["portable"] != bytes(16 * 32)
    assert len(set(found.values())) == 1


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_spans_come_to_their_places_and_the_rest_is_zero(
    native: Library, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("spans") / "file"
    file.write_bytes(CONTENT)
    size_bytes = data.draw(st.integers(1, 4 * UNIT))
    cuts = sorted(data.draw(st.lists(st.integers(0, size_bytes), max_size=12)))
    descriptor, expected, spans = (
        os.open(file, os.O_RDONLY),
        bytearray(size_bytes),
        list[FileSpan](),
    )
    for start, stop in zip(cuts[::2], cuts[1::2], strict=False):
        offset = data.draw(st.integers(0, len(CONTENT) - (stop - start)))
        spans.append(FileSpan(descriptor, offset, start, stop))
        expected[start:stop] = CONTENT[offset : offset + stop - start]
    first = data.draw(st.integers(0, size_bytes // UNIT)) * UNIT
    memory = memory_of(size_bytes)
    read = FileRead(native, memory, (first, size_bytes), UNIT, spans)
    read.run()
    os.close(descriptor)
    assert bytes(memory[first:]) == expected[first:]
    assert bytes(memory[:first]) == b"\xee" * first, "what was there before stays"
    assert read.digests == digests_of(bytes(expected[first:]))
    assert read.done_bytes == size_bytes - first


def test_a_file_that_ends_early_gives_its_whole_units(native: Library, descriptor: int) -> None:
    memory = memory_of(6 * UNIT)
    read = FileRead(native, memory, (0, 6 * UNIT), UNIT, [FileSpan(descriptor, 0, 0, 6 * UNIT)])
    with pytest.raises(FileTooShort):
        read.run()
    assert read.digests == digests_of(CONTENT[: 5 * UNIT])


def test_a_file_that_shrinks_is_noticed_where_it_ends_now(native: Library, descriptor: int) -> None:
    memory = memory_of(4 * UNIT)
    read = FileRead(native, memory, (0, 4 * UNIT), UNIT, [FileSpan(descriptor, 0, 0, 4 * UNIT)])
    os.ftruncate(descriptor, 2 * UNIT + 5)
    with pytest.raises(FileTooShort):
        read.run()
    os.pwrite(descriptor, CONTENT[2 * UNIT :], 2 * UNIT)
    read.run()
    assert read.digests == digests_of(CONTENT[: 4 * UNIT]), (
        "it goes on at the unit that was not done"
    )
    assert bytes(memory) == CONTENT[: 4 * UNIT]


def test_a_file_that_cannot_be_read_says_why(
    native: Library, descriptor: int, tmp_path: Path
) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    spans = [FileSpan(descriptor, 0, 0, UNIT), FileSpan(folder, 0, UNIT, 2 * UNIT)]
    read = FileRead(native, memory_of(2 * UNIT), (0, 2 * UNIT), UNIT, spans)
    with pytest.raises(IsADirectoryError):
        read.run()
    os.close(folder)
    assert read.digests == digests_of(CONTENT[:UNIT])


def test_memory_that_the_system_has_not_got_is_an_error_and_not_a_signal(
    native: Library, descriptor: int, tmp_path: Path
) -> None:
    """As on a file system that is full: here the file below the mapping ends before it."""
    with (tmp_path / "pool").open("w+b") as pool:
        pool.truncate(4 * UNIT)
        with mmap.mmap(pool.fileno(), 4 * UNIT) as mapped:
            pool.truncate(2 * UNIT)
            read = FileRead(
                native,
                memoryview(mapped),
                (0, 4 * UNIT),
                UNIT,
                [FileSpan(descriptor, 0, 0, 4 * UNIT)],
            )
            with pytest.raises(NoMemory):
                read.run()
            assert read.digests == digests_of(CONTENT[: 2 * UNIT])
            with memoryview(mapped) as memory, pytest.raises(OSError, match=r"."):
                populate(native, memory)
            del read


@pytest.mark.parametrize("there", [0, 3 * UNIT + 5, 6 * UNIT])
def test_new_pages_of_a_file_are_entered_for_the_read_and_no_others(
    native: Library, descriptor: int, there: int
) -> None:
    """What was in the file before stays, on both sides of the read."""
    start, stop = 2 * UNIT, 6 * UNIT
    pool = os.memfd_create("pool")
    os.ftruncate(pool, 16 * UNIT)
    with mmap.mmap(pool, 16 * UNIT) as mapped:
        mapped[:there] = b"\xee" * there
        with memoryview(mapped) as whole, whole[UNIT:] as memory:
            spans = [FileSpan(descriptor, 0, start - UNIT, stop - UNIT)]
            read = FileRead(native, memory, (UNIT, 5 * UNIT), UNIT, spans, Backing(pool, UNIT))
            read.run()
            assert read.digests == digests_of(CONTENT[: 4 * UNIT])
            del read
        given = os.fstat(pool).st_blocks * 512
        expected = (b"\xee" * there).ljust(16 * UNIT, b"\0")
        assert mapped[:] == expected[:start] + CONTENT[: stop - start] + expected[stop:]
    os.close(pool)
    assert given == (stop if there else stop - start)


def test_what_is_cancelled_enters_no_pages(native: Library, descriptor: int) -> None:
    pool = os.memfd_create("pool")
    os.ftruncate(pool, UNIT)
    with mmap.mmap(pool, UNIT) as mapped, memoryview(mapped) as memory:
        spans = [FileSpan(descriptor, 0, 0, UNIT)]
        read = FileRead(native, memory, (0, UNIT), UNIT, spans, Backing(pool, 0))
        read.cancel()
        with pytest.raises(ReadCancelled):
            read.run()
        del read
    assert os.fstat(pool).st_blocks == 0
    os.close(pool)


def run_cancelled(read: FileRead) -> None:
    with pytest.raises(ReadCancelled):
        read.run()


def test_after_a_cancel_no_page_is_entered(native: Library) -> None:
    size_bytes = 256 * 1024 * 1024
    pool = os.memfd_create("pool")
    os.truncate(pool, size_bytes)
    with mmap.mmap(pool, size_bytes) as mapped, memoryview(mapped) as memory:
        read = FileRead(native, memory, (0, size_bytes), size_bytes, (), Backing(pool, 0))
        thread = threading.Thread(target=run_cancelled, args=(read,))
        thread.start()
        while not os.fstat(pool).st_blocks:
            pass
        read.cancel()
        entered = os.fstat(pool).st_blocks
        thread.join(10.0)
        assert not thread.is_alive()
        del read
    assert os.fstat(pool).st_blocks == entered
    os.close(pool)


def test_pages_that_cannot_be_entered_ahead_come_as_they_are_written(
    native: Library, descriptor: int
) -> None:
    pool = os.memfd_create("pool")
    os.ftruncate(pool, 2 * UNIT)
    with mmap.mmap(pool, 2 * UNIT) as mapped, memoryview(mapped) as memory:
        spans = [FileSpan(descriptor, 0, 0, 2 * UNIT)]
        read = FileRead(native, memory, (0, 2 * UNIT), UNIT, spans, Backing(1 << 20, 0))
        read.run()
        assert read.digests == digests_of(CONTENT[: 2 * UNIT])
        del read
    os.close(pool)


def test_what_the_system_has_not_got_is_read_when_it_may_be_waited_for(
    native: Library, descriptor: int
) -> None:
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    read = FileRead(
        native, memory_of(5 * UNIT), (0, 5 * UNIT), UNIT, [FileSpan(descriptor, 7, 0, 5 * UNIT)]
    )
    try:
        read.run(resident_only=True)
    except NotResident:
        assert len(read.digests) < 5
        read.run()
    assert read.digests == digests_of(CONTENT[7 : 7 + 5 * UNIT])


def test_after_a_cancel_nothing_is_written(native: Library, descriptor: int) -> None:
    size_bytes = 2048 * UNIT
    spans = [FileSpan(descriptor, 0, at, at + UNIT) for at in range(0, size_bytes, UNIT)]
    memory = memory_of(size_bytes)
    read = FileRead(native, memory, (0, size_bytes), UNIT, spans)
    raised: list[Exception] = []

    def run() -> None:
        try:
            read.run()
        except ReadCancelled as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not read.done_bytes and thread.is_alive():
        pass
    read.cancel()
    done = len(read.digests)
    memory[:] = b"\x11" * size_bytes
    thread.join()
    assert bytes(memory) == b"\x11" * size_bytes
    assert len(read.digests) == done
    assert done == size_bytes // UNIT or len(raised) == 1


def test_spans_outside_of_the_memory_are_refused(native: Library) -> None:
    memory = memory_of(UNIT)
    for bounds, spans in (
        ((0, UNIT + 1), []),
        ((0, UNIT), [FileSpan(0, 0, 5, UNIT + 1)]),
        ((-1, UNIT), []),
    ):
        with pytest.raises(ValueError, match="not all within"):
            FileRead(native, memory, bounds, UNIT, spans)
