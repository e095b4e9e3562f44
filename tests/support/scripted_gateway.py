"""A gateway on a real socket that answers what a test tells it to: the admin API, the inference API
and streams.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, bytes, dict[str, str]]
"""Status, body, headers."""


class ScriptedGateway(ThreadingHTTPServer):
    """Answers by method and path, without the query; each answer holds until the next is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies: dict[str, Reply | Callable[[Any], Reply]] = {}
        self.seen: list[tuple[str, str, Any]] = []
        """Method and path with the query, key, decoded body."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, route: str, body: Any, status: int = 200, **headers: str) -> None:
        """Answer with JSON, or with bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.replies[route] = (status, content, headers)

    def refuse(self, route: str, status: int, code: str, message: str = "no") -> None:
        """Answer with an error."""
        self.answer(route, {"error": {"code": code, "message": message}}, status)

    def stream(self, route: str, lines: Sequence[str], **headers: str) -> None:
        """Answer with server-sent events and comments, a blank line after each."""
        self.answer(route, "".join(f"{line}\n\n" for line in lines).encode(), **headers)

    def asked(self, route: str) -> list[Any]:
        """Bodies of the requests to a route, in order."""
        return [body for seen, _, body in self.seen if seen.partition("?")[0] == route]


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedGateway

    def _do(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        body = json.loads(raw) if raw else None
        key = self.headers.get("Authorization", "")
        self.server.seen.append((f"{self.command} {self.path}", key, body))
        route = f"{self.command} {self.path.partition('?')[0]}"
        reply = self.server.replies.get(route, (404, b"not here", {}))
        status, content, headers = reply(body) if callable(reply) else reply
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = do_PATCH = _do  # noqa: N815 - what http.server looks for

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def scripted_gateway() -> Iterator[ScriptedGateway]:
    """One that listens."""
    with ScriptedGateway() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def chat_lines(*texts: str, finish: str = "stop", loading: Sequence[str] = ()) -> list[str]:
    """A streamed chat: comments while the model loads, texts, the end with its usage."""

    def event(**choice: Any) -> str:
        return "data: " + json.dumps({"choices": [{"index": 0, "delta": {}, **choice}]})

    usage = {"prompt_tokens": 7, "completion_tokens": len(texts), "total_tokens": 7 + len(texts)}
    return [
        *loading,
        event(delta={"role": "assistant"}),
        *(event(delta={"content": text}) for text in texts),
        event(finish_reason=finish),
        "data: " + json.dumps({"choices": [], "usage": usage}),
        "data: [DONE]",
    ]
