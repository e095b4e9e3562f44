import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.dataplane.bandwidth import (
    BandwidthLimit,
    LinkSchedule,
    SourceLimits,
    parse_bandwidth,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("200mbit", 25e6),
        ("200Mbit/s", 25e6),
        ("25g", 3.125e9),
        ("800000", 1e5),
        ("1.5 gbps", 187.5e6),
        ("125MB/s", 125e6),
        ("1MiB/s", 1048576),
        ("64kbit", 8000),
    ],
)
def test_bandwidths(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    "text", ["fast", "200mbits per second", "-1m", "0", "0mbit", "1 2", "mbit", "10xbit"]
)
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"bandwidth"):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["", "  "])
def test_nothing_is_no_limit(text: str) -> None:
    assert parse_bandwidth(text) is None


def test_a_link_in_use_gives_its_bandwidth() -> None:
    clock, schedule = ManualClock(), LinkSchedule(25e6)
    start_s = clock.monotonic_s()
    sizes = [8_000_000, 1, 3_000_000, 5_000_000, 64, 999_999] * 3
    for size_bytes in sizes:
        clock.advance(schedule.take(clock.monotonic_s(), size_bytes))
    took_s = clock.monotonic_s() - start_s
    assert took_s == pytest.approx(sum(sizes) / 25e6, rel=0.1)


def test_readers_of_one_link_share_it() -> None:
    schedule = LinkSchedule(1000.0)
    waits_s = [schedule.take(10.0, 100) for _ in range(5)]
    assert waits_s == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_time_that_nobody_used_is_gone() -> None:
    schedule = LinkSchedule(1000.0)
    assert schedule.take(0.0, 100) == pytest.approx(0.1)
    assert schedule.take(50.0, 100) == pytest.approx(0.1)


@pytest.mark.anyio
async def test_no_limit_takes_no_time() -> None:
    clock = ManualClock()
    await BandwidthLimit(None, clock).take(1 << 40)


def test_folders_share_a_link_and_stores_have_their_own() -> None:
    links = SourceLimits(1e6, ManualClock())
    assert links.of("file:///models/a") is links.of("/models/b")
    assert links.of("s3://one/a") is links.of("s3://one/b")
    assert links.of("s3://one/a") is not links.of("s3://two/a")
