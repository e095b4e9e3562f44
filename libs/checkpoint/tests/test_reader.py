"""Sources: the same contract for a folder and for memory."""

import os

import pytest

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.errors import BadCheckpoint, SourceChanged, SourceUnavailable
from pilotlight.checkpoint.reader import FolderSource, MemorySource, read_small, source_version
from pilotlight.checkpoint.testing import tiny_config, tiny_files

FILES = {"a.txt": b"hello", "b.bin": bytes(range(256)), "empty": b""}


def folder(path, files):
    for name, data in files.items():
        (path / name).write_bytes(data)
    return FolderSource(path)


@pytest.fixture(params=["folder", "memory"])
def source(request, tmp_path):
    return folder(tmp_path, FILES) if request.param == "folder" else MemorySource(FILES)


def test_files_are_listed_by_name(source):
    assert [(file.name, file.size_bytes) for file in source.list_files()] == [
        ("a.txt", 5),
        ("b.bin", 256),
        ("empty", 0),
    ]


def test_ranges(source):
    a, b, empty = source.list_files()
    assert source.read(a, 1, 3) == b"ell"
    assert source.read(b, 0, 256) == FILES["b.bin"]
    assert source.read(empty, 0, 0) == b""
    for offset, size_bytes in ((-1, 1), (0, -1), (4, 2)):
        with pytest.raises(ValueError, match=r"a\.txt"):
            source.read(a, offset, size_bytes)


def test_small_files_are_bounded(source):
    a = source.list_files()[0]
    assert read_small(source, a, 5) == b"hello"
    with pytest.raises(BadCheckpoint, match="at most 4"):
        read_small(source, a, 4)


def test_the_version_depends_on_every_file(source):
    files = source.list_files()
    assert source_version(files) == source_version(reversed(files))
    assert len({source_version(files[:count]) for count in range(4)}) == 4


def test_a_folder_and_memory_give_the_same_model(tmp_path):
    files = tiny_files(tiny_config(), shards=3)
    assert (
        read_checkpoint(folder(tmp_path, files)).spec == read_checkpoint(MemorySource(files)).spec
    )


def test_a_file_of_memory_that_changed_is_noticed():
    (file,) = MemorySource({"a": b"1"}).list_files()
    with pytest.raises(SourceChanged, match="changed"):
        MemorySource({"a": b"2"}).read(file, 0, 1)
    with pytest.raises(SourceChanged, match="gone"):
        MemorySource({}).read(file, 0, 1)


class TestFolder:
    def test_a_file_that_changed_is_noticed(self, tmp_path):
        source = folder(tmp_path, FILES)
        a = source.list_files()[0]
        os.utime(tmp_path / "a.txt", ns=(1, 1))
        with pytest.raises(SourceChanged, match=r"a\.txt: the file has changed"):
            source.read(a, 0, 1)
        (tmp_path / "a.txt").unlink()
        with pytest.raises(SourceChanged, match="gone"):
            source.read(a, 0, 1)

    def test_links_are_followed_and_anything_but_files_is_left_out(self, tmp_path):
        blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
        blobs.mkdir()
        snapshot.mkdir()
        (blobs / "1").write_bytes(b"content")
        (snapshot / "model").symlink_to("../blobs/1")
        (snapshot / "dangling").symlink_to("../blobs/2")
        (snapshot / "folder").mkdir()
        (snapshot / "line\nbreak").write_bytes(b"")
        os.mkfifo(snapshot / "fifo")
        source = FolderSource(snapshot)
        (model,) = source.list_files()
        assert source.read(model, 0, 7) == b"content"

    def test_what_cannot_be_read_is_unavailable(self, tmp_path):
        with pytest.raises(SourceUnavailable, match="No such file"):
            FolderSource(tmp_path / "missing").list_files()
        source = folder(tmp_path, {"a": b"1"})
        (file,) = source.list_files()
        (tmp_path / "a").unlink()
        (tmp_path / "a").mkdir()
        with pytest.raises((SourceUnavailable, SourceChanged)):
            source.read(file, 0, 1)

    def test_the_number_of_files_is_bounded(self, tmp_path, monkeypatch):
        monkeypatch.setattr("pilotlight.checkpoint.reader.MAX_FILES", 2)
        with pytest.raises(BadCheckpoint, match="more than 2"):
            folder(tmp_path, FILES).list_files()
