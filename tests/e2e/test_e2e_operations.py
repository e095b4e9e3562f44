"""What operators do, on whole systems: backup, purge and restore; a node is emptied while it
serves.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from embedded_system import DEADLINE_S, ROOT, RunningSystem, eventually, pilotlight, running

from pilotlight.cli.home import Home

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

QUESTION = [{"role": "user", "content": "What is a pilot light?"}]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as name:
        os.chmod(name, 0o711)
        yield Path(name)


def ask(system: RunningSystem, max_tokens: int = 8) -> str:
    with system.openai() as client:
        reply = client.chat.completions.create(
            model="ember-7m",
            messages=QUESTION,
            temperature=0,
            max_tokens=max_tokens,
        )
    return reply.choices[0].message.content or ""


def command(home: Path, *arguments: str, status: int = 0) -> Any:
    """A command on a home whose system does not run."""
    environment = {**os.environ, "PILOTLIGHT_HOME": str(home)}
    result = subprocess.run(
        [pilotlight(), *arguments, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == status, result.stdout + result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])


def usage_of(system: RunningSystem) -> list[tuple[str, int]]:
    """Rows of usage: no route shows them, so the database is asked."""
    import psycopg

    from pilotlight.cli.embedded import OWNER, postgres_sockets

    password = (system.home / "secrets" / "postgres-owner").read_text().strip()
    sockets = postgres_sockets(system.home / "postgres")
    with psycopg.connect(
        host=str(sockets), user=OWNER, password=password, dbname="pilotlight"
    ) as connection:
        return connection.execute(
            "SELECT request_id, output_tokens FROM gateway.usage ORDER BY request_id"
        ).fetchall()


PAGES = sorted((ROOT / "docs/operations").glob("*.md"))
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.DOTALL)
]


class Operator:
    """A shell that runs the commands of docs/operations/, with folders and a port of their own in
    the place of the pages'.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "first"
        self.restored = folder / "restored"

    def types(self, begins: str, system: RunningSystem | None = None, **replaced: str) -> str:
        """Run the page's block that begins so, but for starting systems; what it prints."""
        (block,) = [block for block in BLOCKS if block.startswith(begins)]
        replaced |= {
            ".pilotlight/": f"{self.home}/",
            "/srv/pilotlight": str(self.restored),
            "/backups": str(self.folder),
        }
        if system is not None:
            replaced["http://127.0.0.1:8000"] = system.url
        for old, new in replaced.items():
            block = block.replace(old, new)
        script = "".join(
            line + "\n"
            for line in block.splitlines()
            if line.strip() != "pilotlight up" and "docker" not in line
        )
        home = system.home if system is not None else self.home
        path = f"{Path(pilotlight()).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            env={**os.environ, "PILOTLIGHT_HOME": str(home), "PATH": path},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout


def test_the_page_as_a_new_operator_types_it(folder: Path) -> None:
    """First model, chat, health, drain, audit, backup, purge, restore: the same models, keys and
    usage, and the same answer.
    """
    operator = Operator(folder)
    with running(operator.home) as system:
        assert "registered my-model" in operator.types("cp -r models/ember-7m", system)
        answer = answer_in(operator.types("curl http://127.0.0.1:8000/v1/chat", system))
        assert "ready" in operator.types("pilotlight status", system)
        (node,) = nodes_of(system)
        drained = operator.types("pilotlight node list", system, NODE=node)
        assert "is drained: nothing is left on it" in drained
        assert node in drained
        assert "may be used again" in drained
        usage = eventually(lambda: usage_of(system))
        assert "model_register" in operator.types("pilotlight audit", system)
        keys, models = (
            (system.key("admin"), system.key("api")),
            system.cli("model", "list")["models"],
        )
        operator.types("pilotlight backup /backups", system)
        made = folder / "pilotlight.backup"
        assert made.stat().st_mode & 0o777 == 0o600
        assert system.cli("backup", str(made), status=1)["error"]["code"] == "backup_failed"
        assert "models" in operator.types(
            "pilotlight down --purge", system, **{"--purge": "--purge --yes"}
        )
        assert system.process.wait(DEADLINE_S) == 0
    assert [path.name for path in operator.home.iterdir()] == ["models"]

    assert "start it with" in operator.types("export PILOTLIGHT_HOME=/srv")
    assert (
        command(operator.restored, "restore", str(made), status=1)["error"]["code"]
        == "home_not_empty"
    )
    # The checkpoint lies where it lay, which is not below the new folder.
    with running(
        operator.restored, environment={"PILOTLIGHT_MODEL_ROOTS": str(operator.home / "models")}
    ) as system:
        assert (system.key("admin"), system.key("api")) == keys
        assert system.cli("model", "list")["models"] == models
        assert usage_of(system) == usage
        asked = operator.types(
            "curl http://127.0.0.1:8000/v1/chat",
            system,
            **{"cat .pilotlight/": f"cat {operator.restored}/"},
        )
        assert answer_in(asked) == answer
        assert (
            len(eventually(lambda: len(found := usage_of(system)) > len(usage) and found))
            == len(usage) + 1
        )
        registered = system.cli("audit", "--action", "model_register")["audit"]
        assert [one["entity"] for one in registered] == ["my-model"]


def answer_in(printed: str) -> str:
    return json.loads(printed.strip().splitlines()[-1])["choices"][0]["message"]["content"]


def test_a_stopped_system_is_backed_up_too(folder: Path) -> None:
    home, copy = folder / "home", folder / "copy.backup"
    with running(home, "--worker-kind", "sim", "--with-demo-model"):
        pass
    assert command(home, "backup", str(copy))["bytes"] > 0
    other = folder / "other"
    assert command(other, "restore", str(copy))["restored"]
    # It runs beside the system that it is a copy of, and what is removed is its own alone.
    with (
        running(home, "--worker-kind", "sim") as first,
        running(other, "--worker-kind", "sim") as system,
    ):
        assert [model["name"] for model in system.cli("model", "list")["models"]] == ["ember-7m"]
        assert nodes_of(system).keys() == nodes_of(first).keys()
        pools = [Home(one).pool_path for one in (home, other)]
        assert all(pool.is_file() for pool in pools)
        assert system.cli("down", "--purge", "--yes")["purged"]
        assert system.process.wait(DEADLINE_S) == 0
        assert [pool.exists() for pool in pools] == [True, False]
        assert ask(first)


@contextlib.contextmanager
def second_node(system: RunningSystem, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another loader, with the environment of the system's own and folders of its own: another node
    on the same machine.
    """
    environment = dict(
        item.split("=", 1)
        for item in (process_of(system.home, "pilotlight.loader") / "environ")
        .read_bytes()
        .decode()
        .split("\0")
        if item
    )
    environment |= {
        f"PILOTLIGHT_{name}_DIR": str(folder / name.lower()) for name in ("RUN", "STATE", "LOG")
    }
    environment.pop("NOTIFY_SOCKET", None)
    environment.pop("PILOTLIGHT_END_WITH_PARENT", None)
    environment.pop("PILOTLIGHT_POOL_PATH", None)
    for name in ("run", "state", "log"):
        (folder / name).mkdir(exist_ok=True, parents=True)
    with (folder / "loader.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pilotlight.loader"],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(DEADLINE_S)
        finally:
            process.kill()


def process_of(home: Path, module: str) -> Path:
    """The process of a service of a system, as a folder below /proc."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and module.encode() in (entry / "cmdline").read_bytes()
                and os.fsencode(home) in (entry / "environ").read_bytes()
            ):
                return entry
    pytest.fail(f"there is no {module}")


def nodes_of(system: RunningSystem) -> dict[str, Any]:
    with system.admin() as admin:
        return {node["node_id"]: node for node in admin.get("/nodes").json()["nodes"]}


def test_a_node_is_drained_and_nobody_notices(folder: Path) -> None:
    """The model moves before it leaves; a stream in flight ends where it runs; restarts of loader
    and scheduler undo nothing.
    """
    slow = {"PILOTLIGHT_SIM_DECODE_STEP_S": "0.1"}
    with running(
        folder / "home", "--worker-kind", "sim", "--with-demo-model", environment=slow
    ) as system:
        ask(system)
        (first,) = nodes_of(system)
        with second_node(system, folder / "second"):
            second = eventually(
                lambda: next((node for node in nodes_of(system) if node != first), None)
            )
            eventually(lambda: nodes_of(system)[second]["workers"] == 1)
            answers: list[str] = []
            streaming = threading.Thread(target=lambda: answers.append(ask(system, max_tokens=150)))
            streaming.start()
            eventually(lambda: nodes_of(system)[first]["left"]["requests"])

            node = system.cli("node", "drain", first)
            assert node["state"] == "draining"
            # While the stream still runs on the old node, new requests are served on the new one.
            eventually(lambda: nodes_of(system)[second]["left"]["instances"])
            ask(system)
            drained = system.cli("node", "drain", first, "--wait", "--timeout-s", "60")
            assert drained["state"] == "drained"
            assert drained["left"] == {"instances": 0, "requests": 0, "copies": 0}
            streaming.join(DEADLINE_S)
            assert len(answers) == 1

            with system.admin() as admin:
                decisions = admin.get("/decisions").json()["decisions"]
            (left,) = [one for one in decisions if one["kind"] == "drain"]
            assert "serves elsewhere" in left["reasons"][0]

            for module in ("pilotlight.loader", "pilotlight.scheduler"):
                os.kill(int(process_of(system.home / "state", module).name), signal.SIGKILL)
            with system.admin() as admin:
                admin.post("/models/ember-7m/evict")
            ask(system)
            shown = eventually(lambda: (found := nodes_of(system))[first]["workers"] == 1 and found)
            assert shown[first]["state"] == "drained"
            assert shown[first]["left"]["instances"] == 0

            # The other one is the last: what runs there ends, and is not started again.
            assert (
                system.cli("node", "drain", second, "--wait", "--timeout-s", "60")["state"]
                == "drained"
            )
            assert system.cli("node", "drain", second, "--undo")["state"] == "ready"
            ask(system)
            assert nodes_of(system)[second]["left"]["instances"] == 1
        done = [one["action"] for one in system.cli("audit", "--entity", second)["audit"]]
        assert done == ["node_undrain", "node_drain"]
        assert (
            system.cli("node", "drain", "node-none", status=1)["error"]["code"] == "node_not_found"
        )


def test_nodes_that_start_one_model_read_it_from_its_source_once(folder: Path) -> None:
    """The second node asks the first, which is itself still reading: they are one chain, by the
    scheduler's record and by the loaders'.
    """
    # Room for one instance on each device.
    small = {"PILOTLIGHT_DEVICE_BYTES": str(24 * 2**20)}
    arguments = ("--worker-kind", "sim", "--with-demo-model", "--link", "20mbit")
    with (
        running(folder / "home", *arguments, environment=small) as system,
        second_node(system, folder / "second"),
    ):
        eventually(lambda: sum(node["workers"] for node in nodes_of(system).values()) == 2)
        with system.admin() as admin:
            assert (
                admin.patch(
                    "/models/ember-7m", json={"min_instances": 2, "max_instances": 2}
                ).status_code
                == 200
            )
            moving = eventually(
                lambda: len(found := admin.get("/transfers").json()["transfers"]) == 2 and found
            )
            assert {one["model"] for one in moving} == {"ember-7m"}
            eventually(
                lambda: (
                    [one["state"] for one in admin.get("/instances").json()["instances"]].count(
                        "ready"
                    )
                    == 2
                )
            )
            starts = [
                one["outcome"]
                for one in admin.get("/decisions").json()["decisions"]
                if one["kind"] == "cold_start"
            ]
        # Both may be decided in one tick: the chain of the one that joined has both.
        chain = max((one["chains"][0] for one in starts), key=lambda one: len(one["members"]))
        first, second = chain["members"]
        assert chain["source"] is None, "no node had it: the first of them reads it from its source"
        assert {first, second} == nodes_of(system).keys()
        found = eventually(lambda: not (idle := system.cli("transfers"))["transfers"] and idle)
        links = {(link["node_id"], link["kind"]): link["name"] for link in found["links"]}
        assert links == {(first, "source"): "file://", (second, "peer"): f"peer://{first}"}
        held = [copy["parts"] for node in nodes_of(system).values() for copy in node["copies"]]
        assert held[0] == held[1]
