"""What an engine does with the host pool, with every byte looked at: it leases a model as a worker
does, and hashes what it is given.
"""

import asyncio
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3
from safetensors import deserialize

from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import PilotlightError
from pilotlight.common.messages.pool import PartReady
from pilotlight.dataplane.pool_client import PoolClient, PoolLease
from pilotlight.policy.ids import InstanceId, WorkerId
from pilotlight.policy.model import Model

RIGHT = "right"

Expected = Mapping[str, bytes]
"""The digest of each tensor's bytes, by its name."""


def expected_of(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """What a checkpoint's files hold, as the safetensors library reads them."""
    found: dict[str, bytes] = {}
    for name, content in files.items():
        if name.endswith(".safetensors"):
            found.update(
                (tensor, blake3(told["data"]).digest()) for tensor, told in deserialize(content)
            )
    return found


@dataclass
class EngineRead:
    """What came of it."""

    outcome: str = ""
    """``right``, or the code of the error that it ended with."""
    message: str = ""
    parts: int = 0
    wrong: list[str] = field(default_factory=list[str])
    """Parts that were given to it and were not what they should be."""
    places: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Offset in the pool's file and size, of each tensor that was given."""
    pool_path: str = ""
    seconds: float = 0.0


async def read_model(
    socket: Path, name: str, model: Model, expected: Expected, *, grace_s: float
) -> EngineRead:
    """Lease a whole model, look at each part as it comes, and at all of them again before the lease
    is given back.
    """
    read, client = EngineRead(), PoolClient(socket, SystemClock(), grace_s=grace_s)
    parts = tuple(range(len(model.spec.part_bytes)))
    try:
        async with await client.lease(
            WorkerId(f"{name}-w0"), InstanceId(f"i-{name}"), model, parts
        ) as lease:
            await _read(lease, expected, read)
    except PilotlightError as error:
        read.outcome, read.message = error.code, error.message
    return read


async def _read(lease: PoolLease, expected: Expected, read: EngineRead) -> None:
    read.pool_path = lease.pool_path
    descriptor = os.open(lease.pool_path, os.O_RDONLY)
    try:
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    try:
        given: list[PartReady] = []
        async for part in lease:
            given.append(part)
            read.parts += 1
            read.places.update(
                {place.name: (place.offset, place.size_bytes) for place in part.tensors}
            )
            read.wrong += [
                f"part {part.part}: {why}"
                for why in await asyncio.to_thread(_wrong, mapped, part, expected)
            ]
        if read.places.keys() != expected.keys():
            read.wrong.append(
                f"tensors {sorted(expected.keys() ^ read.places.keys())} are missing or too many"
            )
        again = [
            why for part in given for why in await asyncio.to_thread(_wrong, mapped, part, expected)
        ]
        if lease.intact:
            read.wrong += [f"under the lease: {why}" for why in again]
            read.outcome = RIGHT
        else:
            read.outcome = "source_unavailable"
            read.message = "the lease was lost"
    finally:
        with suppress(BufferError):
            mapped.close()


def _wrong(mapped: mmap.mmap, part: PartReady, expected: Expected) -> list[str]:
    found: list[str] = []
    with memoryview(mapped) as view:
        for place in part.tensors:
            with view[place.offset : place.offset + place.size_bytes] as data:
                if blake3(data).digest() != expected.get(place.name):
                    found.append(f"{place.name} has other bytes")
    return found
