"""The device of an engine child: its arena, and what it is worth.

Everything that differs between cores and a GPU at a child's start.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog
import torch

from pilotlight.common.clock import Clock
from pilotlight.common.errors import NoRoom
from pilotlight.engine.channel.device_path import DeviceMemory
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.device.arena import ARENA_ADDRESS, CpuArena
from pilotlight.engine.device.arena_protocol import Arena
from pilotlight.policy.cluster import DeviceKind
from pilotlight.worker.engine_child.pins import HeldSlabs, PinnedSlabs, Pins
from pilotlight.worker.engine_child.warmup import CPU_PROBE, CUDA_PROBE, Probe

if TYPE_CHECKING:
    from pilotlight.native.started import NativeStart

log = structlog.get_logger()

PROBE_BYTES = 32 * 1024 * 1024
"""Bytes that are copied to learn how fast parts can be placed: more than the caches hold."""
MEMORY_PROBE_BYTES, MEMORY_PROBES = 128 * 1024 * 1024, 8
"""Bytes that are copied within a device to learn how fast it reads: more than its caches hold."""
CORES_PROBES = 2
"""The same of cores, with ``PROBE_BYTES``."""
CUDA_STEP_TOKENS = 10_240
"""Tokens of a forward pass on a GPU: what keeps it busy, and so many that few steps of those that
run are stretched by prompts (decision 35)."""
CUDA_CHUNK_TOKENS = 2048
"""Of one prompt in a step of requests that run (decisions 56, 119): an 8B model takes 46 ms for
them on an H200."""
CUDA_GATHER_S = 0.010
"""How long prompts that come one after the other wait for each other; about two steps of a large
batch."""
CUDA_ENDING_S = 0.100
"""How long prompts wait for a large batch that is about to end: some 15 of its steps, for so many
apart do the answers of a wave end (decision 108)."""
FIXED_RESERVE_BYTES = 1 << 30
"""Of a GPU's memory, what is not for models: kernels, libraries' workspaces, graphs."""
RESERVE_SHARE = 0.02
"""As much more of all of it: what the driver rounds and spreads."""
STEP_TOKEN_BYTES = 256 * 1024
"""What a token of a forward pass takes at once between two layers, in a model with a hidden size of
8,192 and rows of 28,672 in its MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDevice:
    """A device that is ready for an engine."""

    arena: Arena
    name: str
    load_bytes_per_s: float
    limits: BatchLimits
    probe: Probe
    """The model that warms it up."""
    device_bytes: int = 0
    """Memory for models, if the device says so itself; else 0."""
    pins: Pins | None = None
    """Where the device reads the host pool itself."""
    peer_memory: DeviceMemory | None = None
    """What of it other engines of the host can map."""
    memory_bytes_per_s: float = 0.0
    """What it reads of its own memory; 0: not measured."""
    beside_bytes: int = 0
    """As in ``EngineUp``."""


def open_device(
    kind: DeviceKind,
    threads: int,
    step_tokens: int | None,
    device_bytes: int | None,
    clock: Clock,
    *,
    witness: bool = False,
    started: "NativeStart | None" = None,
) -> OpenDevice:
    """The child's one device.

    Args:
        kind: cores or a GPU.
        threads: that compute.
        step_tokens: most tokens of a forward pass; what fits the device, if None.
        device_bytes: memory for models; what the device has, if None. Cores have no limit of their
            own.
        clock: for measurements.
        witness: a GPU's arena lies where no other process has it.
        started: what of a GPU's start is done already.

    Raises:
        EngineFailed: there is no such device, or it cannot be used; an error of the engine.
        NoRoom: it has less memory than an engine needs for itself.
    """
    if kind is DeviceKind.CUDA:
        limits = replace(
            _limits(step_tokens or CUDA_STEP_TOKENS),
            gather_s=CUDA_GATHER_S,
            ending_s=CUDA_ENDING_S,
            chunk_tokens=CUDA_CHUNK_TOKENS,
            keep_promises=True,
        )
        return _open_cuda(limits, device_bytes, clock, witness=witness, started=started)
    filled_bytes_per_s, read_bytes_per_s = _host_bytes_per_s(threads, clock)
    return OpenDevice(
        arena=CpuArena(address=ARENA_ADDRESS),
        name=f"cpu ({threads} threads)",
        load_bytes_per_s=filled_bytes_per_s,
        limits=_limits(step_tokens) if step_tokens else BatchLimits(),
        probe=CPU_PROBE,
        memory_bytes_per_s=read_bytes_per_s,
    )


def reserve_bytes(memory_bytes: int, step_tokens: int) -> int:
    """Of a GPU's memory, what models do not get: declared, not measured; an engine that runs out of
    it ends the request that wanted it.
    """
    return FIXED_RESERVE_BYTES + int(RESERVE_SHARE * memory_bytes) + step_tokens * STEP_TOKEN_BYTES


def _open_cuda(
    limits: BatchLimits,
    device_bytes: int | None,
    clock: Clock,
    *,
    witness: bool,
    started: "NativeStart | None",
) -> OpenDevice:
    # Only here: it needs the native library, and later triton.
    from pilotlight.engine.cuda.arena import ADDRESSES, WITNESS_ADDRESSES, CudaArena
    from pilotlight.engine.cuda.peers import PeerMemory
    from pilotlight.worker.engine_child.started import checked

    torch.cuda.init()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if started is not None:
        started = checked(started, device)
    addresses = WITNESS_ADDRESSES if witness else ADDRESSES
    arena = CudaArena(0, addresses=addresses, started=started)
    name = torch.cuda.get_device_name(device)
    free_bytes, memory_bytes = arena.native.memory()
    if arena.started is not None:
        # What was begun is this engine's own, as it would be without it.
        free_bytes = arena.started.free_bytes
    reserved = reserve_bytes(memory_bytes, limits.step_tokens)
    room_bytes = device_bytes or free_bytes - reserved
    if room_bytes <= 0:
        raise NoRoom(
            f"{name} has {free_bytes} bytes free, and an engine keeps {reserved} for itself"
        )
    # What captured steps read and write lies in the arena, too, and is no model's by its grant.
    arena.capacity_bytes = room_bytes + FIXED_RESERVE_BYTES
    if room_bytes > free_bytes - reserved:
        log.warning(
            "models get more than the device has for them",
            action="device_bytes_beyond",
            device_bytes=room_bytes,
        )
    if not witness and not arena.canonical:
        log.warning(
            "the arena is not where artifacts expect it",
            action="arena_elsewhere",
            address=hex(arena.address),
        )
    return OpenDevice(
        arena=arena,
        name=name,
        load_bytes_per_s=_pinned_bytes_per_s(device, clock),
        limits=limits,
        probe=CUDA_PROBE,
        device_bytes=room_bytes,
        pins=Pins(lambda pool, slab_bytes: _slabs(arena, pool, slab_bytes), held_of=_held),
        peer_memory=PeerMemory(arena.native, device),
        memory_bytes_per_s=_memory_bytes_per_s(device, clock),
        # What is for no models, and not this engine's own either, is there for another one first.
        beside_bytes=max(0, reserved - max(0, free_bytes - reserved - room_bytes)),
    )


def _slabs(arena: Arena, pool: memoryview, slab_bytes: int) -> PinnedSlabs:
    from pilotlight.engine.cuda.arena import CudaArena
    from pilotlight.engine.cuda.stream import PinnedSlabs as CudaSlabs

    assert isinstance(arena, CudaArena)
    return CudaSlabs(arena.copier, pool, slab_bytes)


def _held(pool: memoryview, slab_bytes: int) -> HeldSlabs | None:
    # Only here, and so when the engine has nothing to do: no start waits for it.
    from pilotlight.dataplane.pool_slabs import PoolSlabs

    return PoolSlabs.of(pool, slab_bytes)


def _limits(step_tokens: int) -> BatchLimits:
    return BatchLimits(step_tokens=step_tokens, running=min(BatchLimits().running, step_tokens))


def _host_bytes_per_s(threads: int, clock: Clock) -> tuple[float, float]:
    """How fast one thread fills memory that is new, and what the engine's threads read of memory
    together while they copy within it: no less, so that a busy moment does not make it so.
    """
    source = bytearray(PROBE_BYTES)
    target = bytearray(PROBE_BYTES)

    def copy() -> None:
        target[:] = source

    filled_bytes_per_s = _bytes_per_s(copy, clock)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    one, other = (torch.frombuffer(each, dtype=torch.uint8) for each in (source, target))
    one.copy_(other)  # What was never written is nowhere.
    start_s = clock.monotonic_s()
    for _ in range(CORES_PROBES):
        other.copy_(one)
    took_s = max(1e-6, clock.monotonic_s() - start_s)
    torch.set_num_threads(before)
    # Reads and writes share the rate, as on a GPU.
    return filled_bytes_per_s, max(filled_bytes_per_s, 2 * CORES_PROBES * PROBE_BYTES / took_s)


def _pinned_bytes_per_s(device: torch.device, clock: Clock) -> float:
    source = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    copy()  # The first one pays for more than the copy.
    return _bytes_per_s(copy, clock)


def _memory_bytes_per_s(device: torch.device, clock: Clock) -> float:
    """What the device reads of its memory while it copies within it: half a millisecond."""
    source = torch.empty(MEMORY_PROBE_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize(device)
    start_s = clock.monotonic_s()
    for _ in range(MEMORY_PROBES):
        target.copy_(source)
    torch.cuda.synchronize(device)
    took_s = max(1e-6, clock.monotonic_s() - start_s)
    del source, target
    torch.cuda.empty_cache()  # What is freed is for models.
    # Reads and writes share the rate; what only reads has nearly all of it.
    return 2 * MEMORY_PROBES * MEMORY_PROBE_BYTES / took_s


def _bytes_per_s(copy: Callable[[], None], clock: Clock) -> float:
    start_s = clock.monotonic_s()
    copy()
    return PROBE_BYTES / max(1e-6, clock.monotonic_s() - start_s)
