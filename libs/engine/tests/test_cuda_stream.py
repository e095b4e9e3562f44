"""The copying of parameters over a fake driver: places, conversion, failures.

Rates are measured in tests/gpu.
"""

import gc
import random
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import MIB, FakeCuda, fake_cuda
from fp8_models import quantized_model
from random_models import source_of

from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.stream import SMALL_BYTES, OrderedCopies, PinnedSlabs
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.device.parameters import Parameters
from pilotlight.engine.errors import BadCheckpoint, EngineFailed, RestoreFailed
from pilotlight.engine.models.registry import decoder_of
from pilotlight.native.copier import Copier
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


def loaded(arena, model, dtype, clock, order=None):
    decoder = decoder_of(model.spec)
    memory = StageMemory(arena, decoder, model.spec.whole, dtype)
    parameters = Parameters(memory)
    for part in order or parameters.parts:
        parameters.place(part, model.parts[part], clock)
    return {
        decoder.prefix(part) + name: tensor
        for part in parameters.parts
        for name, tensor in memory.tensors(part).items()
    }


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "gemma3"])
def test_every_tensor_comes_to_its_place(arena, checkpoint, clock, kind):
    model = checkpoint(kind)
    placed = loaded(arena, model, Dtype.FLOAT64, clock, random.Random(4).sample(range(6), 6))
    for tensors in model.parts.values():
        for name, (_, shape, buffer) in tensors.items():
            assert torch.equal(
                placed[name], torch.frombuffer(bytearray(buffer), dtype=torch.float64).view(shape)
            ), name


@pytest.mark.parametrize("small_bytes", [0, SMALL_BYTES])
def test_conversion_rounds_as_torch_does(arena, checkpoint, clock, monkeypatch, small_bytes):
    """On the device as on the host."""
    monkeypatch.setattr("pilotlight.engine.cuda.stream.SMALL_BYTES", small_bytes)
    model = checkpoint("llama")
    placed = loaded(arena, model, Dtype.BFLOAT16, clock)
    for tensors in model.parts.values():
        for name, (_, shape, buffer) in tensors.items():
            assert torch.equal(
                placed[name],
                torch.frombuffer(bytearray(buffer), dtype=torch.float64).view(shape).bfloat16(),
            ), name


@pytest.mark.parametrize("form", ["fp8-block", "fp8-tensor", "compressed-channel"])
def test_scales_are_converted_while_the_device_copies(arena, clock, monkeypatch, form):
    """No part waits for the copies before it; but for the last one, which waits for all."""
    waited: list[int] = []
    wait_done = Copier.wait_done

    def watched(copier, ticket):
        waited.append(ticket)
        wait_done(copier, ticket)

    monkeypatch.setattr(Copier, "wait_done", watched)
    model = quantized_model("qwen3", form, Dtype.BFLOAT16, Dtype.BFLOAT16)
    parts = [{name: source_of(one) for name, one in part.items()} for part in model.parts()]
    offered = SimpleNamespace(spec=model.spec, parts=dict(enumerate(parts)))
    placed = loaded(arena, offered, Dtype.BFLOAT16, clock)
    assert len(waited) == 1
    for name, stored in model.tensors.items():
        there = placed[name]
        if "scale" in name:
            assert there.dtype is torch.float32
            assert torch.equal(there, stored.float().expand(there.shape)), name
        else:
            assert torch.equal(there.view(torch.uint8), stored.view(torch.uint8)), name


def test_pinned_memory_is_read_where_it_lies(arena, checkpoint, clock, fake):
    """A host pool's slab: a part's image, tensors back to back; what is not pinned goes through the
    ring.
    """
    model = checkpoint("llama")
    image, parts = bytearray(4 * MIB), {}
    place = 64
    for part, tensors in model.parts.items():
        parts[part] = {}
        for name, (dtype, shape, buffer) in tensors.items():
            image[place : place + buffer.nbytes] = buffer
            parts[part][name] = (dtype, shape, (place, place + buffer.nbytes))
            place += -(-buffer.nbytes // 64) * 64
    view = memoryview(image).toreadonly()
    arena.copier.pin(view[: place // 2])
    with pytest.raises(EngineFailed, match="cannot be pinned"):
        arena.copier.pin(view[100:200])
    memory = StageMemory(arena, decoder_of(model.spec), model.spec.whole, Dtype.FLOAT64)
    parameters = Parameters(memory)
    for part, tensors in parts.items():
        sources = {
            name: (dtype, shape, view[slice(*where)])
            for name, (dtype, shape, where) in tensors.items()
        }
        done = parameters.place(part, sources, clock)
        assert (done.ready, done.convert_s) == (part == 5, 0)
    for part, tensors in model.parts.items():
        for name, (_, shape, buffer) in tensors.items():
            there = memory.tensors(part)[name.removeprefix(decoder_of(model.spec).prefix(part))]
            assert torch.equal(
                there, torch.frombuffer(bytearray(buffer), dtype=torch.float64).view(shape)
            ), name
    counts = arena.copier.counts
    assert counts.direct_bytes > 0 < counts.ring_bytes
    arena.copier.unpin(view[: place // 2])
    with pytest.raises(EngineFailed, match="cannot be unpinned"):
        arena.copier.unpin(view[: place // 2])


def test_a_device_that_takes_no_copy_is_an_engine_that_failed(arena, checkpoint, clock, fake):
    model = checkpoint("llama")
    memory = StageMemory(arena, decoder_of(model.spec), model.spec.whole, Dtype.FLOAT64)
    parameters = Parameters(memory)
    with pytest.raises(BadCheckpoint, match="lacks"):
        parameters.place(0, {}, clock)
    parameters.place(0, model.parts[0], clock)
    arena.copier.background = True
    parameters.place(1, model.parts[1], clock)
    fake.fail("cuMemcpyHtoDAsync", 719, 1)
    with pytest.raises(EngineFailed, match="719"):
        parameters.place(2, model.parts[2], clock)
    assert 2 not in parameters


def test_slabs_are_pinned_one_by_one_the_wanted_first(arena, fake, monkeypatch):
    before = fake.registered
    pool = memoryview(bytearray(10 * 4096)).toreadonly()
    pinned = list[int]()
    pin = arena.copier.pin

    def record(slab: memoryview) -> None:
        pin(slab)
        pinned.append(slab.nbytes)

    monkeypatch.setattr(arena.copier, "pin", record)
    slabs = PinnedSlabs(arena.copier, pool, 4 * 4096)
    assert slabs.pin_next([9 * 4096, 5 * 4096])
    assert pinned == [2 * 4096], "the last slab is shorter"
    assert slabs.pin_next([9 * 4096, 5 * 4096])
    assert pinned == [2 * 4096, 4 * 4096]
    with pytest.raises(EngineFailed, match="cannot be pinned"):
        arena.copier.pin(pool[5 * 4096 :])
    assert not slabs.pin_next()
    assert not slabs.pin_next()
    assert (sum(pinned), fake.registered - before) == (10 * 4096, 3)
    slabs.close()
    assert fake.registered == before


def test_parts_that_were_ordered_ahead_come_to_their_places(arena, checkpoint, clock):
    model = checkpoint("llama")
    decoder = decoder_of(model.spec)
    memory = StageMemory(arena, decoder, model.spec.whole, model.spec.dtype)
    parameters = Parameters(memory)
    first, second, *others = parameters.parts
    parameters.place(first, model.parts[first], clock, (second, model.parts[second]))
    assert first in parameters
    assert second not in parameters
    parameters.place(second, model.parts[second], clock, (first, model.parts[first]))
    for part in others:
        parameters.place(part, model.parts[part], clock)
    assert parameters.complete
    for part, tensors in model.parts.items():
        placed = memory.tensors(part)
        for name, (_, shape, buffer) in tensors.items():
            expected = torch.frombuffer(bytearray(buffer), dtype=torch.float64).view(shape)
            assert torch.equal(placed[name.removeprefix(decoder.prefix(part))], expected), name


def test_what_can_be_done_beside_copies_is_done_once_they_have_begun(
    arena, checkpoint, clock, monkeypatch
):
    """And what comes behind the last one is launched before that is waited for."""
    model, seen = checkpoint("llama"), []
    memory = StageMemory(arena, decoder_of(model.spec), model.spec.whole, model.spec.dtype)
    parameters = Parameters(memory)
    watched(monkeypatch, arena, seen)
    parameters.meanwhile = lambda: seen.append("meanwhile")
    parameters.behind_last = lambda: seen.append("behind last")
    first, second, *others = parameters.parts
    parameters.place(first, model.parts[first], clock, (second, model.parts[second]))
    assert seen == ["order", "order", "meanwhile", "finish"]
    for part in [second, *others[:-1]]:
        parameters.place(part, model.parts[part], clock)
    assert "behind last" not in seen
    seen.clear()
    parameters.place(others[-1], model.parts[others[-1]], clock)
    assert seen == ["order", "meanwhile", "finish", "behind last", "finish last"]


def watched(monkeypatch, arena, seen):
    order, finish = arena.copier.order, OrderedCopies.finish

    def ordered(*given, **named):
        seen.append("order")
        return order(*given, **named)

    def finished(copies, monotonic_s, *, last):
        seen.append("finish last" if last else "finish")
        return finish(copies, monotonic_s, last=last)

    monkeypatch.setattr(arena.copier, "order", ordered)
    monkeypatch.setattr(OrderedCopies, "finish", finished)


def test_what_goes_wrong_behind_the_last_copy_waits_for_that(arena, checkpoint, clock, monkeypatch):
    model, seen = checkpoint("llama"), []
    memory = StageMemory(arena, decoder_of(model.spec), model.spec.whole, model.spec.dtype)
    parameters = Parameters(memory)
    *others, last = parameters.parts
    for part in others:
        parameters.place(part, model.parts[part], clock)

    def refuse():
        raise RestoreFailed("the device refuses restored graphs: 719")

    parameters.behind_last = refuse
    watched(monkeypatch, arena, seen)
    with pytest.raises(RestoreFailed):
        parameters.place(last, model.parts[last], clock)
    assert seen == ["order", "finish", "finish last"], "its memory may go"
    assert last not in parameters


def test_nothing_is_launched_behind_parts_that_give_way_to_batches(
    arena, checkpoint, clock, monkeypatch
):
    model, seen = checkpoint("llama"), []
    memory = StageMemory(arena, decoder_of(model.spec), model.spec.whole, model.spec.dtype)
    parameters = Parameters(memory)
    parameters.meanwhile = lambda: seen.append("meanwhile")
    parameters.behind_last = lambda: seen.append("behind last")
    for part in parameters.parts:
        while parameters.place(part, model.parts[part], clock, background=True).waits:
            pass
    assert parameters.complete
    assert seen == []


def test_a_broken_part_that_follows_is_refused_when_it_is_placed(arena, checkpoint, clock):
    model = checkpoint("llama")
    memory = StageMemory(arena, decoder_of(model.spec), model.spec.whole, model.spec.dtype)
    parameters = Parameters(memory)
    first, second, *_ = parameters.parts
    broken = dict(list(model.parts[second].items())[1:])
    parameters.place(first, model.parts[first], clock, (second, broken))
    with pytest.raises(BadCheckpoint, match="lacks"):
        parameters.place(second, broken, clock)
    parameters.place(second, model.parts[second], clock)
    assert second in parameters


def test_what_was_ordered_ahead_ends_before_its_memory_goes(arena, checkpoint, clock):
    model = checkpoint("llama")
    memory = StageMemory(arena, decoder_of(model.spec), model.spec.whole, model.spec.dtype)
    parameters = Parameters(memory)
    first, second, *_ = parameters.parts
    before = arena.copier.counts.direct_bytes + arena.copier.counts.ring_bytes
    parameters.place(first, model.parts[first], clock, (second, model.parts[second]))
    parameters.close()
    sizes = [
        sum(buffer.nbytes for _, _, buffer in model.parts[part].values())
        for part in (first, second)
    ]
    counts = arena.copier.counts
    assert counts.direct_bytes + counts.ring_bytes - before == sum(sizes)
    memory.close()


def test_parts_in_the_background_are_placed_when_they_have_arrived(
    arena, checkpoint, clock, monkeypatch
):
    """Until then nothing waits for them: batches run beside."""
    model = checkpoint("llama")
    memory = StageMemory(arena, decoder_of(model.spec), model.spec.whole, model.spec.dtype)
    parameters = Parameters(memory)
    first, second, *_ = parameters.parts
    with monkeypatch.context() as patched:
        patched.setattr(Copier, "is_over", lambda *_: False)
        placed = parameters.place(first, model.parts[first], clock, background=True)
        assert (placed.waits, placed.ready) == (True, False)
        assert first not in parameters
        assert not parameters.place(second, model.parts[second], clock).waits, "it is waited for"
        assert second in parameters
    while parameters.place(first, model.parts[first], clock, background=True).waits:
        pass
    assert first in parameters
