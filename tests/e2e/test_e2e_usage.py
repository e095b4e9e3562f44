"""Usage of a gateway that is killed: its sums are what its clients were answered."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from embedded_system import DEADLINE_S, RunningSystem, running

from pilotlight.cli.home import Home
from pilotlight.common.testing import until

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.slow]

MODEL = "ember-7m"
STEP_S = 0.05
"""Of the engine: the gateway is killed long before an answer is whole."""
TOKENS = 400
READ = 20


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        environment = {"PILOTLIGHT_SIM_DECODE_STEP_S": str(STEP_S)}
        arguments = ("--worker-kind", "sim", "--with-demo-model")
        with running(Path(folder) / "home", *arguments, environment=environment) as started:
            yield started


def gateway_pid(system: RunningSystem) -> int:
    """Of the gateway that lives."""
    sockets = Home(system.home).run_dir.glob("gateway-*.sock")
    found = {int(path.stem.rpartition("-")[2]) for path in sockets}
    (pid,) = {pid for pid in found if Path(f"/proc/{pid}").exists()}
    return pid


def asked(*, stream: bool, max_tokens: int) -> dict[str, object]:
    return {
        "model": MODEL,
        "prompt": "hello",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
        "logprobs": 1,
    }


def read_until_killed(http: httpx2.Client, pid: int) -> int:
    """Tokens that a client gets of a stream whose gateway is killed."""
    tokens = 0
    with http.stream("POST", "/completions", json=asked(stream=True, max_tokens=TOKENS)) as reply:
        try:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    tokens += len((choice["logprobs"] or {"tokens": []})["tokens"])
                if tokens == READ:
                    os.kill(pid, signal.SIGKILL)
        except httpx2.TransportError:
            return tokens
    raise AssertionError("the stream has ended as if nothing had happened")


async def test_usage_after_a_kill_is_what_clients_were_answered(system: RunningSystem) -> None:
    headers = {"authorization": f"Bearer {system.key('api')}"}
    with httpx2.Client(base_url=f"{system.url}/v1", headers=headers, timeout=DEADLINE_S) as http:
        whole = http.post("/completions", json=asked(stream=False, max_tokens=3)).json()["usage"]
        pid = gateway_pid(system)
        given = read_until_killed(http, pid)
    assert given >= READ

    def rows() -> list[dict[str, int]]:
        try:
            with system.admin() as admin:
                return admin.get("/usage").json()["usage"]
        except httpx2.TransportError:
            return []  # The next gateway is not there yet.

    await until(lambda: sum(row["requests"] for row in rows()) == 2, deadline_s=DEADLINE_S)
    (row,) = rows()
    assert row["failed"] == 1
    assert row["prompt_tokens"] == 2 * whole["prompt_tokens"]
    # What was on its way at the moment of the kill counts.
    assert 0 <= row["output_tokens"] - whole["completion_tokens"] - given <= 1
    assert gateway_pid(system) != pid
    (journal,) = Home(system.home).run_dir.glob("usage-*.journal")
    assert journal.exists()
