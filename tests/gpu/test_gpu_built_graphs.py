"""An artifact with graphs, built by a worker's engine children and restored by another: the tokens
of a child without it; what is wrong with it is refused by name, and the normal path follows.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_files import PoolFile, pool_file

from pilotlight.common.errors import PilotlightError, RestoreFailed
from pilotlight.common.messages.artifacts import ClaimedBuild
from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.common.messages.pool import PartReady
from pilotlight.common.nvml import list_gpus
from pilotlight.policy.builds import needed_bytes
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.ids import WorkerId
from pilotlight.policy.materialized import Artifact, Fingerprint, GraphLayout, Trial
from pilotlight.policy.model import Dtype
from pilotlight.worker.build_session import BuildSession
from pilotlight.worker.build_steps import Built, build
from pilotlight.worker.engines.child_process import ChildOptions
from pilotlight.worker.engines.process import ProcessEngine
from pilotlight.worker.graph_files import GraphFile

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

Record = Callable[[str, object], None]
BUILD_S = 400.0
ROOM_BYTES = 4 << 30
SIZES = 35
BATCHES = (1, 2, 3, 7, 16, 33)


class FileSource:
    """Leases parts that all lie in a file."""

    intact = True

    def __init__(self, pool: PoolFile) -> None:
        self._pool = pool
        self.pool_path = str(pool.path)

    async def lease(self, *arguments: Any, **more: Any) -> Any:
        return self

    async def __aenter__(self) -> "FileSource":
        return self

    async def __aexit__(self, *exception: object) -> None:
        return None

    async def __aiter__(self) -> AsyncIterator[PartReady]:
        for part, tensors in self._pool.parts.items():
            yield PartReady(part=part, tensors=tensors)


MakeSession = Callable[..., BuildSession]


@pytest.fixture
def pool(tmp_path: Path) -> PoolFile:
    """In float32: requests that come in another order make batches of other shapes."""
    return pool_file(tmp_path / "pool", "qwen3", Dtype.FLOAT32, 3)


@pytest.fixture
def make_session(
    device: torch.device, pool: PoolFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MakeSession:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    uuid = list_gpus()[device.index].uuid
    source: Any = FileSource(pool)

    def make(*, record_images: bool = False) -> BuildSession:
        options = ChildOptions(
            threads=2,
            log_path=tmp_path / "child.log",
            device=DeviceKind.CUDA,
            cuda_devices=(uuid,),
            device_bytes=ROOM_BYTES,
            record_images=record_images,
        )
        return BuildSession(ProcessEngine(options), source, WorkerId("worker-1"))

    return make


async def built(make_session: MakeSession, pool: PoolFile) -> Built:
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
        return await build(claimed, make_session, told, graphs=True)


async def outputs(
    session: BuildSession, pool: PoolFile, manifest: bytes = b"", archive: bytes | None = None
) -> list[list[int]]:
    """What batches of several sizes give in one engine; ``session.graphs`` says what became of the
    graphs.
    """
    file = GraphFile()
    try:
        if archive is not None:
            file.write(archive)
        await session.start()
        path = file.path if archive is not None else "/nonexistent" if manifest else ""
        await session.load(pool.model, needed_bytes(pool.model), manifest, path)
        return [tokens for rows in BATCHES for tokens in await batch(session, rows)]
    finally:
        await session.close()
        file.close()


async def batch(session: BuildSession, rows: int) -> Sequence[list[int]]:
    prompts = [[(37 * rows + 11 * row + place) % 900 for place in range(9)] for row in range(rows)]
    return list((await session.run(prompts, 12)).outputs.values())


def changed(manifest: bytes, **changes: Any) -> bytes:
    artifact = decode_json(manifest, Artifact)
    assert artifact.graphs is not None
    return encode_json(replace(artifact, graphs=replace(artifact.graphs, **changes)))


def layout_of(manifest: bytes) -> GraphLayout:
    layout = decode_json(manifest, Artifact).graphs
    assert layout is not None
    return layout


async def test_what_a_worker_builds_another_child_restores(
    make_session: MakeSession, pool: PoolFile, record_property: Record, tmp_path: Path
) -> None:
    """All ways in one test: a build takes three engines, a minute of kernels among it."""
    made = await built(make_session, pool)
    artifact = decode_json(made.manifest, Artifact)
    log = (tmp_path / "child.log").read_text()[-3000:]
    assert artifact.graphs_refused == "", log
    blob = artifact.graphs_blob
    assert blob is not None
    archive = made.archives[blob.digest]
    record_property("archive_bytes", len(archive))
    assert [one.rows for one in layout_of(made.manifest).trials][:4] == [1, 2, 4, 8]
    plain = await outputs(make_session(), pool)

    session = make_session()
    assert await outputs(session, pool, made.manifest, archive) == plain
    assert session.graphs is not None
    told = session.graphs
    assert (told.ready, told.proved, told.refused) == (SIZES, SIZES, ""), told.message

    flipped = bytearray(archive)
    flipped[len(flipped) // 2] ^= 1
    places = tuple(
        replace(place, address=place.address + 512) for place in layout_of(made.manifest).places
    )
    ways: tuple[tuple[bytes, bytes | None, str], ...] = (
        (made.manifest, bytes(flipped), "graphs_digest"),
        (made.manifest, archive[:-1], "graphs_size"),
        (made.manifest, None, "graphs_file"),
        (changed(made.manifest, slot=pool.model.slot + 1), archive, "slot"),
        (changed(made.manifest, places=places), archive, "hidden"),
        (changed(made.manifest, pool_bytes=1 << 40), archive, "pool"),
    )
    for manifest, data, field in ways:
        session = make_session()
        assert await outputs(session, pool, manifest, data) == plain, field
        assert session.graphs is not None, field
        assert (session.graphs.refused, session.graphs.ready) == (field, 0), session.graphs.message

    trials = (Trial(rows=1, digest="0" * 64), *layout_of(made.manifest).trials[1:])
    with pytest.raises(PilotlightError, match="for its trial") as failed:
        await outputs(make_session(), pool, changed(made.manifest, trials=trials), archive)
    assert failed.value.code == RestoreFailed.code
