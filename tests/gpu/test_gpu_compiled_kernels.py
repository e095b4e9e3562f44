"""Kernels that a worker's engine compiled, in an engine on a machine that has compiled nothing: it
compiles nothing of the model's either, and gives the same tokens.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_builds import MakeSession, built, sessions
from pool_files import PoolFile, pool_file

from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.common.messages.graphs import KernelsRecorded, Precomputed
from pilotlight.engine.cuda.compiled import IMAGE, Entry, pack, unpack
from pilotlight.policy.builds import needed_bytes
from pilotlight.policy.materialized import COMPILE_CACHE, Artifact, Blob
from pilotlight.policy.model import Dtype
from pilotlight.worker.build_session import BuildSession
from pilotlight.worker.engine_child.graphs import digest_of
from pilotlight.worker.graph_files import GraphFile

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

Record = Callable[[str, object], None]
PROMPTS = (1, 5, 40, 300, 700)


@pytest.fixture
def pool(tmp_path: Path) -> PoolFile:
    return pool_file(tmp_path / "pool", "qwen3", Dtype.BFLOAT16, 3)


@pytest.fixture
def make_session(
    device: torch.device, pool: PoolFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MakeSession:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "builder"))
    return sessions(device.index, pool, tmp_path / "child.log")


async def ran(
    session: BuildSession,
    pool: PoolFile,
    manifest: bytes = b"",
    archive: bytes = b"",
    *,
    only: bool = False,
) -> tuple[list[list[int]], KernelsRecorded | None]:
    """What prompts give one after the other, and what was compiled for that and for batches."""
    file = GraphFile()
    try:
        file.write(archive)
        precomputed = Precomputed(kernels=file.path if archive else "", only=only)
        up = await session.start()
        assert up.environment is not None
        device_bytes = needed_bytes(pool.model, up.environment)
        await session.load(pool.model, device_bytes, manifest, precomputed=precomputed)
        vocab = pool.model.spec.vocab_size
        prompts = [[(31 * one + 7 * place) % vocab for place in range(one)] for one in PROMPTS]
        outputs: list[list[int]] = []
        for prompt in prompts:
            outputs += (await session.run([prompt], 6)).outputs.values()
        for rows in (2, 17, 40):
            # In which order they come into a batch is not the same each time.
            await session.run([[row + 1, 2, 3] for row in range(rows)], 4)
        return outputs, await session.unload()
    finally:
        await session.close()
        file.close()


async def test_an_engine_with_an_artifacts_kernels_compiles_none_of_the_model(
    make_session: MakeSession,
    pool: PoolFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Record,
) -> None:
    made = await built(make_session, pool)
    artifact = decode_json(made.manifest, Artifact)
    log = (tmp_path / "child.log").read_text()[-3000:]
    assert artifact.compiled_refused == "", log
    assert artifact.compiled_blob is not None
    archive = made.archives[artifact.compiled_blob.digest]
    entries = unpack(archive)
    record_property("kernels", {"entries": len(entries), "bytes": len(archive)})
    record_property("compiled_for", artifact.compiled)

    plain, nothing = await ran(make_session(), pool)
    assert nothing is None

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "fresh"))
    session = make_session()
    outputs, told = await ran(session, pool, made.manifest, archive, only=True)
    assert outputs == plain
    assert session.kernels is not None
    assert (session.kernels.refused, session.kernels.restored) == ("", len(entries))
    assert told is not None
    assert told.compiled == ()

    # An image that lacks its kernel: that one is compiled, or found in triton's own cache.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "builder"))
    wrong = pack(with_others_images(entries))
    blob = Blob(kind=COMPILE_CACHE, digest=digest_of(wrong), size_bytes=len(wrong))
    manifest = encode_json(replace(artifact, blobs=(blob,), graphs=None))
    session = make_session()
    outputs, _ = await ran(session, pool, manifest, wrong)
    assert outputs == plain
    assert session.kernels is not None
    assert session.kernels.refused == "kernels", session.kernels


def with_others_images(entries: Sequence[Entry]) -> list[Entry]:
    """Each kernel with the image of one that has another name."""
    kernels = [one for one in entries if one.facts]
    images = {
        one.facts: data
        for one in kernels
        for name, data in one.files.items()
        if name.endswith(IMAGE)
    }
    assert len(images) > 1
    other = dict(
        zip(images, [*list(images.values())[1:], next(iter(images.values()))], strict=True)
    )
    return [
        Entry(
            one.key,
            {
                name: other[one.facts] if name.endswith(IMAGE) else data
                for name, data in one.files.items()
            },
        )
        for one in entries
    ]
