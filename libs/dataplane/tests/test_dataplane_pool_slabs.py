"""What a process that maps the pool beside its loader reads of it: slabs that hold ready images."""

import mmap
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import HostPoolFull
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_images import PartImage
from pilotlight.dataplane.pool_slabs import PoolSlabs
from pilotlight.dataplane.table import ENTRY_BYTES, HEADER_BYTES, EntryState
from pilotlight.policy.ids import Digest

POOL_BYTES = 2 * 1024 * 1024
UNIT_BYTES = 64 * 1024
SLAB_BYTES = 3 * UNIT_BYTES
"""Images of several units begin and end within slabs."""
MODELS = [Digest(f"{number:064x}") for number in range(4)]
SOME = Digest("ee" * 32)


@contextmanager
def opened(path: Path, clock: ManualClock) -> Iterator[HostPool]:
    path.unlink(missing_ok=True)
    pool = HostPool.open(path, POOL_BYTES, clock)
    try:
        yield pool
    finally:
        pool.close(remove=True)


@contextmanager
def mapped(pool: HostPool, access: int = mmap.ACCESS_READ) -> Iterator[memoryview]:
    """As an engine's process maps it."""
    with pool.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=access) as found:
        view = memoryview(found)
        try:
            yield view
        finally:
            view.release()


def read(view: memoryview, slab_bytes: int = SLAB_BYTES) -> list[int]:
    slabs = PoolSlabs.of(view, slab_bytes)
    assert slabs is not None
    found = slabs.occupied()
    del slabs
    return found


def enter(pool: HostPool, image: PartImage) -> None:
    """The next chunk: a unit, or what is left."""
    start = image.entered * UNIT_BYTES
    pool.enter_chunk(image, (start, min(start + UNIT_BYTES, image.image_bytes)), SOME)


def reserve(pool: HostPool, model: Digest, part: int, image_bytes: int) -> PartImage:
    return pool.reserve(model, part, image_bytes, -(-image_bytes // UNIT_BYTES))


def expected(pool: HostPool, images: list[PartImage]) -> list[int]:
    """Slab by slab, from what the loader itself knows."""
    used_s = {copy.digest: copy.last_used_s for copy in pool.copies()}
    hottest: dict[int, float] = {}
    for slab in range(pool.geometry.file_bytes // SLAB_BYTES + 1):
        within = [
            used_s[image.digest]
            for image in images
            if image.ready
            and pool.file_offset(image) < (slab + 1) * SLAB_BYTES
            and pool.file_offset(image) + image.image_bytes > slab * SLAB_BYTES
        ]
        if within:
            hottest[slab] = max(within)
    return sorted(hottest, key=lambda slab: (-hottest[slab], slab))


events = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(MODELS), st.integers(1, 9 * UNIT_BYTES)),
        st.tuples(st.just("enter"), st.integers(0, 99), st.integers(1, 9)),
        st.tuples(st.just("touch"), st.sampled_from(MODELS), st.just(0)),
        st.tuples(st.just("drop"), st.sampled_from(MODELS), st.just(0)),
        st.tuples(st.just("give up"), st.integers(0, 99), st.just(0)),
    ),
    max_size=40,
)


@given(events=events)
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_table_tells_which_slabs_hold_ready_images(tmp_path: Path, events: list) -> None:
    clock = ManualClock()
    with opened(tmp_path / "pool", clock) as pool, mapped(pool) as view:
        images: list[PartImage] = []
        for number, (event, whom, what) in enumerate(events):
            clock.advance(1)
            if event == "begin":
                with suppress(HostPoolFull):
                    images.append(reserve(pool, whom, number, what))
            elif event == "enter" and images:
                image = images[whom % len(images)]
                for _ in range(min(what, len(image.slots) - image.entered)):
                    enter(pool, image)
            elif event == "touch":
                pool.touch(whom)
            elif event == "drop":
                pool.drop(whom)
            elif event == "give up" and images:
                pool.discard(images[whom % len(images)])
            images = [image for image in images if not image.given_up]
        assert read(view) == expected(pool, images)


@given(seed=st.integers(), torn=st.integers(1, 200))
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_entries_that_are_read_half_written_name_slabs_of_the_file_or_none(
    tmp_path: Path, seed: int, torn: int
) -> None:
    """A pin too many is all that they cost."""
    chance = random.Random(seed)
    with opened(tmp_path / "pool", ManualClock()) as pool:
        for number in range(4):
            image = reserve(pool, MODELS[number], 0, 3 * UNIT_BYTES)
            for _ in image.slots:
                enter(pool, image)
        with mapped(pool) as view:
            content = bytearray(view)
        last = len(content) // SLAB_BYTES
        for _ in range(torn):
            at = HEADER_BYTES + chance.randrange(14 * ENTRY_BYTES)
            size = chance.choice([1, 4, 8, 32])
            content[at : at + size] = chance.choice(
                [bytes(size), b"\xff" * size, chance.randbytes(size)]
            )
            content[HEADER_BYTES + chance.randrange(14) * ENTRY_BYTES] = EntryState.READY
        assert all(0 <= slab <= last for slab in read(memoryview(content)))


def test_an_image_that_ends_on_a_slabs_edge_is_not_in_the_next(tmp_path: Path) -> None:
    with opened(tmp_path / "pool", ManualClock()) as pool, mapped(pool) as view:
        image = reserve(pool, MODELS[0], 0, 4 * UNIT_BYTES)
        while not image.ready:
            enter(pool, image)
        start = pool.file_offset(image)
        assert start % (2 * UNIT_BYTES) == 0
        assert read(view, 2 * UNIT_BYTES) == [
            start // (2 * UNIT_BYTES),
            start // (2 * UNIT_BYTES) + 1,
        ]


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:0],
        lambda content: content[:HEADER_BYTES],
        lambda content: content[:-1],
        lambda content: b"another" + content[7:],
        lambda content: content[:8] + b"\1" + content[9:],
        lambda content: bytes(len(content)),
    ],
    ids=["empty", "a page", "cut", "magic", "older", "zeros"],
)
def test_a_file_that_is_no_pool_of_ours_tells_nothing(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    with opened(tmp_path / "pool", ManualClock()) as pool, mapped(pool) as view:
        content = bytes(view)
        assert PoolSlabs.of(memoryview(content), SLAB_BYTES) is not None
        assert PoolSlabs.of(memoryview(change(content)), SLAB_BYTES) is None


def test_changes_are_seen_through_the_mapping(tmp_path: Path) -> None:
    with opened(tmp_path / "pool", ManualClock()) as pool, mapped(pool) as view:
        slabs = PoolSlabs.of(view, SLAB_BYTES)
        assert slabs is not None
        before = slabs.changes
        image = reserve(pool, MODELS[0], 0, UNIT_BYTES)
        assert slabs.changes == before
        enter(pool, image)
        assert slabs.changes != before
