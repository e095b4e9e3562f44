"""What holds for the repository as a whole."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_TRACKED_BYTES = 32 * 1024 * 1024


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    return [ROOT / name for name in listed.decode().split("\0") if name]


def test_tracked_files_stay_small() -> None:
    total = sum(file.stat().st_size for file in tracked_files() if file.is_file())
    assert total <= MAX_TRACKED_BYTES, f"{total / 2**20:.1f} MiB are tracked"


def test_no_package_shadows_the_namespace() -> None:
    assert not list(ROOT.glob("*/*/src/pilotlight/__init__.py"))


def test_layers_hold() -> None:
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout


def test_generated_pages_are_current() -> None:
    command = [sys.executable, "tools/generate_docs.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


SERVICES_WITHOUT_TENSORS = ("gateway", "scheduler", "loader", "cache", "materializer", "worker")
HEAVY = ("torch", "transformers", "numpy.f2py", "rich")


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES_WITHOUT_TENSORS)
def test_import_diet(service: str) -> None:
    """A service's process imports neither torch nor transformers: they cost a second and 200 MB
    each; nor what only paints logs.
    """
    # In the order of a loader's and a worker's ``__main__``.
    modules = (
        f"pilotlight.common.plain_logs, pilotlight.{service}.app, pilotlight.{service}.settings"
    )
    code = f"import sys, {modules}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_no_file_names_a_machine() -> None:
    words = ("/" + "work/", "/" + "root/", "/opt/" + "wheels")
    for file in tracked_files():
        if file.suffix in {".py", ".md", ".toml", ".sh", ".yml", ".txt"} or file.name in {
            "Makefile",
            "run",
        }:
            text = file.read_text()
            assert not [word for word in words if word in text], f"{file} names a path of a machine"
