"""How fast a link sends: on links that are simulated, and what is read from and told to a real
connection.
"""

import random
import re
import shutil
import socket
import statistics
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from pilotlight.dataplane.link.pacing import (
    INTERVAL_S,
    LEAST_READINGS,
    MOST_CUT,
    TARGET_S,
    Pacer,
    Reading,
)
from pilotlight.dataplane.link.steering import (
    BULK_PRIORITY,
    SO_MAX_PACING_RATE,
    Steering,
    reading_of,
)

STEP_S = 0.002
MBIT = 1e6 / 8
BUFFER_S = 0.05
"""What the narrowest place can queue: as with ``tc tbf ... latency 50ms``."""


@dataclass
class Flow:
    """A connection that always has something to send, or ``wants`` so much a second."""

    wants: float = float("inf")
    pacer: Pacer = field(default_factory=Pacer)
    acked_bytes: float = 0.0
    busy_s: float = 0.0
    rtt_s: float = 0.0
    least_rtt_s: float = float("inf")
    rates: list[float] = field(default_factory=list[float])


class Path:
    """A narrowest place with a queue before it, into which others send as well: nothing makes that
    less.
    """

    def __init__(self, bytes_per_s: float, round_trip_s: float = 0.0002, seed: int = 0) -> None:
        self.bytes_per_s = bytes_per_s
        self.others = 0.0
        self.noise_s = 0.0
        """A round trip may take that much longer for reasons of its own."""
        self.always_s = 0.0
        """Every one does."""
        self.queues_s: list[float] = []
        self.came_through: list[float] = []
        self._round_trip_s = round_trip_s
        self._queued = 0.0
        self._chance = random.Random(seed)

    def run(self, seconds: float, *flows: Flow) -> None:
        self.queues_s, self.came_through = [], []
        for _ in range(round(seconds / STEP_S)):
            self._step(flows)

    def _step(self, flows: tuple[Flow, ...]) -> None:
        capacity, limit = self.bytes_per_s, BUFFER_S * self.bytes_per_s
        # Without a rate: a window that grows until the queue is full, and stays there.
        open_rate = (
            max(0.0, capacity - self.others) / len(flows) * (1.0 if self._queued >= limit else 1.5)
        )
        sent = [
            min(flow.wants, open_rate if flow.pacer.bytes_per_s is None else flow.pacer.bytes_per_s)
            for flow in flows
        ]
        offered = sum(sent) + self.others
        is_queued = self._queued > 0 or offered > capacity
        self._queued = min(max(0.0, self._queued + (offered - capacity) * STEP_S), limit)
        self.queues_s.append(self._queued / capacity)
        # A sender of half of what comes in has half of what goes out.
        through = [mine / offered * capacity if is_queued else mine for mine in sent]
        self.came_through.append(sum(through))
        for flow, mine in zip(flows, through, strict=True):
            flow.acked_bytes += mine * STEP_S
            flow.busy_s += STEP_S
            taken = (
                self._round_trip_s
                + self._queued / capacity
                + self._chance.random() * self.noise_s
                + self.always_s
            )
            flow.rtt_s += (taken - flow.rtt_s) / 2 if flow.rtt_s else taken
            # The handshake went through an empty queue.
            flow.least_rtt_s = min(flow.least_rtt_s, taken, self._round_trip_s)
            flow.pacer.read(
                Reading(round(flow.acked_bytes), flow.busy_s, flow.rtt_s, flow.least_rtt_s)
            )
            flow.rates.append(flow.pacer.bytes_per_s or float("inf"))

    def share_used(self) -> float:
        return statistics.fmean(self.came_through) / self.bytes_per_s


@pytest.mark.parametrize("mbit", [20, 200, 1_000, 25_000])
@pytest.mark.parametrize("round_trip_s", [0.00003, 0.001, 0.03])
def test_a_transfer_alone_uses_the_path_and_leaves_no_queue(
    mbit: float, round_trip_s: float
) -> None:
    path, flow = Path(mbit * MBIT, round_trip_s), Flow()
    path.run(3, flow)
    path.run(20, flow)
    assert path.share_used() > 0.98
    assert statistics.median(path.queues_s) < 1.5 * TARGET_S
    assert sorted(path.queues_s)[int(0.99 * len(path.queues_s))] < 3 * TARGET_S


def test_the_queue_that_the_beginning_fills_is_gone_at_once() -> None:
    path, flow = Path(200 * MBIT), Flow()
    path.run(0.08, flow)
    assert path.queues_s[-1] > 0.03
    path.run(2, flow)
    assert path.queues_s[-1] < 3 * TARGET_S


def test_no_rate_is_set_where_no_queue_is_seen() -> None:
    path, flow = Path(200 * MBIT), Flow(wants=100 * MBIT)
    path.run(5, flow)
    assert flow.pacer.bytes_per_s is None


@pytest.mark.parametrize("others_mbit", [2, 10, 18])
def test_a_little_traffic_of_others_finds_no_queue(others_mbit: float) -> None:
    path, flow = Path(200 * MBIT), Flow()
    path.run(3, flow)
    path.others = others_mbit * MBIT
    path.run(1, flow)
    path.run(10, flow)
    assert statistics.median(path.queues_s) < 1.5 * TARGET_S
    assert sorted(path.queues_s)[int(0.95 * len(path.queues_s))] < 4 * TARGET_S
    assert path.share_used() > 0.98 * (1 - others_mbit / 200)
    path.others = 0.0
    path.run(1, flow)
    path.run(3, flow)
    assert path.share_used() > 0.98


def test_where_others_take_half_the_queue_goes_after_a_while() -> None:
    path, flow = Path(200 * MBIT), Flow()
    path.run(3, flow)
    path.others = 100 * MBIT
    path.run(30, flow)
    path.run(10, flow)
    assert statistics.median(path.queues_s) < 2 * TARGET_S
    assert path.share_used() > 0.4
    path.others = 0.0
    path.run(3, flow)
    path.run(3, flow)
    assert path.share_used() > 0.97


@pytest.mark.parametrize("slow_s", [0.002, 0.004, 0.02])
def test_round_trips_that_always_take_longer_slow_a_transfer_down_by_a_little_only(
    slow_s: float,
) -> None:
    """As on a host whose processors are taken: sending less does not help.

    The path is the same after a minute.
    """
    path, flow = Path(200 * MBIT), Flow()
    path.run(3, flow)
    path.always_s = slow_s
    path.run(60, flow)
    path.run(10, flow)
    assert path.share_used() > 0.85
    path.always_s = 0.0
    path.run(1, flow)
    path.run(3, flow)
    assert path.share_used() > 0.97


def test_a_path_that_gives_a_tenth_for_good_is_known_for_what_it_is() -> None:
    path, flow = Path(1_000 * MBIT), Flow()
    path.run(3, flow)
    path.bytes_per_s = 100 * MBIT
    path.run(90, flow)
    path.run(10, flow)
    assert statistics.median(path.queues_s) < 2 * TARGET_S
    assert path.share_used() > 0.97


def test_a_transfer_that_waits_for_its_own_bytes_asks_for_no_more() -> None:
    path, flow = Path(200 * MBIT), Flow()
    path.run(3, flow)
    rate = flow.pacer.bytes_per_s
    assert rate is not None
    flow.wants = 50 * MBIT
    path.run(20, flow)
    assert (flow.pacer.bytes_per_s or 0) < 1.2 * rate


def test_round_trips_that_now_and_then_take_longer_slow_nobody_down() -> None:
    path, flow = Path(200 * MBIT), Flow()
    path.noise_s = 0.004
    path.run(3, flow)
    path.run(10, flow)
    assert path.share_used() > 0.97


@pytest.mark.parametrize("seed", range(3))
def test_two_transfers_share_a_path(seed: int) -> None:
    path, flows = Path(200 * MBIT, seed=seed), (Flow(), Flow())
    path.run(1, flows[0])
    path.run(20, *flows)
    path.run(10, *flows)
    assert path.share_used() > 0.97
    assert statistics.median(path.queues_s) < 3 * TARGET_S
    assert min(statistics.fmean(flow.rates[-1000:]) for flow in flows) > 0.2 * 200 * MBIT


def test_nothing_is_decided_within_an_interval_nor_from_a_few_readings() -> None:
    pacer = Pacer()
    pacer.read(Reading(0, 0.0, 0.05, 0.001))
    for part in range(1, LEAST_READINGS):
        pacer.read(Reading(1000 * part, INTERVAL_S * part / LEAST_READINGS, 0.05, 0.001))
    assert pacer.bytes_per_s is None
    pacer.read(Reading(10_000, INTERVAL_S, 0.05, 0.001))
    assert pacer.bytes_per_s == pytest.approx(100_000 * (1 - MOST_CUT))
    sleepy = Pacer()
    for part in range(LEAST_READINGS):
        sleepy.read(Reading(10_000 * part, INTERVAL_S * part, 0.05, 0.001))
    assert sleepy.bytes_per_s is None


# ---------------------------------------------------------------- a real connection


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
    ):
        other, _ = listener.accept()
        with other:
            yield one, other


def carry(one: socket.socket, other: socket.socket, size_bytes: int = 200_000) -> None:
    one.sendall(bytes(size_bytes))
    left = size_bytes
    while left:
        left -= len(other.recv(left))


def shown_by_ss(sock: socket.socket) -> str:
    if shutil.which("ss") is None:
        pytest.skip("iproute2's ss is not installed")
    port = str(sock.getsockname()[1])
    return subprocess.run(
        ["ss", "-tinO", "sport", "=", port], capture_output=True, text=True, timeout=10, check=True
    ).stdout


def until_acked(one: socket.socket, size_bytes: int) -> Reading:
    for _ in range(100_000):
        reading = reading_of(one)
        if reading is None:
            pytest.skip("a kernel before 4.10 does not tell when a sender is busy")
        if reading.acked_bytes >= size_bytes:
            return reading
    raise AssertionError("never acknowledged")


def test_what_is_read_is_what_ss_shows(connection: tuple[socket.socket, socket.socket]) -> None:
    one, other = connection
    carry(one, other)
    reading = until_acked(one, 200_000)
    shown = shown_by_ss(one)

    def field_of(pattern: str) -> float:
        found = re.search(pattern, shown)
        assert found is not None, shown
        return float(found[1])

    # ss counts the connection's first packet too.
    assert field_of(r"bytes_acked:(\d+)") - reading.acked_bytes in (0, 1)
    assert field_of(r"minrtt:([\d.]+)") == pytest.approx(reading.least_rtt_s * 1000, abs=0.0011)
    assert field_of(r" rtt:([\d.]+)") == pytest.approx(reading.rtt_s * 1000, abs=0.0011)
    # It leaves out what is less than a millisecond.
    busy = re.search(r"busy:(\d+)ms", shown)
    assert (float(busy[1]) if busy is not None else 0.0) == pytest.approx(
        reading.busy_s * 1000, abs=1.1
    )


class Told(Pacer):
    """Decides as it is told."""

    def __init__(self, rates: Callable[[Reading], float | None]) -> None:
        super().__init__()
        self._rates = rates

    def read(self, reading: Reading) -> None:
        self.bytes_per_s = self._rates(reading)


def pacing_of(sock: socket.socket) -> int:
    return struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8))[0]


def test_the_system_is_told_the_rate(connection: tuple[socket.socket, socket.socket]) -> None:
    rates = iter([None, 5e9, 5e9, 1e6])
    steering = Steering(connection[0], Told(lambda _: next(rates)))
    told: list[int] = []
    for _ in range(4):
        steering.look()
        told.append(pacing_of(connection[0]))
    assert told == [2**64 - 1, 5_000_000_000, 5_000_000_000, 1_000_000]


def test_a_connection_of_a_link_says_that_it_can_wait(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    Steering(connection[0])
    assert connection[0].getsockopt(socket.IPPROTO_IP, socket.IP_TOS) >> 2 == 1, "DSCP LE"
    assert connection[0].getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == BULK_PRIORITY


def test_an_ipv6_connection_says_so_too() -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
        Steering(sock)
        assert sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) >> 2 == 1
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == BULK_PRIORITY
