"""``ps``, ``status``, ``warm --wait``, ``model show`` and ``set``, ``trace`` by a request's id."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from threading import Thread
from typing import Any

import pytest
from scripted_gateway import Reply, ScriptedGateway

from pilotlight.cli import overview
from pilotlight.cli.loaded import told_seconds
from pilotlight.cli.main import run

MIB = 1 << 20
MODEL: dict[str, Any] = {
    "name": "tiny",
    "uri": "file:///models/tiny",
    "dtype": "bfloat16",
    "digest": "ab" * 32,
    "spec": {
        "architecture": "LlamaForCausalLM",
        "num_layers": 8,
        "part_bytes": [MIB],
        "max_context_tokens": 1024,
    },
    "slo": {"ttft_ms": 500.0, "tpot_ms": 50.0, "attainment": 0.99},
    "scaling": {"min_instances": 0, "max_instances": 2, "keep_alive_s": 60.0},
    "pinned": True,
    "created_at": "2026-11-22T20:00:00+00:00",
}


def held(model: str = "tiny", **changes: Any) -> dict[str, Any]:
    return {
        "instance_id": "inst-1",
        "model": model,
        "stage": {"start": 0, "stop": 8},
        "state": "ready",
        "device_bytes": 2 * MIB,
        "in_flight": 0,
        "idle_s": 20.04,
        "reason": "",
        **changes,
    }


def worker(*stages: dict[str, Any]) -> dict[str, Any]:
    device = {"kind": "cuda", "name": "H100"}
    return {"node_id": "node-a", "worker_id": "node-a-w0", "device": device, "held": stages}


def event(topic: str, *rows: dict[str, Any], more: bool = False) -> str:
    body = {"topic": topic, "reset": True, "more": more, "rows": rows, "gone": []}
    return f"data: {json.dumps(body)}"


def model_row(**changes: Any) -> dict[str, Any]:
    return {
        "key": "tiny",
        "state": "cold",
        "reason": "",
        "ready": 0,
        "starting": 0,
        "in_flight": 0,
        "phase": "",
        "fetched": None,
        "size_bytes": MIB,
        **changes,
    }


# ps


def test_what_is_loaded_where(
    far_gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str], out: Callable[[], Any]
) -> None:
    stages = (
        held(),
        held("deleted", stage={"start": 0, "stop": 4}, in_flight=3),
        held("tiny", instance_id="inst-2", state="failed", reason="engine_failed: it died"),
    )
    far_gateway.answer("GET /admin/v1/workers", {"workers": [worker(*stages)]})
    far_gateway.answer("GET /admin/v1/models", {"models": [MODEL]})
    assert run(["ps"]) == 0
    head, first, second, third = capsys.readouterr().out.splitlines()
    assert head.split() == [
        *("model", "state", "worker", "device", "layers", "MiB", "requests", "idle", "leaves")
    ]
    assert first.split() == ["deleted", "ready", "node-a-w0", "H100", "0-3", "2.0", "3"]
    assert second.split()[4:] == ["all", "2.0", "0", "20", "s", "in", "40", "s"]
    assert third.rstrip().endswith("engine_failed: it died")
    assert run(["ps", "--json"]) == 0
    listed = out()["loaded"]
    assert [one["model"] for one in listed] == ["deleted", "tiny", "tiny"]
    assert listed[1]["idle_s"] == 20.0
    kept = {**MODEL, "scaling": {**MODEL["scaling"], "min_instances": 1}}
    far_gateway.answer("GET /admin/v1/models", {"models": [kept]})
    assert run(["ps"]) == 0
    assert "stays: min-instances 1" in capsys.readouterr().out
    far_gateway.answer("GET /admin/v1/workers", {"workers": [worker()]})
    assert run(["ps"]) == 0
    assert "nothing is loaded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.4, "0 s"), (99, "99 s"), (130, "2 min 10 s"), (3000, "50 min"), (9000, "2 h 30 min")],
)
def test_durations(seconds: float, told: str) -> None:
    assert told_seconds(seconds) == told


# status


@pytest.fixture
def well(near_gateway: ScriptedGateway) -> ScriptedGateway:
    node = {
        "key": "node-a",
        "state": "ready",
        "kinds": {"cuda": 2},
        "unwell": 1,
        "used_bytes": 2 * MIB,
        "memory_bytes": 8 * MIB,
        "pool_used_bytes": MIB,
        "pool_bytes": 4 * MIB,
        "running": 3,
        "queued": 1,
        "transfers": 0,
    }
    start = {"model": "tiny", "status": "done", "ttft_s": 0.25, "trace_id": "ab" * 16}
    near_gateway.answer("GET /readyz", b"ready\n")
    near_gateway.stream(
        "GET /admin/v1/stream",
        [
            ": live",
            event("nodes", node, more=True),
            event("nodes"),
            event(
                "models",
                model_row(key="cold-one"),
                model_row(state="starting", starting=1, phase="fetch", fetched=0.5),
                model_row(key="broken", state="failed", reason="no_room: none"),
            ),
            event("cold_starts", start),
        ],
    )
    minute = {"requests": 4, "failed": 1, "output_tokens": 70}
    near_gateway.answer("GET /admin/v1/activity", {"minutes": [minute, minute]})
    return near_gateway


def test_one_screen(
    well: ScriptedGateway, capsys: pytest.CaptureFixture[str], out: Callable[[], Any]
) -> None:
    assert run(["status"]) == 0
    told = capsys.readouterr().out
    for part in (
        well.url,
        "ready  gateway",
        "8 requests, 2 failed, 140 tokens",
        "2 cuda, 1 unwell",
        "1 cold, 1 starting, 1 failed",
        "fetch 50%",
        "no_room: none",
        "cold start of tiny: done, 250 ms",
    ):
        assert part in told
    assert "cold-one" not in told
    assert run(["status", "--json"]) == 0
    found = out()
    assert found["ok"]
    assert [node["key"] for node in found["nodes"]] == ["node-a"]
    assert len(found["models"]) == 3


def test_a_gateway_that_is_not_ready(
    well: ScriptedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    well.answer("GET /readyz", b"NATS stores nothing\n", 503)
    assert run(["status"]) == 1
    assert "not ready  gateway: NATS stores nothing" in capsys.readouterr().out


def test_services_of_this_machine_are_asked_on_their_sockets(
    well: ScriptedGateway, tmp_path: Path
) -> None:
    class NotReady(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b"it stands by\n")

        def address_string(self) -> str:
            return ""

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    (tmp_path / "pool.sock").touch()
    (tmp_path / "cache-1.sock").touch()
    (tmp_path / f"loader-{2**22 + 1}.sock").touch()
    path = tmp_path / "scheduler-1.sock"
    with ThreadingUnixStreamServer(str(path), NotReady) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        found = overview.services(well.url, tmp_path)
        server.shutdown()
        thread.join()
    gateway, cache, scheduler = found
    assert (gateway["name"], gateway["ready"]) == ("gateway", True)
    assert (cache["name"], cache["ready"], "no answer" in cache["reason"]) == ("cache", False, True)
    assert scheduler == {"name": "scheduler", "ready": False, "reason": "it stands by"}


# warm --wait


@pytest.fixture
def warming(far_gateway: ScriptedGateway) -> ScriptedGateway:
    far_gateway.answer("POST /admin/v1/models/org/tiny/warm", {"instance_id": "inst-1"}, 202)
    far_gateway.answer("GET /admin/v1/instances", {"instances": []})
    return far_gateway


@pytest.mark.parametrize("command", [["warm"], ["model", "warm"]])
def test_a_start_is_waited_for(
    warming: ScriptedGateway,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    out: Callable[[], Any],
) -> None:
    loading = model_row(key="org/tiny", state="starting", starting=1, phase="fetch", fetched=0.5)
    events = [
        event("models", model_row(), model_row(key="org/tiny")),
        ": live",
        event("models", loading),
        event("models", {**loading, "state": "ready", "ready": 1, "starting": 0}),
    ]
    warming.stream("GET /admin/v1/stream", events)
    assert run([*command, "org/tiny", "--wait"]) == 0
    assert "org/tiny is ready after" in capsys.readouterr().out
    assert run([*command, "org/tiny", "--wait", "--json"]) == 0
    assert out()["instance_id"] == "inst-1"
    assert run([*command, "org/tiny", "--json"]) == 0
    assert out() == {"instance_id": "inst-1"}


def test_a_start_that_fails_says_why(warming: ScriptedGateway, out: Callable[[], Any]) -> None:
    failed = {"instance_id": "inst-1", "state": "failed", "body": {"reason": "no_room: it is full"}}
    warming.answer("GET /admin/v1/instances", {"instances": [failed]})
    warming.stream("GET /admin/v1/stream", [event("models", model_row(key="org/tiny"))])
    assert run(["warm", "org/tiny", "--wait", "--json"]) == 1
    assert out()["error"]["message"].endswith("it is full")
    given_up = {**failed, "state": "gone", "body": {"reason": "idle for 60 s"}}
    warming.answer("GET /admin/v1/instances", {"instances": [given_up]})
    assert run(["warm", "org/tiny", "--wait", "--json"]) == 1
    assert out()["error"]["message"] == "idle for 60 s"


def test_waiting_has_an_end(warming: ScriptedGateway, out: Callable[[], Any]) -> None:
    warming.stream("GET /admin/v1/stream", [": live", ": live"])
    assert run(["warm", "org/tiny", "--wait", "--timeout-s", "0.000001", "--json"]) == 1
    assert out()["error"]["code"] == "deadline_exceeded"
    assert run(["warm", "org/tiny", "--wait", "--json"]) == 1
    assert "ended" in out()["error"]["message"]
    warming.refuse("GET /admin/v1/stream", 429, "queue_full", "64 streams")
    assert run(["warm", "org/tiny", "--wait", "--json"]) == 1
    assert out()["error"]["code"] == "queue_full"


# one model


def test_a_model_is_shown_and_changed(
    far_gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str], out: Callable[[], Any]
) -> None:
    placed = {"placements": [{"worker_id": "node-a-w0"}]}
    instances = [
        {"instance_id": f"inst-{state}", "model": model, "state": state, "body": placed}
        for model, state in (("tiny", "ready"), ("tiny", "gone"), ("other", "ready"))
    ]
    phase = {
        "name": "fetch",
        "process": "loader",
        "start_s": 0.0,
        "end_s": 1.0,
        "wall_offset_s": 0.0,
    }
    start = {
        "created_at": "now",
        "status": "done",
        "ttft_s": 1.0,
        "coverage": 1.0,
        "phases": [phase],
    }
    far_gateway.answer("GET /admin/v1/models/tiny", MODEL)
    far_gateway.answer("GET /admin/v1/instances", {"instances": instances})
    far_gateway.answer("GET /admin/v1/cold-starts", {"cold_starts": [start]})
    assert run(["model", "show", "tiny"]) == 0
    told = capsys.readouterr().out
    for part in ("LlamaForCausalLM, 8 layers, 1.0 MiB", "for 99.00% of requests", "; pinned"):
        assert part in told
    assert "inst-ready on node-a-w0" in told
    assert "inst-gone" not in told
    assert "fetch" in told
    assert run(["model", "show", "tiny", "--json"]) == 0
    found = out()
    assert (found["model"], len(found["instances"])) == (MODEL, 1)
    far_gateway.answer("PATCH /admin/v1/models/tiny", MODEL)
    assert run(["model", "set", "tiny", "--ttft-ms", "300", "--keep-alive-s", "5"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert far_gateway.seen[-1][2] == {"slo": {"ttft_ms": 300.0}, "keep_alive_s": 5.0}
    assert run(["model", "set", "tiny", "--json"]) == 1
    assert "nothing is to be changed" in out()["error"]["message"]


# trace


def test_a_request_is_traced_by_its_id(
    far_gateway: ScriptedGateway, out: Callable[[], Any]
) -> None:
    trace = {"trace_id": "ab" * 16, "spans": [], "cold_starts": []}

    def named(_: object) -> Reply:
        body = {"trace_id": "ab" * 16, "request_id": "req-1"}
        return 200, json.dumps(body).encode(), {}

    far_gateway.replies["GET /admin/v1/traces"] = named
    far_gateway.answer(f"GET /admin/v1/traces/{'ab' * 16}", trace)
    assert run(["trace", "req-1", "--json"]) == 0
    assert out() == trace
    assert far_gateway.seen[0][0] == "GET /admin/v1/traces?request_id=req-1"
    assert run(["trace", "chatcmpl-1", "--json"]) == 1
    assert "req-" in out()["error"]["message"]
