"""The command line and a gateway: what is asked and shown, errors of the gateway and of the way to
it, help.
"""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pilotlight.cli.client import AdminClient, SystemNotRunning
from pilotlight.cli.demo_model import ensure_demo_model
from pilotlight.cli.main import run
from pilotlight.cli.output import show_error
from pilotlight.common.errors import (
    AlreadyExists,
    BadRequest,
    Forbidden,
    PilotlightError,
    TransientError,
    Unauthorized,
    UriNotAllowed,
)

MODEL = {
    "name": "tiny",
    "spec": {"architecture": "LlamaForCausalLM", "part_bytes": [1 << 20, 1 << 20]},
    "dtype": "bfloat16",
    "slo": {"ttft_ms": 1000.0, "tpot_ms": 50.5},
}


class Scripted(ThreadingHTTPServer):
    """A gateway that answers what it is told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.seen: list[tuple[str, str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, route: str, body: Any, status: int = 200) -> None:
        """Answer a method and path, below ``/admin/v1``."""
        self.answers[route] = (
            status,
            body if isinstance(body, bytes) else json.dumps(body).encode(),
        )

    def refuse(self, route: str, status: int, code: str, message: str = "no") -> None:
        """Answer with an error, in the admin API's shape."""
        self.answer(
            route,
            {"error": {"code": code, "message": message, "param": None, "what_to_do": "x"}},
            status,
        )


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def _do(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length).decode()
        path = self.path.removeprefix("/admin/v1").partition("?")[0]
        self.server.seen.append((f"{self.command} {path}", self.headers["Authorization"], body))
        status, content = self.server.answers.get(f"{self.command} {path}", (404, b"not here"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = do_PATCH = _do  # noqa: N815 - what http.server looks for

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Scripted]:
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("PILOTLIGHT_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("PILOTLIGHT_URL", server.url)
        monkeypatch.setenv("PILOTLIGHT_ADMIN_KEY", "the-key")
        yield server
        server.shutdown()
        thread.join()


def test_a_group_that_becomes_one_worker_says_how_far_it_is(
    gateway: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    short, rest, whole = (
        {"start": start, "stop": stop} for start, stop in ((0, 4), (4, 8), (0, 8))
    )
    placements = [
        {"node_id": "a", "stage": whole, "held": short},
        {"node_id": "b", "stage": rest, "held": rest},
    ]
    body = {"digest": "d1", "placements": placements}
    gateway.answer("GET /models", {"models": [MODEL]})
    gateway.answer(
        "GET /instances",
        {"instances": [{"model": "tiny", "state": "consolidating", "body": body}]},
    )
    coming = [
        {"node_id": node, "digest": digest, "done_bytes": done, "total_bytes": 200}
        for node, digest, done in (("a", "d1", 50), ("b", "d1", 199), ("a", "d2", 150))
    ]
    gateway.answer("GET /transfers", {"transfers": coming})
    assert run(["model", "list"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "25%" in shown
    gateway.answer("GET /transfers", {"transfers": coming[1:]})
    assert run(["model", "list"]) == 0
    assert "%" not in capsys.readouterr().out


def test_a_group_that_becomes_several_instances_says_how_many(
    gateway: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    group = {
        "model": "tiny",
        "state": "ready",
        "body": {"digest": "d1", "targets": 3, "placements": [{"node_id": "a"}, {"node_id": "b"}]},
    }
    one = {**group, "body": {**group["body"], "targets": 1}}
    gateway.answer("GET /models", {"models": [MODEL]})
    gateway.answer("GET /instances", {"instances": [group]})
    assert run(["model", "list"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 ready (2 stages, to become 3 instances)" in shown
    gateway.answer("GET /instances", {"instances": [one]})
    assert run(["model", "list"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 ready (2 stages)" in shown
    assert "to become" not in shown


def test_models_are_listed(
    gateway: Scripted, capsys: pytest.CaptureFixture[str], out: Callable[[], Any]
) -> None:
    instances = [
        {"model": "tiny", "state": state, "body": {"placements": [{}] * stages}}
        for state, stages in (("ready", 1), ("gone", 1), ("ready", 1), ("loading", 2))
    ]
    gateway.answer("GET /models", {"models": [MODEL]})
    gateway.answer("GET /instances", {"instances": instances})
    assert run(["model", "list"]) == 0
    assert "1 loading (2 stages), 2 ready" in capsys.readouterr().out
    assert run(["model", "list", "--json"]) == 0
    assert out() == {"models": [MODEL], "instances": instances}
    gateway.answer("GET /models", {"models": []})
    assert run(["model", "list"]) == 0
    assert "pilotlight model add" in capsys.readouterr().out
    assert {key for _, key, _ in gateway.seen} == {"Bearer the-key"}


def test_a_model_is_added_warmed_and_removed(
    gateway: Scripted, capsys: pytest.CaptureFixture[str], out: Callable[[], Any], tmp_path: Path
) -> None:
    gateway.answer("POST /models", MODEL, 201)
    assert run(["model", "add", "tiny", str(tmp_path), "--ttft-ms", "5", "--pinned"]) == 0
    assert "2.0 MiB" in capsys.readouterr().out
    sent = json.loads(gateway.seen[-1][2])
    assert (sent["uri"], sent["slo"], sent["pinned"]) == (
        tmp_path.as_uri(),
        {"ttft_ms": 5.0, "tpot_ms": 200.0},
        True,
    )
    gateway.answer("POST /models/org/tiny/warm", {"instance_id": "inst-1"}, 202)
    assert run(["model", "warm", "org/tiny", "--json"]) == 0
    assert out() == {"instance_id": "inst-1"}
    gateway.answer("DELETE /models/org/tiny", b"", 204)
    assert run(["model", "rm", "org/tiny", "--json"]) == 0
    assert out() == {"deleted": "org/tiny"}


def test_a_model_is_pinned_unpinned_and_evicted(
    gateway: Scripted, capsys: pytest.CaptureFixture[str], out: Callable[[], Any]
) -> None:
    gateway.answer("PATCH /models/org/tiny", {"name": "org/tiny"})
    assert run(["model", "pin", "org/tiny"]) == 0
    assert json.loads(gateway.seen[-1][2]) == {"pinned": True}
    assert run(["model", "unpin", "org/tiny"]) == 0
    assert json.loads(gateway.seen[-1][2]) == {"pinned": False}
    assert "is pinned" in capsys.readouterr().out
    gateway.answer("POST /models/org/tiny/evict", {"instance_ids": ["i"]}, 202)
    assert run(["model", "evict", "org/tiny", "--json"]) == 0
    assert out() == {"instance_ids": ["i"]}


EVICTION = {
    "at": "2026-11-22T20:00:00.5+00:00",
    "kind": "instance",
    "node_id": "n0",
    "reason": "iam: unused for 3.0 s",
    "inputs": {
        "for_model": "other",
        "loss": 0.25,
        "score": 2.5e-7,
        "size_bytes": 1 << 20,
        "spared": [
            {"model": "third", "loss": 0.5, "size_bytes": 2 << 20, "score": 3e-7},
            {"model": "fourth", "loss": 0.75, "size_bytes": 1 << 20},
        ],
    },
}


def test_why_a_model_was_evicted(
    gateway: Scripted, capsys: pytest.CaptureFixture[str], out: Callable[[], Any]
) -> None:
    page = {"evictions": [EVICTION], "next_before": None}
    gateway.answer("GET /evictions", page)
    assert run(["why-evicted", "org/tiny"]) == 0
    said = capsys.readouterr().out
    for part in (
        "from a device of n0 for other",
        "iam: unused",
        "1.0 MiB, score 2.5e-07",
        "third (loss 0.5, 2.0 MiB, score 3e-07)",
        "fourth (loss 0.75, 1.0 MiB)",
    ):
        assert part in said
    assert run(["why-evicted", "org/tiny", "--json"]) == 0
    assert out() == page
    gateway.answer("GET /evictions", {"evictions": [], "next_before": None})
    assert run(["why-evicted", "org/tiny"]) == 0
    assert "was not evicted" in capsys.readouterr().out


def verification(status: str, **changes: Any) -> dict[str, Any]:
    """One as the gateway tells it."""
    started = {
        "verification_id": "n0.abc",
        "node_id": "n0",
        "model": "org/tiny",
        "status": status,
        "done_bytes": 3 << 20,
    }
    rest = {
        "total_bytes": 4 << 20,
        "filled_parts": 0,
        "difference_count": 0,
        "differences": [],
        "code": "",
        "error": "",
    }
    return {**started, **rest, **changes}


def test_a_model_is_verified(
    gateway: Scripted, capsys: pytest.CaptureFixture[str], out: Callable[[], Any]
) -> None:
    gateway.answer("POST /models/org/tiny/verify", verification("waiting"), 202)
    gateway.answer("GET /verifications/n0.abc", verification("done", filled_parts=2))
    assert run(["model", "verify", "org/tiny", "--timeout", "60"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "org/tiny is what is recorded: 3.0 MiB were read; digests of 2 parts were missing and are recorded now"
        in told
    )
    assert json.loads(gateway.seen[-2][2]) == {"deadline_s": 60.0}
    differs = verification(
        "done",
        difference_count=101,
        differences=["part 2, bytes [0, 9), from a [b].safetensors at byte 7"],
    )
    gateway.answer("GET /verifications/n0.abc", differs)
    assert run(["model", "verify", "org/tiny"]) == 1
    told = capsys.readouterr().out
    assert "in 101 places" in told
    assert "part 2, bytes [0, 9), from a [b].safetensors at byte 7" in told
    assert run(["model", "verify", "org/tiny", "--json"]) == 1
    assert out() == differs
    gateway.answer(
        "GET /verifications/n0.abc",
        verification("failed", code="source_changed", error="it is another file"),
    )
    assert run(["model", "verify", "org/tiny"]) == 1
    assert "source_changed: it is another file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "invalid_api_key", Unauthorized),
        (403, "forbidden", Forbidden),
        (409, "already_exists", AlreadyExists),
        (422, "uri_not_allowed", UriNotAllowed),
        (503, "a_code_of_a_later_release", TransientError),
    ],
)
def test_errors_of_the_gateway_are_the_taxonomys(
    gateway: Scripted, status: int, code: str, kind: type[PilotlightError]
) -> None:
    gateway.refuse("GET /models", status, code, "because")
    with AdminClient(gateway.url, "the-key") as client, pytest.raises(kind, match="because"):
        client.get("/models")


@pytest.mark.parametrize(
    "body", [b"", b"<html>Bad Gateway</html>", b"[]", b'{"error": "no"}', b'{"error": {}}', b"\xff"]
)
def test_errors_of_something_else(gateway: Scripted, body: bytes) -> None:
    gateway.answer("GET /models", body, 502)
    with AdminClient(gateway.url, "the-key") as client, pytest.raises(PilotlightError, match="502"):
        client.get("/models")


def test_what_answers_is_no_gateway(gateway: Scripted) -> None:
    gateway.answer("GET /models", b"<html>Welcome</html>")
    with (
        AdminClient(gateway.url, "the-key") as client,
        pytest.raises(SystemNotRunning, match="no Pilotlight"),
    ):
        client.get("/models")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "ftp://host", "nonsense", "http://", "http://127.0.0.1:99999"]
)
def test_nobody_answers(url: str) -> None:
    with pytest.raises((SystemNotRunning, BadRequest)) as caught, AdminClient(url, "key") as client:
        client.get("/models")
    assert caught.value.action


def test_a_key_that_is_none() -> None:
    with pytest.raises(BadRequest, match="PILOTLIGHT_ADMIN_KEY"):
        AdminClient("http://127.0.0.1:1", "clé")


def test_the_demo_model_is_registered_once(gateway: Scripted) -> None:
    gateway.answer("GET /models/ember-7m", MODEL)
    with AdminClient(gateway.url, "the-key") as client:
        ensure_demo_model(client)
        assert [route for route, _, _ in gateway.seen] == ["GET /models/ember-7m"]
        gateway.refuse("GET /models/ember-7m", 404, "model_not_found")
        gateway.refuse("POST /models", 409, "already_exists")
        ensure_demo_model(client)
        assert [route for route, _, _ in gateway.seen][1:] == [
            "GET /models/ember-7m",
            "POST /models",
        ]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("up", "down", "demo", "doctor", "logs", "model", "trace"):
        assert command in text
        assert run([command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out or command == "model"
    assert run(["model", "--help"]) == 0
    assert {"add", "list", "rm", "warm", "verify"} <= set(capsys.readouterr().out.split())


def test_brackets_in_a_message_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_error(BadRequest("there is no folder [/x] in [bold]")) == 1
    assert "there is no folder [/x] in [bold]" in capsys.readouterr().err
