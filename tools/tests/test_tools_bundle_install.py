"""``install.sh`` on small archives: what it installs, and what it says when something is not as it
must be.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import borrowed_torch
import pip
import pytest

from bundle import install
from bundle.archive import files_below, write_archive

BUNDLE = Path(install.__file__).parent
PYTHON = "{}.{}".format(*sys.version_info)
DEADLINE_S = 120.0
MAIN = """
import sys
def main():
    import pathlib
    print("well:", *sys.argv[1:], (pathlib.Path(sys.prefix) / "share/pilotlight/docs/page.md").read_text())
"""


def wheel(folder: Path, name: str, files: dict[str, str], entry_points: str = "") -> None:
    """The smallest wheel that pip installs."""
    info = f"{name}-1.dist-info"
    texts = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\nRequires-Dist: torch\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    record = "".join(f"{file},,\n" for file in [*texts, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as target:
        for file, text in {**texts, f"{info}/RECORD": record}.items():
            target.writestr(file, text)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with one package, one page and one test, in parts of 512 KiB."""
    base = tmp_path_factory.mktemp("bundle")
    wheels = base / "wheels"
    wheels.mkdir()
    wheel(wheels, "light", {"light.py": MAIN}, "[console_scripts]\npilotlight = light:main\n")
    with zipfile.ZipFile(wheels / "pip-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as target:
        for name, path in files_below(Path(pip.__file__).parent, "pip").items():
            target.write(path, name)
    (base / "page.md").write_text("a page")
    folder = base / "made"
    folder.mkdir()
    entries = {**files_below(wheels, "wheels"), "share/docs/page.md": base / "page.md"}
    archives = [
        write_archive("pilotlight", "light", entries, folder, 512 * 1024),
        write_archive("tests", "light-tests", {"tree/test_light.py": base / "page.md"}, folder),
    ]
    manifest = {
        "format": install.FORMAT,
        "version": "1.0",
        "python": PYTHON,
        "platform": f"linux-{os.uname().machine}",
        "glibc": "2.1",
        "machine": {"torch": ">=2.11,<2.16", "numpy": ""},
        "archives": [asdict(archive) for archive in archives],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))
    for name in ("install.sh", "install.py", "borrowed_torch.py"):
        shutil.copy(BUNDLE / name, folder / name)
    return folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(made, tmp_path / "bundle")


@pytest.fixture
def no_torch(tmp_path: Path) -> Path:
    """A folder with a python3 that has no torch; the only one that is looked at beside the one that
    runs.
    """
    return fake_python(tmp_path / "bare", {})


def fake_python(folder: Path, versions: dict[str, str], site: Path | None = None) -> Path:
    """An interpreter that answers the probe as told."""
    folder.mkdir()
    answer = json.dumps(
        {"python": PYTHON, "found": versions, "folders": [str(site)] if site else []}
    )
    program = folder / "python"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    return program


def run(
    bundle: Path, *arguments: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, **environment}
    command = ["sh", bundle / "install.sh", *arguments]
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def change(bundle: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest, indent=2))


@pytest.fixture
def lender(tmp_path: Path) -> Path:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "torch.py").write_text("def zeros(size): pass\n")
    (site / "numpy.py").write_text("")
    return fake_python(tmp_path / "lender", {"torch": "2.11.0+cu130", "numpy": "2.4"}, site)


@pytest.mark.slow
def test_installs_and_may_be_run_again(made: Path, tmp_path: Path, lender: Path) -> None:
    prefix = tmp_path / "prefix"
    first = run(made, prefix, "--torch-from", lender)
    assert first.returncode == 0, first.stderr
    assert f"Using torch 2.11.0+cu130, numpy 2.4 of {lender}" in first.stdout
    assert first.stdout.strip().endswith("well: doctor a page")
    release = (prefix / "current").resolve()
    code = "import sys, torch; print(torch.__file__, *sys.path)"
    told = subprocess.run(
        [prefix / "current/bin/python", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert Path(told[0]).parent == lender.parent.parent / "site-packages"
    assert told[-1] == str(Path(told[0]).parent), (
        "what the machine lends comes after all that is installed"
    )
    again = run(made, prefix, "--torch-from", lender)
    assert again.returncode == 0, again.stderr
    assert "Verifying" not in again.stdout
    (release / install.COMPLETE).unlink()
    (release / "bin" / "pilotlight").unlink()
    mended = run(made, prefix, "--torch-from", lender)
    assert "Verifying" in mended.stdout
    assert mended.stdout.strip().endswith("well: doctor a page")
    assert not (release / "share/pilotlight/tree").exists()
    with_tests = run(made, prefix, "--torch-from", lender, "--with-tests")
    assert f"remove it when nothing runs from it: {release}" in with_tests.stdout
    assert (prefix / "current/share/pilotlight/tree/test_light.py").is_file()
    assert [path.name for path in prefix.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_without_a_torch_it_says_what_to_do(
    bundle: Path,
    tmp_path: Path,
    no_torch: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        borrowed_torch, "candidates", lambda python: [str(no_torch), str(tmp_path / "nobody")]
    )
    release = install.install(bundle, tmp_path / "prefix")
    said = capsys.readouterr().err
    assert f"{no_torch} has torch not, numpy not; {tmp_path / 'nobody'} does not run" in said
    assert "-m pip install 'torch>=2.11,<2.16' 'numpy'" in said
    assert "--torch-from" in said
    assert "WITH_TORCH=1" in said
    assert (release / install.COMPLETE).is_file()
    with pytest.raises(install.InstallError, match=r"does not have torch>=2\.11,<2\.16"):
        install.install(bundle, tmp_path / "prefix", str(no_torch))


def test_a_missing_part(bundle: Path, tmp_path: Path) -> None:
    (bundle / "light.tar.xz.01").unlink()
    done = run(bundle, tmp_path / "prefix")
    assert done.returncode == 1
    assert "parts are missing" in done.stderr
    assert "light.tar.xz.01" in done.stderr
    assert not (tmp_path / "prefix").exists()


def test_a_damaged_part(bundle: Path, tmp_path: Path) -> None:
    part = bundle / "light.tar.xz.00"
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    done = run(bundle, tmp_path / "prefix")
    assert done.returncode == 1
    assert "light.tar.xz.00 is damaged" in done.stderr
    assert "Copy it again" in done.stderr
    part.write_bytes(part.read_bytes()[:100])
    assert "100 of 524288 bytes" in run(bundle, tmp_path / "prefix").stderr


def test_another_python(bundle: Path, tmp_path: Path) -> None:
    change(bundle, lambda manifest: manifest.update(python="3.99"))
    done = run(bundle, tmp_path / "prefix")
    assert done.returncode == 1
    assert "is for Python 3.99, and there is none here" in done.stderr
    assert f"{sys.executable} is {PYTHON};" in done.stderr


def test_another_platform(bundle: Path, tmp_path: Path) -> None:
    change(bundle, lambda manifest: manifest.update(platform="linux-riscv64"))
    done = run(bundle, tmp_path / "prefix")
    assert done.returncode == 1
    assert "the archive is for linux-riscv64, this machine is linux-" in done.stderr


@pytest.mark.parametrize("libc", ["2.27", ""])
def test_another_c_library(bundle: Path, libc: str) -> None:
    manifest = {**install.read_manifest(bundle), "glibc": "2.28"}
    with pytest.raises(install.InstallError, match=r"glibc 2\.28 or newer is needed"):
        install.check_machine(manifest, PYTHON, os.uname().machine, libc)


def test_too_little_room(bundle: Path, tmp_path: Path) -> None:
    change(bundle, lambda manifest: manifest["archives"][0].update(unpacked_bytes=10**18))
    done = run(bundle, tmp_path / "prefix")
    assert done.returncode == 1
    assert "are free: free some, or name another folder" in done.stderr


def test_a_prefix_that_cannot_be(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(bundle, tmp_path / "file" / "prefix")
    assert done.returncode == 1
    assert "Name another folder" in done.stderr


def test_a_folder_without_its_manifest(bundle: Path, tmp_path: Path) -> None:
    (bundle / "manifest.json").unlink()
    done = run(bundle, tmp_path / "prefix")
    assert done.returncode == 1
    assert "manifest.json is missing: copy the whole folder" in done.stderr


def test_parts_of_two_bundles(bundle: Path, tmp_path: Path) -> None:
    change(bundle, lambda manifest: manifest["archives"][0].update(sha256="0" * 64))
    assert "are of different bundles" in run(bundle, tmp_path / "prefix").stderr


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.11.0+cu130", True),
        ("2.15.9", True),
        ("2.16.0", False),
        ("2.10.1", False),
        ("2.11.0a0+5228986c39.nv25.05", True),
        ("", False),
    ],
)
def test_ranges(version: str, fits: bool) -> None:
    assert borrowed_torch.in_range(version, ">=2.11,<2.16") is fits
    assert borrowed_torch.in_range(version, "")
