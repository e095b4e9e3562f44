"""The bucket of a new installation is made once; against a stand-in.

What a real server says is in tests/conformance.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from standin_s3 import ACCESS_KEY, SECRET_KEY
from standin_sources import Fault, Standin

from pilotlight.common.bucket import _first_line, ensure_bucket
from pilotlight.common.errors import SourceUnavailable
from pilotlight.common.settings import S3Settings


class Buckets(Standin):
    """Those that were made. Access keys are checked, signatures are not."""

    def __init__(self) -> None:
        self.made: set[str] = set()
        super().__init__()

    def answer(self, request) -> None:
        where = urlsplit(request.path)
        name = where.path.strip("/")
        if not parse_qs(where.query)["X-Amz-Credential"][0].startswith(f"{ACCESS_KEY}/"):
            request.send(403, b"")
        elif request.command == "HEAD":
            request.send(200 if name in self.made else 404, b"")
        else:
            assert request.command == "PUT"
            request.send(409 if name in self.made else 200, b"")
            self.made.add(name)


@pytest.fixture
def server() -> Iterator[Buckets]:
    running = Buckets()
    yield running
    running.stop()


def ensured(server: Buckets, folder: Path, url: str, access_key: str = ACCESS_KEY) -> bool:
    (folder / "s3-access-key").write_text(access_key)
    (folder / "s3-secret-key").write_text(SECRET_KEY)
    settings = S3Settings(s3_endpoint=server.url, s3_allow_http=True, secrets_dir=folder)
    return asyncio.run(ensure_bucket(url, settings))


def test_made_once_and_found_again(server: Buckets, tmp_path: Path) -> None:
    assert ensured(server, tmp_path, "s3://pilotlight/some/prefix")
    assert not ensured(server, tmp_path, "s3://pilotlight")
    assert server.made == {"pilotlight"}
    assert [one.method for one in server.asked] == ["HEAD", "PUT", "HEAD"]


def test_asked_again_while_the_server_starts(server: Buckets, tmp_path: Path) -> None:
    server.faults = [Fault("pilotlight", "status", 503)]
    assert ensured(server, tmp_path, "s3://pilotlight")
    assert [one.method for one in server.asked] == ["HEAD", "HEAD", "PUT"]


def test_somebody_else_makes_it_at_the_same_time(server: Buckets, tmp_path: Path) -> None:
    server.faults = [Fault("pilotlight", "status", 404)]
    server.made = {"pilotlight"}
    assert not ensured(server, tmp_path, "s3://pilotlight")


def test_a_refusal_is_said_at_once(server: Buckets, tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match=r"the bucket pilotlight cannot be made: .*403"):
        ensured(server, tmp_path, "s3://pilotlight", access_key="nobody")
    assert len(server.asked) == 1


def test_a_folder_has_no_bucket(server: Buckets, tmp_path: Path) -> None:
    assert not ensured(server, tmp_path, "file:///var/lib/objects")
    assert server.asked == []


def test_an_error_that_says_nothing_is_named() -> None:
    assert _first_line(TimeoutError()) == "TimeoutError"
    assert _first_line(OSError("one\ntwo")) == "one"
