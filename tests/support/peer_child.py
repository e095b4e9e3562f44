"""An engine's process with one device, joined to another one of the same host, and the pair of
them.

``python peer_child.py ROLE OPTIONS``, the options in JSON: ``driver`` is that of a fake device,
empty for CUDA's. Each says at which port its door is, reads the other one's, and says at last what
it found; all of it in lines of JSON.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

import torch
from channel_ends import HERE, HOST, THERE
from peer_lending import borrows, lends
from random_models import random_parts, source_of, spec_of

from pilotlight.engine.channel import device_path
from pilotlight.engine.channel.channel import Frame, wait_for_any
from pilotlight.engine.channel.device_path import Devices
from pilotlight.engine.channel.door import Door
from pilotlight.engine.channel.tcp import TcpChannel, connect
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.peers import PeerMemory
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.device.memory import parameter_bytes
from pilotlight.engine.engine import Engine
from pilotlight.engine.errors import PeerLost
from pilotlight.engine.kv_sharing import KvAsked, answer, ask
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.pipeline import borrowing, frames
from pilotlight.engine.pipeline.frames import KvCopied, header_of, pack, tensor_of, unpack
from pilotlight.engine.pipeline.joining import NextStage, join
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype, Stage
from pilotlight.policy.request import RequestKey, Sampling

INSTANCE, WHOLE = InstanceId("i"), InstanceId("whole")
KIND, DTYPE, KV_TOKENS, LEAD = "llama", Dtype.FLOAT32, 2048, Stage(0, 1)
PROMPTS = (5, 40, 17, 130)
MAX_TOKENS = 60
DEADLINE_S = 150
SHAPES = ((1,), (3, 5), (257, 129), (1 << 20,), (2, 3, 5, 7 * 11 * 13 * 17))
LAST = (Dtype.BFLOAT16, (1 << 22,), 99)
NOTHING = memoryview(b"")


class Child:
    """One of the two processes."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.ways: list[str] = []
        driver = options.get("driver", "")
        if driver:
            self.device = torch.device("cpu")
            self.arena = CudaArena(
                0, num_slots=2, slot_bytes=32 << 30, driver=driver, device=self.device
            )
            frames.on_device = lambda tensor: True
        else:
            self.device = torch.device("cuda", 0)
            torch.zeros(1, device=self.device)
            self.arena = CudaArena(0)
        # A granule has room for thousands of the small models' tokens.
        self.arena.whole_granules = False
        device_path.LEAST_BYTES = 1
        borrowing.PATIENCE_S = DEADLINE_S  # Kernels may be compiled meanwhile.
        self.devices = Devices(PeerMemory(self.arena.native, self.device), self.ways.append)
        self.me = HERE if options["first"] else THERE
        self.other = THERE if options["first"] else HERE
        self.door = Door(self.me, (HOST, 0), monotonic, devices=self.devices)
        print(json.dumps({"port": self.door.port}), flush=True)
        self.at: tuple[str, int] = (HOST, json.loads(sys.stdin.readline())["port"])

    def connects(self, about: str, *, on_device: bool = True) -> TcpChannel:
        devices = self.devices if on_device else None
        return connect(self.at, self.me, self.other.node_id, about, monotonic, 30, devices=devices)

    def engine(self) -> Engine:
        return Engine(1, monotonic, BatchLimits(step_tokens=200, running=12), self.arena)

    def load(self, engine: Engine, instance: InstanceId, stage: Stage | None = None) -> None:
        stage = stage or SPEC.whole
        room = engine.begin_load(instance, SPEC, stage, DTYPE, bytes_of(stage))
        for part in room.parts:
            engine.place_part(instance, part, PARTS[part])


SPEC = spec_of(KIND, DTYPE)
PARTS = [
    {name: source_of(tensor) for name, tensor in tensors.items()}
    for tensors in random_parts(SPEC, 3)
]


def bytes_of(stage: Stage) -> int:
    kv_bytes = KV_TOKENS * SPEC.kv_bytes_per_token(stage, DTYPE)
    return parameter_bytes(decoder_of(SPEC), stage, DTYPE) + kv_bytes


def add(engine: Engine, instance: InstanceId) -> None:
    for number, length in enumerate(PROMPTS):
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(SPEC.vocab_size, (length,), generator=generator).tolist()
        sampling = Sampling(seed=number, max_tokens=MAX_TOKENS, temperature=0.0)
        name = RequestId(f"{instance}/{number}")
        engine.add(name, 1, instance, prompt, (), sampling)


def run(engine: Engine, done: Callable[[dict[str, list[int]]], bool]) -> dict[str, list[int]]:
    """Steps until it holds of the tokens by request."""
    return step(engine, {}, done)


def step(
    engine: Engine, tokens: dict[str, list[int]], done: Callable[[dict[str, list[int]]], bool]
) -> dict[str, list[int]]:
    deadline_s = monotonic() + DEADLINE_S
    while not done(tokens):
        assert monotonic() < deadline_s, tokens
        engine.wait(0.01)
        result = engine.step()
        assert not result.lost, result.lost
        for produced in result.produced:
            assert not produced.code, produced
            tokens.setdefault(produced.request_id, []).extend(produced.token_ids)
    return tokens


def have(number: int, instance: InstanceId, tokens: dict[str, list[int]]) -> bool:
    return all(len(tokens.get(f"{instance}/{each}", ())) >= number for each in range(len(PROMPTS)))


# Payloads: bit for bit, and how fast.


def payload_of(dtype: Dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits: those of NaNs, too."""
    count = torch.Size(shape).numel() * dtype.size_bytes
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(256, (count,), generator=generator, dtype=torch.uint8)
    return row.view(TORCH_DTYPES[dtype]).view(shape)


def all_payloads() -> list[torch.Tensor]:
    dtypes = (Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32)
    pairs = [(dtype, shape) for dtype in dtypes for shape in SHAPES]
    return [payload_of(dtype, shape, seed) for seed, (dtype, shape) in enumerate(pairs)]


def sends(child: Child) -> dict[str, Any]:
    channel = child.connects("bits")
    channel.offer_device()
    carries = channel.carries_device(30)
    for number, payload in enumerate(all_payloads()):
        tensor = payload.to(child.device)
        header = KvCopied(layer=number, blocks=(), tensor=header_of(tensor))
        channel.send(pack(header, tensor), 30)
    channel.receive(60)  # It has taken all of them.
    channel.close()
    found = [
        {"way": "device" if on_device else "host", "bytes": size, "gb_per_s": speed}
        for on_device in (True, False)
        for size, count in child.options["sizes"]
        for speed in [_speed(child, size, count, on_device=on_device)]
    ]
    return {"carries": carries, "speeds": found}


def _speed(child: Child, size: int, count: int, *, on_device: bool) -> float:
    channel = child.connects(f"speed {size} {on_device}", on_device=on_device)
    channel.offer_device()
    assert channel.carries_device(30) is on_device
    payload = torch.randint(256, (size,), dtype=torch.uint8).to(child.device)
    for _ in range(2):  # The first ones find nothing allocated.
        channel.send(Frame(b"", frames.bytes_of(payload)), 60)
    channel.receive(60)
    began_s = monotonic()
    for _ in range(count):
        channel.send(Frame(b"", frames.bytes_of(payload)), 60)
    channel.receive(60)
    took_s = monotonic() - began_s
    channel.close()
    return round(count * size / took_s / 1e9, 3)


def takes(child: Child) -> dict[str, Any]:
    channel = child.door.accept("bits", 60)
    wrong, on_host = [], 0
    for number, payload in enumerate(all_payloads()):
        frame = channel.receive(60)
        header = unpack(frame)
        assert isinstance(header, KvCopied)
        assert header.layer == number
        tensor = tensor_of(frame, header.tensor)
        on_host += not isinstance(frame.payload, torch.Tensor) or tensor.device != child.device
        row, expected = (each.cpu().view(-1).view(torch.uint8) for each in (tensor, payload))
        if tensor.shape != payload.shape or not torch.equal(row, expected):
            wrong.append(number)
    channel.send(Frame(b"", NOTHING), 30)
    for on_device in (True, False):
        for size, count in child.options["sizes"]:
            speeds = child.door.accept(f"speed {size} {on_device}", 60)
            for frames_until in (2, count):
                for _ in range(frames_until):
                    payload = speeds.receive(60).payload
                    if not isinstance(payload, torch.Tensor):  # As a stage would use it.
                        torch.frombuffer(payload, dtype=torch.uint8).to(child.device)
                if child.device.type == "cuda":
                    torch.cuda.synchronize()
                speeds.send(Frame(b"", NOTHING), 30)
    return {"wrong": wrong, "on_host": on_host, "payloads": len(all_payloads())}


def vanishes(child: Child) -> dict[str, Any]:
    """Sends, and is gone without a word: nothing is unmapped here."""
    channel = child.connects("last words")
    channel.offer_device()
    carries = channel.carries_device(30)
    channel.send(Frame(b"", frames.bytes_of(payload_of(*LAST).to(child.device))), 30)
    print(json.dumps({"carries": carries}), flush=True)
    os._exit(0)


def remains(child: Child) -> dict[str, Any]:
    channel = child.door.accept("last words", 60)
    deadline_s = monotonic() + 60
    while not channel.lost:
        assert monotonic() < deadline_s
        wait_for_any([channel], 0.1)
    payload = channel.receive(0).payload
    assert isinstance(payload, torch.Tensor)
    equal = torch.equal(payload.cpu(), payload_of(*LAST).view(-1).view(torch.uint8))
    channel.close()
    return {"equal": equal}


# A pipeline, and its consolidation.


def joined(child: Child, mine: Stage, following: Stage) -> tuple[TcpChannel, TcpChannel]:
    behind = NextStage(child.other.node_id, child.at, following)
    return join(child.door, child.me, INSTANCE, mine, behind, monotonic, 60, child.devices)


def leads(child: Child) -> dict[str, Any]:
    rest = Stage(LEAD.stop, SPEC.num_layers)
    engine = child.engine()
    child.load(engine, WHOLE)
    add(engine, WHOLE)
    expected = run(engine, partial(have, MAX_TOKENS, WHOLE))
    engine.unload(WHOLE)
    child.load(engine, INSTANCE, LEAD)
    engine.connect(INSTANCE, *joined(child, LEAD, rest))
    tokens = run(engine, lambda tokens: engine.serves(INSTANCE))
    add(engine, INSTANCE)
    step(engine, tokens, partial(have, 20, INSTANCE))
    in_pipeline = sum(map(len, tokens.values()))
    room = engine.extend(INSTANCE, SPEC.whole, bytes_of(SPEC.whole))
    left = [part for part in room.parts if part not in SPEC.parts_of(LEAD)]
    by_device: list[int] = []
    reasons: list[str] = []

    def offer(_: dict[str, list[int]]) -> bool:
        if left and not (placed := engine.place_part(INSTANCE, left[0], PARTS[left[0]])).waits:
            by_device.append(placed.by_device_bytes)
            reasons.append(placed.why)
            del left[0]
        return not left

    step(engine, tokens, offer)
    step(
        engine,
        tokens,
        # On a fast device the last token may come before the pipeline is over.
        lambda tokens: have(MAX_TOKENS, INSTANCE, tokens) and not engine.channels,
    )
    wrong = [
        number
        for number in range(len(PROMPTS))
        if tokens[f"{INSTANCE}/{number}"] != expected[f"{WHOLE}/{number}"]
    ]
    alone = not engine.channels
    parts = {"by_device": by_device, "reasons": reasons}
    told = {"wrong": wrong, "alone": alone, "in_pipeline": in_pipeline, "ways": child.ways}
    return {**told, **parts}


def follows(child: Child) -> dict[str, Any]:
    rest = Stage(LEAD.stop, SPEC.num_layers)
    engine = child.engine()
    child.load(engine, INSTANCE, rest)
    before, behind = joined(child, rest, LEAD)
    engine.connect(INSTANCE, before, behind)
    left, deadline_s = False, monotonic() + DEADLINE_S
    while not left:
        assert monotonic() < deadline_s
        result = engine.step() if engine.has_work else None
        if result is None:
            wait_for_any(engine.channels, 0.05)
            continue
        assert not result.lost, result.lost
        left = bool(result.left)
    return {"ways": child.ways}


# KV by its tokens.


def gives(child: Child) -> dict[str, Any]:
    engine = child.engine()
    child.load(engine, INSTANCE)
    add(engine, INSTANCE)
    tokens = run(engine, partial(have, MAX_TOKENS, INSTANCE))
    channel = child.door.accept("kv", 60)
    channel.offer_device()

    def find(asked: KvAsked, layer: int) -> Any:
        on_device = channel.carries_device(30)
        return engine.shared_kv(INSTANCE, asked.token_ids, layer, on_device=on_device)

    with suppress(PeerLost):  # Who asks hangs up when it has all.
        answer(channel, find, 60)
    channel.close()
    return {"tokens": tokens[f"{INSTANCE}/3"], "ways": child.ways}


def asks(child: Child) -> dict[str, Any]:
    engine = child.engine()
    child.load(engine, INSTANCE)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(SPEC.vocab_size, (PROMPTS[3],), generator=generator).tolist()
    channel = child.connects("kv")
    asked, key = KvAsked(instance_id=INSTANCE, token_ids=tuple(prompt)), RequestKey("moved", 1)
    pieces = ask(channel, asked, key, lambda: 60.0, 1 << 30)
    channel.close()
    sampling = Sampling(seed=3, max_tokens=MAX_TOKENS, temperature=0.0)
    engine.add(RequestId("moved"), 1, INSTANCE, prompt, (), sampling, pieces=pieces)
    tokens = run(engine, lambda tokens: len(tokens.get("moved", ())) == MAX_TOKENS)
    devices = sorted({piece.keys_and_values.device.type for piece in pieces})
    stop = min((piece.stop for piece in pieces), default=0)
    return {"tokens": tokens["moved"], "kv_tokens": stop, "devices": devices}


ROLES = {
    one.__name__: one
    for one in (sends, takes, vanishes, remains, leads, follows, gives, asks, lends, borrows)
}

if __name__ == "__main__":
    child = Child(json.loads(sys.argv[2]))
    print(json.dumps(ROLES[sys.argv[1]](child)), flush=True)
    child.door.close()
