"""``pilotlight org|project|key …`` and ``pilotlight usage`` against a gateway."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from pilotlight.cli.main import run

LIMITS = {
    "requests_per_minute": 600,
    "tokens_per_minute": None,
    "concurrent_requests": 8,
    "tokens_per_month": None,
}
AT = "2026-01-31T12:00:00.5+00:00"
KEY = {
    "key_id": "key-0123456789abcdef",
    "prefix": "pl-inference-abc",
    "role": "inference",
    "label": "ci",
    "project": "acme/search",
    "admin_role": "viewer",
    "models": ["acme/*"],
    "routes": [],
    "limits": LIMITS,
    "created_at": AT,
    "expires_at": None,
    "last_used_at": AT,
    "revoked_at": None,
}
PROJECT = {
    "name": "acme/search",
    "organization": "acme",
    "models": ["acme/*"],
    "routes": [],
    "limits": LIMITS,
    "weight": 2.0,
    "created_at": AT,
}
USED = {
    "day": "2026-01-31",
    "project": "acme/search",
    "key_id": KEY["key_id"],
    "label": "ci",
    "model": "fox",
    "requests": 1200,
    "failed": 1,
    "prompt_tokens": 5,
    "output_tokens": 6,
    "device_s": 2.5,
    "start_device_s": 0.25,
    "idle_device_s": 12.5,
}


class Scripted(ThreadingHTTPServer):
    """A gateway that answers what it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, dict[str, list[str]], Any]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path.removeprefix("/admin/v1"))
        route = f"{self.command} {parts.path}"
        self.server.asked.append((route, parse_qs(parts.query), json.loads(body) if body else None))
        answer = self.server.answers[route]
        content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _do  # noqa: N815 - what http.server looks for

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Scripted]:
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("PILOTLIGHT_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("PILOTLIGHT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("PILOTLIGHT_ADMIN_KEY", "the-key")
        yield server
        server.shutdown()
        thread.join()


def test_organizations_and_projects(gateway: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = {
        "GET /organizations": {"organizations": [{"name": "acme", "created_at": AT}]},
        "POST /organizations": {"name": "acme", "created_at": AT},
        "GET /projects": {"projects": [PROJECT]},
        "POST /projects": PROJECT,
        "PATCH /projects/acme/search": PROJECT,
    }
    assert run(["org", "create", "acme"]) == 0
    assert run(["org", "list"]) == 0
    assert run(["project", "create", "acme/search", "--model", "acme/*", "--model", "fox"]) == 0
    assert run(["project", "set", "acme/search", "--route", "/v1/chat"]) == 0
    capsys.readouterr()
    assert run(["project", "list"]) == 0
    shown = capsys.readouterr().out
    assert "acme/*" in shown
    assert "all" in shown
    bodies = [body for _, _, body in gateway.asked if body is not None]
    assert bodies == [
        {"name": "acme"},
        {"name": "acme/search", "models": ["acme/*", "fox"], "routes": []},
        {"models": [], "routes": ["/v1/chat"]},
    ]


def test_a_key_is_made_listed_rotated_and_revoked(
    gateway: Scripted, capsys: pytest.CaptureFixture[str], out: Callable[[], Any]
) -> None:
    made = {**KEY, "key": "pl-inference-abcdef"}
    gateway.answers = {
        "POST /keys": made,
        "GET /keys": {"keys": [KEY]},
        f"POST /keys/{KEY['key_id']}/rotate": made,
        f"DELETE /keys/{KEY['key_id']}": "",
    }
    assert run(["key", "create", "ci", "--project", "acme/search", "--model", "acme/*"]) == 0
    assert "pl-inference-abcdef" in capsys.readouterr().out.splitlines()
    assert run(["key", "create", "ops", "--admin", "viewer", "--expires", "2027-01-31"]) == 0
    assert run(["key", "list"]) == 0
    shown = capsys.readouterr().out
    assert "2026-01-31T12:00:00" in shown
    assert run(["key", "rotate", KEY["key_id"], "--overlap-s", "60", "--json"]) == 0
    assert out()["key"] == "pl-inference-abcdef"
    assert run(["key", "revoke", KEY["key_id"], "--json"]) == 0
    assert out() == {"key_id": KEY["key_id"], "revoked": True}
    bodies = [body for _, _, body in gateway.asked if body is not None]
    assert bodies == [
        {"label": "ci", "models": ["acme/*"], "routes": [], "project": "acme/search"},
        {
            "label": "ops",
            "models": [],
            "routes": [],
            "role": "admin",
            "admin_role": "viewer",
            "expires_at": "2027-01-31T00:00:00+00:00",
        },
        {"overlap_s": 60.0},
    ]


def test_limits_are_said_whole_and_shown(
    gateway: Scripted, capsys: pytest.CaptureFixture[str], out: Callable[[], Any]
) -> None:
    gateway.answers = {
        "PUT /projects/acme/search/limits": PROJECT,
        f"PUT /keys/{KEY['key_id']}/limits": KEY,
        "GET /projects": {"projects": [PROJECT]},
        "GET /keys": {"keys": [KEY]},
    }
    limits = ["--requests-per-minute", "600", "--concurrent-requests", "8"]
    assert run(["project", "limit", "acme/search", *limits, "--weight", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown == "project acme/search: 600 requests/min, 8 at a time, weight 2\n"
    assert run(["key", "limit", KEY["key_id"], *limits]) == 0
    assert "600 requests/min" in capsys.readouterr().out
    assert [body for _, _, body in gateway.asked] == [{**LIMITS, "weight": 2.0}, LIMITS]
    assert run(["key", "limit", KEY["key_id"], "--json"]) == 0
    assert out()["limits"] == LIMITS
    assert gateway.asked[-1][2] == dict.fromkeys(LIMITS)
    for listed in ("project", "key"):
        assert run([listed, "list"]) == 0
        assert "600" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["web", "pl-inference-secret", "key-0123", "../keys"])
@pytest.mark.parametrize("command", ["revoke", "rotate", "limit"])
def test_what_is_no_keys_id_is_not_sent(
    gateway: Scripted, capsys: pytest.CaptureFixture[str], command: str, wrong: str
) -> None:
    assert run(["key", command, wrong]) == 1
    captured = capsys.readouterr()
    assert "pilotlight key list" in captured.err
    assert "secret" not in captured.err + captured.out
    assert gateway.asked == []


def test_usage_for_people_and_as_csv(gateway: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = {"GET /usage": {"usage": [USED]}}
    assert run(["usage", "--since", "2026-01-01", "--key", KEY["key_id"]]) == 0
    assert "1,200" in capsys.readouterr().out
    assert gateway.asked[-1][1] == {
        "since": ["2026-01-01T00:00:00+00:00"],
        "key_id": [KEY["key_id"]],
    }
    gateway.answers = {"GET /usage": "day,project\r\n"}
    assert run(["usage", "--csv"]) == 0
    assert capsys.readouterr().out.splitlines() == ["day,project"]
    assert gateway.asked[-1][1] == {"format": ["csv"]}


def test_usage_by_model_has_the_costliest_first(
    gateway: Scripted, capsys: pytest.CaptureFixture[str], out: Callable[[], Any]
) -> None:
    dear = USED | {"model": "dear", "idle_device_s": 9000.0}
    gateway.answers = {"GET /usage/models": {"models": [USED, dear]}}
    assert run(["usage", "--by-model", "--model", "dear", "--since", "2026-01-01"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("dear") < shown.index(USED["model"])
    assert "9,000.000" in shown
    assert gateway.asked[-1][1] == {"since": ["2026-01-01T00:00:00+00:00"], "model": ["dear"]}
    assert run(["usage", "--by-model", "--json"]) == 0
    assert [one["model"] for one in out()["models"]] == [USED["model"], "dear"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["usage", "--since", "yesterday"],
        ["usage", "--csv", "--json"],
        ["usage", "--by-model", "--csv"],
        ["usage", "--by-model", "--key", KEY["key_id"]],
    ],
)
def test_what_makes_no_sense(
    gateway: Scripted, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(arguments) == 1
    captured = capsys.readouterr()
    assert "unprocessable" in captured.err + captured.out
    assert gateway.asked == []
