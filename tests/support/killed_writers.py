"""Processes that write for ever and are killed at some instant: forked from a process that has
imported everything already.
"""

import contextlib
import itertools
import mmap
import os
import random
import select
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from blake3 import blake3

from pilotlight.checkpoint.digests import chunk_digest
from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import Conflict, HostPoolFull
from pilotlight.dataplane.disk_tier import DiskTier, Unwritten
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_images import PartImage
from pilotlight.policy.ids import Digest, Epoch

_context = get_context("forkserver")
_context.set_forkserver_preload(["killed_writers", "pytest"])
START_S = 60.0
END_S = 60.0

DISK_SIZES = (64, 5000, 20_000)
DISK_CONTENTS = 200


def started(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process that runs a function of this module; returns as it begins."""
    ready, says = _context.Pipe(duplex=False)
    process = _context.Process(target=_run, args=(says, target, *arguments), daemon=True)
    path = os.environ.get("PYTHONPATH")
    # The server, which the first process starts, finds what it imports beforehand only so.
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        process.start()
    finally:
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)
    says.close()
    assert ready.poll(START_S), "it has not begun in time"
    ready.close()
    return process


def _run(says: Connection, target: Callable[..., None], *arguments: Any) -> None:
    says.send_bytes(b"ready")
    says.close()
    target(*arguments)


def killed(process: BaseProcess, after_s: float) -> bool:
    """Kill it after so long; whether it was still running, as it should be."""
    process.join(after_s)
    running = process.is_alive()
    process.kill()
    process.join(END_S)
    process.close()  # It says so, if the process is still there.
    return running


def disk_content(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def store_for_ever(folder: Path, limit_bytes: int, seed: int) -> None:
    """What a loader's disk tier does all day."""
    tier = DiskTier(folder, limit_bytes, SystemClock(), lambda event: None)
    tier.open()
    rng = random.Random(seed)
    while True:
        content = disk_content(rng.randrange(DISK_CONTENTS), rng.choice(DISK_SIZES))
        with contextlib.suppress(Unwritten):
            pieces = (
                memoryview(content)[start : start + 500] for start in range(0, len(content), 500)
            )
            tier.write(chunk_digest(content), len(content), pieces)


POOL_BYTES = 4 * 1024 * 1024
POOL_CHUNK_BYTES = 16 * 1024
POOL_PARTS = 6
LEASED = 0
"""The model under a lease: it is not given up."""


def pool_digest(model: int) -> Digest:
    return Digest(f"{model:02x}" * 32)


def pool_chunk(model: int, part: int, index: int) -> bytes:
    """The bytes of a chunk, by where it belongs."""
    return blake3(f"{model} {part} {index}".encode()).digest(POOL_CHUNK_BYTES)


def pool_chunks(model: int, part: int) -> int:
    return 1 + (model * 5 + part * 3) % 7


def fill_part(pool: HostPool, image: PartImage, model: int) -> None:
    """The next chunk of an image, of which something else comes first."""
    index = image.entered
    start = index * POOL_CHUNK_BYTES
    content = pool_chunk(model, image.part, index)
    pool.write(image, start, memoryview(content[::-1]))
    pool.write(image, start, memoryview(content))
    pool.enter_chunk(image, (start, start + POOL_CHUNK_BYTES), chunk_digest(content))


def raise_epoch_for_ever(path: Path) -> None:
    """What a loader does when leaders follow one another, faster than they do."""
    pool = HostPool.open(path, POOL_BYTES, SystemClock())
    for epoch in itertools.count(pool.highest_epoch + 1):
        pool.raise_epoch(Epoch(epoch))


def use_pool_for_ever(path: Path, noted: Path, seed: int) -> None:
    """What a loader does to its pool all day: several fetches at a time, copies that are dropped,
    epochs.

    In the file ``noted`` a byte for each part says whether it was ready for sure; the first eight
    are the epoch.
    """
    rng, pool = random.Random(seed), HostPool.open(path, POOL_BYTES, SystemClock())
    filling: dict[PartImage, int] = {}
    with noted.open("r+b") as file, mmap.mmap(file.fileno(), 0) as note:
        while True:
            model, part = rng.randrange(12), rng.randrange(POOL_PARTS)
            match rng.randrange(10):
                case 0 | 1:
                    chunks = pool_chunks(model, part)
                    with contextlib.suppress(HostPoolFull, Conflict):
                        filling[
                            pool.reserve(
                                pool_digest(model), part, chunks * POOL_CHUNK_BYTES, chunks
                            )
                        ] = model
                case 2 if filling:
                    image = rng.choice(list(filling))
                    del filling[image]
                    pool.discard(image)
                case 3 if model != LEASED:
                    note[noted_at(model, 0) : noted_at(model, POOL_PARTS)] = bytes(POOL_PARTS)
                    pool.drop(pool_digest(model))
                case 4:
                    pool.raise_epoch(Epoch(pool.highest_epoch + 1))
                    note[:8] = pool.highest_epoch.to_bytes(8, "little")
                case _ if filling:
                    image = rng.choice(list(filling))
                    fill_part(pool, image, filling[image])
                    if image.ready:
                        note[noted_at(filling.pop(image), image.part)] = 1


def noted_at(model: int, part: int) -> int:
    return 8 + model * POOL_PARTS + part


NOTED_BYTES = 8 + 12 * POOL_PARTS


def read_leased_for_ever(path: Path, places: dict[int, int], reads: Path) -> None:
    """What a worker does: it maps the pool once, and reads the parts of its lease, under whichever
    loader; ends when one has changed.
    """
    expected = {
        part: b"".join(
            pool_chunk(LEASED, part, index) for index in range(pool_chunks(LEASED, part))
        )
        for part in places
    }
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for count in itertools.count():
            for part, offset in places.items():
                if mapped[offset : offset + len(expected[part])] != expected[part]:
                    sys.exit(f"part {part} has changed under its lease")
            if count == 100:
                reads.touch()
            # The other processes need the machine, too.
            select.select((), (), (), 0.002)
