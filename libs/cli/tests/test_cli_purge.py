"""What `pilotlight down --purge` removes, and what it leaves."""

import json
import shutil
from pathlib import Path

import pytest

from pilotlight.cli import home as homes
from pilotlight.cli import purge as purging
from pilotlight.cli.home import Home
from pilotlight.cli.purge import HomeNotOurs, purge
from pilotlight.common.clock import SystemClock
from pilotlight.dataplane.pool import HostPool

MIB = 1 << 20


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory of these tests' own."""
    folder = tmp_path / "shm"
    folder.mkdir()
    for module in (homes, purging):
        monkeypatch.setattr(module, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def home(shared: Path, tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.prepare()
    (made.state / "node-id").write_text("node-1")
    (made.models / "tiny").mkdir()
    return made


def purged(home: Home, capsys: pytest.CaptureFixture[str]) -> object:
    assert purge(home, yes=True, as_json=True) == 0
    return json.loads(capsys.readouterr().out)


def test_a_copy_leaves_the_pool_of_the_system_that_it_was_made_of(
    home: Home, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(home.root, tmp_path / "copy", symlinks=True)
    copy = Home(tmp_path / "copy")
    # A system of the release before has the pool by its node's name, which the copy has too.
    pools = [
        HostPool.open(path, MIB, SystemClock())
        for path in (home.pool_path, shared / "pilotlight-node-1.pool")
    ]
    HostPool.open(copy.pool_path, MIB, SystemClock()).close(remove=False)
    assert purged(copy, capsys) == {"purged": True, "home": str(copy.root), "kept": ["models"]}
    assert set(shared.iterdir()) == {pool.path for pool in pools}
    for pool in pools:
        pool.close(remove=False)
    purged(home, capsys)
    assert list(shared.iterdir()) == []


def test_what_is_no_pool_stays(
    home: Home, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs").write_text("theirs")
    home.pool_path.symlink_to(tmp_path / "theirs")
    (shared / "pilotlight-node-1.pool").mkdir()
    purged(home, capsys)
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert len(list(shared.iterdir())) == 2


def test_pools_of_further_nodes_go_too(
    home: Home, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of ``pilotlight up --nodes``; not what only looks like one."""
    mine = [Path(f"{home.pool_path}{end}") for end in ("", "-2", "-3")]
    for path in (*mine, Path(f"{home.pool_path}-of-mine")):
        path.write_bytes(b"")
    purged(home, capsys)
    assert [path.name for path in shared.iterdir()] == [f"{home.pool_path.name}-of-mine"]


def test_what_was_purged_has_nothing_left_to_remove(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    purged(home, capsys)
    assert purged(home, capsys) == {"purged": False}
    assert purge(home, yes=False, as_json=False) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert [path.name for path in home.root.iterdir()] == ["models"]
    (home.root / "secrets").mkdir()
    with pytest.raises(HomeNotOurs):
        purge(home, yes=True, as_json=True)
    assert (home.root / "secrets").is_dir()
