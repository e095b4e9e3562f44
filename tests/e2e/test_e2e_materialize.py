"""Materialized state end to end: built once, restored by cold starts, refused where it does not
fit.
"""

import os
import random
import signal
import statistics
import threading
from collections import Counter
from enum import StrEnum
from typing import Any

import pytest
from chaos.processes import Processes, Target
from embedded_system import RunningSystem, eventually, running
from materialized_system import build_children, builds, materials, register, stored
from prometheus_client.parser import text_string_to_metric_families

from pilotlight.cli.waterfall import is_whole

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NAME = "ember-7m"
BUILD_S = 120.0
REPEATS = 3
SCHEDULES = int(os.environ.get("PILOTLIGHT_BUILD_KILLS", "2"))
SEED = int(os.environ.get("PILOTLIGHT_BUILD_SEED", "19"))
LONGEST_S = 3.0
"""From the build's begin to the fault; a build takes about as long."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("materialize")
    environment = {
        "PILOTLIGHT_BUILD_IDLE_S": "0.5",
        "PILOTLIGHT_ARTIFACT_UPKEEP_INTERVAL_S": "0.5",
    }
    with running(home, environment=environment) as one:
        yield one


def cold_start(system: RunningSystem, name: str) -> dict[str, Any]:
    """Evict a model, ask it, and give the record of its cold start."""
    with system.admin() as admin:
        assert admin.post(f"/models/{name}/evict").status_code == 202
        eventually(lambda: name not in held_models(admin))
        with (
            system.openai() as client,
            client.chat.completions.with_streaming_response.create(
                model=name,
                messages=[{"role": "user", "content": "Hello!"}],
                max_tokens=4,
                stream=True,
                temperature=0,
            ) as response,
        ):
            list(response.parse())
            trace_id = response.headers["x-trace-id"]

        def finished() -> Any:
            found = admin.get(f"/traces/{trace_id}")
            records = found.json()["cold_starts"] if found.status_code == 200 else []
            return next(filter(is_whole, records), None)

        return eventually(finished)


def held_models(admin: Any) -> set[str]:
    workers = admin.get("/workers").json()["workers"]
    return {stage["model"] for one in workers for stage in one["held"]}


def phases(record: dict[str, Any]) -> set[str]:
    return {phase["name"] for phase in record["phases"]}


def test_a_cold_start_restores_what_was_materialized(system: RunningSystem) -> None:
    register(system, "one")
    before = phases(cold_start(system, "one"))
    assert "init" in before
    assert "restore" not in before
    done = system.cli("materialize", "one")
    (artifact,) = done["artifacts"]
    assert artifact["kind"] == "manifest"
    for measured in ("prefill_tokens_per_s", "load_bytes_per_s", "init_s", "restore_s"):
        assert artifact[measured] > 0
    (build,) = done["builds"]
    assert (build["state"], build["attempt"]) == ("built", 1)
    records = [cold_start(system, "one") for _ in range(REPEATS)]
    assert all("restore" in phases(record) for record in records)
    assert not any("init" in phases(record) for record in records)
    # A start takes a tenth of a second; a busy machine may hold one up between two of its phases.
    assert statistics.median(record["coverage"] for record in records) > 0.9
    again = system.cli("materialize", "one")
    assert again["artifacts"] == done["artifacts"], "it is there already"
    text = eventually(lambda: (home := restore_counts(system)).get("found") and home)
    assert text.get("failed", 0) == 0


def test_an_artifact_of_which_one_bit_is_another_is_refused_and_nobody_notices(
    system: RunningSystem,
) -> None:
    register(system, "bent")
    said, folder = answer(system, "bent"), system.home / "objects" / "artifacts"
    before = {*folder.glob("*")}
    system.cli("materialize", "bent")
    (file,) = {*folder.glob("*")} - before
    whole = file.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)
    try:
        record = cold_start(system, "bent")
        assert "init" in phases(record)
        assert "restore" not in phases(record)
        assert answer(system, "bent") == said
        eventually(lambda: restore_counts(system, "field").get("digest"))
        assert restore_counts(system).get("failed", 0) == 0
    finally:
        file.write_bytes(whole)  # the tests behind look at what the store has


def restore_counts(system: RunningSystem, label: str = "outcome") -> dict[str, float]:
    import httpx2

    text = httpx2.get(f"{system.url}/metrics").text
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "pilotlight_worker_restores_total"
    }


def test_a_model_registered_as_auto_is_built_when_there_is_time(system: RunningSystem) -> None:
    register(system, "auto", materialize="auto")
    with system.admin() as admin:
        assert admin.get("/models/auto").json()["materialize"] == "auto"
    eventually(lambda: materials(system, "auto")["artifacts"], BUILD_S)


def test_a_builder_that_is_killed_leaves_nothing_and_the_build_is_taken_up_again(
    system: RunningSystem,
) -> None:
    register(system, "killed")
    system.cli("materialize", "killed", "--no-wait")
    eventually(lambda: builds(system, "killed", "building"), BUILD_S)
    children = build_children(system)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    assert children
    found = eventually(lambda: builds(system, "killed", "failed"), BUILD_S)
    assert found[0]["reason"].startswith("engine_failed")
    assert materials(system, "killed")["artifacts"] == []
    done = system.cli("materialize", "killed")
    assert done["builds"][0]["attempt"] == 2


class Fault(StrEnum):
    """What is done while something is being built."""

    CHILD = "child"
    """The engine that builds is killed."""
    MATERIALIZER = "materializer"
    WORKER = "worker"
    """The worker that builds is killed, and with it what it runs: the build's lease has to end."""


def fault_of(pick: random.Random) -> Fault:
    """Which one; a worker's death takes its lease's length, and is left to the longer runs."""
    faults = [Fault.CHILD, Fault.MATERIALIZER]
    if SCHEDULES > 10 and pick.random() < 0.15:
        return Fault.WORKER
    return pick.choice(faults)


def answer(system: RunningSystem, name: str) -> str:
    with system.openai() as client:
        reply = client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": "Hello!"}],
            max_tokens=4,
            temperature=0,
        )
    return reply.choices[0].message.content or ""


def asked(system: RunningSystem, name: str) -> Any:
    """Has the model built; the materializer may be on its way back."""
    with system.admin() as admin:

        def ask() -> bool:
            status = admin.post(f"/models/{name}/materialize").status_code
            assert status in (202, 503)
            return status == 202

        eventually(ask)


def shown(system: RunningSystem, name: str) -> dict[str, Any]:
    """What there is of it, as soon as the materializer says so."""

    def look() -> Any:
        found = materials(system, name)
        return found if "builds" in found else None

    return eventually(look)


def states(system: RunningSystem, name: str) -> set[str]:
    """Of its builds."""
    return {one["state"] for one in shown(system, name)["builds"]}


def inflict(system: RunningSystem, fault: Fault) -> int:
    """How many processes it hit."""
    if fault is Fault.CHILD:
        victims = build_children(system)
    else:
        target = Target.MATERIALIZER if fault is Fault.MATERIALIZER else Target.WORKER
        victims = [one.pid for one in Processes(system.process.pid, "").of(target)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    return len(victims)


def check(system: RunningSystem, name: str) -> bool:
    """Whether it is built; what is listed is whole, and nothing is listed of what is not built."""
    found = shown(system, name)
    objects = stored(system)
    of_builds = [one["state"] for one in found["builds"]]
    assert len(of_builds) <= 1, "one build for each fingerprint"
    assert all(one["size_bytes"] in objects for one in found["artifacts"])
    assert bool(found["artifacts"]) == (of_builds == ["built"])
    return of_builds == ["built"]


def rooms(system: RunningSystem) -> list[int]:
    """What workers lease for builds, or ask for."""
    with system.admin() as admin:
        workers = admin.get("/workers").json()["workers"]
    return [one["build"]["wanted_bytes"] + one["build"]["taken_bytes"] for one in workers]


def test_kills_at_random_instants_leave_nothing_half_there(system: RunningSystem) -> None:
    """Builds are taken up again, and who asks the model notices nothing.

    ``PILOTLIGHT_BUILD_KILLS=20`` plays more schedules, ``PILOTLIGHT_BUILD_SEED`` others.
    """
    pick, pause, hits = random.Random(SEED), threading.Event(), Counter[Fault]()
    number, name = 0, "storm-0"
    register(system, name)
    said = answer(system, name)
    for _ in range(SCHEDULES):
        asked(system, name)
        eventually(lambda name=name: {"building", "built"} & states(system, name), BUILD_S)
        # The moment is what is drawn here; nothing is waited for.
        pause.wait(pick.uniform(0.0, LONGEST_S))
        fault = fault_of(pick)
        hits[fault] += inflict(system, fault) > 0
        if pick.random() < 0.5:
            assert answer(system, name) == said
        if check(system, name):
            number, name = number + 1, f"storm-{number + 1}"
            register(system, name)
    asked(system, name)

    def built() -> bool:
        if "failed" in states(system, name):
            asked(system, name)
        return check(system, name)

    eventually(built, BUILD_S)
    with system.admin() as admin:
        models = [one["name"] for one in admin.get("/models").json()["models"]]

    def whole() -> bool:
        found = (one for model in models for one in shown(system, model)["artifacts"])
        return stored(system) == sorted(one["size_bytes"] for one in found)

    eventually(whole, BUILD_S)
    assert answer(system, name) == said
    eventually(lambda: not any(rooms(system)), BUILD_S)
    assert sum(hits.values()) >= SCHEDULES // 2, "most faults hit something"
    print(f"{SCHEDULES} schedules of seed {SEED}: {dict(hits)}, {number + 1} built")
