"""The two stages of the pipeline in ``serving.py``, each a process that does as it is told: join,
begin, wait, end.

Both kinds speak over ``Channel`` by TCP, joined as an instance's stages are. ``EngineStage``
computes with our engine on the CPU; ``WaitingStage`` stands in for a device: it waits as long as a
device would compute, and leaves the host's processors alone as one does.
"""

import asyncio
import json
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from children import obey
from netns import address

from pilotlight.checkpoint.config import parse_config
from pilotlight.checkpoint.testing import tiny_config
from pilotlight.common.clock import SystemClock
from pilotlight.common.cluster_key import ClusterKey
from pilotlight.common.handshake import CHANNEL_PURPOSE, Identity
from pilotlight.common.waiting import pause
from pilotlight.engine.channel.channel import Channel, Frame, wait_for_any
from pilotlight.engine.channel.door import Door
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.device.memory import parameter_bytes
from pilotlight.engine.engine import Engine
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.pipeline.joining import NextStage, join
from pilotlight.policy.ids import InstanceId, NodeId, RequestId
from pilotlight.policy.model import Dtype, Stage
from pilotlight.policy.request import Sampling

KEY = ClusterKey(b"the key of the benchmark", CHANNEL_PURPOSE)
PORT = 9778
INSTANCE = InstanceId("bench")
DTYPE = Dtype.BFLOAT16
CONFIG = tiny_config(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=8,
    vocab_size=8192,
    num_attention_heads=16,
    num_key_value_heads=16,
    max_position_embeddings=4096,
)
STAGES = (Stage(0, 4), Stage(4, 8))
KV_TOKENS = 16384
PROMPT_TOKENS = 32
WARM_TOKENS = 16
"""That every request has before anything is measured."""
JOIN_S = 30.0
PAUSE_S = 0.02
SILENCE_S = 60.0
"""After which a stage has lost the other one."""
HIDDEN_BYTES = 2 * 4096
"""Of a token's activations, as an 8B model in bfloat16 has them."""
CLOCK = SystemClock()


class StageProcess(ABC):
    """What both kinds share: the channels, a thread that computes, and when each request's tokens
    came.
    """

    def __init__(self, index: int) -> None:
        self._stage = STAGES[index]
        self._me = identity(index)
        self._following = NextStage(
            identity(1 - index).node_id, (address(1 - index), PORT), STAGES[1 - index]
        )
        self._door = Door(self._me, (address(index), PORT), CLOCK.monotonic_s)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._times: dict[str, list[float]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def join(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Connect to the other stage."""
        channels = await asyncio.to_thread(
            join,
            self._door,
            self._me,
            INSTANCE,
            self._stage,
            self._following,
            CLOCK.monotonic_s,
            JOIN_S,
        )
        self._connected(*channels)
        self._thread.start()
        return {}

    async def begin(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have requests decoded, and come back once all are under way."""
        self._times = {f"{order['run']}.{number}": [] for number in range(order["requests"])}
        for number, request_id in enumerate(self._times):
            self._orders.put(
                lambda request_id=request_id, number=number: self._add(request_id, number)
            )
        while any(len(times) < WARM_TOKENS for times in self._times.values()):
            await pause(PAUSE_S)
        return {}

    async def wait(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Let time pass."""
        await pause(order["seconds"])
        return {}

    async def end(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """End them; when each of their tokens came."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for request_id in self._times:
            self._orders.put(lambda request_id=request_id: self._abort(request_id))
        self._orders.put(lambda: loop.call_soon_threadsafe(ended.set) and None)
        await ended.wait()
        return {"times": list(self._times.values())}

    @abstractmethod
    def _connected(self, before: Channel, behind: Channel) -> None:
        """Take the channels from the stage before and to the one behind it."""

    @abstractmethod
    def _add(self, request_id: str, number: int) -> None:
        """Decode a request from now on. In the thread that computes, as the two below."""

    @abstractmethod
    def _abort(self, request_id: str) -> None:
        """Decode it no longer."""

    @abstractmethod
    def _step(self) -> None:
        """Compute, or wait a little for something to compute."""

    def _run(self) -> None:
        while True:
            while not self._orders.empty():
                self._orders.get()()
            self._step()


class EngineStage(StageProcess):
    """Our engine on the CPU, one thread, with random parameters."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._engine = Engine(1, CLOCK.monotonic_s)
        spec = parse_config(json.dumps(CONFIG).encode(), DTYPE)
        decoder, stage = decoder_of(spec), self._stage
        device_bytes = parameter_bytes(decoder, stage, DTYPE) + KV_TOKENS * spec.kv_bytes_per_token(
            stage, DTYPE
        )
        self._engine.begin_load(INSTANCE, spec, stage, DTYPE, device_bytes)
        for part in spec.parts_of(stage):
            tensors = {
                decoder.prefix(part) + name: (torch.randn(tuple(shape)) * 0.02).to(
                    TORCH_DTYPES[DTYPE]
                )
                for name, shape in decoder.shapes(part).items()
            }
            sources = {
                name: (DTYPE, tuple(tensor.shape), tensor.view(-1).view(torch.uint8).numpy().data)
                for name, tensor in tensors.items()
            }
            self._engine.place_part(INSTANCE, part, sources)

    def _connected(self, before: Channel, behind: Channel) -> None:
        self._engine.connect(INSTANCE, before, behind)

    def _add(self, request_id: str, number: int) -> None:
        prompt = [(number * 37 + at) % CONFIG["vocab_size"] for at in range(PROMPT_TOKENS)]
        sampling = Sampling(
            seed=0,
            max_tokens=CONFIG["max_position_embeddings"] // 2,
            temperature=0.0,
            ignore_eos=True,
        )
        self._engine.add(RequestId(request_id), 1, INSTANCE, prompt, (), sampling)

    def _abort(self, request_id: str) -> None:
        self._engine.abort(RequestId(request_id), 1)

    def _step(self) -> None:
        if not self._engine.has_work:
            self._engine.wait(PAUSE_S)
            return
        result = self._engine.step()
        now_s = CLOCK.monotonic_s()
        if result.lost:
            os._exit(1)
        for produced in result.produced:
            if produced.request_id in self._times:
                self._times[produced.request_id].extend([now_s] * len(produced.token_ids))


class WaitingStage(StageProcess):
    """A device's stand-in: all requests are one batch, which waits ``device_s`` in each stage and
    crosses the wire as activations.
    """

    def __init__(self, index: int, device_s: float) -> None:
        super().__init__(index)
        self._leads = index == 0
        self._device_s = device_s
        self._idle = threading.Event()
        self._active: list[str] = []

    def _connected(self, before: Channel, behind: Channel) -> None:
        self._before, self._behind = before, behind

    def _add(self, request_id: str, number: int) -> None:
        self._active.append(request_id)

    def _abort(self, request_id: str) -> None:
        self._active.remove(request_id)

    def _step(self) -> None:
        if self._leads and self._active:
            self._idle.wait(self._device_s)
            self._behind.send(
                Frame(b"hidden", memoryview(bytes(HIDDEN_BYTES * len(self._active)))), SILENCE_S
            )
            self._before.receive(SILENCE_S)
            now_s = CLOCK.monotonic_s()
            for request_id in self._active:
                self._times[request_id].append(now_s)
        elif not self._leads and self._before.readable:
            hidden = self._before.receive(SILENCE_S)
            self._idle.wait(self._device_s)
            self._behind.send(
                Frame(b"sampled", hidden.payload[: len(hidden.payload) // HIDDEN_BYTES * 4]),
                SILENCE_S,
            )
        else:
            wait_for_any((self._before,), PAUSE_S)


def identity(index: int) -> Identity:
    """Of a node."""
    return Identity(NodeId(f"n{index}"), KEY)


async def serve_stage(index: int, device_s: float | None) -> None:
    """One stage; ``device_s`` is what the stand-in for a device takes for a batch, None: our engine
    on the CPU.
    """
    stage = EngineStage(index) if device_s is None else WaitingStage(index, device_s)
    await obey({"join": stage.join, "begin": stage.begin, "wait": stage.wait, "end": stage.end})
    os._exit(0)
