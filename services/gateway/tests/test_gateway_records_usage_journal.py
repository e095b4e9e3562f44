"""Usage of gateways that are killed: their file, and the one that takes it over."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import URL, select
from structlog.testing import capture_logs

from pilotlight.common.db import tables
from pilotlight.common.testing import until
from pilotlight.gateway.admin.testing import (
    AdminWorld,
    database_away,
)
from pilotlight.gateway.records import usage as usage_module
from pilotlight.gateway.records import usage_journal
from pilotlight.gateway.records.usage import UsageRecorder, UsageRepository
from pilotlight.gateway.records.usage_journal import (
    LOST_STATUS,
    Meter,
    UsageJournal,
    UsageRow,
    left_behind,
)

pytestmark = pytest.mark.anyio
AT = datetime(2026, 7, 1, 12, 0, 0, 123_457, tzinfo=UTC)
WRITER = 7
KILLED = """
import os, signal, sys
from datetime import datetime, UTC
from pathlib import Path
from pilotlight.gateway.records.usage_journal import UsageJournal, UsageRow

AT = datetime(2026, 7, 1, 12, 0, 0, 123_457, tzinfo=UTC)
journal = UsageJournal(Path(sys.argv[1]), 7)

def meter(name, streamed=True):
    return journal.begin(
        AT, model="fox", key_id="k", request_id=name, prompt_tokens=5, streamed=streamed
    )

def row(name):
    return UsageRow(at=AT, model="fox", key_id="k", request_id=name, prompt_tokens=5,
                    output_tokens=9, status="ok", device_s=1.5)

for name in ("ended", "written"):
    one = meter(name)
    one.output(9)
    one.ended(row(name))
meter("streams").output(3, 0.25)
meter("whole", streamed=False).output(3)
meter("silent")
freed = meter("freed")
freed.ended(row("freed"))
freed.written()
os.kill(os.getpid(), signal.SIGKILL)
"""


def _row(name: str, **changes: object) -> UsageRow:
    given = {"at": AT, "model": "fox", "key_id": "k", "request_id": name, "prompt_tokens": 5}
    given["device_s"] = 1.5
    return UsageRow(**{**given, "output_tokens": 9, "status": "ok", **changes})


def _begin(journal: UsageJournal, name: str, model: str = "fox") -> Meter | None:
    return journal.begin(
        AT, model=model, key_id="k", request_id=name, prompt_tokens=5, streamed=True
    )


def _killed(folder: Path) -> None:
    """A process that is killed while it has a journal."""
    ended = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL


def test_a_killed_process_leaves_what_its_clients_were_given(tmp_path: Path) -> None:
    _killed(tmp_path)
    (left,) = left_behind(tmp_path)
    assert left.writer == WRITER
    assert left.rows == [
        _row("ended"),
        _row("written"),
        _row("streams", output_tokens=3, status=LOST_STATUS, device_s=0.25),
    ]
    # It is locked for the one that has it.
    assert not list(left_behind(tmp_path))
    left.leave()
    (again,) = left_behind(tmp_path)
    again.done()
    assert not list(tmp_path.iterdir())


def test_the_file_of_one_that_lives_is_left_alone_and_goes_with_it(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, WRITER)
    meter = _begin(journal, "r")
    assert meter is not None
    assert not list(left_behind(tmp_path))
    meter.written()
    journal.close()
    assert not list(tmp_path.iterdir())


def test_a_slot_that_is_used_again_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, WRITER)
    first = _begin(journal, "a")
    assert first is not None
    first.output(3, 2.0)
    first.written()
    second = _begin(journal, "b")
    assert second is not None
    second.ended(_row("b", device_s=0.0))
    journal.close()
    (left,) = left_behind(tmp_path)
    assert left.rows == [_row("b", device_s=0.0)]
    left.done()


def test_what_has_ended_is_noted_whole(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, WRITER)
    before = _begin(journal, "a")
    assert before is not None
    before.output(3, 2.0)
    before.written()
    noted = [journal.note(_row(name)) for name in ("b", "c", "d")]
    assert journal.note(_row("e", model="m" * 1000)) is None
    assert noted[1] is not None
    noted[1].written()
    journal.close()
    (left,) = left_behind(tmp_path)
    assert left.rows == [_row("b"), _row("d")]
    left.done()


def test_rows_that_were_not_written_outlive_an_orderly_end(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, WRITER)
    meter = _begin(journal, "r")
    assert meter is not None
    meter.ended(_row("r"))
    journal.close()
    (left,) = left_behind(tmp_path)
    assert left.rows == [_row("r")]
    left.done()


def test_slots_are_used_again_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_journal, "MAX_SLOTS", 2)
    journal = UsageJournal(tmp_path, WRITER)
    first, second = _begin(journal, "a"), _begin(journal, "b")
    assert first is not None
    assert second is not None
    assert _begin(journal, "c") is None
    first.written()
    assert _begin(journal, "c") is not None
    second.written()
    assert _begin(journal, "d", model="m" * 1000) is None
    journal.close()


def test_a_full_disk_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(usage_journal, "SLOTS_AT_A_TIME", 2)
    journal = UsageJournal(tmp_path, WRITER)
    monkeypatch.setattr(os, "posix_fallocate", full)
    first, second = _begin(journal, "a"), _begin(journal, "b")
    assert _begin(journal, "c") is None
    for meter in (first, second):
        assert meter is not None
        meter.output(1)
        meter.written()
    journal.close()
    with pytest.raises(OSError, match="no space"):
        UsageJournal(tmp_path, WRITER)
    assert not list(tmp_path.iterdir())


def test_what_is_no_journal_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "usage-x.journal").write_bytes(b"hello")
    (left,) = left_behind(tmp_path)
    assert left.rows == []
    left.done()


# In the database.


@pytest.fixture
def world(fresh_admin: AdminWorld) -> AdminWorld:
    return fresh_admin


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "usage"
    made.mkdir()
    return made


def _journals(folder: Path) -> int:
    return len(list(folder.glob(usage_journal.PATTERN)))


async def _written(world: AdminWorld) -> list[tuple[str, int, str]]:
    table = tables.usage
    columns = select(table.c.request_id, table.c.output_tokens, table.c.status)
    async with world.database.reading() as connection:
        return [tuple(row) for row in await connection.execute(columns.order_by(table.c.id))]


async def test_the_next_gateway_writes_each_row_once(world: AdminWorld, folder: Path) -> None:
    _killed(folder)
    # The one that was killed had written this one, and had not noted so.
    await UsageRepository(world.database).add([_row("written")], writer=WRITER)
    usage = UsageRecorder(
        world.database, world.context.clock, world.context.background, folder=folder
    )
    with capture_logs() as logs:
        await usage.start()
        await until(lambda: any(line.get("action") == "usage_taken_over" for line in logs))
    await usage.stop()
    assert await _written(world) == [
        ("written", 9, "ok"),
        ("ended", 9, "ok"),
        ("streams", 3, LOST_STATUS),
    ]
    assert not _journals(folder)


async def test_what_is_left_waits_for_the_database(
    world: AdminWorld, module_database: URL, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "TAKE_OVER_INTERVAL_S", 0.01)
    _killed(folder)
    usage = UsageRecorder(
        world.database, world.context.clock, world.context.background, folder=folder
    )
    with database_away(module_database):
        await usage.start()
        await asyncio.sleep(0)
        assert _journals(folder) == 2
    await until(lambda: _journals(folder) == 1)
    await usage.stop()
    assert [name for name, *_ in await _written(world)] == ["ended", "written", "streams"]


async def test_a_row_stands_in_the_journal_until_it_is_written(
    world: AdminWorld, module_database: URL, folder: Path
) -> None:
    usage = UsageRecorder(
        world.database, world.context.clock, world.context.background, folder=folder
    )
    await usage.start()
    meter = usage.meter(model="fox", key_id="k", request_id="r", prompt_tokens=5)
    assert meter is not None
    meter.output(2)
    with database_away(module_database):
        usage.record(
            model="fox",
            key_id="k",
            request_id="r",
            prompt_tokens=5,
            output_tokens=2,
            status="ok",
            meter=meter,
        )
        await usage.stop()
    (left,) = left_behind(folder)
    assert [row.request_id for row in left.rows] == ["r"]
    left.leave()
    await usage.stop()
    assert await _written(world) == [("r", 2, "ok")]


async def test_what_was_not_metered_is_noted_at_its_end(
    world: AdminWorld, module_database: URL, folder: Path
) -> None:
    usage = UsageRecorder(
        world.database, world.context.clock, world.context.background, folder=folder
    )
    await usage.start()
    asked = {"model": "fox", "key_id": "k", "prompt_tokens": 5, "output_tokens": 2, "status": "ok"}
    with database_away(module_database):
        usage.record(request_id="r", **asked)
        await usage.stop()
    (left,) = left_behind(folder)
    assert [(row.request_id, row.output_tokens) for row in left.rows] == [("r", 2)]
    left.leave()
    await usage.stop()
    assert await _written(world) == [("r", 2, "ok")]


async def test_without_a_folder_for_it_usage_goes_on(world: AdminWorld, tmp_path: Path) -> None:
    usage = UsageRecorder(
        world.database, world.context.clock, world.context.background, folder=tmp_path / "none"
    )
    with capture_logs() as logs:
        await usage.start()
    assert [line["action"] for line in logs] == ["usage_journal_failed"]
    assert usage.meter(model="fox", key_id="k", request_id="r", prompt_tokens=5) is None
    await usage.stop()
