"""Graphs recorded by two processes and restored by a third, each with its arena elsewhere, over a
fake driver: what torch takes there falls out in another way, and every graph does what one that was
captured there would.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fake_cuda import MIB, fake_cuda
from fake_recording import HERE, NAME, OURS, SEGMENT, SLOT_BYTES, THEIRS, Process
from restored_rig import StandInSteps, places_in

from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.fitting import Fitting, GraphsRefused, places_of
from pilotlight.engine.cuda.indirect import Anywhere, Replay
from pilotlight.engine.cuda.recording import NotRecorded
from pilotlight.engine.cuda.traces import PERMANENT, TEMPORARY, with_addresses
from pilotlight.engine.device.memory import StageMemory
from pilotlight.native.graphs import GraphArchive
from pilotlight.native.library import NativeError
from pilotlight.native.pointers import moved, nodes_of, pointers_of, with_pointers
from pilotlight.policy.graphs.trace import TraceRefused
from pilotlight.policy.materialized import GraphLayout, Trial


@pytest.fixture
def process() -> Iterator[Callable[..., Process]]:
    fake_cuda().reset()
    made: list[Process] = []

    def make(*arguments: Any, **settings: Any) -> Process:
        made.append(Process(*arguments, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def recorded(process: Callable[..., Process]) -> bytes:
    witness = process(THEIRS, 1, stale=0x7FFC_0000_1234).record()
    return process(OURS, 0, stale=0x7FFD_8888_5678).record(witness)


def run(process: Process, archive: bytes, size: int) -> bytes:
    made = GraphArchive(process.arena.native, archive, process.arena.native_arena)
    made.build(size)
    found = written(process, lambda: made.launch(size))
    made.close()
    return found


def written(process: Process, go: Callable[[], None]) -> bytes:
    """What is in the pool's first segments, afterwards."""
    first, num_bytes = process.memory.graph_pool_bytes(1).data_ptr(), 8 * SEGMENT
    ctypes.memset(first, 7, num_bytes)
    go()
    return ctypes.string_at(first, num_bytes)


def test_every_address_is_told_by_what_it_points_to(recorded: bytes) -> None:
    table = pointers_of(recorded)
    places = {node.place: node for node in nodes_of(recorded)}
    told = [
        (node.graph, word.place - place, word.allocation, word.inside)
        for word in table.words
        for place, node in places.items()
        if place <= word.place < place + len(node.parameters)
    ]
    base = len(table.allocations) - 4
    logits, gone, kept, again = range(base, base + 4)
    assert table.captures == (8, 4)
    assert [(one.taken, one.given) for one in table.allocations[gone:]] == [
        (1, 1),
        (1, 0xFFFF_FFFF),
        (2, 0xFFFF_FFFF),
    ]
    assert sorted(told) == [
        (4, 0, logits, 0),
        (4, 0, again, 128),
        (4, 8, 1, 64),
        (4, 8, kept, 64),
        (8, 0, logits, 0),
        (8, 0, kept, 128),
        (8, 8, 1, 64),
        (8, 8, kept, 64),
    ], "and not the one that looks like one, nor what the stack had"
    assert table.allocations[again].address == table.allocations[gone].address
    assert {table.allocations[one].kind for one in (kept, again)} == {TEMPORARY}


@pytest.mark.parametrize("busy", [False, True])
def test_a_third_process_runs_them_where_its_memory_is(
    process: Callable[..., Process], recorded: bytes, busy: bool
) -> None:
    here = process(HERE, 1, busy=busy, stale=0x7FFD_8888_5678)
    table = pointers_of(recorded)
    replay = Replay(here.memory, table, here.pool, here.arena.workspace.memory)
    kept, again = replay.bases[-2:]
    offset = here.memory.graph_pool_bytes(1).data_ptr() - table.allocations[-4].address
    moved_as_one = [one.address + offset for one in table.allocations[-2:]]
    assert ([kept, again] == moved_as_one) != busy, "they fall out otherwise"
    archive = moved(recorded, replay.bases, here.arena.native_arena)
    for size, first in ((8, kept), (4, again)):
        graph = here.graph(first, kept)
        expected = written(here, lambda graph=graph: here.driver.replay(graph))
        assert run(here, archive, size) == expected
    replay.close()
    replay.close()
    assert len(here.held) == 1 + busy
    assert here.arena.workspace.memory.events == ()


def test_at_their_addresses_they_run_as_they_were(process: Callable[..., Process]) -> None:
    witness = process(THEIRS, 1).record()
    ours = process(OURS, 0)
    archive = ours.record(witness)
    assert run(ours, archive, 8) == run(ours, plain(archive), 8) != b"\7" * (8 * SEGMENT)


def test_what_a_graph_expects_is_kept_and_lies_where_no_other_model_writes(
    process: Callable[..., Process],
) -> None:
    witness = process(THEIRS, 1).record(permanent=True)
    archive = process(OURS, 0).record(witness, permanent=True)
    table = pointers_of(archive)
    kinds = [one.kind for one in table.allocations[-3:]]
    assert kinds == [TEMPORARY, PERMANENT, TEMPORARY]
    here = process(HERE, 1)
    lasting = here.arena.workspace.memory
    replay = Replay(here.memory, table, here.pool, lasting)
    number = len(table.allocations) - 2
    assert replay.contents == [number]
    assert [event.address for event in lasting.events] == [replay.bases[number]]
    contents = table.allocations[number].contents
    assert contents == bytes(range(256)) * (SEGMENT // 256)
    replay.close()


def test_a_graph_whose_memory_was_given_back_is_refused(process: Callable[..., Process]) -> None:
    witness = process(THEIRS, 1).record(orphan=True)
    with pytest.raises(NotRecorded, match="which was given back") as refused:
        process(OURS, 0).record(witness, orphan=True)
    assert refused.value.field == "orphan"


def test_what_is_in_doubt_is_refused_by_the_kernels_name(process: Callable[..., Process]) -> None:
    """An address that is shifted by four bits, as a descriptor may have it."""
    witness = process(THEIRS, 1, stale=(THEIRS + SLOT_BYTES + 64) >> 4).record()
    with pytest.raises(NotRecorded, match=rf"word 16 of {NAME} ") as refused:
        process(OURS, 1, stale=(OURS + SLOT_BYTES + 64) >> 4).record(witness)
    assert refused.value.field == "encoded"


def test_a_witness_of_other_work_is_refused(process: Callable[..., Process]) -> None:
    archive = process(OURS, 0).record()
    witness = process(THEIRS, 1).record()
    table = pointers_of(witness)
    shorter = replace(table, allocations=table.allocations[:-1])
    for wrong, why in ((with_pointers(witness, shorter), "witness"), (archive, "unproven")):
        with pytest.raises(TraceRefused, match=why):
            with_addresses(archive, [wrong])
    with pytest.raises(NativeError, match="does not say"):
        with_addresses(archive, [plain(witness)])


def plain(archive: bytes) -> bytes:
    """An archive that says nothing of its addresses."""
    made = bytearray(archive)
    made[20:24] = bytes(4)
    return bytes(made)


def test_a_process_that_took_other_memory_before_is_refused(
    process: Callable[..., Process], recorded: bytes
) -> None:
    here, table = process(HERE, 1), pointers_of(recorded)
    logits = table.allocations[-4]
    other = replace(
        table,
        allocations=(
            *table.allocations[:-4],
            replace(logits, num_bytes=1),
            *table.allocations[-3:],
        ),
    )
    lasting = here.arena.workspace.memory
    with pytest.raises(GraphsRefused) as refused:
        Replay(here.memory, other, here.pool, lasting)
    assert refused.value.field == "sequence"
    first = replace(table.allocations[0], num_bytes=1)
    other = replace(table, allocations=(first, *table.allocations[1:]))
    with pytest.raises(GraphsRefused) as refused:
        Replay(here.memory, other, here.pool, lasting)
    assert refused.value.field == "sequence"


def test_without_memory_they_are_refused_and_nothing_is_held(
    process: Callable[..., Process], recorded: bytes
) -> None:
    here, table = process(HERE, 1), pointers_of(recorded)
    fake_cuda().set_memory(0)
    large = tuple(
        replace(one, num_bytes=64 * MIB) if one.taken else one for one in table.allocations
    )
    with pytest.raises(GraphsRefused) as refused:
        Replay(
            here.memory, replace(table, allocations=large), here.pool, here.arena.workspace.memory
        )
    fake_cuda().reset()
    assert refused.value.field == "pool"


class OnTheFake:
    """Stands for ``ArchiveOnDevice``, which has a stream of torch's."""

    def __init__(self, memory: StageMemory, archive: bytes, kernels: object) -> None:
        assert kernels is None
        arena = memory.arena
        assert isinstance(arena, CudaArena)
        self._archive = GraphArchive(arena.native, archive, arena.native_arena)
        self.spent_ms = {"images": 0.0}

    def check(self, size: int) -> int:
        return 0

    def build(self, size: int, between: Callable[[], None]) -> None:
        between()
        self._archive.build(size)

    def launch(self, size: int) -> None:
        self._archive.launch(size)

    def close(self) -> None:
        self._archive.close()


def test_a_stage_takes_the_memory_with_its_first_graph_and_gives_it_back(
    process: Callable[..., Process], recorded: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotlight.engine.cuda.indirect.ArchiveOnDevice", OnTheFake)
    here, way = process(HERE, 1, stale=0x7FFD_8888_5678), Anywhere()
    device = way.open(here.memory, recorded)
    assert device.tags == (8, 4)
    assert device.spent_ms == {}
    device.load(8)
    steps = StandInSteps()
    steps.places = {"metadata": here.memory.for_steps((64,), torch.uint8).data_ptr()}
    layout = GraphLayout(
        slot=0,
        places=places_in({name: at - 4096 for name, at in places_of(steps).items()}),
        pool_bytes=8 * SEGMENT,
        trials=(Trial(rows=4, digest="0" * 64), Trial(rows=8, digest="1" * 64)),
    )
    scratch = cast("Any", SimpleNamespace(graphs=here.graphs))

    def fit(layout: GraphLayout) -> None:
        way.fit(Fitting(layout, here.memory, scratch, steps, later=False))

    fit(layout)
    before = len(here.pool.events)
    assert device.check(8) == device.check(4) == 0
    assert len(here.pool.events) == before + 4
    device.build(8, lambda: None)
    device.launch(8)
    assert device.spent_ms == {"images": 0.0}
    device.close()
    assert sum(event.taken for event in here.pool.events) == 4
    assert sum(not event.taken for event in here.pool.events) == 3
    apart = replace(layout, places=places_in({"metadata": 5, "logits": 5}))
    with pytest.raises(GraphsRefused) as refused:
        fit(apart)
    assert refused.value.field == "slot"


def test_an_archive_that_says_nothing_of_addresses_is_refused(
    process: Callable[..., Process], recorded: bytes
) -> None:
    with pytest.raises(NativeError, match="does not say"):
        Anywhere().open(process(HERE, 1).memory, plain(recorded))
