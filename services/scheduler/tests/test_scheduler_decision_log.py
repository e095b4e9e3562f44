"""A term's decision log: files that are long, many, or cannot be written."""

from dataclasses import replace
from pathlib import Path

import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.common.decision_replay import replay
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.control.testing import LargeCluster, Size
from pilotlight.policy.ids import Epoch
from pilotlight.scheduler import decision_log
from pilotlight.scheduler.decision_log import DecisionLog

pytestmark = pytest.mark.anyio


class Leader:
    """Ticks of a cluster, noted as a term does."""

    def __init__(self, folder: Path | None, *, file_bytes: int = 1 << 30, keep: int = 1 << 31):
        self.cluster = LargeCluster(Size(nodes=4, workers_per_node=2, models=12, instances=6))
        self.cluster.memory = replace(self.cluster.memory, index=None)
        self.log = DecisionLog(
            folder=folder,
            file_bytes=file_bytes,
            keep_bytes=keep,
            epoch=Epoch(7),
            rules=self.cluster.rules,
            clock=ManualClock(),
        )

    def tick(self, changed: Focus) -> None:
        cluster = self.cluster
        if self.log.begins:
            cluster.books = cluster.books.settled()
            cluster.memory = replace(cluster.memory, index=None)
        facts, memory = cluster.facts(changed), cluster.memory
        plan = cluster.tick(changed)
        self.log.note(facts, memory, plan)
        cluster.carry_out(plan)

    def ticks(self, count: int) -> None:
        for number in range(count):
            self.tick(self.cluster.report(number))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


async def test_a_long_file_is_ended_and_each_of_them_replays(tmp_path: Path) -> None:
    """The next one begins with a tick that looks at everything."""
    leader = Leader(tmp_path, file_bytes=1000)
    for _ in range(3):
        leader.ticks(5)
        assert leader.log.place.endswith("#4")
        await leader.log.write()
        assert leader.log.begins
    files = _files(tmp_path)
    assert [one.name for one in files] == [f"00000007-000{at}.decisions" for at in range(3)]
    found = [replay(one) for one in files]
    assert [(one.identical, one.ticks) for one in found] == [(True, 5)] * 3


async def test_the_oldest_files_go(tmp_path: Path) -> None:
    """What is kept leaves room for one more file."""
    leader = Leader(tmp_path, file_bytes=1000, keep=6000)
    for _ in range(6):
        leader.ticks(3)
        await leader.log.write()
    names = [one.name for one in _files(tmp_path)]
    assert names[-1] == "00000007-0005.decisions"
    assert 1 <= len(names) < 6


async def test_a_log_that_cannot_be_written_is_begun_anew(tmp_path: Path) -> None:
    """Ticks do not wait for it."""
    folder = tmp_path / "taken"
    folder.write_text("a file")
    leader = Leader(folder)
    leader.ticks(2)
    await leader.log.write()
    assert leader.log.begins
    folder.unlink()
    leader.ticks(2)
    await leader.log.write()
    leader.log.close()
    (file,) = _files(folder)
    assert replay(file).ticks == 2


async def test_a_log_that_falls_behind_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps a bounded number of ticks in memory."""
    monkeypatch.setattr(decision_log, "MAX_WAITING", 4)
    leader = Leader(tmp_path)
    leader.ticks(7)
    await leader.log.write()
    leader.log.close()
    (file,) = _files(tmp_path)
    found = replay(file)
    assert (found.identical, found.ticks) == (True, 2)


async def test_without_a_folder_nothing_is_noted() -> None:
    """And no tick has to look at everything for it."""
    leader = Leader(None)
    leader.ticks(2)
    assert not leader.log.begins
    assert leader.log.place == ""
    await leader.log.write()
