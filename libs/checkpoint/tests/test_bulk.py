"""Reads past the system's memory give what plain reads give, and leave that memory alone."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.checkpoint.bulk import ALIGNMENT, PIECE_BYTES, pieces_of, resident_share

SIZE_BYTES = 3 * PIECE_BYTES + 2 * ALIGNMENT + 77
PLACES = st.one_of(
    st.integers(0, SIZE_BYTES),
    st.integers(0, SIZE_BYTES // ALIGNMENT).map(lambda blocks: blocks * ALIGNMENT),
    st.sampled_from((0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, SIZE_BYTES - 1, SIZE_BYTES)),
)


@pytest.fixture(scope="module")
def content() -> bytes:
    return os.urandom(SIZE_BYTES)


@pytest.fixture(scope="module", params=("disk", "memory"))
def descriptor(request: pytest.FixtureRequest, content: bytes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A file where tests put theirs, and one in shared memory, which is nothing but the system's memory."""
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


@given(places=st.tuples(PLACES, PLACES).map(sorted), forgotten=st.booleans())
def test_any_range_comes_in_order_and_whole(descriptor, content, places, forgotten):
    start, stop = places
    if forgotten:
        forget(descriptor)
    pieces = [bytes(piece) for piece in pieces_of(descriptor, start, stop)]
    assert b"".join(pieces) == content[start:stop]
    assert all(len(piece) == PIECE_BYTES for piece in pieces[:-1])


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("start", [0, ALIGNMENT, SIZE_BYTES - ALIGNMENT, SIZE_BYTES - 5, SIZE_BYTES, SIZE_BYTES + 5])
def test_a_file_that_ends_before_gives_what_it_has(descriptor, content, start, forgotten):
    if forgotten:
        forget(descriptor)
    assert b"".join(bytes(piece) for piece in pieces_of(descriptor, start, SIZE_BYTES + PIECE_BYTES)) == content[start:]


def test_what_the_system_does_not_hold_is_not_put_there(descriptor):
    forget(descriptor)
    if not is_direct(descriptor):
        pytest.skip("the tests' files lie where nothing is read past the system's memory")
    assert sum(map(len, pieces_of(descriptor, 5, SIZE_BYTES))) == SIZE_BYTES - 5
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
