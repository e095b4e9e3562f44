"""A stage in a process of its own: reads its parts from a folder, joins a pipeline over sockets,
and gives KV to each peer that asks.

``python stage_child.py FOLDER START STOP CONTROL_FD BEFORE_FD BEHIND_FD``: a frame on CONTROL_FD
names a request; the answer is a frame for each piece of its KV, and an empty one. Without the last
two the stage listens on TCP: it prints its port, and reads from its input which stage follows, and
at which port.
"""

import mmap
import socket
import sys
from pathlib import Path
from time import monotonic

import msgspec
from channel_ends import HOST, KEY

from pilotlight.common.handshake import Identity
from pilotlight.engine.channel.channel import Frame, wait_for_any
from pilotlight.engine.channel.door import Door
from pilotlight.engine.channel.unix import UnixChannel
from pilotlight.engine.engine import Engine
from pilotlight.engine.pipeline.frames import KvBlocks, header_of, pack
from pilotlight.engine.pipeline.joining import NextStage, join
from pilotlight.policy.ids import InstanceId, NodeId
from pilotlight.policy.model import Dtype, ModelSpec, Stage
from pilotlight.policy.request import RequestKey

INSTANCE = InstanceId("i")


class StoredTensor(msgspec.Struct):
    dtype: Dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class StoredModel(msgspec.Struct):
    spec: ModelSpec
    parts: dict[int, dict[str, StoredTensor]]


def store(checkpoint, folder: Path) -> None:
    """Writes a checkpoint of the tests to a folder."""
    parts: dict[int, dict[str, StoredTensor]] = {}
    with open(folder / "bytes", "wb") as file:
        for part, tensors in checkpoint.parts.items():
            parts[part] = {}
            for name, (dtype, shape, buffer) in tensors.items():
                start = file.tell()
                file.write(buffer)
                parts[part][name] = StoredTensor(dtype, shape, start, file.tell())
    (folder / "index").write_bytes(msgspec.msgpack.encode(StoredModel(checkpoint.spec, parts)))


def identity(stage: Stage) -> Identity:
    """Each stage is on a node of its own."""
    return Identity(NodeId(f"node of {stage.start}"), KEY)


def follows(stage: Stage, port: int) -> NextStage:
    """A stage whose door is at this port."""
    return NextStage(identity(stage).node_id, (HOST, port), stage)


def connected(stage: Stage):
    """The channels from the stage before and to the one behind."""
    if len(sys.argv) > 5:
        return tuple(UnixChannel(socket.socket(fileno=int(fd)), monotonic) for fd in sys.argv[5:7])
    door = Door(identity(stage), (HOST, 0), monotonic)
    print(door.port, flush=True)
    start, stop, port = map(int, sys.stdin.readline().split())
    channels = join(
        door, identity(stage), INSTANCE, stage, follows(Stage(start, stop), port), monotonic, 30
    )
    door.close()
    return channels


def main() -> None:
    folder, stage = Path(sys.argv[1]), Stage(int(sys.argv[2]), int(sys.argv[3]))
    control = UnixChannel(socket.socket(fileno=int(sys.argv[4])), monotonic)
    before, behind = connected(stage)
    model = msgspec.msgpack.decode((folder / "index").read_bytes(), type=StoredModel)
    with open(folder / "bytes", "rb") as file:
        stored = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    engine = Engine(1, monotonic)
    room = engine.begin_load(INSTANCE, model.spec, stage, model.spec.dtype, 1 << 25)
    for part in room.parts:
        tensors = {
            name: (each.dtype, each.shape, stored[each.start : each.stop])
            for name, each in model.parts[part].items()
        }
        engine.place_part(INSTANCE, part, tensors)
    engine.connect(INSTANCE, before, behind)
    while True:
        while engine.has_work:
            if engine.step().lost:
                return
        if control.readable:
            key = msgspec.msgpack.decode(control.receive(0).header, type=RequestKey)
            for piece in engine.export_kv(INSTANCE, [key], stage):
                tensor = piece.keys_and_values
                header = KvBlocks(
                    key=key, layers=stage, blocks=(), start=piece.start, tensor=header_of(tensor)
                )
                control.send(pack(header, tensor), 10)
            control.send(Frame(b"", memoryview(b"")), 10)
        wait_for_any((before, behind, control), 1.0)


if __name__ == "__main__":
    main()
