"""The real archive: made here, installed where no network is, and used."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bundle import build

pytestmark = [pytest.mark.bundle, pytest.mark.slow]

PYTHON = "{}.{}".format(*sys.version_info)
DEADLINE_S = 600.0
NOWHERE = "http://127.0.0.1:9"
WITHOUT_NETWORK = ("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Not pytest's: PostgreSQL, which does not run as root, has to pass the folders above.
    with tempfile.TemporaryDirectory(prefix="pilotlight-bundle-") as name:
        os.chmod(name, 0o711)
        yield Path(name)


@pytest.fixture(scope="module")
def made(folder: Path) -> Path:
    bundle, _ = build.make(PYTHON, folder / "dist", with_torch=False)
    return bundle


@pytest.fixture(scope="module")
def installed(made: Path, folder: Path) -> tuple[Path, str]:
    prefix = folder / "installed"
    done = offline(
        folder, "sh", made / "install.sh", prefix, "--with-tests", "--torch-from", sys.executable
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return prefix, done.stdout


def offline(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run without a network, where we may take it away; with every proxy and index pointing nowhere
    in any case.
    """
    variables = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "UV_", "PYTHON", "VIRTUAL"))
        },
        **dict.fromkeys(
            ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"), NOWHERE
        ),
        "no_proxy": "127.0.0.1,localhost",
        "PYTHON": sys.executable,
        "PILOTLIGHT_HOME": str(folder / "home"),
    }
    isolated = (
        os.geteuid() == 0 and shutil.which("unshare") is not None and shutil.which("ip") is not None
    )
    prefix = WITHOUT_NETWORK if isolated else ()
    return subprocess.run(
        [*prefix, *command],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_parts_are_small_and_named_in_the_manifest(made: Path) -> None:
    manifest = json.loads((made / "manifest.json").read_text())
    named = {part["name"] for archive in manifest["archives"] for part in archive["parts"]}
    there = {path.name for path in made.iterdir()}
    assert there == {*named, "manifest.json", *build.INSTALLER}
    assert all((made / name).stat().st_size <= 28 * 2**20 for name in there)
    assert sum((made / name).stat().st_size for name in there) < 60 * 2**20


def test_installs_and_ends_with_doctor(installed: tuple[Path, str]) -> None:
    _, said = installed
    assert "Using torch" in said
    assert "torch is installed" in said


def test_the_demo_runs_from_it(installed: tuple[Path, str], folder: Path) -> None:
    prefix, _ = installed
    where = offline(
        folder,
        prefix / "current/bin/python",
        "-c",
        "import pilotlight.cli as cli; print(cli.__path__[0])",
    )
    assert where.stdout.startswith(str(prefix)), where.stdout + where.stderr
    done = offline(folder, prefix / "bin/pilotlight", "demo", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["output_tokens"] > 5
    assert {"fetch", "load", "prefill"} <= set(result["phases"])


def test_the_gpu_tests_run_from_it(installed: tuple[Path, str], folder: Path) -> None:
    """All that needs no device passes, the rest says that there is none; on a machine with one, all
    of it passes.
    """
    prefix, _ = installed
    tree = prefix / "current/share/pilotlight/tree"
    done = offline(folder, prefix / "current/bin/python", tree / "tools/test_gpu.py")
    *lines, last = done.stdout.splitlines()
    checks = {check["check"]: check for check in map(json.loads, lines)}
    for name in ("environment", "engine", "chat"):
        assert checks[name]["ok"], (checks[name], done.stderr)
    has_device = checks["driver"]["ok"] and checks["torch"]["ok"]
    assert (last, done.returncode) == (("PASS", 0) if has_device else ("FAIL", 1))
    devices = [check for name, check in checks.items() if name.startswith("device: ")]
    assert len(devices) >= 5
    assert all(check["ok"] or check["detail"] for check in devices)
