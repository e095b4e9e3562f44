"""A start that the library begins by itself, over a fake driver: what was planned is there when
somebody attaches, what is not what he needs is not taken, and all of the rest goes.
"""

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest
from fake_cuda import MIB, FakeCuda, fake_cuda
from graph_archives import ImageMaker, form_notes
from graph_driver import Driver, device_of_the_fake

from pilotlight.native.device import Device, DeviceArena
from pilotlight.native.graphs import GraphArchive, add_image, dump_graphs
from pilotlight.native.library import NativeError, library
from pilotlight.native.plan import (
    PLAN,
    TRYING,
    BadPlan,
    NativePlan,
    PlannedGraphs,
    kept_plan,
    taken_plan,
)
from pilotlight.native.started import STEPS, NativeStart
from pilotlight.native.starting import Begun

ADDRESS, ARENA_BYTES, CHUNK = 0x6200_0000_0000, 64 * MIB, 4 * MIB
POINTER_AND_WORD = struct.Struct("<QQ")
_names = count()


@dataclass
class Rig:
    fake: FakeCuda
    plan: NativePlan
    archive: bytes

    def device(self) -> Device:
        return Device(0, self.fake.path)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    fake = fake_cuda()
    fake.reset()
    with device_of_the_fake(ADDRESS, ARENA_BYTES) as (driver, _, arena):
        archive = archive_of(driver, arena)
    (tmp_path / "graphs").write_bytes(archive)
    yield Rig(
        fake,
        NativePlan(
            layout="as it was",
            library=str(library().path),
            driver=fake.path,
            address=ADDRESS,
            num_bytes=ARENA_BYTES,
            ranges=((0, 10 * MIB, CHUNK), (20 * MIB, 24 * MIB, CHUNK // 2)),
            graphs=PlannedGraphs(
                path=str(tmp_path / "graphs"),
                size_bytes=len(archive),
                digest=digest_of(archive),
                sizes=(8, 1),
            ),
        ),
        archive,
    )
    fake.reset()


def digest_of(data: bytes) -> str:
    made = ctypes.create_string_buffer(32)
    library().get("blake3", data, len(data), made)
    return made.raw.hex()


def archive_of(driver: Driver, arena: DeviceArena) -> bytes:
    """Graphs 1, 8 and 16 of a kernel each."""
    graphs: dict[int, int] = {}
    for tag in (1, 8, 16):
        name = f"begun_{next(_names)}"
        image = ImageMaker([name], code=b"code", notes=form_notes((8, 8), 128)).image()
        function = driver.load(image, name)
        add_image(image, function)
        graphs[tag] = driver.graph()
        driver.kernel(graphs[tag], function, POINTER_AND_WORD.pack(ADDRESS + 64 * tag, tag))
    return dump_graphs(graphs, arena).archive


def over(start: NativeStart, *steps: str) -> None:
    for step in steps:
        start.wait(step)


def test_all_that_was_planned_is_there(rig: Rig) -> None:
    start = NativeStart(Begun(rig.plan))
    over(start, *STEPS)
    assert tuple(start.took_ms) == STEPS
    device = rig.device()
    arena = start.arena(device)
    assert (arena.address, arena.num_bytes) == (ADDRESS, ARENA_BYTES)
    assert arena.idle_bytes == 14 * MIB
    assert arena.physical_bytes == 0
    assert start.free_bytes == 4096 * MIB

    before = {name: rig.fake.calls(name) for name in ("cuMemCreate", "cuMemMap")}
    arena.back(0, 10 * MIB, CHUNK)
    arena.back(20 * MIB, 24 * MIB, CHUNK // 2)
    assert {name: rig.fake.calls(name) for name in before} == before, "it is mapped where it is"

    opened = start.archive(rig.archive)
    assert opened is not None
    assert start.made == 2, "those that were planned"
    archive = GraphArchive(device, rig.archive, arena, opened)
    assert set(archive.tags) == {1, 8, 16}
    assert not archive.advance(8)
    archive.launch(8)
    assert archive.advance(16), "others are made as ever"
    archive.build(16)
    archive.launch(16)
    archive.close()

    arena.close()
    start.close()


def test_what_nobody_takes_goes(rig: Rig) -> None:
    used, registered, reserved = rig.fake.used_bytes, rig.fake.registered, rig.fake.reserved
    start = NativeStart(Begun(rig.plan))
    over(start, *STEPS)
    assert rig.fake.used_bytes > used
    start.close()
    assert (rig.fake.used_bytes, rig.fake.registered) == (used, registered)
    assert rig.fake.reserved == reserved


@pytest.mark.parametrize("other", [b"x", b""])
def test_another_archive_is_not_taken_and_goes(rig: Rig, other: bytes) -> None:
    start = NativeStart(Begun(rig.plan))
    over(start, *STEPS)
    unloaded = rig.fake.calls("cuModuleUnload")
    assert start.archive((rig.archive[:-1] if other else rig.archive + b"x") + other) is None
    assert rig.fake.calls("cuModuleUnload") > unloaded
    assert start.archive(rig.archive) is None, "it is gone"
    start.close()


def test_a_thing_is_taken_once(rig: Rig) -> None:
    start = NativeStart(Begun(rig.plan))
    arena = start.arena(rig.device())
    opened = start.archive(rig.archive)
    assert opened is not None
    assert start.archive(rig.archive) is None
    with pytest.raises(NativeError, match="it was taken"):
        start.arena(rig.device())
    GraphArchive(rig.device(), rig.archive, arena, opened).close()
    arena.close()


@pytest.mark.parametrize(
    ("field", "value", "step", "why"),
    [
        ("digest", "00" * 32, "archive", "another digest"),
        ("size_bytes", 17, "archive", "another size"),
        ("path", "/nowhere/graphs", "archive", "no archive"),
    ],
)
def test_an_archive_that_is_not_what_was_planned_is_not_opened(
    rig: Rig, field: str, value: object, step: str, why: str
) -> None:
    assert rig.plan.graphs is not None
    graphs = replace(rig.plan.graphs, **{field: value})
    start = NativeStart(Begun(replace(rig.plan, graphs=graphs)))
    over(start, "arena", "memory")
    assert start.archive(rig.archive) is None
    with pytest.raises(NativeError, match=why):
        over(start, step)
    arena = start.arena(rig.device())
    assert arena.idle_bytes == 14 * MIB, "memory is there all the same"
    arena.close()


def test_a_flipped_byte_is_found_before_the_driver_sees_it(rig: Rig) -> None:
    assert rig.plan.graphs is not None
    path = Path(rig.plan.graphs.path)
    data = bytearray(rig.archive)
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    loads = rig.fake.calls("cuModuleLoadData")
    start = NativeStart(Begun(rig.plan))
    with pytest.raises(NativeError, match="another digest"):
        over(start, "graphs")
    assert start.archive(bytes(data)) is None
    assert rig.fake.calls("cuModuleLoadData") == loads
    start.close()


@pytest.mark.parametrize(
    ("function", "step"),
    [
        ("cuDevicePrimaryCtxRetain", "context"),
        ("cuMemAddressReserve", "arena"),
        ("cuMemCreate", "memory"),
        ("cuModuleLoadData", "graphs"),
        ("cuGraphInstantiate", "graphs"),
    ],
)
def test_a_driver_that_refuses_ends_that_step_alone(rig: Rig, function: str, step: str) -> None:
    used, registered = rig.fake.used_bytes, rig.fake.registered
    rig.fake.fail(function, 999)
    start = NativeStart(Begun(rig.plan))
    with pytest.raises(NativeError):
        over(start, step)
    start.close()
    assert (rig.fake.used_bytes, rig.fake.registered) == (used, registered)


def test_an_arena_whose_place_is_taken_is_none(rig: Rig) -> None:
    device = rig.device()
    there = DeviceArena(device, ARENA_BYTES, ADDRESS)
    start = NativeStart(Begun(rig.plan))
    with pytest.raises(NativeError):
        start.arena(device)
    start.close()
    there.close()


def test_a_start_that_goes_at_once_leaves_nothing(rig: Rig) -> None:
    used, registered, reserved = rig.fake.used_bytes, rig.fake.registered, rig.fake.reserved
    for _ in range(20):
        NativeStart(Begun(rig.plan)).close()
    assert (rig.fake.used_bytes, rig.fake.registered) == (used, registered)
    assert rig.fake.reserved == reserved


def test_a_library_of_another_release_begins_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rig.plan.as_struct()
    made.plan_bytes += 8
    monkeypatch.setattr(NativePlan, "as_struct", lambda _: made)
    with pytest.raises(BadPlan, match="another release"):
        Begun(rig.plan)


def test_plans_come_back_as_they_were(rig: Rig) -> None:
    for plan in (rig.plan, replace(rig.plan, graphs=None)):
        assert NativePlan.from_json(plan.as_json()) == plan


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"format": 1}',
        b'{"format": 2}',
        b"\xff",
    ],
)
def test_what_is_no_plan_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(BadPlan):
        NativePlan.from_json(data)


def test_a_plan_with_numbers_that_are_none_is_none(rig: Rig) -> None:
    for name, value in (("address", -1.5), ("address", "x"), ("ranges", [[1]]), ("driver", 3)):
        data = replace(rig.plan, **{name: value}).as_json()
        with pytest.raises(BadPlan):
            NativePlan.from_json(data)


class TestFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path, rig: Rig) -> Path:
        made = tmp_path / "start"
        made.mkdir(mode=0o700)
        (made / PLAN).write_bytes(rig.plan.as_json())
        (made / PLAN).chmod(0o600)
        return made

    def test_a_plan_is_tried_once(self, folder: Path, rig: Rig) -> None:
        assert taken_plan(folder) == rig.plan
        assert taken_plan(folder) is None, "whoever had it never came up"
        kept_plan(folder)
        assert taken_plan(folder) == rig.plan

    def test_a_newer_plan_stays(self, folder: Path, rig: Rig) -> None:
        taken_plan(folder)
        newer = replace(rig.plan, layout="newer")
        (folder / PLAN).write_bytes(newer.as_json())
        kept_plan(folder)
        assert not (folder / TRYING).exists()
        (folder / PLAN).chmod(0o600)
        assert taken_plan(folder) == newer

    def test_there_may_be_no_folder_at_all(self, tmp_path: Path) -> None:
        assert taken_plan(tmp_path / "none") is None
        kept_plan(tmp_path / "none")

    @pytest.mark.parametrize("whose", ["file", "folder"])
    def test_what_others_may_write_is_not_believed(self, folder: Path, whose: str) -> None:
        (folder if whose == "folder" else folder / PLAN).chmod(0o777)
        with pytest.raises(BadPlan, match="others may write"):
            taken_plan(folder)
        assert taken_plan(folder) is None

    def test_a_link_is_not_followed(self, folder: Path, tmp_path: Path) -> None:
        (folder / PLAN).rename(tmp_path / "elsewhere")
        (folder / PLAN).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError, match="symbolic"):
            taken_plan(folder)


def test_another_release_of_the_library_is_not_attached_to(rig: Rig, tmp_path: Path) -> None:
    copied = tmp_path / "libpilotlight_native-of-another.so"
    copied.write_bytes(library().path.read_bytes())
    begun = Begun(replace(rig.plan, library=str(copied)))
    used, registered, reserved = rig.fake.used_bytes, rig.fake.registered, rig.fake.reserved
    with pytest.raises(NativeError, match="not the library of this release"):
        NativeStart(begun)
    begun.end()
    assert (used, registered, reserved) >= (
        rig.fake.used_bytes,
        rig.fake.registered,
        rig.fake.reserved,
    )
