"""Usage of a gateway that is killed, and of clients of which half leave: what was counted is what
they were answered.
"""

import asyncio
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest
from embedded_system import DEADLINE_S, RunningSystem, running
from prometheus_client.parser import text_string_to_metric_families

from pilotlight.cli.home import Home
from pilotlight.common.testing import until

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.slow]

MODEL = "ember-7m"
STEP_S = 0.05
"""Of the engine: the gateway is killed long before an answer is whole."""
TOKENS = 400
READ = 20
STREAMS = 64


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
    tokens, killed = 0, False
    with http.stream("POST", "/completions", json=asked(stream=True, max_tokens=TOKENS)) as reply:
        try:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    tokens += len((choice["logprobs"] or {"tokens": []})["tokens"])
                if tokens == READ and not killed:
                    os.kill(pid, signal.SIGKILL)
                    killed = True
        except httpx2.TransportError:
            return tokens
    raise AssertionError("the stream has ended as if nothing had happened")


async def test_usage_after_a_kill_is_what_clients_were_answered(system: RunningSystem) -> None:
    begun_s = time.monotonic()
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
    # One device, and one request at a time: the stream had all of it while it was given.
    assert (given - 1) * STEP_S <= row["device_s"]
    assert row["start_device_s"] > 0
    assert row["device_s"] + row["start_device_s"] <= time.monotonic() - begun_s


class Counted(NamedTuple):
    """What a gateway says that it did."""

    ok: float
    cancelled: float
    tokens: float
    running: float


def counted(system: RunningSystem) -> Counted:
    pages = text_string_to_metric_families(httpx2.get(f"{system.url}/metrics", timeout=10).text)
    samples = [sample for family in pages for sample in family.samples]

    def total(name: str, **labels: str) -> float:
        mine = {"service": "gateway", **labels}.items()
        return sum(
            each.value for each in samples if each.name == name and mine <= each.labels.items()
        )

    return Counted(
        ok=total("pilotlight_requests_total", status="ok"),
        cancelled=total("pilotlight_requests_total", status="cancelled"),
        tokens=total("pilotlight_output_tokens_total"),
        running=total("pilotlight_running_requests"),
    )


def used(system: RunningSystem) -> Counter[str]:
    """Usage of all keys and days."""
    with system.admin() as admin:
        rows = admin.get("/usage").json()["usage"]
    names = ("requests", "failed", "output_tokens", "device_s", "idle_device_s")
    return Counter({name: sum(row[name] for row in rows) for name in names})


async def test_counters_are_what_clients_of_which_half_leave_have_counted(
    system: RunningSystem,
) -> None:
    """64 streams at a time, as long as ``PILOTLIGHT_STREAMS_S`` says."""
    headers = {"authorization": f"Bearer {system.key('api')}"}
    before, used_before, clock_s = counted(system), used(system), time.monotonic
    begun_s = clock_s()
    ends_s = begun_s + float(os.environ.get("PILOTLIGHT_STREAMS_S", "4"))
    whole: list[int] = []
    left: list[int] = []

    async def client(http: httpx2.AsyncClient, number: int) -> None:
        leaves = bool(number % 2)
        while clock_s() < ends_s:
            tokens = 0
            body = asked(stream=True, max_tokens=TOKENS if leaves else 4 + number % 7)
            async with http.stream("POST", "/completions", json=body) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        tokens += len((choice["logprobs"] or {"tokens": []})["tokens"])
                    if leaves and tokens > number % 5:
                        break
            (left if leaves else whole).append(tokens)

    limits = httpx2.Limits(max_connections=STREAMS)
    async with (
        httpx2.AsyncClient(
            base_url=f"{system.url}/v1", headers=headers, timeout=DEADLINE_S, limits=limits
        ) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(STREAMS):
            group.create_task(client(http, number))

    def settled() -> bool:
        now = counted(system)
        return not now.running and now.cancelled - before.cancelled == len(left)

    await until(settled, deadline_s=DEADLINE_S)
    after = counted(system)
    assert after.ok - before.ok == len(whole) >= STREAMS / 2
    assert len(left) >= STREAMS / 2
    # Of those that left, what was on its way to them counts as well.
    assert after.tokens - before.tokens >= sum(whole) + sum(left)

    answered = used_before["requests"] + len(whole) + len(left)
    await until(lambda: used(system)["requests"] == answered, deadline_s=DEADLINE_S)
    now = used(system)
    assert now["requests"] == answered
    assert now["failed"] == used_before["failed"]
    assert now["output_tokens"] - used_before["output_tokens"] == after.tokens - before.tokens
    # There is one device: all streams together had no more of it than has passed.
    passed_s = clock_s() - begun_s
    assert 0 < now["device_s"] - used_before["device_s"] <= passed_s
    # Between its load and the requests the model was there, and nobody used the device.
    await until(lambda: used(system)["idle_device_s"] > 0, deadline_s=DEADLINE_S)
