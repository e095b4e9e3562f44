"""A node that says its network gives more than it does is found out by one start, told of, and left
to what others cannot do.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import overstating_loader
import pytest
from embedded_system import DEADLINE_S, RunningSystem, copied, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LINK, LIARS_LINK = "80mbit", "10mbit"
"""The demo model's 14 MB take 1.4 s, and 11.2 s at the node that says it has 10 Gbit/s."""
LIARS_BYTES_PER_S = 10e6 / 8
NAMES = ("before", "tempted", "wiser", "again")
OWN_FOLDERS = ("PILOTLIGHT_RUN_DIR", "PILOTLIGHT_STATE_DIR", "PILOTLIGHT_LOG_DIR")


def loader_environment(system: RunningSystem) -> dict[str, str]:
    """What the system's own loader was given."""
    parent = system.process.pid
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"pilotlight.loader" in Path(f"/proc/{pid}/cmdline").read_bytes():
            entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            return dict(entry.split("=", 1) for entry in entries if "=" in entry)
    raise AssertionError("the system has no loader")


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        models = Path(folder) / "models"
        environment = {"PILOTLIGHT_MODEL_ROOTS": str(models)}
        paths = {name: copied(models, name) for name in NAMES}
        arguments = ("--workers", "2", "--link", LINK)
        with running(Path(folder) / "home", *arguments, environment=environment) as started:
            for name, path in paths.items():
                started.cli("model", "add", name, str(path), "--ttft-ms", "60000")
            yield started


@pytest.fixture
def liar(system: RunningSystem) -> Iterator[None]:
    """One more node, with two workers."""
    environment = loader_environment(system)
    for name in OWN_FOLDERS:
        environment[name] = str(Path(environment[name]) / "node-liar")
    environment["PILOTLIGHT_POOL_PATH"] += "-liar"
    environment["PILOTLIGHT_LINK"] = LIARS_LINK
    environment["PILOTLIGHT_END_WITH_PARENT"] = str(os.getpid())
    log = system.home / "logs" / "liar.log"
    command = [sys.executable, overstating_loader.__file__]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60.0)


def ask(system: RunningSystem, model: str) -> None:
    with system.openai() as client:
        client.completions.create(model=model, prompt="Hello", temperature=0, max_tokens=2)


def nodes(system: RunningSystem) -> set[str]:
    """Those whose workers are up."""
    with system.admin() as admin:
        workers = admin.get("/workers").json()["workers"]
    return {one["node_id"] for one in workers if one["engine_up"]}


def start_of(system: RunningSystem, model: str) -> dict[str, Any]:
    """The only decision of a model, which is a start."""
    with system.admin() as admin:
        rows = admin.get("/decisions", params={"model": model}).json()["decisions"]
    (row,) = [one for one in rows if one["kind"] == "cold_start"]
    return row["outcome"]["scheme"]


def test_it_gets_one_start_a_line_in_the_log_and_no_other(
    system: RunningSystem, request: pytest.FixtureRequest
) -> None:
    """The first model teaches what the source gives, before the liar is there."""
    ask(system, "before")
    (honest,) = start_of(system, "before")["placements"]
    request.getfixturevalue("liar")
    eventually(lambda: len(nodes(system)) == 2, DEADLINE_S)
    (lying,) = nodes(system) - {honest["node_id"]}
    ask(system, "tempted")
    assert [one["node_id"] for one in start_of(system, "tempted")["placements"]] == [lying]
    (told,) = eventually(lambda: system.logged("scheduler", "node_slow"))
    assert told["node_id"] == lying
    assert told["bytes_per_s"] < 1.2 * LIARS_BYTES_PER_S
    for model in ("wiser", "again"):
        ask(system, model)
        (place,) = start_of(system, model)["placements"]
        assert place["node_id"] == honest["node_id"]
    assert len(system.logged("scheduler", "node_slow")) == 1
