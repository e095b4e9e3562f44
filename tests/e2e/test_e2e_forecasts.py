"""A model whose instance is busy has a copy where its next one has room, before a request waits for
it; nothing is started for that.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODEL = "busy"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """Two nodes with a worker each; an instance carries two requests."""
    home: Path = tmp_path_factory.mktemp("forecasts")
    home.chmod(0o711)
    environment = {
        "PILOTLIGHT_MODEL_ROOTS": str(DEMO_FOLDER),
        "PILOTLIGHT_INSTANCE_REQUESTS": "2",
        "PILOTLIGHT_HOLD_TIMEOUT_S": "60",
    }
    with running(home / "home", "--workers", "1", "--nodes", "2", environment=environment) as up:
        limits = ("--max-instances", "2", "--ttft-ms", "5000")
        up.cli("model", "add", MODEL, str(DEMO_FOLDER), *limits)
        yield up


def seen(system: RunningSystem, what: str) -> list[dict[str, Any]]:
    with system.admin() as admin:
        return admin.get(f"/{what}").json()[what]


def copies(system: RunningSystem) -> dict[str, bool]:
    """Whether each node's pool has parts of the model, by the node's name."""
    return {
        one["node_id"]: any(copy["tier"] == "host" for copy in one["copies"])
        for one in seen(system, "nodes")
    }


@contextmanager
def asked_all_the_time(system: RunningSystem, clients: int) -> Iterator[list[Exception]]:
    """Some requests at a time, until the caller has seen enough."""
    over, failed = threading.Event(), list[Exception]()

    def ask() -> None:
        try:
            with system.openai() as client:
                while not over.is_set():
                    client.completions.create(
                        model=MODEL, prompt=[0, 5, 6, 7], max_tokens=64, temperature=0, seed=1
                    )
        except Exception as error:  # noqa: BLE001 - the test looks at it
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for one in threads:
        one.start()
    try:
        yield failed
    finally:
        over.set()
        for one in threads:
            one.join()


def test_a_busy_model_has_a_copy_where_it_may_start_once_more(system: RunningSystem) -> None:
    with asked_all_the_time(system, 2) as failed:
        eventually(lambda: len(copies(system)) == 2 and all(copies(system).values()), 60.0)
        instances = seen(system, "instances")
    assert not failed
    assert len([one for one in instances if one["state"] == "ready"]) == 1, "nothing was started"
