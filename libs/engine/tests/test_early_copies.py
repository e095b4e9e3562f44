"""Copies of parts that have come when a stage has its memory, over a fake driver."""

import gc

import pytest
import torch
from fake_cuda import MIB, FakeCuda, fake_cuda

from pilotlight.engine import resident
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.engine import Engine
from pilotlight.engine.errors import EngineFailed, NoRoom
from pilotlight.native.copier import Copier
from pilotlight.native.library import NativeError
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Dtype

INSTANCE = InstanceId("early")


@pytest.fixture
def fake() -> FakeCuda:
    found = fake_cuda()
    found.reset()
    return found


@pytest.fixture
def arena(fake):
    gc.collect()
    made = CudaArena(
        0, driver=fake.path, device=torch.device("cpu"), num_slots=1, slot_bytes=32 << 30
    )
    yield made
    made.close()


class Come:
    """Parts that have come, and how often they were asked for."""

    def __init__(self, parts, asked=None):
        self.parts = parts
        self.asked = [] if asked is None else asked

    def first(self):
        self.asked.append("first")
        return {part: self.parts[part] for part in sorted(self.parts)[:1]}

    def come(self):
        self.asked.append("come")
        return self.parts


MAPPING = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")


def mapped_by(fake: FakeCuda) -> tuple[int, ...]:
    return tuple(fake.calls(name) for name in MAPPING)


def test_nothing_is_mapped_between_the_first_copy_and_the_last(
    arena, checkpoint, clock, fake, monkeypatch
):
    """A driver that maps and copies that are under way wait for each other."""
    model, seen = checkpoint("llama"), []
    engine = Engine(1, clock, arena=arena)
    order = arena.copier.order
    before = mapped_by(fake)

    def ordered(*given, **named):
        seen.append(mapped_by(fake))
        return order(*given, **named)

    monkeypatch.setattr(arena.copier, "order", ordered)
    early = {0: model.parts[0], 1: {}, 2: model.parts[2], 99: {}}
    given = INSTANCE, model.spec, model.spec.whole, Dtype.FLOAT64, 64 * MIB
    engine.begin_load(*given, early=Come(early))
    assert len(seen) == 2, "of the parts that can be read"
    for part in range(model.spec.num_layers + 2):
        placed = engine.place_part(INSTANCE, part, model.parts[part])
    assert placed.ready
    assert len(seen) == model.spec.num_layers + 2, "no part comes twice"
    assert {*seen, mapped_by(fake)} == {seen[0]}
    extents = 1 + 2 * model.spec.num_layers
    used = [after - was for was, after in zip(before, seen[0], strict=True)]
    assert used == [extents] * 3 + [0] * 2, "parameters are one, each layer's keys and values one"
    engine.unload(INSTANCE)


def test_the_first_copy_is_ordered_before_all_that_needs_no_memory_of_its_own(
    arena, checkpoint, clock, monkeypatch
):
    model, seen = checkpoint("llama"), []
    engine = Engine(1, clock, arena=arena)
    order, compute_on, resize = arena.copier.order, resident.compute_on, KvCache.resize

    def noted(name, does):
        def wrapped(*given, **named):
            seen.append(name)
            return does(*given, **named)

        return wrapped

    monkeypatch.setattr(arena.copier, "order", noted("copy", order))
    monkeypatch.setattr(resident, "compute_on", noted("rest", compute_on))
    monkeypatch.setattr(KvCache, "resize", noted("kv", resize))
    given = INSTANCE, model.spec, model.spec.whole, Dtype.FLOAT64, 64 * MIB
    engine.begin_load(*given, early=Come({0: model.parts[0], 1: model.parts[1]}, seen))
    assert seen == ["kv", "first", "copy", "rest", "come", "copy"]


def test_no_copy_begins_where_a_stage_cannot_be_set_up(arena, checkpoint, clock, monkeypatch):
    model, asked = checkpoint("llama"), []
    engine = Engine(1, clock, arena=arena)

    def refuse(*_):
        raise NoRoom("the device refuses 64 bytes")

    monkeypatch.setattr(KvCache, "resize", refuse)
    given = INSTANCE, model.spec, model.spec.whole, Dtype.FLOAT64, 64 * MIB
    with pytest.raises(NoRoom):
        engine.begin_load(*given, early=Come({0: model.parts[0]}, asked))
    assert asked == []
    assert arena.backed_bytes == arena.physical_bytes == 0


def test_what_a_device_does_not_copy_early_is_said_when_it_is_placed(
    arena, checkpoint, clock, monkeypatch
):
    model = checkpoint("llama")
    engine = Engine(1, clock, arena=arena)
    monkeypatch.setattr(Copier, "submit", refused_copy)
    given = INSTANCE, model.spec, model.spec.whole, Dtype.FLOAT64, 64 * MIB
    engine.begin_load(*given, early=Come({0: model.parts[0]}))
    with pytest.raises(EngineFailed, match="do not come"):
        engine.place_part(INSTANCE, 0, model.parts[0])


def refused_copy(*_, **__):
    raise NativeError(719, "the device is gone")
