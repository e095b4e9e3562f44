"""The process that reads: where there is one, how often it looks, and what it forgets."""

import socket
from pathlib import Path
from typing import Any

from pilotlight.common.clock import ManualClock
from pilotlight.dataplane.link.nixl_process import has_rdma, takes_nixl
from pilotlight.dataplane.link.nixl_reader import AWAKE_S, BUSY_NAP_MS, IDLE_NAP_MS, Reader
from pilotlight.dataplane.link.nixl_wire import (
    MAX_MESSAGE_BYTES,
    Done,
    Forget,
    FromReader,
    Learn,
    Learned,
    Read,
    Stir,
    decode,
)
from pilotlight.dataplane.link.sender import LONGEST_BEAT_S


class FakeAgent:
    """``Agent`` whose reads end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, int, int]] = []
        self.forgotten: list[str] = []
        self.is_finished = False

    def register(self, memory: memoryview) -> int:
        return 0

    def offer(self) -> bytes:
        return b""

    def learn(self, agent: bytes) -> str:
        return agent.decode()

    def forget(self, name: str) -> None:
        self.forgotten.append(name)

    def read(self, name: str, theirs: int, ours: int, size_bytes: int) -> Any:
        self.begun.append((name, theirs, ours, size_bytes))
        return object()

    def is_done(self, read: Any) -> bool:
        return self.is_finished

    def progress(self) -> None: ...


def test_the_process_looks_often_as_long_as_somebody_reads() -> None:
    ours, theirs = socket.socketpair()
    clock = ManualClock()
    reader = Reader(sock=theirs, agent=FakeAgent(), landing=0, clock=clock)
    naps = [reader._nap_ms()]
    reader._on_message(Stir())
    for seconds in (1.0, LONGEST_BEAT_S - 1.0, AWAKE_S):
        clock.advance(seconds)
        naps.append(reader._nap_ms())
    assert naps == [IDLE_NAP_MS, BUSY_NAP_MS, BUSY_NAP_MS, IDLE_NAP_MS]
    ours.close()
    theirs.close()


def test_a_node_is_forgotten_once_nothing_of_it_is_read() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent = FakeAgent()
    reader = Reader(sock=theirs, agent=agent, landing=1000, clock=ManualClock())
    for message in (
        Learn(peer=1, agent=b"x"),
        Learn(peer=2, agent=b"x"),
        Read(number=9, peer=1, address=5, offset=8, size_bytes=3),
    ):
        reader._on_message(message)
    assert agent.begun == [("x", 5, 1008, 3)]
    reader._on_message(Forget(peer=2))
    reader._on_message(Forget(peer=1))
    reader._look()
    assert agent.forgotten == []
    agent.is_finished = True
    reader._look()
    # Two links knew it by one name: it is forgotten with the second one.
    assert agent.forgotten == ["x"]
    reader._on_message(Read(number=10, peer=1, address=5, offset=8, size_bytes=3))
    said = [decode(ours.recv(MAX_MESSAGE_BYTES), FromReader) for _ in range(4)]
    assert said[:3] == [Learned(peer=1), Learned(peer=2), Done(number=9)]
    assert said[3] == Done(number=10, error="nobody knows that node")
    ours.close()
    theirs.close()


def test_nixl_is_taken_where_it_is_wanted_or_where_there_is_a_device(tmp_path: Path) -> None:
    nothing, empty, device = tmp_path / "nothing", tmp_path / "empty", tmp_path / "device"
    empty.mkdir()
    (device / "mlx5_0").mkdir(parents=True)
    assert [has_rdma(folder) for folder in (nothing, empty, device)] == [False, False, True]
    assert [takes_nixl("auto", folder) for folder in (nothing, empty, device)] == [
        False,
        False,
        True,
    ]
    assert [takes_nixl(transport, nothing) for transport in ("tcp", "nixl")] == [False, True]
    assert not takes_nixl("tcp", device)
