"""Stand-in for an S3 server: buckets in memory, and the errors that tests ask for."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from standin_sources import Standin, StandinRequest

ACCESS_KEY = "AKIASTANDIN"
SECRET_KEY = "standin-secret"


class StandinS3(Standin):
    """Buckets in memory. Access keys are checked, signatures are not."""

    def __init__(self, *buckets: str) -> None:
        self.buckets: dict[str, dict[str, bytes]] = {name: {} for name in buckets}
        self.heeds_if_match = True
        self.etags: dict[tuple[str, str], str] = {}
        """Of objects whose ETag says nothing about their content, by bucket and key."""
        super().__init__()

    def put(self, bucket: str, prefix: str, files: dict[str, bytes]) -> None:
        self.buckets[bucket].update({f"{prefix}/{name}": data for name, data in files.items()})

    def answer(self, request: StandinRequest) -> None:
        parts = urlsplit(request.path)
        bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
        if f"Credential={ACCESS_KEY}/" not in request.headers.get("Authorization", ""):
            _refuse(request, 403, "InvalidAccessKeyId")
        elif bucket not in self.buckets:
            _refuse(request, 404, "NoSuchBucket")
        elif request.command == "GET" and not key:
            self._list(request, bucket, parse_qs(parts.query).get("prefix", [""])[0])
        elif request.command == "PUT":
            self._put(request, bucket, key)
        elif request.command == "POST":
            for found in re.findall(r"<Key>([^<]+)</Key>", request.body.decode()):
                self.buckets[bucket].pop(found, None)
            request.send(200, b'<?xml version="1.0"?><DeleteResult></DeleteResult>')
        elif key not in self.buckets[bucket]:
            _refuse(request, 404, "NoSuchKey")
        else:
            self._get(request, self.buckets[bucket][key], self.etags.get((bucket, key)))

    def _get(self, request: StandinRequest, data: bytes, etag: str | None) -> None:
        etag = etag or etag_of(data)
        if self.heeds_if_match and request.headers.get("If-Match", etag) != etag:
            _refuse(request, 412, "PreconditionFailed")
            return
        request.send_range(data, {"ETag": etag, "Last-Modified": "Sat, 21 Nov 2026 00:00:00 GMT"})

    def _put(self, request: StandinRequest, bucket: str, key: str) -> None:
        if request.headers.get("If-None-Match") == "*" and key in self.buckets[bucket]:
            _refuse(request, 412, "PreconditionFailed")
            return
        self.buckets[bucket][key] = request.body
        request.send(200, b"", {"ETag": etag_of(request.body)})

    def _list(self, request: StandinRequest, bucket: str, prefix: str) -> None:
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-21T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(self.etags.get((bucket, key)) or etag_of(data))}</ETag><Size>{len(data)}</Size></Contents>"
            for key, data in sorted(self.buckets[bucket].items())
            if key.startswith(prefix)
        )
        body = f'<?xml version="1.0"?><ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>{found}</ListBucketResult>'
        request.send(200, body.encode(), {"Content-Type": "application/xml"})


def etag_of(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@contextmanager
def running_s3(*buckets: str) -> Iterator[StandinS3]:
    server = StandinS3(*buckets)
    try:
        yield server
    finally:
        server.stop()


def _refuse(request: StandinRequest, status: int, code: str) -> None:
    request.send(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())
