"""The system under Docker Compose, as an operator starts it: built, started, asked, broken, taken
down.
"""

import base64
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[2]
BUILD_DEADLINE_S = 1500.0
"""Without any cache, torch included."""
DEADLINE_S = 120.0
SECRETS = "/run/pilotlight-secrets"
BUCKET = "s3://pilotlight"
_UPLOAD = """
import pathlib, sys, obstore
from pilotlight.common.s3 import s3_store
from pilotlight.common.settings import ServiceSettings
store = s3_store(ServiceSettings(), "pilotlight", sys.argv[2])
for path in pathlib.Path(sys.argv[1]).iterdir():
    obstore.put(store, path.name, path)
"""

T = TypeVar("T")


def until(check: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Ask again and again until the answer is true; other processes give no event to wait for."""
    end_s = time.monotonic() + deadline_s
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < end_s, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.2)


def run(
    *command: str,
    environment: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
    check: bool = True,
) -> str:
    """A command's standard output.

    Raises:
        AssertionError: it failed.
    """
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0 or not check, (
        f"{' '.join(command)}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    )
    return done.stdout


@dataclass(frozen=True, kw_only=True)
class Composed:
    """One project."""

    project: str
    environment: Mapping[str, str] = field(repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.environment['PILOTLIGHT_PORT']}"

    def but(self, **settings: str) -> "Composed":
        """The same project with other settings, for what is started from now on."""
        return replace(self, environment={**self.environment, **settings})

    def compose(self, *arguments: str, deadline_s: float = DEADLINE_S, check: bool = True) -> str:
        return run(
            "docker",
            "compose",
            *arguments,
            environment=self.environment,
            deadline_s=deadline_s,
            check=check,
        )

    def inside(self, service: str, *command: str, check: bool = True) -> str:
        return self.compose("exec", "-T", service, *command, check=check)

    def crash(self, container: str) -> None:
        """Kill every process of a container, as a crash would: a container that is killed by
        ``docker kill`` stays down.
        """
        run("docker", "exec", container, "sh", "-c", "kill -9 -1", check=False)

    def up(self) -> None:
        self.compose(
            "up",
            "--detach",
            "--wait",
            "--wait-timeout",
            f"{DEADLINE_S:.0f}",
            deadline_s=2 * DEADLINE_S,
        )

    def services(self) -> list[str]:
        """Those that keep running."""
        return self.compose("ps", "--services", "--status", "running").split()

    def inspect(self, service: str) -> dict[str, Any]:
        return json.loads(run("docker", "inspect", self.container(service)))[0]

    def container(self, service: str) -> str:
        """Its id, which stays the same when it is started again."""
        return self.compose("ps", "--all", "--quiet", service).strip()

    def health(self, service: str) -> str:
        state = self.inspect(service)["State"]
        return state["Health"]["Status"] if state["Status"] == "running" else state["Status"]

    def key(self, name: str) -> str:
        return self.inside("gateway", "cat", f"{SECRETS}/{name}").strip()

    def openai(self, key: str) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=DEADLINE_S, max_retries=0)

    def admin(self, key: str) -> httpx2.Client:
        return httpx2.Client(
            base_url=f"{self.url}/admin/v1",
            headers={"Authorization": f"Bearer {key}"},
            timeout=DEADLINE_S,
        )

    def upload(self, model: str) -> str:
        """Put a model of the folder into the S3 server, which nothing outside reaches; its URI."""
        mount = f"{self.environment['PILOTLIGHT_MODELS']}:/models:ro"
        arguments = ("python", "-c", _UPLOAD, f"/models/{model}", f"models/{model}")
        self.compose("run", "--rm", "-T", "--no-deps", "--volume", mount, "migrations", *arguments)
        return f"{BUCKET}/models/{model}"

    def traces(self) -> dict[str, set[str]]:
        """What the collector has: the services that made spans of each trace."""
        tag = self.environment["PILOTLIGHT_TAG"]
        mount = f"{self.project}_spans:/spans:ro"
        image = f"pilotlight-setup:{tag}"
        text = run(
            *(
                "docker",
                "run",
                "--rm",
                "--network",
                "none",
                "--volume",
                mount,
                "--entrypoint",
                "cat",
                image,
            ),
            "/spans/spans.jsonl",
            check=False,
        )
        found: dict[str, set[str]] = {}
        for line in text.splitlines():
            batch = json.loads(line)
            # Some sinks say before each batch what it is of.
            for resource in batch.get("traces", batch)["resourceSpans"]:
                attributes = {
                    item["key"]: item["value"] for item in resource["resource"]["attributes"]
                }
                service = attributes["service.name"]["stringValue"].removeprefix("pilotlight-")
                for scope in resource["scopeSpans"]:
                    for span in scope["spans"]:
                        found.setdefault(_hex(span["traceId"]), set()).add(service)
        return found


def _hex(trace_id: str) -> str:
    """OTLP's JSON has hex digits; protobuf's own way of writing JSON has base64."""
    return trace_id if len(trace_id) == 32 else base64.b64decode(trace_id).hex()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def inherited() -> dict[str, str]:
    """The environment without what its owner has set for a system of his own: what images are made
    of may be set.
    """
    files = os.environ.get("COMPOSE_FILE", "docker-compose.yml").split(os.pathsep)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.endswith(("_WHEELS", "_IMAGE")) or not name.startswith(("PILOTLIGHT_", "COMPOSE_"))
    }
    # No .env either; and the same files from whatever folder commands are typed in.
    return {
        **kept,
        "COMPOSE_ENV_FILES": os.devnull,
        "COMPOSE_FILE": os.pathsep.join(str(ROOT / file) for file in files),
    }


def _up(system: Composed) -> Composed:
    """Start it: once more on another port where another process has taken its own since it was
    found free.
    """
    try:
        system.up()
    except AssertionError as error:
        if not any(
            taken in str(error) for taken in ("port is already allocated", "address already in use")
        ):
            raise
        system = system.but(PILOTLIGHT_PORT=free_port())
        system.up()
    return system


@contextmanager
def composed() -> Iterator[Composed]:
    """Build and start everything under a name of its own, and leave nothing behind."""
    name = f"pilotlight-test-{os.getpid()}"
    settings = {
        "COMPOSE_PROJECT_NAME": name,
        "PILOTLIGHT_TAG": name,
        "PILOTLIGHT_PORT": free_port(),
        "PILOTLIGHT_SHM_SIZE": "512m",
        "PILOTLIGHT_MODELS": str(ROOT / "models"),
        "PILOTLIGHT_MODEL_ROOTS": f"/models,{BUCKET}/models",
    }
    system = Composed(project=name, environment={**inherited(), **settings})
    try:
        system.compose("build", "--quiet", deadline_s=BUILD_DEADLINE_S)
        try:
            system = _up(system)
        except AssertionError:
            sys.stderr.write(system.compose("logs", "--tail", "20", check=False))
            raise
        yield system
    finally:
        system.compose(
            "down",
            "--volumes",
            "--remove-orphans",
            "--timeout",
            "5",
            deadline_s=2 * DEADLINE_S,
            check=False,
        )
        images = run(
            "docker", "images", "--quiet", "--filter", f"reference=pilotlight-*:{name}*"
        ).split()
        run("docker", "rmi", "--force", *dict.fromkeys(images), check=False)
