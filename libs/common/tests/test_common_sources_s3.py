"""Models in a bucket, against a stand-in for the faults; what a real server says is in
tests/conformance.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from standin_s3 import ACCESS_KEY, SECRET_KEY, StandinS3, running_s3
from standin_sources import Fault

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.errors import (
    BadCheckpoint,
    CheckpointError,
    SourceChanged,
    SourceDenied,
    SourceMissing,
    SourceUnavailable,
)
from pilotlight.checkpoint.reader import MemorySource, Source
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.model_roots import ModelRootsSettings
from pilotlight.common.settings import S3Settings
from pilotlight.common.sources import s3 as s3_module
from pilotlight.common.sources.opening import Sources
from pilotlight.common.sources.ranged import Patience
from pilotlight.common.waiting import Backoff

DATA = bytes(range(256)) * 4096
FILES = {"a.bin": DATA, "empty": b"", "small.json": b"{}"}
PATIENCE = Patience(stall_timeout_s=0.5, tries=4, backoff=Backoff(first_s=0.001, limit_s=0.002))


@pytest.fixture
def server() -> Iterator[StandinS3]:
    with running_s3("models") as running:
        running.put("models", "team/tiny", FILES)
        running.put("models", "team/tiny/onnx", {"model.onnx": b"x"})
        running.put("models", "team/tiny-2", {"other.bin": b"x"})
        yield running


def settings_of(server: StandinS3, folder: Path, **changes: object) -> ModelRootsSettings:
    (folder / "s3-access-key").write_text(ACCESS_KEY + "\n")
    (folder / "s3-secret-key").write_text(SECRET_KEY + "\n")
    given = {
        "s3_endpoint": server.url,
        "s3_allow_http": True,
        "model_roots": "s3://models/team",
        "secrets_dir": folder,
    }
    return ModelRootsSettings(**{**given, **changes})


@pytest.fixture
def source(server: StandinS3, tmp_path: Path) -> Source:
    return Sources(settings_of(server, tmp_path), PATIENCE).open("s3://models/team/tiny")


def test_the_files_right_below_the_prefix_are_listed(source: Source) -> None:
    assert [(file.name, file.size_bytes) for file in source.list_files()] == [
        ("a.bin", len(DATA)),
        ("empty", 0),
        ("small.json", 2),
    ]


def test_ranges_are_pinned_by_etag(source: Source, server: StandinS3) -> None:
    a, empty, _ = source.list_files()
    assert source.read(a, 1000, 5000) == DATA[1000:6000]
    assert source.read(empty, 0, 0) == b""
    asked = server.asked[-1]
    assert asked.headers["range"] == "bytes=1000-5999"
    assert f"etag-{asked.headers['if-match']}" == a.version
    buffers = [memoryview(bytearray(size)) for size in (10, 0, 7, 100_000)]
    counted: list[int] = []
    source.read_into(a, 3, buffers, counted.append)
    assert b"".join(bytes(buffer) for buffer in buffers) == DATA[3 : 3 + 100_017]
    assert sum(counted) == 100_017


@pytest.mark.parametrize("heeds_if_match", [True, False])
def test_an_object_that_changed_is_noticed(
    source: Source, server: StandinS3, heeds_if_match: bool
) -> None:
    a = source.list_files()[0]
    server.heeds_if_match = heeds_if_match
    server.put("models", "team/tiny", {"a.bin": DATA[::-1]})
    with pytest.raises(SourceChanged, match=r"a\.bin: the object is another one now"):
        source.read(a, 0, 10)
    del server.buckets["models"]["team/tiny/a.bin"]
    with pytest.raises(SourceChanged, match="gone"):
        source.read(a, 0, 10)


def test_one_that_changes_while_it_is_read_is_noticed(source: Source, server: StandinS3) -> None:
    a = source.list_files()[0]
    server.faults.append(Fault("a.bin", "cut"))

    def change(_: int) -> None:
        server.put("models", "team/tiny", {"a.bin": DATA[::-1]})

    with pytest.raises(SourceChanged):
        source.read_into(a, 0, [memoryview(bytearray(len(DATA)))], change)


def test_a_range_goes_on_where_its_connection_broke(source: Source, server: StandinS3) -> None:
    a = source.list_files()[0]
    server.faults += [Fault("a.bin", "cut", times=2), Fault("a.bin", "status", 503)]
    before = len(server.asked)
    assert source.read(a, 0, len(DATA)) == DATA
    starts = [
        int(asked.headers["range"].removeprefix("bytes=").partition("-")[0])
        for asked in server.asked[before:]
    ]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert starts[1] > len(DATA) // 4
    assert len(starts) == 4


def test_a_connection_that_stalls_is_given_up_and_made_again(
    source: Source, server: StandinS3
) -> None:
    a = source.list_files()[0]
    server.faults.append(Fault("a.bin", "stall"))
    assert source.read(a, 0, len(DATA)) == DATA


@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [
        (Fault("", "status", 503, times=99), SourceUnavailable, "answers 503, 4 times"),
        (Fault("", "status", 403, times=99), SourceDenied, "answers 403"),
        (Fault("", "status", 401, times=99), SourceDenied, "answers 401"),
        (Fault("", "status", 400), SourceUnavailable, "answers 400; check PILOTLIGHT_S3_ENDPOINT"),
        (Fault("", "cut", times=99), SourceUnavailable, "broke, 4 times"),
        (Fault("", "stall", times=99), SourceUnavailable, "no answer in time, 4 times"),
    ],
)
def test_what_does_not_pass_is_told(
    source: Source, server: StandinS3, fault: Fault, error: type[CheckpointError], told: str
) -> None:
    a = source.list_files()[0]
    server.faults.append(Fault(fault.where, fault.kind, fault.value, fault.times))
    with pytest.raises(error, match=told) as caught:
        source.read(a, 0, 10)
    assert type(caught.value) is error
    assert SECRET_KEY not in str(caught.value)
    assert server.url not in str(caught.value)


def test_nobody_listens(server: StandinS3, tmp_path: Path) -> None:
    settings = settings_of(server, tmp_path)
    server.stop()
    with pytest.raises(SourceUnavailable, match="s3://models: no connection can be made, 4 times"):
        Sources(settings, PATIENCE).open("s3://models/team/tiny").list_files()


def test_wrong_credentials_and_places_are_told_apart(server: StandinS3, tmp_path: Path) -> None:
    settings = settings_of(server, tmp_path, model_roots="s3://models, s3://nobodys")
    sources = Sources(settings, PATIENCE)
    with pytest.raises(SourceMissing, match="there is no bucket s3://nobodys"):
        sources.open("s3://nobodys/tiny").list_files()
    with pytest.raises(SourceMissing, match="there is nothing below s3://models/team/tin"):
        sources.open("s3://models/team/tin").list_files()
    (tmp_path / "s3-access-key").write_text("AKIASOMEBODY")
    with pytest.raises(SourceDenied, match="wrong credentials"):
        sources.open("s3://models/team/tiny").list_files()


def test_a_server_without_good_etags_is_refused(
    source: Source, server: StandinS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("standin_s3.etag_of", lambda data: 'W/"1"')
    with pytest.raises(SourceUnavailable, match="weak ETag"):
        source.list_files()


def test_a_listing_is_bounded(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_module, "MAX_LISTED", 3)
    with pytest.raises(BadCheckpoint, match="name the model's own prefix"):
        source.list_files()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_is_read_from_a_bucket(server: StandinS3, tmp_path: Path, shards: int) -> None:
    files = tiny_files(tiny_config(), shards=shards)
    server.put("models", f"team/whole-{shards}", files)
    source = (
        Sources(settings_of(server, tmp_path), PATIENCE)
        .pin(f"S3://models/team/whole-{shards}/")
        .source
    )
    found, known = read_checkpoint(source), read_checkpoint(MemorySource(files))
    assert found.spec == known.spec
    assert [part.tensors for part in found.manifest.parts] == [
        part.tensors for part in known.manifest.parts
    ]


def test_settings_say_what_is_wrong_with_an_endpoint() -> None:
    with pytest.raises(SettingsInvalid, match="PILOTLIGHT_S3_ALLOW_HTTP"):
        S3Settings(s3_endpoint="http://s3.example.org")
    for endpoint in (
        "s3.example.org",
        "ftp://x",
        "https://",
        "https://a:b@x",
        "https://x/?y",
        "https://x:99999",
    ):
        with pytest.raises(SettingsInvalid, match="PILOTLIGHT_S3_ENDPOINT") as caught:
            S3Settings(s3_endpoint=endpoint)
        assert "a:b" not in caught.value.message


def test_secrets_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "s3-secret-key").write_bytes(b"\xff\xfe")
    settings = ModelRootsSettings(model_roots="s3://models", secrets_dir=tmp_path)
    with pytest.raises(SettingsInvalid, match="S3 secrets"):
        Sources(settings, PATIENCE).open("s3://models/x")
