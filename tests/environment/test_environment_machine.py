"""Machines that are not as they should be, before anything is started: one message, one status,
nothing left behind.
"""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from confined import run_python
from embedded_system import pilotlight

from pilotlight.cli.home import MAX_HOME_BYTES, Home
from pilotlight.cli.main import run
from pilotlight.common.errors import all_errors

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0


def refusal(output: str) -> dict[str, str]:
    """The one line that a refused command writes."""
    (line,) = output.strip().splitlines()
    told = json.loads(line)["error"]
    assert set(told) == {"code", "message", "what_to_do"}
    assert all(told.values())
    return told


def up(home: Path, *, places: dict[Path, str] | None = None, **environment: str) -> dict[str, str]:
    """What ``pilotlight up`` says when it refuses; ``pilotlight doctor`` says the same."""
    program = f"""
import os, sys
from pilotlight.cli.main import run
os.environ.update({environment | {"PILOTLIGHT_HOME": str(home), "PILOTLIGHT_PORT": str(free_port())}!r})
sys.exit(10 * run(["up", "--json"]) + run(["doctor", "--json"]))
"""
    done = run_python(program, places or {})
    assert done.returncode == 11, done.stdout + done.stderr
    assert not done.stderr
    started, examined = done.stdout.splitlines()
    told = refusal(started)
    failed = {
        (check["found"], check["what_to_do"])
        for check in json.loads(examined)["checks"]
        if check["verdict"] == "failed"
    }
    assert (told["message"], told["what_to_do"]) in failed
    return told


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_taken_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOME", str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert run(["up", "--json", "--port", port]) == 1
        told = refusal(capsys.readouterr().out)
        assert (told["code"], f"127.0.0.1:{port}" in told["message"]) == ("port_taken", True)
        assert "--port" in told["what_to_do"]
        assert run(["doctor", "--json", "--port", port]) == 1
        (failed,) = [
            one for one in json.loads(capsys.readouterr().out)["checks"] if one["name"] == "port"
        ]
        assert (failed["found"], failed["what_to_do"]) == (told["message"], told["what_to_do"])
    assert Home(tmp_path / "home").running() is None
    Home(tmp_path / "home").lock().close()


def test_a_full_disk_before_the_first_start(tmp_path: Path) -> None:
    told = up(tmp_path / "home", places={tmp_path: "4m"})
    assert told["code"] == "disk_full"
    assert f"{tmp_path / 'home'} has 4 MiB free" in told["message"]
    assert "PILOTLIGHT_EVENTS_BYTES" in told["message"]


def test_a_disk_without_a_byte(tmp_path: Path) -> None:
    """The message is that of the disk, not of a folder whose rights are wrong."""
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from confined import fill
from pilotlight.cli.home import Home
from pilotlight.cli.preflight import look_at_home
from pilotlight.common.errors import DiskFull
home = Home(Path({str(tmp_path / "home")!r}))
fillers = fill(home.root.parent)
for look in (lambda: look_at_home(home), home.prepare):
    try:
        look()
        raise SystemExit("not refused")
    except DiskFull as error:
        assert "no room left" in error.message, error.message
for filler in fillers:
    filler.unlink()
home.prepare()
"""
    done = run_python(program, {tmp_path: "2m"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_little_shared_memory(tmp_path: Path) -> None:
    told = up(tmp_path / "home", places={Path("/dev/shm"): "4m"}, PILOTLIGHT_POOL_BYTES="2000000")
    assert told["code"] == "shared_memory_too_small"
    assert "/dev/shm has 4 of 4 MiB free" in told["message"]
    assert "shm_size" in told["what_to_do"]
    told = up(
        tmp_path / "home", places={Path("/dev/shm"): "64m"}, PILOTLIGHT_POOL_BYTES=str(128 << 20)
    )
    assert "PILOTLIGHT_POOL_BYTES asks for 128 MiB, and /dev/shm is 64 MiB large" in told["message"]
    assert not (tmp_path / "home").exists()


def test_a_read_only_state_folder(tmp_path: Path) -> None:
    told = up(tmp_path / "home", places={tmp_path: "ro"})
    assert told["code"] == "home_unusable"
    assert (
        f"cannot write to the state folder {tmp_path / 'home'} (PILOTLIGHT_HOME): Read-only file system"
        == told["message"]
    )
    Home(tmp_path / "home").prepare()
    before = {path: path.read_bytes() for path in (tmp_path / "home").rglob("*") if path.is_file()}
    assert up(tmp_path / "home", places={tmp_path: "ro"}) == told
    assert {
        path: path.read_bytes() for path in (tmp_path / "home").rglob("*") if path.is_file()
    } == before


def test_a_low_hard_limit_of_files(tmp_path: Path) -> None:
    def lowered() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    variables = {
        **os.environ,
        "PILOTLIGHT_HOME": str(tmp_path / "home"),
        "PILOTLIGHT_RUN_DIR": str(tmp_path),
    }
    refused = subprocess.run(
        [pilotlight(), "up", "--json"],
        env=variables,
        preexec_fn=lowered,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    told = refusal(refused.stdout)
    assert (refused.returncode, told["code"]) == (1, "file_limit_too_low")
    assert "256" in told["message"]
    assert "ulimit" in told["what_to_do"]
    assert not (tmp_path / "home").exists()
    # A service that something else starts.
    refused = subprocess.run(
        [sys.executable, "-m", "pilotlight.cache"],
        env=variables,
        preexec_fn=lowered,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    (line,) = refused.stderr.strip().splitlines()
    assert refused.returncode == 1
    assert json.loads(line)["code"] == "file_limit_too_low"


def test_a_low_soft_limit_is_raised() -> None:
    program = "import resource; from pilotlight.common.fitness import check_files; check_files(); print(*resource.getrlimit(7))"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    done = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    soft, kept = map(int, done.stdout.split())
    assert (soft, kept) == (min(hard, 65536) if hard > 0 else 65536, hard)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("a,b", "','"),
        ("a\nb", "'\\\\n'"),
        (os.fsdecode(b"a\xffb"), "\\\\udcff"),
        ("/".join(["x" * 200] * 4), f"at most {MAX_HOME_BYTES}"),
        ("y" * 300, "file systems take 255"),
    ],
    ids=["comma", "newline", "bytes", "path", "name"],
)
def test_a_home_that_cannot_be(
    name: str,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOME", os.fsdecode(os.fsencode(tmp_path / name)))
    assert run(["up", "--json"]) == 1
    captured = capsys.readouterr()
    told = refusal(captured.out)
    assert told["code"] == "home_unusable"
    assert word.replace("\\\\", "\\") in told["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "url", "code"),
    [
        ("DATABASE", "postgresql://me:word@127.0.0.1:{port}/x", "database_unavailable"),
        ("DATABASE", "nonsense", "settings_invalid"),
    ],
)
def test_a_server_that_is_not_there(
    variable: str,
    url: str,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOME", str(tmp_path / "home"))
    port = free_port()
    monkeypatch.setenv(f"PILOTLIGHT_{variable}_URL", url.format(port=port))
    assert run(["up", "--json", "--port", str(free_port())]) == 1
    told = refusal(capsys.readouterr().out)
    assert told["code"] == code
    assert "word" not in told["message"].replace("password", "")
    assert f"PILOTLIGHT_{variable}_URL" in told["message"] + told["what_to_do"]
    assert run(["doctor", "--json", "--port", str(free_port())]) == 1
    failed = {
        one["found"]
        for one in json.loads(capsys.readouterr().out)["checks"]
        if one["verdict"] == "failed"
    }
    assert told["message"] in failed
    assert not (tmp_path / "home").exists()


def test_every_code_here_is_one_of_the_taxonomy() -> None:
    codes = {kind.code for kind in all_errors()}
    assert {
        "port_taken",
        "disk_full",
        "shared_memory_too_small",
        "file_limit_too_low",
        "home_unusable",
        "folder_unusable",
    } <= codes
