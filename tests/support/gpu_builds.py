"""Builds of artifacts by a worker's engine children on a GPU, of a small model."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import torch
from gpu_seen import gpu_of
from pool_files import PoolFile

from pilotlight.common.clock import SystemClock
from pilotlight.common.messages.artifacts import ClaimedBuild
from pilotlight.common.messages.graphs import GraphWays
from pilotlight.common.messages.pool import PartReady
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.ids import WorkerId
from pilotlight.policy.materialized import Fingerprint
from pilotlight.worker.build_session import BuildSession
from pilotlight.worker.build_steps import Built, build
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.process import ProcessEngine

BUILD_S = 400.0
ROOM_BYTES = 4 << 30
MakeSession = Callable[..., BuildSession]


class FileSource:
    """Leases parts that all lie in a file."""

    intact = True

    def __init__(self, pool: PoolFile) -> None:
        self._pool = pool
        self._wanted: tuple[int, ...] = ()
        self.pool_path = str(pool.path)

    async def lease(
        self, worker_id: object, instance_id: object, model: object, parts: tuple[int, ...]
    ) -> Any:
        self._wanted = parts
        return self

    async def __aenter__(self) -> "FileSource":
        return self

    async def __aexit__(self, *exception: object) -> None:
        return None

    async def __aiter__(self) -> AsyncIterator[PartReady]:
        for part in self._wanted:
            yield PartReady(part=part, tensors=self._pool.parts[part])


def sessions(index: int, pool: PoolFile, log_path: Path) -> MakeSession:
    """Makes engines on a device, whose processes find what this one does."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    uuid = gpu_of(torch.device("cuda", index)).uuid
    source: Any = FileSource(pool)

    def make(
        *, record_images: bool = False, note_kernels: bool = False, witness: bool = False
    ) -> BuildSession:
        options = ChildOptions(
            threads=2,
            log_path=log_path,
            device=DeviceKind.CUDA,
            cuda_devices=(uuid,),
            device_bytes=ROOM_BYTES,
            record_images=record_images,
            note_kernels=note_kernels,
            witness=witness,
        )
        return BuildSession(ProcessEngine(options), source, WorkerId("worker-1"), SystemClock())

    return make


async def built(make_session: MakeSession, pool: PoolFile, *, ranges: bool = False) -> Built:
    """An artifact, as a worker builds it."""
    session = make_session()
    up = await session.start()
    await session.close()
    assert up.environment is not None
    claimed = ClaimedBuild(
        model=pool.model,
        fingerprint=Fingerprint.of(up.environment, pool.model),
        attempt=1,
        lease_s=60.0,
    )

    async def told(step: str, share: float) -> None:
        return None

    async with asyncio.timeout(BUILD_S):
        return await build(claimed, make_session, told, GraphWays(), ranges=ranges)
