"""The thread that makes an engine's channels, where engines can map each other's memory."""

import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import structlog
import torch
from fake_cuda import fake_cuda

from pilotlight.common.cluster_key import ClusterKey
from pilotlight.common.handshake import CHANNEL_PURPOSE, Identity
from pilotlight.common.messages.engine import Run
from pilotlight.common.messages.pipelines import ConnectStage, KvAt, OpenDoor, StageAddress
from pilotlight.engine.channel.channel import Frame
from pilotlight.engine.channel.device_path import Devices
from pilotlight.engine.channel.tcp import TcpChannel, connect
from pilotlight.engine.cuda.peers import PeerMemory
from pilotlight.engine.kv_pieces import KvPiece
from pilotlight.engine.kv_sharing import KvAsked, ask
from pilotlight.native.device import Device
from pilotlight.policy.ids import InstanceId, NodeId, RequestId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import RequestKey, Sampling
from pilotlight.worker.engine_child import kv_sharing
from pilotlight.worker.engine_child.kv_sharing import KvSharing
from pilotlight.worker.engine_child.neighbours import Neighbours

HOST = "127.0.0.1"
INSTANCE = InstanceId("i")
STAGES = (Stage(0, 2), Stage(2, 4))
LARGE = torch.arange(1 << 18, dtype=torch.int32).view(torch.uint8)
MIB = 1 << 20


@pytest.fixture
def memory() -> Callable[[], PeerMemory]:
    """memory(): of an engine's fake device."""
    fake = fake_cuda()
    fake.reset()
    return lambda: PeerMemory(Device(0, fake.path), torch.device("cpu"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster-key").write_text("a key of this cluster")
    (tmp_path / "cluster-key").chmod(0o600)
    return tmp_path


def until(condition: Callable[[], object]) -> Any:
    """What it gives, once that is something."""
    deadline_s = monotonic() + 30
    while not (found := condition()):
        assert monotonic() < deadline_s
    return found


def joined(folder: Path, *memories: PeerMemory | None) -> list[tuple[TcpChannel, TcpChannel]]:
    """The channels of two stages, each of an engine with its memory."""
    sides = [Neighbours(monotonic, memory) for memory in memories]
    names = [NodeId(f"node {number}") for number in range(2)]
    ports = [
        side.open_door(OpenDoor(node_id=name, host=HOST, secrets_dir=str(folder)))
        for side, name in zip(sides, names, strict=True)
    ]
    for number, side in enumerate(sides):
        behind = StageAddress(
            node_id=names[1 - number], host=HOST, port=ports[1 - number], stage=STAGES[1 - number]
        )
        side.connect(
            ConnectStage(instance_id=INSTANCE, stage=STAGES[number], behind=behind, timeout_s=30.0)
        )
    return [until(side.take)[0].channels for side in sides]


@pytest.mark.parametrize("have", [(True, True), (True, False), (False, False)])
def test_stages_of_one_host_send_from_device_to_device(
    folder: Path, memory: Callable[[], PeerMemory], have: tuple[bool, bool]
) -> None:
    with structlog.testing.capture_logs() as logs:
        ends = joined(folder, *(memory() if one else None for one in have))
        (before, behind), (other_before, other_behind) = ends
        for end in (before, other_before):
            assert not end.readable
        assert [end.carries_device(1.0) for end in (behind, other_behind)] == [all(have)] * 2
        behind.send(Frame(b"hidden", LARGE), 10)
        until(lambda: not behind.readable and other_before.readable)
        frame = other_before.receive(10)
        assert isinstance(frame.payload, torch.Tensor) is all(have)
        assert bytes(frame.in_host) == LARGE.numpy().tobytes()
        for end in (before, behind, other_before, other_behind):
            end.close()
    ways = [line["way"] for line in logs if line.get("action") == "channel_way"]
    assert ways.count("device memory") == (2 if all(have) else 0)
    assert any(way.startswith(f"closed: {LARGE.nbytes} bytes") for way in ways) is all(have)


def test_kv_is_given_from_device_to_device(folder: Path, memory: Callable[[], PeerMemory]) -> None:
    """The engine is told to leave its copies on the device, and they go as they are."""
    asked: list[bool] = []

    class Engine:
        def shared_kv(
            self, instance_id: Any, token_ids: Any, layer: int, *, on_device: bool
        ) -> tuple[Stage, torch.Tensor] | None:
            asked.append(on_device)
            return None if layer else (Stage(0, 4), torch.ones(4, 2, 16, 2, 2))

    side = Neighbours(monotonic, memory())
    command = OpenDoor(node_id=NodeId("gives"), host=HOST, secrets_dir=str(folder))
    address = HOST, side.open_door(command)
    me = Identity(NodeId("asks"), ClusterKey(b"a key of this cluster", CHANNEL_PURPOSE))
    channel = connect(
        address, me, NodeId("gives"), "kv/a/1", monotonic, 30, devices=Devices(memory())
    )
    found: list[tuple[KvPiece, ...]] = []
    question = KvAsked(instance_id=INSTANCE, token_ids=(1, 2))
    key = RequestKey(RequestId("a"), 1)
    thread = threading.Thread(
        target=lambda: found.append(ask(channel, question, key, lambda: 30.0))
    )
    thread.start()
    until(lambda: side.kv.look(Engine()) or not thread.is_alive())
    thread.join(10)
    channel.close()
    assert asked == [True, True]
    assert torch.equal(found[0][0].keys_and_values, torch.ones(4, 2, 16, 2, 2))


def test_what_waits_on_the_device_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come may stay there as far as there is room, which comes back when it is taken."""
    monkeypatch.setattr(kv_sharing, "ASKED_DEVICE_BYTES", 10 * MIB)
    rooms: list[int] = []

    def came(self: Any, run: Run, until_s: float, device_bytes: int) -> tuple[KvPiece, ...]:
        rooms.append(device_bytes)
        # On a device, as far as the count goes.
        tensor = torch.empty(1, 2, 16, 2, 4 * MIB // 64, dtype=torch.uint8, device="meta")
        key = RequestKey(run.request_id, 1)
        return (KvPiece(key=key, layers=Stage(0, 1), start=0, keys_and_values=tensor),)

    monkeypatch.setattr(KvSharing, "_ask", came)
    me = Identity(NodeId("me"), ClusterKey(b"a key", CHANNEL_PURPOSE))
    kv = KvSharing(monotonic, lambda: me, lambda: None)

    def asks(number: int) -> None:
        run = Run(
            request_id=RequestId(str(number)),
            attempt=1,
            instance_id=INSTANCE,
            prompt_ids=[*range(40)],
            output_ids=[],
            sampling=Sampling(seed=0, max_tokens=4),
            kv_at=KvAt(instance_id=INSTANCE, node_id=NodeId("other"), host=HOST, port=1),
        )
        assert kv.asks(run, monotonic())
        until(lambda: len(rooms) > number)

    asks(0)
    asks(1)
    assert rooms == [10 * MIB, 6 * MIB]
    taken = 0
    while taken < 2:
        taken += len(kv.moved())
    asks(2)
    assert rooms[2] == 10 * MIB
    assert until(kv.moved)[0].device_bytes == 4 * MIB
