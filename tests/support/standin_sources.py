"""Stand-ins for servers that models come from: a server with faults, and a hub with its CDN on it.

Ours and small: they speak the parts of the protocols that Pilotlight uses, and fail in the ways
that tests ask for. What real servers do, other tests ask real servers.
"""

import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Fault:
    """What goes wrong with requests whose target holds ``where``."""

    where: str
    kind: str
    """``cut``: ``value`` bytes of the body, by default half of it, then the end of the connection.
    ``stall``: as many, then nothing. ``status``: ``value`` as status and nothing else.
    ``redirect``: to ``value``."""
    value: Any = None
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """One request, as it arrived."""

    method: str
    target: str
    headers: dict[str, str]


class Standin:
    """A server with a log and faults."""

    host = "127.0.0.1"
    """Where it listens."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.faults: list[Fault] = []
        self.on_asked: Callable[[Asked], None] = lambda _: None
        """Called with each request before it is answered, from the thread that answers it."""
        self.sent_bytes = 0
        """Of bodies, and of each before it goes out: what a client has received is counted."""
        self.released = threading.Event()
        self.connections: list[StandinRequest] = []
        self._lock = threading.Lock()
        standin = self

        class Handler(StandinRequest):
            server_of = standin

        self._server = ThreadingHTTPServer((self.host, 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    def count(self, size_bytes: int) -> None:
        """Add to what was sent."""
        with self._lock:
            self.sent_bytes += size_bytes

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, request: "StandinRequest") -> None:
        raise NotImplementedError

    def fault_for(self, target: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.where in target and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def stop(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join(10)
        for connection in list(self.connections):
            connection.abandon()
        self._server.server_close()


class StandinRequest(BaseHTTPRequestHandler):
    server_of: Standin
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 64 * 1024

    def setup(self) -> None:
        super().setup()
        self.server_of.connections.append(self)

    def finish(self) -> None:
        self.server_of.connections.remove(self)
        super().finish()

    def abandon(self) -> None:
        """End a connection that waits for another request."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _any(self) -> None:
        standin = self.server_of
        asked = Asked(
            self.command, self.path, {name.lower(): value for name, value in self.headers.items()}
        )
        standin.asked.append(asked)
        standin.on_asked(asked)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.fault = standin.fault_for(self.path)
        try:
            if self.fault is not None and self.fault.kind == "status":
                self.send(int(self.fault.value), b"", self.fault.headers)
            elif self.fault is not None and self.fault.kind == "redirect":
                self.send(302, b"", {"Location": str(self.fault.value), **self.fault.headers})
            else:
                standin.answer(self)
        except ConnectionError:
            self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _any  # noqa: N815 - what http.server looks for

    def send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        size_bytes: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if size_bytes is None else size_bytes))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault is not None and self.fault.kind in ("cut", "stall"):
            some = body[: len(body) // 2 if self.fault.value is None else self.fault.value]
            self._send_body(some)
            if self.fault.kind == "stall":
                self.server_of.released.wait(30)
            self.close_connection = True
            return
        self._send_body(body)

    def _send_body(self, body: bytes) -> None:
        self.server_of.count(len(body))
        try:
            self.wfile.write(body)
            self.wfile.flush()
        except ConnectionError:
            self.server_of.count(-len(body))
            raise

    def send_range(self, data: bytes, headers: dict[str, str]) -> None:
        """``data``, or the range of it that was asked for."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            self.send(200, data, headers)
            return
        start = int(match[1])
        stop = min(int(match[2]) + 1 if match[2] else len(data), len(data))
        if start >= len(data):
            self.send(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
            return
        self.send(
            206,
            data[start:stop],
            {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"},
        )


class StandinHub(Standin):
    """A hub with one repository, and its CDN on another port."""

    def __init__(
        self, files: dict[str, bytes], repository: str = "org/name", token: str | None = None
    ) -> None:
        self.repository = repository
        self.token = token
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refs: dict[str, str] = {}
        self.cdn = StandinCdn()
        self.push(files)
        super().__init__()

    def push(self, files: dict[str, bytes], ref: str = "main") -> str:
        """A commit to a branch."""
        named = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        commit = hashlib.sha1(json.dumps([named, len(self.commits)]).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.refs[ref] = commit
        self.cdn.blobs.update({sha256(data): data for data in files.values()})
        return commit

    def stop(self) -> None:
        self.cdn.stop()
        super().stop()

    def answer(self, request: StandinRequest) -> None:
        parts = urlsplit(request.path)
        if (
            self.token is not None
            and request.headers.get("Authorization") != f"Bearer {self.token}"
        ):
            request.send(401, b'{"error":"Invalid credentials"}', {"X-Error-Code": "GatedRepo"})
            return
        api, resolve = f"/api/models/{self.repository}/revision/", f"/{self.repository}/resolve/"
        if parts.path.startswith(api):
            self._list(request, unquote(parts.path.removeprefix(api)))
        elif parts.path.startswith(resolve):
            commit, _, name = parts.path.removeprefix(resolve).partition("/")
            self._resolve(request, commit, unquote(name))
        else:
            request.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _list(self, request: StandinRequest, revision: str) -> None:
        commit = self.refs.get(revision, revision)
        if commit not in self.commits:
            request.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings: list[dict[str, Any]] = []
        for name, data in self.commits[commit].items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_blob(data)}
            if is_large(name):
                entry["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        body = {"id": self.repository, "sha": commit, "private": False, "siblings": siblings}
        request.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, request: StandinRequest, commit: str, name: str) -> None:
        data = self.commits.get(commit, {}).get(name)
        if data is None:
            request.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        told = {"X-Repo-Commit": commit}
        if not is_large(name):
            request.send_range(data, {**told, "ETag": f'"{git_blob(data)}"'})
            return
        digest = sha256(data)
        told |= {
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": str(len(data)),
            "Location": self.cdn.place_of(digest),
        }
        request.send(302, b"Found", told)


class StandinCdn(Standin):
    """Where large files lie. References to it are good until ``expire`` is called."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.ranges = True
        self._season = 0
        super().__init__()

    def place_of(self, digest: str) -> str:
        return f"{self.url}/blobs/{digest}?season={self._season}"

    def expire(self) -> None:
        """References that were given until now are good no more."""
        self._season += 1

    def answer(self, request: StandinRequest) -> None:
        parts = urlsplit(request.path)
        digest = parts.path.removeprefix("/blobs/")
        data = self.blobs.get(digest)
        if parse_qs(parts.query).get("season") != [str(self._season)] or data is None:
            request.send(403, b"<Error>expired</Error>")
            return
        etag = self.etags.get(digest, f'"cdn-{digest[:16]}"')
        told = {"ETag": etag} if etag else {}
        if self.ranges:
            request.send_range(data, told)
        else:
            request.send(200, data, told)


def is_large(name: str) -> bool:
    """Whether the stand-in keeps a file where its hub refers to."""
    return name.endswith((".safetensors", "tokenizer.json"))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def running_hub(files: dict[str, bytes], **options: Any) -> Iterator[StandinHub]:
    hub = StandinHub(files, **options)
    try:
        yield hub
    finally:
        hub.stop()
