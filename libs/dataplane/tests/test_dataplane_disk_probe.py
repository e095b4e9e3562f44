"""The disk is measured once: behind fetches, within bounds, and nothing is left of it."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from disk_tiers import Tier, content_of

from pilotlight.common.clock import ManualClock
from pilotlight.dataplane import disk_probe
from pilotlight.dataplane.bandwidth import SourceLimits
from pilotlight.dataplane.disk_probe import (
    BLOCK_BYTES,
    LEAST_BYTES,
    SCRATCH_BYTES,
    DiskProbe,
)
from pilotlight.dataplane.disk_tier import DiskEvent, DiskOrigin
from pilotlight.dataplane.lanes import LaneLimits, Lanes
from pilotlight.policy.cluster import LinkSpeed, OriginKind

READ_S = 0.01


class Ticking(ManualClock):
    """Each look at it takes some time, so that each read does."""

    def __init__(self, tick_s: float = READ_S) -> None:
        super().__init__()
        self.tick_s = tick_s
        self.looks = 0

    def monotonic_s(self) -> float:
        self.looks += 1
        return self.looks * self.tick_s


@dataclass
class Measured:
    """What a probe found of a tier."""

    tier: Tier
    clock: Ticking = field(default_factory=Ticking)
    rates: list[float] = field(default_factory=list[float])

    def run(self, is_busy: Callable[[], bool] = lambda: False) -> list[float]:
        probe = DiskProbe(self.tier.tier, self.clock, is_busy, self.rates.append)
        probe.start()
        assert probe.join(60)
        return self.rates


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Tier]:
    made = Tier(tmp_path / "tier", 4 * SCRATCH_BYTES)
    with closing(made.tier):
        yield made


def _filled(tier: Tier) -> Tier:
    """With just enough chunks, and no room for anything else."""
    for seed in range(LEAST_BYTES // BLOCK_BYTES):
        tier.store(content_of(seed, BLOCK_BYTES))
    tier.tier.limit_bytes = tier.tier.used_bytes
    return tier


def _files(tier: Tier) -> list[Path]:
    return [path for path in tier.tier.folder.rglob("*") if path.name != ".lock"]


def test_where_there_is_nothing_a_file_is_written_and_read_and_gone(empty: Tier) -> None:
    measured = Measured(empty)
    (rate,) = measured.run()
    # The last read finds the end of the file.
    assert 0 < rate <= BLOCK_BYTES / READ_S
    assert not _files(empty)
    assert empty.tier.used_bytes == 0


def test_chunks_that_are_there_are_read_and_nothing_is_written(empty: Tier) -> None:
    tier = _filled(empty)
    before = sorted(_files(tier))
    (rate,) = Measured(tier).run()
    assert rate > 0
    assert sorted(_files(tier)) == before
    assert tier.events[DiskEvent.READ] == 0, "it is no use of a chunk"


def test_what_is_too_little_says_nothing(empty: Tier) -> None:
    empty.tier.limit_bytes = LEAST_BYTES - 1
    assert Measured(empty).run() == []


def test_a_disk_that_cannot_be_written_to_is_not_measured(empty: Tier) -> None:
    for path in (empty.tier.folder / ".lock", empty.tier.folder):
        path.unlink() if path.is_file() else path.rmdir()
    assert Measured(empty).run() == []


@pytest.mark.parametrize("tick_s", [READ_S, 0.3, 5.0])
def test_it_ends_after_a_second_or_so_many_bytes(
    empty: Tier, monkeypatch: pytest.MonkeyPatch, tick_s: float
) -> None:
    """On a disk that is slow, and on one whose reads take a moment. Either has a rate."""
    monkeypatch.setattr(disk_probe, "MOST_BYTES", 4 * BLOCK_BYTES)
    for seed in range(6):
        empty.store(content_of(seed, BLOCK_BYTES))
    clock = Ticking(tick_s)
    (rate,) = Measured(empty, clock).run()
    assert rate > 0
    # Each looks at the clock twice; every other one finds the end of a file.
    reads = clock.looks // 2
    assert reads * tick_s <= disk_probe.MOST_S + tick_s
    assert reads <= 2 * 4


def test_nothing_is_read_while_a_fetch_goes_on(empty: Tier) -> None:
    """One comes in the middle; what was read before counts, and the rest follows."""
    clock = Ticking()
    asked, looks = 0, list[int]()

    def is_busy() -> bool:
        nonlocal asked
        asked += 1
        if 4 < asked < 8:
            looks.append(clock.looks)
            return True
        return False

    (rate,) = Measured(_filled(empty), clock).run(is_busy)
    assert rate > 0
    assert len(looks) == 3
    assert len(set(looks)) == 1, "no read between"


def test_it_can_be_ended_while_it_waits(empty: Tier) -> None:
    rates = list[float]()
    probe = DiskProbe(empty.tier, Ticking(), lambda: True, rates.append)
    probe.start()
    probe.stop()
    assert probe.join(60)
    assert rates == []


@pytest.mark.parametrize("full", [False, True])
def test_file_systems_that_do_not_read_past_memory_are_measured_too(
    empty: Tier, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    def never(descriptor: int, *, wanted: bool = True) -> bool:
        return False

    monkeypatch.setattr(disk_probe, "_past_memory", never)
    (rate,) = Measured(_filled(empty) if full else empty).run()
    assert rate > 0


def test_one_that_takes_the_flag_and_refuses_the_read_is_read_as_usual(
    empty: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, refused = os.preadv, 0

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal refused
        if refused == 0:
            refused += 1
            raise OSError(errno.EINVAL, "no")
        return really(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(disk_probe, "_past_memory", lambda _, *, wanted=True: wanted)
    (rate,) = Measured(_filled(empty)).run()
    assert rate > 0
    assert refused == 1


def test_a_link_is_as_fast_as_its_probe_until_it_was_used(empty: Tier) -> None:
    origin, clock = DiskOrigin(empty.tier), ManualClock()
    lanes = Lanes(LaneLimits(least=1, most=1), SourceLimits(None, clock), clock)
    assert lanes.measured() == ()
    lanes.probed(origin, 5.0)
    expected = LinkSpeed(kind=OriginKind.DISK, name="disk", bytes_per_s=5.0)
    assert lanes.measured() == (expected,)
    lanes.of(origin).bytes_per_s = 7.0
    assert [one.bytes_per_s for one in lanes.measured()] == [7.0]
