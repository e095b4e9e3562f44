"""Models on a hub, against a stand-in with a CDN on another port."""

import socket
from collections.abc import Iterator
from pathlib import Path

import httpcore2
import pytest
from standin_sources import Fault, StandinHub, git_blob, running_hub, sha256

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.errors import (
    CheckpointError,
    SourceChanged,
    SourceDenied,
    SourceMissing,
    SourceUnavailable,
)
from pilotlight.checkpoint.reader import MemorySource, SourceFile
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.errors import SettingsInvalid, UnprocessableInput, UriNotAllowed
from pilotlight.common.model_roots import ModelRootsSettings
from pilotlight.common.sources.http import GuardedHttp, Origin, is_public
from pilotlight.common.sources.opening import PinnedSource, Sources
from pilotlight.common.sources.ranged import Patience
from pilotlight.common.waiting import Backoff

DATA = bytes(range(256)) * 4096
FILES = {"a.safetensors": DATA, "config.json": b'{"a": 1}', "onnx/model.onnx": b"x"}
PATIENCE = Patience(stall_timeout_s=0.5, tries=4, backoff=Backoff(first_s=0.001, limit_s=0.002))
TOKEN = "hf_verysecret"


@pytest.fixture
def hub() -> Iterator[StandinHub]:
    with running_hub(FILES) as running:
        yield running


def sources_of(hub: StandinHub, **changes: object) -> Sources:
    given = {
        "hub_endpoint": hub.url,
        "model_roots": "hf://org",
        "hub_private_hosts": f"127.0.0.1:{hub.cdn.port}",
    }
    return Sources(ModelRootsSettings(**{**given, **changes}), PATIENCE)


@pytest.fixture
def pinned(hub: StandinHub) -> Iterator[PinnedSource]:
    pinned = sources_of(hub).pin("hf://org/name")
    yield pinned
    pinned.source.close()


def large(pinned: PinnedSource) -> SourceFile:
    return pinned.source.list_files()[0]


def test_a_revision_is_pinned_to_its_commit(hub: StandinHub, pinned: PinnedSource) -> None:
    commit = hub.refs["main"]
    assert (pinned.uri, pinned.revision) == (f"hf://org/name@{commit}", "main")
    assert pinned.source.list_files() == (
        SourceFile(name="a.safetensors", size_bytes=len(DATA), version=f"sha256-{sha256(DATA)}"),
        SourceFile(
            name="config.json", size_bytes=8, version=f"git-{git_blob(FILES['config.json'])}"
        ),
    )
    hub.push({"config.json": b"{}"})
    assert pinned.source.read(pinned.source.list_files()[1], 0, 8) == FILES["config.json"]
    assert [asked.target for asked in hub.asked if "resolve" in asked.target] == [
        f"/org/name/resolve/{commit}/config.json"
    ]


@pytest.mark.parametrize("uri", ["hf://org/name@refs/pr/7", "HF://org/name@refs/pr/7"])
def test_branches_tags_and_commits_are_revisions(hub: StandinHub, uri: str) -> None:
    commit = hub.push({"config.json": b"[]"}, "refs/pr/7")
    sources = sources_of(hub)
    assert sources.pin(uri).uri == f"hf://org/name@{commit}"
    assert sources.pin("hf://org/name", "refs/pr/7").revision == "refs/pr/7"
    assert sources.pin(f"hf://org/name@{commit}").uri == f"hf://org/name@{commit}"
    with pytest.raises(UnprocessableInput, match="says another"):
        sources.pin(uri, "main")
    with pytest.raises(UnprocessableInput, match="not a revision"):
        sources.pin("hf://org/name", "../main")
    with pytest.raises(SourceMissing, match="404 RevisionNotFound"):
        sources.pin("hf://org/name@nowhere")
    with pytest.raises(SourceMissing, match="404 RepoNotFound"):
        sources.pin("hf://org/other")


def test_large_files_come_from_where_the_hub_refers_to(
    hub: StandinHub, pinned: PinnedSource
) -> None:
    a = large(pinned)
    assert pinned.source.read(a, 100, 5000) == DATA[100:5100]
    assert pinned.source.read(a, 0, len(DATA)) == DATA
    # The reference is used again, until it is good no more.
    assert len([asked for asked in hub.asked if "a.safetensors" in asked.target]) == 1
    hub.cdn.expire()
    assert pinned.source.read(a, 7, 7) == DATA[7:14]
    assert [asked.headers["range"] for asked in hub.cdn.asked] == [
        "bytes=100-5099",
        f"bytes=0-{len(DATA) - 1}",
        *["bytes=7-13"] * 2,
    ]


def test_the_token_is_for_the_hub_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hub-token").write_text(TOKEN + "\n")
    with running_hub(FILES, token=TOKEN) as hub:
        pinned = sources_of(hub, secrets_dir=tmp_path).pin("hf://org/name")
        assert pinned.source.read(large(pinned), 0, 10) == DATA[:10]
        pinned.source.close()
        assert {asked.headers.get("authorization") for asked in hub.asked} == {f"Bearer {TOKEN}"}
        assert hub.cdn.asked
        assert all("authorization" not in asked.headers for asked in hub.cdn.asked)
        with pytest.raises(SourceDenied, match="private or gated") as caught:
            sources_of(hub).pin("hf://org/name")
        assert TOKEN not in str(caught.value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        sources_of(hub).pin("hf://org/name").source.close()
        monkeypatch.setenv("HF_TOKEN", "x\ny")
        with pytest.raises(SettingsInvalid, match="HF_TOKEN"):
            sources_of(hub)


def test_another_digest_for_the_same_commit_is_noticed(
    hub: StandinHub, pinned: PinnedSource
) -> None:
    a, config = pinned.source.list_files()
    hub.commits[hub.refs["main"]].update({"a.safetensors": DATA[::-1], "config.json": b'{"a": 2}'})
    for file in (a, config):
        with pytest.raises(SourceChanged, match="the hub gives content"):
            pinned.source.read(file, 0, 8)
    del hub.commits[hub.refs["main"]]["a.safetensors"]
    with pytest.raises(SourceChanged, match="gone"):
        pinned.source.read(a, 0, 8)


def test_another_file_behind_the_same_reference_is_noticed(
    hub: StandinHub, pinned: PinnedSource
) -> None:
    a, digest = large(pinned), sha256(DATA)
    assert pinned.source.read(a, 0, 8) == DATA[:8]
    hub.cdn.blobs[digest] = DATA[::-1]
    hub.cdn.etags[digest] = '"another"'
    with pytest.raises(SourceChanged, match="referred to is another file"):
        pinned.source.read(a, 8, 8)


def test_a_place_that_does_not_name_its_content_is_refused(
    hub: StandinHub, pinned: PinnedSource
) -> None:
    hub.cdn.etags[sha256(DATA)] = ""
    with pytest.raises(SourceUnavailable, match=r"does not say which content it gives \(ETag\)"):
        pinned.source.read(large(pinned), 0, 8)


def test_another_size_behind_the_reference_is_noticed(
    hub: StandinHub, pinned: PinnedSource
) -> None:
    hub.cdn.blobs[sha256(DATA)] = DATA[:-1]
    with pytest.raises(SourceChanged, match=f"the file has {len(DATA) - 1} bytes now"):
        pinned.source.read(large(pinned), 0, 8)
    with pytest.raises(SourceChanged, match="shorter"):
        pinned.source.read(large(pinned), len(DATA) - 1, 1)


def test_a_whole_file_is_checked_against_its_digest(hub: StandinHub, pinned: PinnedSource) -> None:
    hub.cdn.blobs[sha256(DATA)] = DATA[::-1]
    with pytest.raises(SourceChanged, match="digest"):
        pinned.source.read(large(pinned), 0, len(DATA))


def test_a_range_goes_on_where_its_connection_broke(hub: StandinHub, pinned: PinnedSource) -> None:
    a = large(pinned)
    hub.faults += [
        Fault("a.safetensors", "status", 503),
        Fault("a.safetensors", "status", 429, headers={"Retry-After": "0"}),
    ]
    hub.cdn.faults.append(Fault("blobs", "cut"))
    assert pinned.source.read(a, 0, len(DATA)) == DATA
    assert [asked.headers["range"] for asked in hub.cdn.asked] == [
        f"bytes=0-{len(DATA) - 1}",
        f"bytes={len(DATA) // 2}-{len(DATA) - 1}",
    ]


@pytest.mark.parametrize(
    ("kind", "known"), [("status", True), ("cut", True), ("gone", True), ("cut", False)]
)
def test_a_place_that_fails_is_not_asked_again(hub: StandinHub, kind: str, known: bool) -> None:
    """The hub is asked again, and may refer to a server that works."""
    with running_hub(FILES) as other:
        pinned = sources_of(hub, hub_private_hosts="127.0.0.1").pin("hf://org/name")
        a, failing = large(pinned), hub.cdn
        if known:
            assert pinned.source.read(a, 0, 8) == DATA[:8]
            hub.cdn = other.cdn
        else:
            failing.on_asked = lambda _: setattr(hub, "cdn", other.cdn)
        if kind == "gone":
            failing.stop()
        failing.faults.append(Fault("blobs", kind, 503, times=99))
        before = len(failing.asked)
        assert pinned.source.read(a, 8, 5000) == DATA[8:5008]
        assert pinned.source.read(a, 8, 9) == DATA[8:17]
        assert len(failing.asked) - before <= 1
        assert len(other.cdn.asked) == 2
        pinned.source.close()
        failing.stop()


def test_a_connection_that_stalls_is_given_up_and_made_again(
    hub: StandinHub, pinned: PinnedSource
) -> None:
    hub.cdn.faults.append(Fault("blobs", "stall"))
    assert pinned.source.read(large(pinned), 0, len(DATA)) == DATA


@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [
        (Fault("", "status", 401, 99), SourceDenied, "needs a token"),
        (Fault("", "status", 403, 99), SourceDenied, "needs a token"),
        (Fault("", "status", 404, 99), SourceChanged, "gone"),
        (Fault("", "status", 500, 99), SourceUnavailable, "answers 500, 4 times"),
        (Fault("", "status", 429, 99), SourceUnavailable, "answers 429, 4 times"),
        (
            Fault("", "status", 429, 1, {"Retry-After": "300"}),
            SourceUnavailable,
            "left alone for 300 s",
        ),
        (Fault("", "status", 418, 99), SourceUnavailable, "PILOTLIGHT_HUB_ENDPOINT"),
        (Fault("", "cut", None, 99), SourceUnavailable, "4 times"),
        (
            Fault("", "redirect", "http://127.0.0.1:1/x"),
            SourceDenied,
            "127.0.0.1:1, which is in a private network",
        ),
        (
            Fault("", "redirect", "http://169.254.169.254/latest/meta-data"),
            SourceDenied,
            "private network",
        ),
        (Fault("", "redirect", "http://[::ffff:10.0.0.1]/"), SourceDenied, "private network"),
        (Fault("", "redirect", "http://localhost:1/"), SourceDenied, "private network"),
        (Fault("", "redirect", "http://user:pass@example.org/"), SourceDenied, "not a plain http"),
        (Fault("", "redirect", "file:///etc/passwd"), SourceDenied, "not a plain http"),
        (Fault("", "redirect", "http://a b/", 99), SourceUnavailable, "cannot be connected to"),
        (Fault("", "redirect", "http://127.0.0.1:99999/"), SourceDenied, "not a plain http"),
        (Fault("", "redirect", "http://[x"), SourceDenied, "not a plain http"),
        (
            Fault("", "redirect", "/org/name/resolve/again", 99),
            SourceUnavailable,
            "more than 5 redirects",
        ),
    ],
)
def test_what_does_not_pass_is_told(
    hub: StandinHub, pinned: PinnedSource, fault: Fault, error: type[CheckpointError], told: str
) -> None:
    config = pinned.source.list_files()[1]
    hub.faults.append(Fault(fault.where, fault.kind, fault.value, fault.times, fault.headers))
    with pytest.raises(error, match=told) as caught:
        pinned.source.read(config, 0, 8)
    assert type(caught.value) is error


def test_a_cdn_in_a_private_network_must_be_named(hub: StandinHub) -> None:
    pinned = sources_of(hub, hub_private_hosts="10.0.0.1, cdn.example.org:443").pin("hf://org/name")
    with pytest.raises(SourceDenied, match="PILOTLIGHT_HUB_PRIVATE_HOSTS"):
        pinned.source.read(large(pinned), 0, 8)
    assert not hub.cdn.asked


def test_a_server_without_ranges_is_refused(hub: StandinHub, pinned: PinnedSource) -> None:
    hub.cdn.ranges = False
    with pytest.raises(SourceUnavailable, match="no ranges"):
        pinned.source.read(large(pinned), 0, 8)


def test_nobody_listens_and_what_is_no_hub(hub: StandinHub) -> None:
    sources = sources_of(hub)
    hub.faults.append(Fault("api", "status", 200))
    with pytest.raises(SourceUnavailable, match="is no hub"):
        sources.pin("hf://org/name")
    hub.stop()
    with pytest.raises(SourceUnavailable, match="cannot be connected to"):
        sources.pin("hf://org/name")


def test_a_hub_that_refuses_is_let_go_of(hub: StandinHub, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[GuardedHttp] = []
    close = GuardedHttp.close

    def closing(http: GuardedHttp) -> None:
        closed.append(http)
        close(http)

    monkeypatch.setattr(GuardedHttp, "close", closing)
    with pytest.raises(SourceMissing):
        sources_of(hub).pin("hf://org/name@nowhere")
    assert len(closed) == 1


def test_a_loader_reads_commits_alone(hub: StandinHub) -> None:
    sources = sources_of(hub)
    with pytest.raises(UriNotAllowed, match="names no commit"):
        sources.open("hf://org/name@main")
    with pytest.raises(UriNotAllowed, match="not below an allowed root"):
        sources.open(f"hf://others/name@{hub.refs['main']}")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_on_a_hub_is_known_by_its_content(shards: int) -> None:
    files = tiny_files(tiny_config(), shards=shards)
    digests: list[str] = []
    for repository in ("org/one", "org/two"):
        with running_hub(files, repository=repository) as hub:
            pinned = sources_of(hub).pin(f"hf://{repository}")
            found, known = read_checkpoint(pinned.source), read_checkpoint(MemorySource(files))
            pinned.source.close()
        assert found.spec == known.spec
        digests.append(found.manifest.digest())
    assert len(set(digests)) == 1


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("1.1.1.1", True), ("10.1.2.3", False), ("127.0.0.1", False), ("169.254.169.254", False), ("100.64.0.1", False),
        ("0.0.0.0", False), ("224.0.0.1", False), ("192.168.1.1", False), ("2606:4700::1", True), ("::1", False),
        ("fd00::1", False), ("fe80::1%eth0", False), ("::ffff:127.0.0.1", False), ("::ffff:1.1.1.1", True),
        ("64:ff9b::a00:1", False), ("2002:a00:1::", False),
    ],
)  # fmt: skip
def test_private_addresses_are_known_in_every_dress(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_a_name_is_looked_up_once_and_connected_to_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that stands for a public address when it is checked must not stand for a private one
    when it is connected to.
    """
    connected: list[str] = []
    looked_up: list[str] = []

    def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        looked_up.append(host)
        return [
            (
                socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                ("1.1.1.1" if len(looked_up) == 1 else "127.0.0.1", port),
            )
        ]

    def connect(_: object, host: str, *__: object) -> None:
        connected.append(host)
        raise httpcore2.ConnectError("not in a test")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(httpcore2.SyncBackend, "connect_tcp", connect)
    http = GuardedHttp("https://hub.example.org", None)
    with (
        pytest.raises(Exception, match="cannot be connected to"),
        http.get("https://cdn.example.org/x"),
    ):
        pass
    assert (looked_up, connected) == (["cdn.example.org"], ["1.1.1.1"])
    with (
        pytest.raises(SourceDenied, match="without encryption"),
        http.get("http://cdn.example.org/x"),
    ):
        pass
    http.close()


def test_origins() -> None:
    assert Origin.of("https://Hub.example.org/x") == Origin("https", "hub.example.org", 443)
    for url in ("ftp://x", "//x", "https://", "https://u@x/"):
        with pytest.raises(ValueError, match="not a plain"):
            Origin.of(url)
