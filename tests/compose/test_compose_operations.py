"""What operators do with the containers, typed as docs/operations/ has it: backup and restore, and
an upgrade.

``make test-compose``.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from composed import BUILD_DEADLINE_S, DEADLINE_S, ROOT, Composed, composed, run, until

pytestmark = [pytest.mark.compose, pytest.mark.slow]

MODEL = "ember-7m"
FROM_S3 = "ember-7m-from-s3"
SLO = {"ttft_ms": 5000, "tpot_ms": 200}
PAGES = sorted((ROOT / "docs/operations").glob("*.md"))
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.DOTALL)
]
OURS = {"gateway", "scheduler", "cache", "materializer", "node"}
COPIED = (
    "constraints.txt",
    "libs",
    "services",
    "migrations",
    "deploy",
    "tools",
    "Dockerfile",
    ".dockerignore",
)


@pytest.fixture(scope="module")
def system() -> Iterator[Composed]:
    with composed() as made:
        yield made


@pytest.fixture(scope="module")
def answer(system: Composed) -> str:
    """What the demo model says, which is registered from a folder and from the S3 server."""
    with system.admin(system.key("admin-key")) as admin:
        for name, uri in ((MODEL, f"file:///models/{MODEL}"), (FROM_S3, system.upload(MODEL))):
            made = admin.post(
                "/models", json={"name": name, "uri": uri, "slo": SLO, "keep_alive_s": 600}
            )
            assert made.status_code == 201, made.text
    text = chat(system, MODEL)
    assert "light" in text
    assert chat(system, FROM_S3) == text
    until(lambda: len(usage_of(system)) == 2, "usage of two requests")
    return text


def chat(system: Composed, model: str) -> str:
    with system.openai(system.key("api-key")) as client:
        reply = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is a pilot light?"}],
            temperature=0,
            max_tokens=16,
        )
    return reply.choices[0].message.content or ""


def types(system: Composed, folder: Path, begins: str) -> None:
    """Run the page's block that begins so, in a folder, but for getting another release."""
    (block,) = [block for block in BLOCKS if block.startswith(begins)]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.replace("git pull\n", "")],
        cwd=folder,
        env=dict(system.environment),
        capture_output=True,
        text=True,
        timeout=BUILD_DEADLINE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"


@dataclass(frozen=True)
class Kept:
    """What may not be lost."""

    keys: tuple[str, ...]
    models: list[dict[str, Any]]
    usage: list[str]


def usage_of(system: Composed) -> list[str]:
    """No route shows it, so the database is asked."""
    rows = "SELECT request_id, output_tokens FROM gateway.usage ORDER BY request_id"
    return system.inside(
        "postgres", "psql", "-U", "pilotlight", "-d", "pilotlight", "-Atc", rows
    ).splitlines()


def kept(system: Composed) -> Kept:
    with system.admin(system.key("admin-key")) as admin:
        models = admin.get("/models").json()["models"]
    asked = ("sh", "-c", "cd /volumes/secrets/all && sha256sum *")
    secrets = system.compose("run", "--rm", "--no-deps", "-T", "setup", *asked)
    return Kept(
        (system.key("admin-key"), system.key("api-key"), *secrets.splitlines()),
        models,
        usage_of(system),
    )


def both_answer(system: Composed, answer: str) -> None:
    """And their usage is written."""
    before = len(usage_of(system))
    for model in (MODEL, FROM_S3):
        assert chat(system, model) == answer
    until(lambda: len(usage_of(system)) == before + 2, "usage of two more requests")


def test_backup_and_restore(system: Composed, answer: str, tmp_path: Path) -> None:
    """Ready models serve while it is made.

    Then all is deleted, and comes back: keys, models, objects, usage, and the same answers.
    """
    before = kept(system)
    assert len(before.keys) > 10
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(types, system, tmp_path, "( umask 077")
        while not made.done():
            for model in (MODEL, FROM_S3):
                assert chat(system, model) == answer
        made.result()
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {
        "database.dump": 0o600,
        "volumes.tar": 0o600,
    }

    system.compose("--profile", "*", "down", "-v", "--timeout", "5", deadline_s=2 * DEADLINE_S)
    assert (
        run(
            "docker",
            "volume",
            "ls",
            "--quiet",
            "--filter",
            f"label=com.docker.compose.project={system.project}",
        )
        == ""
    )
    types(system, tmp_path, "docker compose build\ndocker compose run")
    after = kept(system)
    assert (after.keys, after.models) == (before.keys, before.models)
    assert set(after.usage) >= set(before.usage)
    both_answer(system, answer)


def test_upgrade_and_back(system: Composed, answer: str, tmp_path: Path) -> None:
    """Images of another tag are built and take over from the ones that run, whose data they go on
    with; then the first ones again.
    """
    newer = system.but(PILOTLIGHT_TAG=f"{system.project}-next")
    for release in (newer, system):
        before = kept(system)
        types(release, tmp_path, "git pull")
        images = {service: system.inspect(service)["Config"]["Image"] for service in OURS}
        assert images == {
            service: f"pilotlight-{service}:{release.environment['PILOTLIGHT_TAG']}"
            for service in OURS
        }
        assert kept(release) == before
        both_answer(release, answer)


def test_images_of_a_checkout_that_only_its_owner_reads(system: Composed, tmp_path: Path) -> None:
    """One that was made with umask 077: the user of the containers reads and runs all the same what
    is copied from it.
    """
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                tmp_path / name,
                ignore=shutil.ignore_patterns("tests", "__pycache__", "*.egg-info"),
            )
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    run("chmod", "-R", "go=", str(tmp_path))
    files = [
        str(tmp_path / Path(file).name)
        for file in system.environment["COMPOSE_FILE"].split(os.pathsep)
    ]
    for file in files:
        shutil.copy(ROOT / Path(file).name, file)
    private = system.but(
        COMPOSE_FILE=os.pathsep.join(files), PILOTLIGHT_TAG=f"{system.project}-private"
    )
    private.compose("build", "--quiet", "setup", deadline_s=BUILD_DEADLINE_S)
    looked = 'command -v serve && command -v healthy && find /opt/pilotlight ! -readable && find /opt/pilotlight/migrations -name "*.py"'
    image = f"pilotlight-setup:{private.environment['PILOTLIGHT_TAG']}"
    shown = run(
        "docker", "run", "--rm", "--network", "none", "--read-only", image, "sh", "-c", looked
    ).split()
    first = [
        "/opt/pilotlight/bin/serve",
        "/opt/pilotlight/bin/healthy",
        "/opt/pilotlight/migrations/env.py",
    ]
    assert shown[:3] == first, shown
