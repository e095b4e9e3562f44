"""A group whose workers all become instances: a burst of requests is answered by a pipeline of
three stages, and then by several workers, in a whole system of three nodes.
"""

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, copied, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LINK = "40mbit"
"""The demo model's 14 MB take one node 2.8 s."""
SLO_MS = 1_500.0
"""Two nodes miss it; three come nearest, if they miss it, too."""
BURST = 6
"""Requests at once; an instance is to have two."""
BEGINNINGS = ("Lily", "Tom", "Ben", "Mia", "Sam", "Anna")
TALE = " went to the park one morning with a red ball, and there, under a tall tree, was a big dog."
"""More than a block of tokens behind each beginning: on however slow a machine, what moves has KV
to bring along.
"""
TOKENS = 100
DEVICE_BYTES = 35 << 20
"""Room for the demo model with its KV, and for no other beside it."""


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        environment = {
            "PILOTLIGHT_MAX_STAGES": "3",
            "PILOTLIGHT_INSTANCE_REQUESTS": "2",
            "PILOTLIGHT_THREADS": "1",
            "PILOTLIGHT_POOL_BYTES": str(64 << 20),
            "PILOTLIGHT_DEVICE_BYTES": str(DEVICE_BYTES),
            # The streams last for as long as stages take to grow, on whatever machine.
            "PILOTLIGHT_FAULTS": "step=0.03",
        }
        arguments = ("--workers", "1", "--nodes", "3", "--link", LINK)
        with running(Path(folder) / "home", *arguments, environment=environment) as started:
            yield started


def added(system: RunningSystem, model: str, folder: Path, slo_ms: float = SLO_MS) -> None:
    """In float32, so that stages round as one worker does."""
    slo = ("--ttft-ms", str(slo_ms), "--dtype", "float32", "--max-instances", "3")
    system.cli("model", "add", model, str(folder), *slo)


def said(system: RunningSystem, model: str, number: int) -> str:
    """An answer to one of several prompts."""
    with system.openai() as client:
        answer = client.completions.create(
            model=model,
            prompt=BEGINNINGS[number] + TALE,
            temperature=0,
            max_tokens=TOKENS,
            extra_body={"ignore_eos": True},
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == TOKENS, "every token, once"
    return answer.choices[0].text


def instances(system: RunningSystem, model: str) -> list[dict[str, Any]]:
    with system.admin() as admin:
        found = admin.get("/instances").json()["instances"]
    ours = [{**one["body"], **one} for one in found if one["model"] == model]
    return [one for one in ours if one["state"] not in ("gone", "failed")]


def whole(system: RunningSystem, model: str) -> list[dict[str, Any]]:
    """Instances of one worker that serve."""
    return [
        one
        for one in instances(system, model)
        if one["state"] == "ready" and len(one["placements"]) == 1
    ]


def held(system: RunningSystem) -> dict[str, list[str]]:
    """What each worker holds, by instance."""
    with system.admin() as admin:
        workers = admin.get("/workers").json()["workers"]
    return {one["worker_id"]: [stage["instance_id"] for stage in one["held"]] for one in workers}


def running_on(system: RunningSystem, model: str) -> dict[str, int]:
    """Requests in flight on each instance, as its worker says."""
    with system.admin() as admin:
        workers = admin.get("/workers").json()["workers"]
    stages = [stage for one in workers for stage in one["held"] if stage["model"] == model]
    return {stage["instance_id"]: stage["in_flight"] for stage in stages}


def kv_came(system: RunningSystem) -> int:
    """Tokens whose keys and values engines asked others for, by their logs."""
    lines = (
        line
        for path in (system.home / "logs").rglob("engine-*.log")
        for line in path.read_text(errors="replace").splitlines()
        if "kv_came" in line
    )
    return sum(json.loads(line)["tokens"] for line in lines)


def pid_of(system: RunningSystem, module: str) -> int:
    """The process of a service."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            arguments = (status.parent / "cmdline").read_bytes().split(b"\0")
            if parent == system.process.pid and module.encode() in arguments:
                return int(status.parent.name)
    raise AssertionError(f"{module} does not run")


def burst(
    pool: ThreadPoolExecutor, system: RunningSystem, model: str, requests: int = BURST
) -> list[Future[str]]:
    return [pool.submit(said, system, model, number) for number in range(requests)]


@pytest.fixture(scope="module")
def texts(system: RunningSystem) -> list[str]:
    """What the model says that one worker loaded alone."""
    added(system, "alone", DEMO_FOLDER, slo_ms=60_000.0)
    with ThreadPoolExecutor(BURST) as pool:
        spoken = [one.result() for one in burst(pool, system, "alone")]
    system.cli("model", "rm", "alone")
    return spoken


@pytest.fixture
def added_cold(system: RunningSystem) -> Iterator[Callable[[str], None]]:
    """Adds another checkpoint, of which nothing lies in a host pool, when all workers are free;
    it goes with the test.
    """
    names: list[str] = []

    def add(model: str) -> None:
        eventually(lambda: list(held(system).values()) == [[], [], []], 60.0)
        added(system, model, copied(system.home / "models", model))
        names.append(model)

    yield add
    for name in names:
        system.cli("model", "rm", name)


def test_every_worker_of_a_group_becomes_an_instance_while_it_answers(
    system: RunningSystem, added_cold: Callable[[str], None], texts: list[str]
) -> None:
    added_cold("many")
    with ThreadPoolExecutor(BURST) as pool:
        answers = burst(pool, system, "many")
        (group,) = eventually(
            lambda: [one for one in instances(system, "many") if one["targets"] > 1], 60.0
        )
        # All came before there was another instance: what runs there has moved.
        moved = eventually(
            lambda: (
                all(one.done() for one in answers)
                or any(
                    count
                    for name, count in running_on(system, "many").items()
                    if name != group["instance_id"]
                )
            ),
            60.0,
        )
        assert moved
        assert not all(one.done() for one in answers), "requests share what their group became"
        assert [one.result() for one in answers] == texts
        served = eventually(lambda: len(found := whole(system, "many")) == 3 and found, 60.0)
    assert kv_came(system), "what moved brought its keys and values along"
    (lead,) = (one for one in served if one["placements"][0]["grown_from"] is None)
    others = [one for one in served if one is not lead]
    assert {one["placements"][0]["grown_from"] for one in others} == {lead["instance_id"]}
    now = held(system)
    assert all(now[one["placements"][0]["worker_id"]] == [one["instance_id"]] for one in served)
    with system.admin() as admin:
        decisions = admin.get("/decisions", params={"model": "many"}).json()["decisions"]
        starts = [one for one in decisions if one["kind"] == "cold_start"]
        assert len(starts) == 1, "three instances come of one start"
        became = [one for each in decisions for one in each["outcome"].get("become", ())]
        assert sorted(became) == sorted(one["instance_id"] for one in others)
    with ThreadPoolExecutor(BURST) as pool:
        assert [one.result() for one in burst(pool, system, "many")] == texts


def test_another_leader_goes_on_where_the_one_before_died(
    system: RunningSystem, added_cold: Callable[[str], None], texts: list[str]
) -> None:
    """What is to become what is in the rows alone."""
    added_cold("led")
    with ThreadPoolExecutor(BURST) as pool:
        answers = burst(pool, system, "led")
        eventually(
            lambda: [one for one in instances(system, "led") if one["state"] == "consolidating"],
            60.0,
        )
        os.kill(pid_of(system, "pilotlight.scheduler"), signal.SIGKILL)
        assert [one.result() for one in answers] == texts
        served = eventually(lambda: whole(system, "led"), 60.0)
    eventually(
        lambda: (
            {one["instance_id"] for one in instances(system, "led")}
            == {instance_id for held_now in held(system).values() for instance_id in held_now}
        ),
        60.0,
    )
    assert served
