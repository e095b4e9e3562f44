"""Files of this machine, read straight into the pool: the same image, the same errors, as when
they are read in Python.
"""

import asyncio
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from disk_tiers import Tier
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_chunks import BYTES, CHUNK, ONE, PART

from pilotlight.checkpoint.checkpoint import read_chunk
from pilotlight.checkpoint.digests import UNIT_BYTES, chunk_digest, unit_digests
from pilotlight.checkpoint.manifest import Chunk, Segment
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.common.errors import CorruptChunk, HostPoolFull, SourceChanged
from pilotlight.dataplane import source_origin
from pilotlight.dataplane.chunk_fill import ChunkFill, ChunkWork, WrongBytes
from pilotlight.dataplane.disk_tier import DiskEvent, DiskOrigin
from pilotlight.dataplane.file_reads import FileReads, native_reads
from pilotlight.dataplane.origin import NotHere
from pilotlight.dataplane.readers import Abandoned, ReadProgress
from pilotlight.dataplane.source_origin import OpenFiles, SourceOrigin
from pilotlight.native.building import compiler
from pilotlight.native.reads import NO_FILE, FileSpan
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.ids import Digest

LIBRARY = native_reads()
pytestmark = pytest.mark.skipif(
    LIBRARY is None and compiler() is None, reason="there is no C++ compiler, and no library"
)


class Target:
    """Where a chunk goes, filled by the library or in Python."""

    def __init__(self, digest: Digest | None, size_bytes: int, *, native: bool = True) -> None:
        self.mapped = mmap.mmap(-1, size_bytes)
        self.mapped.write(b"\xee" * size_bytes)
        self.size_bytes = size_bytes
        files = None
        if native:
            assert LIBRARY is not None
            files = FileReads(LIBRARY, lambda: memoryview(self.mapped), NO_FILE, Path("pool"))
        self.fill = ChunkFill(digest, size_bytes, self._place, files)

    def _place(self, offset: int, data: memoryview) -> None:
        self.mapped[offset : offset + len(data)] = bytes(data)

    def begin(self, name: str = "source", progress: ReadProgress | None = None) -> ChunkWork:
        return self.fill.begin(name, progress or ReadProgress(), trusted=True)

    @property
    def bytes(self) -> bytes:
        return self.mapped[:]


@pytest.fixture
def model(register: Callable[..., Any]) -> Any:
    return register(hidden_size=384, intermediate_size=1600, vocab_size=512)


def origin_of(model: Any) -> SourceOrigin:
    return SourceOrigin(FolderSource(model.folder), model.manifest, model.model.uri)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_chunk_is_the_same_both_ways(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    contents = [os.urandom(3 * UNIT_BYTES + 5), os.urandom(UNIT_BYTES)]
    for number, content in enumerate(contents):
        (folder / f"{number}").write_bytes(content)
    source = FolderSource(folder)
    size_bytes = data.draw(st.integers(1, 4 * UNIT_BYTES))
    cuts = sorted(data.draw(st.lists(st.integers(0, size_bytes), max_size=10, unique=True)))
    segments: list[Segment] = []
    for start, stop in zip(cuts[::2], cuts[1::2], strict=False):
        file = data.draw(st.integers(0, 1))
        length = min(stop - start, len(contents[file]))
        offset = data.draw(st.integers(0, len(contents[file]) - length))
        segments.append(
            Segment(file=file, file_offset=offset, image_offset=100 + start, size_bytes=length)
        )
    chunk = Chunk(image_offset=100, size_bytes=size_bytes, segments=tuple(segments))

    class Files:
        files = source.list_files()

    origin = SourceOrigin(source, Files, "file:///model")
    before = data.draw(st.sampled_from([0, 0, UNIT_BYTES, 1000, 2 * UNIT_BYTES]))
    found: list[tuple[bytes, tuple[bytes, ...], dict[str, int]]] = []
    for native in (True, False):
        target = Target(None, size_bytes, native=native)
        target.begin("peer").write(bytes(min(before, size_bytes)))
        origin.read(0, chunk, target.begin())
        assert target.fill.is_whole
        found.append((target.bytes, target.fill.units, target.fill.shares))
    assert found[0] == found[1]
    assert found[0][1] == unit_digests(found[0][0])


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.anyio
async def test_a_whole_model_comes_both_ways(make_node, register, native: bool) -> None:
    node = make_node(native=native)
    registered = node.add(
        register(hidden_size=384, intermediate_size=1600, vocab_size=512, shards=2)
    )
    parts = range(len(registered.manifest.parts))
    holder = node.copies.claim(registered.model, parts, ONE, leased=True)
    async with asyncio.timeout(30):
        assert [part.part async for part in node.copies.ready_parts(holder)] == list(parts)
    folder, manifest = FolderSource(registered.folder), registered.manifest
    for number, part in enumerate(manifest.parts):
        expected = tuple(chunk_digest(read_chunk(folder, manifest, chunk)) for chunk in part.chunks)
        assert node.pool.chunk_digests(node.pool.find(registered.model.digest, number)) == expected
    total_bytes = sum(part.image_bytes for part in manifest.parts)
    assert (
        sum(size_bytes for kind, size_bytes in node.seen.given if kind is OriginKind.SOURCE)
        == total_bytes
    )


@pytest.mark.anyio
async def test_wrong_bytes_of_a_folder_are_found_before_the_chunk_is_announced(
    make_node, register
) -> None:
    node = make_node()
    registered = node.add(register())
    lies = {(0, 0): chunk_digest(b"something else")}
    node.manifests.manifests[registered.model.digest] = registered.manifest.with_digests(lies)
    holder = node.copies.claim(registered.model, [0], ONE, leased=True)
    async with asyncio.timeout(10):
        with pytest.raises(CorruptChunk):
            await anext(node.copies.ready_parts(holder))
    assert node.pool.find(registered.model.digest, 0) is None
    assert node.seen.given == []


def test_a_wrong_unit_costs_the_unit_where_the_list_is_known(tmp_path: Path) -> None:
    wrong = bytearray(BYTES)
    wrong[2 * UNIT_BYTES + 9] ^= 1
    (tmp_path / "file").write_bytes(wrong)
    target, descriptor = (
        Target(chunk_digest(BYTES), len(BYTES)),
        os.open(tmp_path / "file", os.O_RDONLY),
    )
    work = target.begin("disk")
    work.expect(unit_digests(BYTES))
    with pytest.raises(WrongBytes):
        work.read_files([FileSpan(descriptor, 0, 0, len(BYTES))], lambda: None)
    assert target.fill.prefix.size_bytes == 2 * UNIT_BYTES
    target.begin("source").write(BYTES[2 * UNIT_BYTES :])
    assert target.fill.is_whole
    assert target.fill.shares == {"disk": 2 * UNIT_BYTES, "source": len(BYTES) - 2 * UNIT_BYTES}
    os.close(descriptor)


def test_a_folder_whose_file_was_written_to_gives_nothing(model: Any) -> None:
    target = Target(None, CHUNK.size_bytes)
    [file] = model.folder.glob("*.safetensors")
    os.utime(file, ns=(1, 1))
    with pytest.raises(SourceChanged):
        origin_of(model).read(PART, CHUNK, target.begin())
    assert target.fill.received_bytes == 0


def test_what_changed_while_it_was_read_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BYTES)
    target, descriptor = Target(None, len(BYTES)), os.open(tmp_path / "file", os.O_RDONLY)

    def changed() -> None:
        raise SourceChanged("another one now")

    work = target.begin()
    with pytest.raises(SourceChanged):
        work.read_files([FileSpan(descriptor, 0, 0, len(BYTES))], changed)
    work.revoke()
    os.close(descriptor)
    assert (target.fill.received_bytes, target.fill.units) == (0, ())


def test_an_unchecked_chunk_is_read_from_a_trusted_origin_alone() -> None:
    target = Target(None, len(BYTES))
    work = target.fill.begin("disk", ReadProgress())
    with pytest.raises(WrongBytes, match="not recorded"):
        work.read_files([], lambda: None)
    assert target.bytes == b"\xee" * len(BYTES)


def test_a_file_that_cannot_be_read_leaves_whole_units_to_the_next_origin(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BYTES)
    descriptor, folder = os.open(tmp_path / "file", os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    target, progress = Target(chunk_digest(BYTES), len(BYTES)), ReadProgress()
    spans = [
        FileSpan(descriptor, 0, 0, UNIT_BYTES + 7),
        FileSpan(folder, 0, UNIT_BYTES + 7, len(BYTES)),
    ]
    with pytest.raises(IsADirectoryError):
        target.begin("disk", progress).read_files(spans, lambda: None)
    assert target.fill.received_bytes == UNIT_BYTES
    assert progress.bytes == UNIT_BYTES + 7, "a read that gave something has not stalled"
    target.begin("source").write(BYTES[UNIT_BYTES:])
    assert target.fill.is_whole
    for opened in (descriptor, folder):
        os.close(opened)


def test_a_read_that_is_revoked_in_the_middle_writes_nothing_any_more(tmp_path: Path) -> None:
    """Each span is one small range: so there is a middle."""
    (tmp_path / "file").write_bytes(b"\x77" * 4096)
    descriptor, size_bytes = os.open(tmp_path / "file", os.O_RDONLY), 64 * UNIT_BYTES
    spans = [FileSpan(descriptor, 0, at, at + 4096) for at in range(0, size_bytes, 4096)]
    target, progress = Target(Digest("0" * 64), size_bytes), ReadProgress()
    work, raised = target.begin("disk", progress), list[BaseException]()

    def read() -> None:
        try:
            work.read_files(spans, lambda: None)
        except (Abandoned, WrongBytes) as error:
            raised.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    while not progress.bytes and thread.is_alive():
        pass
    work.revoke()
    kept = target.fill.received_bytes
    target.mapped[:] = b"\x11" * size_bytes
    thread.join()
    os.close(descriptor)
    assert target.bytes == b"\x11" * size_bytes
    assert [type(error) for error in raised] == [Abandoned]
    assert target.fill.received_bytes == kept < size_bytes
    assert kept % UNIT_BYTES == 0
    assert len(target.fill.units) == kept // UNIT_BYTES
    with pytest.raises(Abandoned):
        work.read_files(spans, lambda: None)


def test_a_file_larger_than_all_memory_is_read_past_it(tmp_path: Path) -> None:
    with (tmp_path / "model").open("wb") as file:
        try:
            file.truncate(1 << 40)
        except OSError as error:
            pytest.skip(f"this disk takes no such file: {error}")
        file.seek(5 << 30)
        file.write(BYTES)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    source = FolderSource(tmp_path)

    class Files:
        files = source.list_files()

    chunk = Chunk(
        image_offset=0,
        size_bytes=len(BYTES),
        segments=(Segment(file=0, file_offset=5 << 30, image_offset=0, size_bytes=len(BYTES)),),
    )
    target = Target(chunk_digest(BYTES), len(BYTES))
    SourceOrigin(source, Files, "file:///model").read(0, chunk, target.begin())
    assert target.fill.is_whole
    assert target.bytes == BYTES


def test_the_disk_tier_gives_its_chunks_and_removes_what_is_torn(tmp_path: Path) -> None:
    disk_tier = Tier(tmp_path, 16 * UNIT_BYTES)
    digest = disk_tier.store(BYTES)
    target = Target(digest, len(BYTES))
    DiskOrigin(disk_tier.tier).read(0, None, target.fill.begin("disk", ReadProgress()))
    assert target.fill.is_whole
    assert target.bytes == BYTES
    [path] = disk_tier.tier.folder.glob("*/*.chunk")
    with path.open("r+b") as file:
        file.seek(UNIT_BYTES)
        file.write(b"torn")
    again = Target(digest, len(BYTES))
    with pytest.raises(NotHere):
        DiskOrigin(disk_tier.tier).read(0, None, again.fill.begin("disk", ReadProgress()))
    assert not path.exists()
    assert disk_tier.events[DiskEvent.DAMAGED] == 1


def test_a_full_pool_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BYTES)
    assert LIBRARY is not None
    with (tmp_path / "pool").open("w+b") as pool:
        pool.truncate(len(BYTES))
        mapped = mmap.mmap(pool.fileno(), len(BYTES))
        pool.truncate(UNIT_BYTES)
    files = FileReads(LIBRARY, lambda: memoryview(mapped), NO_FILE, tmp_path)
    fill = ChunkFill(chunk_digest(BYTES), len(BYTES), lambda _offset, _data: None, files)
    with (
        (tmp_path / "file").open("rb") as file,
        pytest.raises(HostPoolFull, match="make it larger"),
    ):
        fill.begin("disk", ReadProgress()).read_files(
            [FileSpan(file.fileno(), 0, 0, len(BYTES))], lambda: None
        )


def open_below(folder: Path) -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/")
    return found


def test_files_stay_open_up_to_a_bound_and_not_beyond_the_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_origin, "KEPT_FILES", 2)
    for number in range(4):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * UNIT_BYTES)
    files = OpenFiles(FolderSource(tmp_path), FolderSource(tmp_path).list_files())
    for number in (0, 1, 0, 2, 3, 1):
        with files.file(number) as descriptor:
            assert os.pread(descriptor, 1, 0) == bytes([number])
        files.check_still(number)
    assert open_below(tmp_path) == 2
    files.close()
    assert open_below(tmp_path) == 0


@pytest.mark.parametrize("change", ["written to", "replaced", "gone"])
def test_a_file_that_stays_open_is_still_asked_for_by_name(tmp_path: Path, change: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(BYTES)
    chunk = Chunk(
        image_offset=0,
        size_bytes=len(BYTES),
        segments=(Segment(file=0, file_offset=0, image_offset=0, size_bytes=len(BYTES)),),
    )

    class Files:
        files = FolderSource(tmp_path).list_files()

    origin = SourceOrigin(FolderSource(tmp_path), Files, "file:///model")
    first, second = Target(None, len(BYTES)), Target(None, len(BYTES))
    origin.read(0, chunk, first.begin())
    assert first.bytes == BYTES
    if change == "written to":
        with path.open("r+b") as file:
            file.write(b"other")
        os.utime(path, ns=(1, 1))
    elif change == "replaced":
        (tmp_path / "new").write_bytes(BYTES)
        os.utime(tmp_path / "new", ns=(2, 2))
        (tmp_path / "new").replace(path)
    else:
        path.unlink()
    with pytest.raises(SourceChanged):
        origin.read(0, chunk, second.begin())
    assert not second.fill.units
    origin.close()
    assert open_below(tmp_path) == 0
