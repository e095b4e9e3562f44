"""The state folder: its permissions, its lock, and what is said of the process that runs it."""

import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pilotlight.cli.home import MAX_SOCKET_PATH_BYTES, Home, HomeInUse, HomeUnusable
from pilotlight.cli.running import stop_running
from pilotlight.common.secret_files import read_secret

URL = "http://127.0.0.1:8000"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.prepare()
    return made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nothing_of_it_is_readable_for_others(home: Home) -> None:
    # As root PostgreSQL runs as another user and must pass through, which is not reading.
    assert mode(home.root) in (0o700, 0o711)
    for folder in (home.secrets, home.logs, home.models, home.objects, home.state, home.run_dir):
        assert mode(folder) == 0o700, folder
    files = [
        home.admin_key,
        home.api_key,
        *(file for file in home.secrets.iterdir() if file.is_file()),
    ]
    assert {mode(file) for file in files} == {0o600}
    assert len({file.read_text() for file in files}) == len(files)
    assert all(len(file.read_text().strip()) > 40 for file in files)
    assert {"cluster-key", "key-pepper", "postgres-owner", "nats-gateway"} <= {
        file.name for file in home.secrets.iterdir()
    }
    assert home.secret("cluster-key") == read_secret(home.secrets, "cluster-key")
    assert set(home.nats_passwords()) >= {"gateway", "scheduler", "worker", "admin"}


def test_keys_stay_as_they_are(home: Home) -> None:
    home.admin_key.write_text("my own key\n")
    before = {file.name: file.read_text() for file in home.secrets.iterdir() if file.is_file()}
    (home.secrets / "key-pepper").unlink()
    home.prepare()
    assert home.admin_key.read_text() == "my own key\n"
    after = {file.name: file.read_text() for file in home.secrets.iterdir() if file.is_file()}
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"key-pepper"}


def test_two_that_prepare_at_once_agree(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with multiprocessing.get_context("fork").Pool(4) as pool:
        keys = pool.map(_prepare, [home] * 8)
    assert len(set(keys)) == 1
    assert not [name for name in os.listdir(home.root) if name.startswith(".")]


def _prepare(home: Home) -> str:
    home.prepare()
    return home.admin_key.read_text() + home.secret("cluster-key")


@pytest.mark.parametrize("root", ["/proc/nowhere", "{file}", "{file}/below", "/dev/null/x"])
def test_a_folder_that_cannot_be_had(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_text("")
    home = Home(Path(root.format(file=tmp_path / "file")))
    for attempt in (home.prepare, home.lock):
        with pytest.raises(HomeUnusable, match=str(home.root)) as caught:
            attempt()
        assert "PILOTLIGHT_HOME" in caught.value.action
    assert home.running() is None


def test_a_deep_folder_has_its_sockets_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep = Home(tmp_path / ("x" * 100))
    assert deep.run_dir == Home(deep.root).run_dir != Home(deep.root / "y").run_dir
    assert deep.run_dir.parent == tmp_path
    if len(str(tmp_path)) < 30:
        assert len(str(deep.run_dir)) + 40 <= MAX_SOCKET_PATH_BYTES
    deep.run_dir.symlink_to(tmp_path)
    with pytest.raises(HomeUnusable, match="somebody else"):
        deep.prepare()
    deep.run_dir.unlink()
    deep.run_dir.mkdir(mode=0o777)
    deep.prepare()
    assert mode(deep.run_dir) == 0o700
    assert Home(Path("/h")).run_dir == Path("/h/run")


def test_one_process_at_a_time(home: Home) -> None:
    lock = home.lock()
    with pytest.raises(HomeInUse, match="another process"):
        home.lock()
    home.announce(URL)
    with pytest.raises(HomeInUse, match=f"process {os.getpid()} at {URL}") as caught:
        home.lock()
    assert "pilotlight down" in caught.value.action
    home.withdraw()
    home.withdraw()
    lock.close()
    home.lock().close()


def test_who_runs(home: Home) -> None:
    assert home.running() is None
    home.announce(URL)
    running = home.running()
    assert running is not None
    assert (running.pid, running.url) == (os.getpid(), URL)
    home.withdraw()
    assert home.running() is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"pid": "x", "url": "y", "started_ticks": 1}',
        '{"pid": -1, "url": "y", "started_ticks": 1}',
    ],
)
def test_a_broken_announcement_is_none(home: Home, content: str) -> None:
    (home.root / "up.json").write_text(content)
    assert home.running() is None


@pytest.fixture
def sleeper(home: Home) -> subprocess.Popen[bytes]:
    """A process that announced itself on the folder."""
    program = (
        "import sys, signal\nfrom pathlib import Path\nfrom pilotlight.cli.home import Home\n"
        f"Home(Path({str(home.root)!r})).announce({URL!r})\nprint(1, flush=True)\nsignal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


@pytest.mark.slow
def test_down_ends_the_process_that_announced_itself(
    home: Home, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert stop_running(home, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"stopped": True, "pid": sleeper.pid}
    # Ended, but not reaped: it is not running, and no process is told to end twice.
    assert home.running() is None
    assert stop_running(home, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"stopped": False}
    assert sleeper.wait() == -signal.SIGTERM


def test_down_spares_a_later_process_with_the_same_id(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([sys.executable, "-ISc", "input()"], stdin=subprocess.PIPE) as innocent:
        stale = {"pid": innocent.pid, "started_ticks": 1, "url": URL}
        (home.root / "up.json").write_text(json.dumps(stale))
        assert home.running() is None
        assert stop_running(home, as_json=False) == 0
        assert "no system runs" in capsys.readouterr().out
        innocent.communicate(b"\n")
    assert innocent.returncode == 0


def test_a_secret_that_is_brought_later_reaches_who_needs_it(home: Home) -> None:
    assert read_secret(home.secrets_of("loader"), "hub-token") is None
    (home.secrets / "hub-token").write_text("hf_token\n")
    assert read_secret(home.secrets_of("loader"), "hub-token") == "hf_token"
    assert read_secret(home.secrets_of("gateway"), "hub-token") == "hf_token"
    assert not (home.secrets_of("scheduler") / "hub-token").is_symlink()
