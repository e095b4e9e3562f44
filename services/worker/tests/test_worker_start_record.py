"""What an engine keeps for the next one, over a fake driver: a plan that the library carries out,
on which the next engine's arena stands.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from blake3 import blake3
from fake_cuda import FakeCuda, fake_cuda

from pilotlight.engine.cuda import arena as cuda_arena
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.models.decoder import Decoder
from pilotlight.engine.models.registry import decoder_of
from pilotlight.native.library import NativeError, library
from pilotlight.native.plan import PLAN, TRYING, NativePlan, taken_plan
from pilotlight.native.started import NativeStart
from pilotlight.native.starting import Begun
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.policy.materialized import GRAPHS, Blob
from pilotlight.policy.model import Dtype, Model
from pilotlight.worker.engine_child import start_record
from pilotlight.worker.engine_child.graphs import RestoredArchive
from pilotlight.worker.engine_child.stages import StageLoads
from pilotlight.worker.engine_child.start_record import StartRecord

SLOT_BYTES = 32 << 30
INSTANCE = InstanceId("one")
ARCHIVE = b"graphs that nobody opens" * 100


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    found = fake_cuda()
    found.reset()
    monkeypatch.setattr(start_record, "LIBCUDA", found.path)
    yield found
    found.reset()


def arena_of(fake: FakeCuda, started: NativeStart | None = None) -> CudaArena:
    return CudaArena(
        0,
        driver=fake.path,
        device=torch.device("cpu"),
        num_slots=1,
        slot_bytes=SLOT_BYTES,
        started=started,
    )


def archive_of(memory: StageMemory, data: bytes = ARCHIVE) -> RestoredArchive:
    blob = Blob(kind=GRAPHS, digest=Digest(blake3(data).hexdigest()), size_bytes=len(data))
    return RestoredArchive(blob, data, (1, 8), memory, 40 << 20)


class Loads:
    """As much of ``StageLoads`` as a record asks."""

    def __init__(self) -> None:
        self.restoring = SimpleNamespace(proved=None)
        self.graphs = SimpleNamespace(take_archive=self.take)
        self.archive: RestoredArchive | None = None

    def take(self, _: InstanceId) -> RestoredArchive | None:
        taken, self.archive = self.archive, None
        return taken

    def prove(self, archive: RestoredArchive) -> None:
        self.archive, self.restoring.proved = archive, INSTANCE

    @property
    def as_loads(self) -> StageLoads:
        return cast("StageLoads", self)


@pytest.fixture
def decoder(model: Model) -> Decoder:
    return decoder_of(model.spec)


def test_what_is_planned_is_what_the_next_engine_has(
    fake: FakeCuda, decoder: Decoder, tmp_path: Path
) -> None:
    folder, loads = tmp_path / "starts" / "w0", Loads()
    arena = arena_of(fake)
    memory = StageMemory(arena, decoder, decoder.spec.whole, Dtype.FLOAT32)
    memory.for_steps((1024,), torch.float32)
    record = StartRecord(folder, arena, lambda: "this layout")
    assert not record.write(loads.as_loads), "nothing is proved"
    loads.prove(archive_of(memory))
    assert record.write(loads.as_loads)
    assert not record.write(loads.as_loads), "once"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {one.stat().st_mode & 0o777 for one in folder.iterdir()} == {0o600}
    parts = [memory.extent(part) for part in memory.parts]
    steps = memory.layout.steps.start
    pool = SLOT_BYTES - cuda_arena.POOL_BYTES
    arena.close()

    plan = taken_plan(folder)
    assert plan is not None
    assert (plan.layout, plan.address) == ("this layout", cuda_arena.ADDRESSES[0])
    assert plan.ranges == (
        (parts[0].start, parts[-1].stop, cuda_arena.CHUNK_BYTES),
        (steps, steps + arena.granule_bytes, cuda_arena.CHUNK_BYTES),
        (pool, pool + (64 << 20), cuda_arena.POOL_CHUNK_BYTES),
    )
    assert plan.graphs is not None
    assert Path(plan.graphs.path).read_bytes() == ARCHIVE
    assert plan.graphs.sizes == (1, 8)

    start = NativeStart(Begun(plan))
    again = arena_of(fake, start)
    assert again.started is start
    assert again.canonical
    held = again.idle_bytes
    assert held == sum(stop - first for first, stop, _ in plan.ranges)
    asked = fake.calls("cuMemCreate"), fake.calls("cuMemMap")
    StageMemory(again, decoder, decoder.spec.whole, Dtype.FLOAT32)
    assert (fake.calls("cuMemCreate"), fake.calls("cuMemMap")) == asked
    assert again.idle_bytes < held
    again.close()


def test_a_plan_that_was_carried_out_is_kept(
    fake: FakeCuda, decoder: Decoder, tmp_path: Path
) -> None:
    folder, loads = tmp_path / "starts", Loads()
    arena = arena_of(fake)
    memory = StageMemory(arena, decoder, decoder.spec.whole, Dtype.FLOAT32)
    loads.prove(archive_of(memory))
    StartRecord(folder, arena, lambda: "1").write(loads.as_loads)
    arena.close()
    plan = taken_plan(folder)
    assert plan is not None
    start = NativeStart(Begun(plan))
    with pytest.raises(NativeError):
        start.wait("graphs")  # These bytes are no archive.
    again = arena_of(fake, start)
    record = StartRecord(folder, again, lambda: "1")
    assert not (folder / PLAN).exists()
    assert record.write(Loads().as_loads)
    assert (folder / PLAN).exists()
    assert not (folder / TRYING).exists()
    assert not record.write(Loads().as_loads)
    again.close()


def test_only_the_last_archive_stays(fake: FakeCuda, decoder: Decoder, tmp_path: Path) -> None:
    loads, arena = Loads(), arena_of(fake)
    memory = StageMemory(arena, decoder, decoder.spec.whole, Dtype.FLOAT32)
    record = StartRecord(tmp_path, arena, lambda: "1")
    for data in (ARCHIVE, b"another one"):
        loads.prove(archive_of(memory, data))
        assert record.write(loads.as_loads)
    plan = NativePlan.from_json((tmp_path / PLAN).read_bytes())
    assert plan.graphs is not None
    assert {one.name for one in tmp_path.iterdir()} == {PLAN, Path(plan.graphs.path).name}
    assert Path(plan.graphs.path).read_bytes() == b"another one"
    arena.close()


def test_a_folder_that_takes_nothing_is_given_up(
    fake: FakeCuda, decoder: Decoder, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    loads, arena = Loads(), arena_of(fake)
    memory = StageMemory(arena, decoder, decoder.spec.whole, Dtype.FLOAT32)
    record = StartRecord(tmp_path / "file" / "starts", arena, lambda: "1")
    loads.prove(archive_of(memory))
    assert not record.write(loads.as_loads)
    loads.prove(archive_of(memory))
    assert not record.write(loads.as_loads)
    arena.close()


def test_an_arena_elsewhere_plans_nothing(fake: FakeCuda, decoder: Decoder, tmp_path: Path) -> None:
    loads = Loads()
    arena = CudaArena(
        0,
        driver=fake.path,
        device=torch.device("cpu"),
        num_slots=1,
        slot_bytes=SLOT_BYTES,
        addresses=cuda_arena.WITNESS_ADDRESSES,
    )
    arena.canonical = False
    memory = StageMemory(arena, decoder, decoder.spec.whole, Dtype.FLOAT32)
    loads.prove(archive_of(memory))
    assert not StartRecord(tmp_path, arena, lambda: "1").write(loads.as_loads)
    assert not list(tmp_path.iterdir())
    arena.close()


def test_a_start_for_another_arena_is_not_taken(fake: FakeCuda, tmp_path: Path) -> None:
    plan = NativePlan(
        layout="1",
        library=str(library().path),
        driver=fake.path,
        address=cuda_arena.ADDRESSES[0],
        num_bytes=1 << 30,
        ranges=(),
    )
    start = NativeStart(Begun(plan))
    start.wait("memory")
    arena = arena_of(fake, start)
    assert arena.started is None
    start.close()
    arena.close()
