"""Traces of real processes: decode steps of an engine on a CPU, three times, each with another
address space. ``tests/support/trace_recorder.py`` recorded them.

torch's operators stand for kernels and glibc's allocator gives the addresses, many of them again
and again. What the third process had is the truth that the first two have to foretell.
"""

import gzip
from pathlib import Path

import pytest

from pilotlight.common.messages.codec import decode_json
from pilotlight.policy.graphs.buffers import BufferClass, buffers_of
from pilotlight.policy.graphs.matching import IndexPointer, match, require_certain, restored
from pilotlight.policy.graphs.trace import Trace, check_trace

FOLDER = Path(__file__).parent / "traces"
GRAPH = 2


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    found = [
        decode_json(gzip.decompress(file.read_bytes()), Trace)
        for file in sorted(FOLDER.glob("decode-*.json.gz"))
    ]
    assert len(found) == 3
    return found


def test_every_parameter_of_a_third_process_is_foretold(traces: list[Trace]) -> None:
    ours, witness, theirs = traces
    found = match(ours, [witness])
    require_certain(found)
    captured = [number for number, one in enumerate(ours.launches) if one.graph == GRAPH]
    assert len(captured) > 100
    moved = 0
    for number in captured:
        made = restored(ours.launches[number], found.pointers.get(number, ()), theirs.allocations)
        assert made == theirs.launches[number].parameters
        moved += made != ours.launches[number].parameters
    assert moved > 100, "the addresses are others there"


def test_without_the_order_of_time_many_would_be_wrong(traces: list[Trace]) -> None:
    """MEDUSA's Figure 6 is no rarity: an allocator gives the same addresses again. The first match,
    or the recorded address itself, is another buffer's in the other process.
    """
    ours, witness, theirs = traces
    found = match(ours, [witness])
    wrong = 0
    for number, pointers in found.pointers.items():
        launch = ours.launches[number]
        for one in pointers:
            address = launch.word(one.offset)
            first = next(
                index for index, made in enumerate(ours.allocations) if made.holds(address)
            )
            naive = IndexPointer(one.offset, first, address - ours.allocations[first].address)
            wrong += restored(launch, [naive], theirs.allocations) != restored(
                launch, [one], theirs.allocations
            )
    assert wrong > 10


def test_buffers_of_a_real_step_are_given_or_temporary(traces: list[Trace]) -> None:
    ours, witness, _ = traces
    found = match(ours, [witness])
    began = ours.capture_of(GRAPH).began
    filled = [number for number, one in enumerate(ours.allocations) if one.at < began]
    buffers = buffers_of(ours, found, GRAPH, filled)
    kinds = set(buffers.classes.values())
    assert {BufferClass.GIVEN, BufferClass.TEMPORARY} <= kinds
    assert buffers.saved_bytes < 4096, "little outlives its step"


def test_processes_with_the_same_addresses_prove_nothing(traces: list[Trace]) -> None:
    ours = traces[0]
    assert {one.why for one in match(ours, [ours]).doubts} == {"unproven"}


def test_recorded_traces_can_have_happened(traces: list[Trace]) -> None:
    for one in traces:
        check_trace(one)
