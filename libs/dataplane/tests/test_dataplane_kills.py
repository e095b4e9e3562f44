"""Kill the process that holds a host pool at any instant: what the next one finds is whole, and no
reader sees a change.
"""

import mmap
import random
from itertools import pairwise
from pathlib import Path

import pytest
from killed_writers import (
    LEASED,
    NOTED_BYTES,
    POOL_BYTES,
    POOL_CHUNK_BYTES,
    POOL_PARTS,
    fill_part,
    killed,
    noted_at,
    pool_chunk,
    pool_chunks,
    pool_digest,
    raise_epoch_for_ever,
    read_leased_for_ever,
    started,
    use_pool_for_ever,
)

from pilotlight.common.clock import ManualClock
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_images import PartImage
from pilotlight.dataplane.table import ENTRY_BYTES, HEADER_BYTES, EntryState, read_header

LOOKS = 100_000
MODELS = {pool_digest(model): model for model in range(12)}


def images_of(pool: HostPool) -> list[PartImage]:
    found = [pool.find(digest, part) for digest in MODELS for part in range(POOL_PARTS)]
    return [image for image in found if image is not None]


def check(pool: HostPool, noted: bytes) -> int:
    """Every invariant of a pool that was just taken over; how many parts it has."""
    images = images_of(pool)
    assert sum(len(copy.parts) for copy in pool.copies()) == len(images)
    for image in images:
        model = MODELS[image.digest]
        expected = b"".join(
            pool_chunk(model, image.part, index) for index in range(pool_chunks(model, image.part))
        )
        with pool.view(image, 0, image.image_bytes) as view:
            assert view == expected, "a part with other bytes was taken over"
    extents = sorted(image.extent for image in images)
    assert all(first.stop <= second.offset for first, second in pairwise(extents)), (
        "two parts overlap"
    )
    assert sum(extent.size_bytes for extent in extents) + pool.free_bytes == POOL_BYTES, (
        "bytes leak"
    )
    slots = [slot for image in images for slot in image.slots]
    states = pool._mapped[
        HEADER_BYTES : HEADER_BYTES + ENTRY_BYTES * pool.geometry.slots : ENTRY_BYTES
    ]
    assert sorted(slots) == [
        slot for slot, state in enumerate(states) if state == EntryState.READY
    ], "entries leak"
    assert len(slots) + len(pool._table._free) == pool.geometry.slots
    held = {noted_at(MODELS[image.digest], image.part) for image in images}
    assert held >= {at for at in range(8, NOTED_BYTES) if noted[at]}, (
        "a part that was ready is lost"
    )
    assert pool.highest_epoch >= int.from_bytes(noted[:8], "little"), "an epoch is forgotten"
    return len(images)


def kill_again_and_again(folder: Path, seed: int, kills: int) -> None:
    path, noted, reads = folder / "pool", folder / "noted", folder / "reads"
    noted.write_bytes(bytes(NOTED_BYTES))
    rng, clock = random.Random(seed), ManualClock()
    pool = HostPool.open(path, POOL_BYTES, clock)
    for part in range(POOL_PARTS):
        image = pool.reserve(
            pool_digest(LEASED),
            part,
            pool_chunks(LEASED, part) * POOL_CHUNK_BYTES,
            pool_chunks(LEASED, part),
        )
        while not image.ready:
            fill_part(pool, image, LEASED)
    places = {image.part: pool.file_offset(image) for image in images_of(pool)}
    pool.close(remove=False)
    reader = started(read_leased_for_ever, path, places, reads)
    unfinished, found = 0, set[int]()
    for kill in range(kills):
        process = started(use_pool_for_ever, path, noted, seed * 1_000_000 + kill)
        assert killed(process, rng.choice((0.001, 0.004, 0.015)) * rng.random()), (
            "it ended by itself"
        )
        before = noted.read_bytes()
        with path.open("rb") as file:
            entered = sum(
                file.read(HEADER_BYTES + ENTRY_BYTES * pool.geometry.slots)[
                    HEADER_BYTES::ENTRY_BYTES
                ]
            )
        pool = HostPool.open(path, POOL_BYTES, clock)
        found.add(check(pool, before))
        unfinished += entered > sum(len(image.slots) for image in images_of(pool))
        pool.close(remove=False)
        assert reader.is_alive(), "a part has changed under its lease"
        if rng.random() < 0.1:
            assert killed(reader, 0.0)
            reader = started(read_leased_for_ever, path, places, reads)
    assert killed(reader, 0.0)
    assert unfinished, "no process was killed in the middle of something"
    assert len(found) > 3
    assert reads.exists(), "no process has read"
    pool = HostPool.open(path, POOL_BYTES, clock)
    for digest in MODELS:
        pool.drop(digest)
    assert pool.free_bytes == pool.largest_free_bytes == POOL_BYTES
    pool.close(remove=True)


def test_whoever_looks_while_an_epoch_is_raised_sees_the_last_one_or_the_next(tmp_path: Path):
    """And no other: what is there when a loader is killed is what the next one begins with."""
    path = tmp_path / "pool"
    HostPool.open(path, POOL_BYTES, ManualClock()).close(remove=False)
    raising = started(raise_epoch_for_ever, path)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), HEADER_BYTES, prot=mmap.PROT_READ) as page,
    ):
        seen = [0]
        while len(seen) < LOOKS or seen[-1] < LOOKS:
            header = read_header(page[:])
            assert header is not None
            seen.append(header.highest_epoch)
    assert killed(raising, 0.0)
    assert seen == sorted(seen)


@pytest.mark.slow
def test_a_kill_at_any_instant_leaks_nothing_and_corrupts_nobody(tmp_path: Path):
    kill_again_and_again(tmp_path, 1, 150)


@pytest.mark.chaos
@pytest.mark.slow
def test_a_kill_at_any_of_a_thousand_instants_leaks_nothing_and_corrupts_nobody(tmp_path: Path):
    kill_again_and_again(tmp_path, 2, 1000)
