"""Frames of decision logs, there and back, also where a file ends too soon."""

import random
import zlib
from pathlib import Path

import pytest

from pilotlight.common.decision_stream import WINDOW_BYTES, Squeezer, frames_of
from pilotlight.common.errors import BadRequest

FRAMES = [b"first", b"", b"second" * 500, bytes(range(256))]


def written(*, flushed: bool) -> list[bytes]:
    """By frame, what goes to the file with it; and the end."""
    stream = Squeezer()
    pieces = [stream.put(one) + (stream.flush() if flushed else b"") for one in FRAMES]
    return [*pieces, stream.end()]


@pytest.mark.parametrize("flushed", [False, True])
def test_what_was_put_is_read(tmp_path: Path, *, flushed: bool) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(written(flushed=flushed)))
    assert list(frames_of(path)) == FRAMES


def test_a_file_that_was_cut_off_has_what_was_flushed(tmp_path: Path) -> None:
    pieces = written(flushed=True)
    path, whole = tmp_path / "log", b"".join(pieces)
    ends = [len(b"".join(pieces[: number + 1])) for number in range(len(FRAMES))]
    for size in range(4, len(whole)):
        path.write_bytes(whole[:size])
        found = list(frames_of(path))
        assert found == FRAMES[: len(found)]
        assert len(found) >= sum(end <= size for end in ends)


def test_what_came_long_before_takes_no_room_again() -> None:
    """Further back than zlib's 32 KiB, and within the window."""
    first = random.Random(1).randbytes(WINDOW_BYTES // 64)
    stream = Squeezer()
    once = len(stream.put(first) + stream.flush())
    assert len(stream.put(first) + stream.flush()) < once // 50


def test_logs_of_releases_before_are_read(tmp_path: Path) -> None:
    """They were squeezed by zlib."""
    path = tmp_path / "log"
    frames = b"".join(len(one).to_bytes(4, "big") + one for one in FRAMES)
    path.write_bytes(zlib.compress(frames))
    assert list(frames_of(path)) == FRAMES


@pytest.mark.parametrize("content", [b"no log", b"\x28\xb5\x2f\xfd no log"])
def test_another_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(BadRequest, match="no decision log"):
        list(frames_of(path))
