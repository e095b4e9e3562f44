"""The command line against one system: a folder becomes a model, is chatted with at a terminal,
looked at, traced, measured, warmed, changed and evicted.
"""

import os
import pty
import re
import select
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, eventually, pilotlight

from pilotlight.cli.client import AdminClient
from pilotlight.cli.loaded import rows
from pilotlight.common.clock import SystemClock

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NAME, QUESTION = "talker", "What is a pilot light?"
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def talker(system: RunningSystem, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model of its own, from a folder that the system may not read."""
    folder = tmp_path_factory.mktemp("elsewhere") / NAME
    folder.mkdir()
    for file in DEMO_FOLDER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    refused = system.cli("pull", str(folder), status=1)
    assert "--yes" in refused["error"]["message"]
    assert system.cli("pull", str(folder), "--yes")["name"] == NAME
    yield NAME
    system.cli("model", "rm", NAME)


def test_a_cold_answer_is_looked_at_from_all_sides(system: RunningSystem, talker: str) -> None:
    answer = system.cli("run", talker, QUESTION, "--temperature", "0", "--max-tokens", "16")
    assert answer["text"].startswith("A pilot light is")
    assert (answer["cold"], answer["finish_reason"]) in ((True, "stop"), (True, "length"))
    (held,) = [one for one in system.cli("ps")["loaded"] if one["model"] == talker]
    assert (held["state"], held["layers"]) == ("ready", "all")
    status = system.cli("status")
    assert {"gateway", "scheduler", "cache", "loader", "materializer", "worker"} == {
        service["name"] for service in status["services"] if service["ready"]
    }
    assert next(row for row in status["models"] if row["key"] == talker)["state"] == "ready"
    assert len(status["nodes"]) == 1
    eventually(lambda: _traced(system, answer["request_id"]))
    assert system.cli("trace", answer["trace_id"])["cold_starts"][0]["model"] == talker
    shown = system.cli("model", "show", talker)
    assert shown["instances"][0]["instance_id"] == held["instance_id"]
    assert shown["last_cold_start"]["model"] == talker


def test_idle_time_goes_on_while_nothing_is_reported(system: RunningSystem, talker: str) -> None:
    system.cli("run", talker, QUESTION)
    (before,) = loaded_of(system, talker)
    eventually(lambda: loaded_of(system, talker)[0]["idle_s"] > before["idle_s"] + 1.0)


def test_a_load_test(system: RunningSystem, talker: str) -> None:
    load = ("-n", "6", "-c", "3", "--input-len", "16", "--output-len", "8")
    found = system.cli("bench", talker, *load)
    assert (found["requests"], found["failed"], found["output_tokens"]) == (6, 0, 48)
    assert found["prompt_tokens"] == 96
    assert found["ttft_ms"]["p99"] > 0


def test_a_model_is_changed_evicted_and_warmed(system: RunningSystem, talker: str) -> None:
    changed = system.cli("model", "set", talker, "--keep-alive-s", "120", "--ttft-ms", "700")
    assert (changed["scaling"]["keep_alive_s"], changed["slo"]["ttft_ms"]) == (120.0, 700.0)
    system.cli("model", "evict", talker)
    eventually(lambda: not loaded_of(system, talker))
    assert system.cli("warm", talker, "--wait")["ready"]
    assert loaded_of(system, talker)


def test_a_conversation_at_a_terminal(system: RunningSystem, talker: str) -> None:
    ours, theirs = pty.openpty()
    command = [pilotlight(), "chat", talker, "--temperature", "0"]
    environment = {**system.environment, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        seen = until(ours, ">>> ")
        os.write(ours, f"{QUESTION}\n".encode())
        seen += until(ours, ">>> ")
        os.write(ours, b"/show\n")
        seen += until(ours, ">>> ")
        os.write(ours, b"/bye\n")
        assert process.wait(DEADLINE_S) == 0
    os.close(ours)
    assert f"{talker}: /help lists commands" in plain(seen)
    assert "A pilot light is a small flame" in plain(seen)
    assert f"{talker}, 1 turns" in plain(seen)


def test_logs_are_sentences(system: RunningSystem, talker: str) -> None:
    shown = subprocess.run(
        [pilotlight(), "logs", "gateway", "-n", "500"],
        env=system.environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert f"model registered model={talker}" in shown.stdout
    assert '"event"' not in shown.stdout


def loaded_of(system: RunningSystem, name: str) -> list[dict[str, Any]]:
    """What ``ps`` has of a model."""
    with AdminClient(system.url, system.key("admin")) as client:
        found = rows(client.get("/workers")["workers"], client.get("/models")["models"])
    return [one for one in found if one["model"] == name]


def _traced(system: RunningSystem, request_id: str) -> bool:
    """The trace is there, and found by the request."""
    shown = subprocess.run(
        [pilotlight(), "trace", request_id],
        env=system.environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return shown.returncode == 0 and "cold start of" in shown.stdout


def until(terminal: int, mark: str) -> str:
    """What is written until the mark comes after it."""
    clock, seen = SystemClock(), ""
    until_s = clock.monotonic_s() + DEADLINE_S
    while mark not in seen:
        left_s = until_s - clock.monotonic_s()
        readable, _, _ = select.select([terminal], [], [], max(0.0, left_s))
        assert readable, f"{mark!r} did not come: {seen!r}"
        seen += os.read(terminal, 65536).decode(errors="replace")
    return seen


def plain(text: str) -> str:
    """Without the sequences that style and move."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
