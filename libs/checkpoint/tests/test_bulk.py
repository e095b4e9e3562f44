"""Reads past the system's memory give what plain reads give, and leave that memory alone."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.checkpoint import bulk
from pilotlight.checkpoint.bulk import (
    ALIGNMENT,
    LARGE_BYTES,
    PIECE_BYTES,
    pieces_of,
    resident_share,
)
from pilotlight.checkpoint.free_memory import MemoryFacts, memory_facts, reads_past

SIZE_BYTES = 3 * PIECE_BYTES + 2 * ALIGNMENT + 77
PLACES = st.one_of(
    st.integers(0, SIZE_BYTES),
    st.integers(0, SIZE_BYTES // ALIGNMENT).map(lambda blocks: blocks * ALIGNMENT),
    st.sampled_from(
        (0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, SIZE_BYTES - 1, SIZE_BYTES)
    ),
)


@pytest.fixture(scope="module")
def content() -> bytes:
    return os.urandom(SIZE_BYTES)


@pytest.fixture(scope="module", params=("disk", "memory"))
def descriptor(
    request: pytest.FixtureRequest, content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """A file where tests put theirs, and one in shared memory, which is nothing but the system's
    memory.
    """
    folder = tmp_path_factory.mktemp("bulk") if request.param == "disk" else Path("/dev/shm")
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(content)
        file.flush()
        yield file.fileno()


def forget(descriptor: int) -> None:
    """Have the system keep nothing of a file in memory."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def is_direct(descriptor: int) -> bool:
    """Whether a file's bytes can be read past the system's memory, and are not there now."""
    try:
        os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return resident_share(descriptor, 0, SIZE_BYTES) == 0


@given(
    places=st.tuples(PLACES, PLACES).map(sorted),
    forgotten=st.booleans(),
    past=st.sampled_from((None, False, True)),
)
def test_any_range_comes_in_order_and_whole(descriptor, content, places, forgotten, past):
    start, stop = places
    if forgotten:
        forget(descriptor)
    pieces = [bytes(piece) for piece in pieces_of(descriptor, start, stop, past=past)]
    assert b"".join(pieces) == content[start:stop]
    assert all(len(piece) == PIECE_BYTES for piece in pieces[:-1])


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize(
    "start", [0, ALIGNMENT, SIZE_BYTES - ALIGNMENT, SIZE_BYTES - 5, SIZE_BYTES, SIZE_BYTES + 5]
)
def test_a_file_that_ends_before_gives_what_it_has(descriptor, content, start, forgotten):
    if forgotten:
        forget(descriptor)
    assert (
        b"".join(
            bytes(piece)
            for piece in pieces_of(descriptor, start, SIZE_BYTES + PIECE_BYTES, past=True)
        )
        == content[start:]
    )


def test_what_fits_into_memory_comes_through_it(descriptor):
    forget(descriptor)
    assert sum(map(len, pieces_of(descriptor, 0, SIZE_BYTES))) == SIZE_BYTES
    assert resident_share(descriptor, 0, SIZE_BYTES) == 1


def test_a_file_that_is_larger_than_free_memory_does_not(tmp_path, monkeypatch):
    """The same call, on a file that is mostly a hole; how much is free is what another machine's
    kernel says.
    """
    meminfo = tmp_path / "meminfo"
    with (tmp_path / "large").open("wb+") as file:
        file.truncate(LARGE_BYTES)
        os.posix_fallocate(file.fileno(), 0, SIZE_BYTES)
        for free_kib, resident in ((LARGE_BYTES // 1024 - 1, False), (LARGE_BYTES // 1024, True)):
            meminfo.write_text(f"MemAvailable: {free_kib} kB\n")
            monkeypatch.setattr(bulk, "memory_facts", lambda: memory_facts(meminfo, tmp_path))
            forget(file.fileno())
            if not resident and not is_direct(file.fileno()):
                pytest.skip("the tests' files lie where nothing is read past the system's memory")
            assert sum(map(len, pieces_of(file.fileno(), 0, SIZE_BYTES))) == SIZE_BYTES
            assert (resident_share(file.fileno(), 0, SIZE_BYTES) > 0) is resident


GIB = 1 << 30


@pytest.mark.parametrize(
    ("size_gib", "facts", "past"),
    [
        (8, MemoryFacts(8 * GIB), False),
        (9, MemoryFacts(8 * GIB), True),
        (900, MemoryFacts(None), False),
        # A container's limit counts where it leaves less, and what files have of it does not.
        (5, MemoryFacts(64 * GIB, 8 * GIB, 4 * GIB), True),
        (5, MemoryFacts(64 * GIB, 8 * GIB, 4 * GIB, GIB), False),
        (5, MemoryFacts(4 * GIB, 64 * GIB, 4 * GIB), True),
        (5, MemoryFacts(64 * GIB, 8 * GIB, None), False),
        (1, MemoryFacts(None, 8 * GIB, 9 * GIB), True),
        (5, MemoryFacts(64 * GIB, None, 60 * GIB), False),
    ],
)
def test_past_memory_is_read_what_is_larger_than_what_is_free(size_gib, facts, past):
    assert reads_past(size_gib * GIB, facts) is past


def test_the_kernels_words_are_understood(tmp_path):
    meminfo, new, old = (tmp_path / name for name in ("meminfo", "new", "old"))
    meminfo.write_text("MemTotal:       100 kB\nMemAvailable:    70 kB\nHugePages_Total:       0\n")
    for folder in (new, old / "memory"):
        folder.mkdir(parents=True)
    assert memory_facts(meminfo, new) == MemoryFacts(70 * 1024)
    (new / "memory.max").write_text("max\n")
    assert memory_facts(meminfo, new) == MemoryFacts(70 * 1024)
    (new / "memory.max").write_text("5000\n")
    (new / "memory.current").write_text("3000\n")
    (new / "memory.stat").write_text("anon 7\nfile 900\ninactive_file 400\nactive_file 100\n")
    assert memory_facts(meminfo, new) == MemoryFacts(70 * 1024, 5000, 3000, 500)
    (old / "memory" / "memory.limit_in_bytes").write_text("6000\n")
    (old / "memory" / "memory.usage_in_bytes").write_text("2000\n")
    (old / "memory" / "memory.stat").write_text(
        "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 4\n"
    )
    assert memory_facts(meminfo, old) == MemoryFacts(70 * 1024, 6000, 2000, 34)
    assert memory_facts(tmp_path / "none", tmp_path / "none") == MemoryFacts(None)
    assert memory_facts().available_bytes


def test_what_the_system_does_not_hold_is_not_put_there(descriptor):
    forget(descriptor)
    if not is_direct(descriptor):
        pytest.skip("the tests' files lie where nothing is read past the system's memory")
    assert sum(map(len, pieces_of(descriptor, 5, SIZE_BYTES, past=True))) == SIZE_BYTES - 5
    assert resident_share(descriptor, 0, SIZE_BYTES) == 0


def test_what_the_system_holds_comes_from_there(descriptor):
    os.pread(descriptor, SIZE_BYTES, 0)
    assert resident_share(descriptor, 0, SIZE_BYTES) == 1
    assert resident_share(descriptor, 4097, 4098) == 1


def test_a_closed_file_is_an_error():
    with tempfile.TemporaryFile() as file:
        file.write(b"x")
        closed = file.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        next(pieces_of(closed, 0, 1))
