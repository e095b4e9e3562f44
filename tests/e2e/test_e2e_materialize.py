"""Materialized state end to end: built once, restored by cold starts, refused where it does not
fit.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from embedded_system import RunningSystem, copied, eventually, running
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NAME = "ember-7m"
BUILD_S = 120.0


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("materialize")
    environment = {"PILOTLIGHT_BUILD_IDLE_S": "0.5"}
    with running(home, environment=environment) as one:
        yield one


def cold_start(system: RunningSystem, name: str) -> dict[str, Any]:
    """Evict a model, ask it, and give the record of its cold start."""
    with system.admin() as admin:
        assert admin.post(f"/models/{name}/evict").status_code == 202
        eventually(lambda: not any(one["held"] for one in admin.get("/workers").json()["workers"]))
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
            done = [one for one in records if one["status"] == "done"]
            names = {phase["name"] for one in done for phase in one["phases"]}
            return done[0] if "prefill" in names else None

        return eventually(finished)


def phases(record: dict[str, Any]) -> set[str]:
    return {phase["name"] for phase in record["phases"]}


def materials(system: RunningSystem, name: str) -> dict[str, Any]:
    with system.admin() as admin:
        return admin.get(f"/models/{name}/materials").json()


def builds(system: RunningSystem, name: str, state: str) -> list[dict[str, Any]]:
    return [one for one in materials(system, name)["builds"] if one["state"] == state]


def register(system: RunningSystem, name: str, **body: Any) -> None:
    """A copy of the demo model, which is another checkpoint."""
    folder = system.home / "models" / name
    if not folder.exists():
        copied(system.home / "models", name)
    with system.admin() as admin:
        new = {
            "name": name,
            "uri": folder.as_uri(),
            "slo": {"ttft_ms": 5000, "tpot_ms": 200},
            **body,
        }
        reply = admin.post("/models", json=new)
        assert reply.status_code == 201, reply.text


def test_a_cold_start_restores_what_was_materialized(system: RunningSystem) -> None:
    register(system, "one")
    before = phases(cold_start(system, "one"))
    assert "init" in before
    assert "restore" not in before
    done = system.cli("materialize", "one")
    (artifact,) = done["artifacts"]
    assert artifact["kind"] == "manifest"
    assert artifact["prefill_tokens_per_s"] > 0
    (build,) = done["builds"]
    assert (build["state"], build["attempt"]) == ("built", 1)
    record = cold_start(system, "one")
    assert "restore" in phases(record)
    assert "init" not in phases(record)
    assert record["coverage"] > 0.9
    again = system.cli("materialize", "one")
    assert again["artifacts"] == done["artifacts"], "it is there already"
    text = eventually(lambda: (home := restore_counts(system)).get("found") and home)
    assert text.get("failed", 0) == 0


def restore_counts(system: RunningSystem) -> dict[str, float]:
    import httpx2

    text = httpx2.get(f"{system.url}/metrics").text
    return {
        sample.labels["outcome"]: sample.value
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


def build_children(system: RunningSystem) -> list[int]:
    """Engine processes whose log is that of builds."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_text()
            log = os.readlink(entry / "fd" / "1")
        except OSError:
            continue
        if "engine_child.child" in command and log.startswith(str(system.home)) and "build-" in log:
            found.append(int(entry.name))
    return found
