"""An artifact with graphs, built by a worker's engine children and restored by another: the tokens
of a child without it; what is wrong with it is refused by name, and the normal path follows.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_builds import MakeSession, built, sessions
from pool_files import PoolFile, pool_file

from pilotlight.common.errors import PilotlightError, RestoreFailed
from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.engine.cuda.prompts import LENGTHS
from pilotlight.policy.builds import needed_bytes
from pilotlight.policy.materialized import Artifact, GraphLayout, Trial
from pilotlight.policy.model import Dtype
from pilotlight.worker.build_session import BuildSession
from pilotlight.worker.graph_files import GraphFile

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

Record = Callable[[str, object], None]
GRAPHS = 35 + 8
"""Of decode steps, and of prompts."""
BATCHES = (1, 2, 3, 7, 16, 33)


@pytest.fixture
def pool(tmp_path: Path) -> PoolFile:
    """In float32: requests that come in another order make batches of other shapes."""
    return pool_file(tmp_path / "pool", "qwen3", Dtype.FLOAT32, 3)


@pytest.fixture
def make_session(
    device: torch.device, pool: PoolFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MakeSession:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return sessions(device.index, pool, tmp_path / "child.log")


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
        up = await session.start()
        assert up.environment is not None
        path = file.path if archive is not None else "/nonexistent" if manifest else ""
        device_bytes = needed_bytes(pool.model, up.environment)
        await session.load(pool.model, device_bytes, manifest, path)
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
    assert layout_of(made.manifest).prompts_refused == "", log
    assert [one.rows for one in layout_of(made.manifest).prompts] == list(LENGTHS)
    plain = await outputs(make_session(), pool)

    session = make_session()
    assert await outputs(session, pool, made.manifest, archive) == plain
    assert session.graphs is not None
    told = session.graphs
    assert (told.ready, told.proved, told.refused) == (GRAPHS, GRAPHS, ""), told.message

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
    # The engine ended with it; the next one starts without graphs.
    assert await outputs(make_session(), pool) == plain


async def test_with_less_memory_the_cache_is_smaller_and_the_graphs_are_the_same(
    make_session: MakeSession, pool: PoolFile
) -> None:
    """A granule less for the keys and the values of each layer: nothing is profiled anew."""
    made = await built(make_session, pool)
    blob = decode_json(made.manifest, Artifact).graphs_blob
    assert blob is not None
    plain = await outputs(make_session(), pool)
    rooms: list[int] = []
    with closing(GraphFile()) as file:
        file.write(made.archives[blob.digest])
        for granules in (0, 2 * pool.model.spec.num_layers):
            session = make_session()
            try:
                up = await session.start()
                assert up.environment is not None
                less = granules * up.environment.granule_bytes
                room_bytes = needed_bytes(pool.model, up.environment) - less
                args = (pool.model, room_bytes, made.manifest, file.path)
                rooms.append(await session.load(*args))
                found = [tokens for rows in BATCHES for tokens in await batch(session, rows)]
                assert session.graphs is not None
                assert (session.graphs.ready, session.graphs.refused) == (GRAPHS, "")
                assert found == plain
            finally:
                await session.close()
    assert 0 < rooms[1] < rooms[0]
