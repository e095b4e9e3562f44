"""Backups of a system's own database, and what a restore leaves behind that fails: on a real
PostgreSQL.
"""

import asyncio
import errno
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from pilotlight.cli import backup, backup_archive
from pilotlight.cli.backup import BackupFailed, HomeNotEmpty, back_up, restore
from pilotlight.cli.backup_archive import DUMP, MANIFEST, BackupInvalid, Manifest, write_archive
from pilotlight.cli.embedded import PostgresServer
from pilotlight.cli.home import Home, HomeInUse
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System
from pilotlight.common.db.migrate import MigrateSettings, migrate
from pilotlight.common.errors import PilotlightError

pytestmark = pytest.mark.anyio

KEPT = ("demo", "logs", "nothing-of-ours", "pilotlight-home", "run")
"""What may lie in a folder that is restored into."""


@pytest.fixture(autouse=True)
def others_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's shell is set up for another database."""
    monkeypatch.delenv("PILOTLIGHT_DATABASE_URL", raising=False)
    monkeypatch.delenv("PILOTLIGHT_OBJECT_STORE_URL", raising=False)
    for name, value in {
        "HOST": "nowhere.invalid",
        "PORT": "1",
        "DATABASE": "other",
        "USER": "other",
    }.items():
        monkeypatch.setenv(f"PG{name}", value)


def server_of(home: Home) -> PostgresServer:
    return PostgresServer(home.root / "postgres", home.secret("postgres-owner"))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.prepare()
    (made.objects / "manifests").mkdir()
    (made.objects / "manifests" / "a.json").write_text("{}")
    (made.objects / "manifests" / "b.json#1").write_text("{")
    return made


@pytest.fixture
async def file(home: Home, tmp_path: Path) -> Path:
    """A backup of a system that is stopped."""
    postgres = server_of(home)
    await postgres.start()
    settings = MigrateSettings(database_url=postgres.owner_url, secrets_dir=home.secrets)
    await asyncio.to_thread(migrate, settings)
    await postgres.stop()
    await back_up(home, tmp_path / "file", as_json=True)
    return tmp_path / "file"


def damaged(home: Home, tmp_path: Path) -> Path:
    """A whole backup, but for a dump that no database takes."""
    dump = tmp_path / DUMP
    dump.write_text("no dump")
    write_archive(home, dump, "0001", tmp_path / "damaged")
    return tmp_path / "damaged"


def used(folder: Path) -> Home:
    """A folder without a system, in which things lie all the same."""
    for name in ("demo", "logs", "run", "nothing-of-ours"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(name)
    (folder / "pilotlight-home").write_text("ours")
    return Home(folder)


def look(home: Home) -> dict[str, str]:
    """Every file but the lock's."""
    return {
        path.relative_to(home.root).as_posix(): path.read_text()
        for path in home.root.rglob("*")
        if path.is_file() and path.name != "up.lock"
    }


async def tables_of(home: Home) -> int:
    postgres = server_of(home)
    await postgres.start()
    try:
        with psycopg.connect(postgres.owner_url) as connection:
            row = connection.execute(
                "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'gateway'"
            ).fetchone()
    finally:
        await postgres.stop()
    return 0 if row is None else int(row[0])


async def test_what_is_backed_up_comes_back(home: Home, file: Path, tmp_path: Path) -> None:
    with tarfile.open(file) as tar:
        assert [name for name in tar.getnames() if name.startswith("objects")] == [
            "objects/manifests/a.json"
        ]
    other = used(tmp_path / "other")
    await restore(other, file, as_json=True)
    assert other.admin_key.read_text() == home.admin_key.read_text()
    assert (other.root / "demo" / "file").is_file()
    assert await tables_of(other) > 0
    with pytest.raises(HomeNotEmpty, match="postgres"):
        await restore(other, file, as_json=True)


async def test_what_the_shell_says_of_other_databases_is_not_heard(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres = server_of(home)
    await postgres.start()
    monkeypatch.setenv("PGOPTIONS", "-c nonsense=1")
    assert await backup._run(postgres, home, "psql", "-XAtc", "SELECT 1") == "1\n"
    await postgres.stop()


async def test_a_restore_that_fails_leaves_the_folder_as_it_was(home: Home, tmp_path: Path) -> None:
    other = used(tmp_path / "other")
    before = look(other)
    with pytest.raises(BackupFailed, match="pg_restore failed"):
        await restore(other, damaged(home, tmp_path), as_json=True)
    found = look(other)
    assert found.pop("logs/postgres.log")
    assert found == before
    assert sorted(path.name for path in other.root.iterdir() if path.name != "up.lock") == sorted(
        KEPT
    )
    other.lock().close()


async def test_two_restores_at_once_do_not_undo_each_other(file: Path, tmp_path: Path) -> None:
    other = Home(tmp_path / "other")
    results: list[Any] = await asyncio.gather(
        *(restore(other, file, as_json=True) for _ in range(3)), return_exceptions=True
    )
    assert [type(one) for one in results] == [int, HomeInUse, HomeInUse]
    assert other.admin_key.is_file()
    assert await tables_of(other) > 0


async def test_nothing_is_begun_where_somebody_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    monkeypatch.setattr("pilotlight.cli.system.looks", lambda *_: {})
    with home.lock():
        for start in (
            System(home, SystemOptions(), lambda _: None).start(),
            restore(home, tmp_path / "file", as_json=True),
        ):
            with pytest.raises(HomeInUse):
                await start
    assert [path.name for path in home.root.iterdir()] == ["up.lock"]


async def test_a_full_disk_is_not_the_files_fault(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = damaged(home, tmp_path)
    monkeypatch.setattr(backup_archive, "_extract", full)
    with pytest.raises(BackupFailed, match="No space left"):
        await restore(Home(tmp_path / "other"), file, as_json=True)
    assert look(Home(tmp_path / "other")) == {}


@pytest.mark.parametrize("name", ["secrets", "nats", "api.key"])
async def test_what_could_be_a_systems_is_not_written_over(
    home: Home, tmp_path: Path, name: str
) -> None:
    other = used(tmp_path / "other")
    (other.root / name).mkdir()
    with pytest.raises(HomeNotEmpty, match=name):
        await restore(other, damaged(home, tmp_path), as_json=True)


async def test_a_database_of_the_operators_own_is_not_passed_over(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.root / "postgres" / "data").mkdir(parents=True)
    (home.root / "postgres" / "data" / "PG_VERSION").write_text("17")
    monkeypatch.setenv("PILOTLIGHT_DATABASE_URL", "postgresql://owner@server/pilotlight")
    with pytest.raises(BackupFailed, match="PILOTLIGHT_DATABASE_URL is set"):
        await back_up(home, tmp_path / "file", as_json=True)
    assert not (tmp_path / "file").exists()


async def test_a_folder_that_is_not_there_is_to_be_made_first(home: Home, tmp_path: Path) -> None:
    (home.root / "postgres" / "data").mkdir(parents=True)
    (home.root / "postgres" / "data" / "PG_VERSION").write_text("17")
    with pytest.raises(
        BackupFailed, match=f"there is no folder {tmp_path / 'none'}: make it first"
    ):
        await back_up(home, tmp_path / "none" / "file", as_json=True)
    assert not (tmp_path / "none").exists()


async def test_an_object_store_of_the_operators_own_is_named(
    home: Home,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PILOTLIGHT_OBJECT_STORE_URL", home.objects.as_uri())
    assert manifest_of(file).object_store == ""
    monkeypatch.setenv("PILOTLIGHT_OBJECT_STORE_URL", "s3://bucket/prefix")
    await back_up(home, tmp_path / "second", as_json=True)
    assert "s3://bucket/prefix" in capsys.readouterr().err
    assert manifest_of(tmp_path / "second").object_store == "s3://bucket/prefix"


def manifest_of(file: Path) -> Manifest:
    with tarfile.open(file) as tar:
        member = tar.extractfile(MANIFEST)
        assert member is not None
        return msgspec.json.decode(member.read(), type=Manifest)


async def test_a_file_that_was_cut_off_is_refused(home: Home, tmp_path: Path) -> None:
    file = damaged(home, tmp_path)
    file.write_bytes(file.read_bytes()[:-20_000])
    with pytest.raises(BackupInvalid) as refused:
        await restore(Home(tmp_path / "other"), file, as_json=True)
    assert isinstance(refused.value, PilotlightError)
    assert look(Home(tmp_path / "other")) == {}
