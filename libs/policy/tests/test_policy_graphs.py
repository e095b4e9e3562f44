"""Which words of captured graphs are addresses: MEDUSA's rules one by one, then random processes
whose truth is known.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.policy.graphs.buffers import BufferClass, buffers_of
from pilotlight.policy.graphs.matching import (
    IndexPointer,
    Matching,
    match,
    require_certain,
    restored,
)
from pilotlight.policy.graphs.owners import Owners
from pilotlight.policy.graphs.trace import (
    Allocation,
    Capture,
    Launch,
    Param,
    Trace,
    TraceRefused,
    check_trace,
)

A, B, C = 0x7F00_0000_0000, 0x7F00_0010_0000, 0x7F00_0020_0000
LAYOUT = {"some_kernel": (Param(0, 8), Param(8, 4), Param(16, 16))}


def words(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def launch(at: int, first: int, third: int = 0, fourth: int = 0, second: int = 0) -> Launch:
    return Launch(at, "some_kernel", words(first, second, third, fourth), graph=8)


def trace(
    *allocations: Allocation, launches: Sequence[Launch], began: int = 50, ended: int = 100
) -> Trace:
    return Trace(
        source="made by hand",
        layouts=LAYOUT,
        allocations=allocations,
        launches=launches,
        captures=(Capture(8, began, ended),),
    )


def pointers(matching: Matching, number: int = 0) -> list[IndexPointer]:
    return list(matching.pointers.get(number, ()))


def test_a_reused_address_belongs_to_the_allocation_that_has_it_at_the_launch() -> None:
    """MEDUSA's Figure 6: allocations i and i + 1 return A; online i returns A, and i + 1 B."""
    offline = trace(
        Allocation(0, A, 64, freed_at=1), Allocation(2, A, 64), launches=[launch(60, A)]
    )
    online = trace(Allocation(0, A, 64, freed_at=1), Allocation(2, B, 64), launches=[launch(60, B)])
    found = match(offline, [online])
    assert pointers(found) == [IndexPointer(0, 1, 0)]
    assert restored(offline.launches[0], pointers(found), online.allocations) == words(B, 0, 0, 0)


def test_an_address_inside_a_buffer_keeps_its_offset() -> None:
    ours = trace(Allocation(0, A, 4096), launches=[launch(60, A + 1000, third=A + 4095)])
    theirs = trace(Allocation(0, C, 4096), launches=[launch(60, C + 1000, third=C + 4095)])
    found = match(ours, [theirs])
    assert pointers(found) == [IndexPointer(0, 0, 1000), IndexPointer(16, 0, 4095)]
    assert restored(ours.launches[0], pointers(found), [Allocation(0, B, 4096)]) == words(
        B + 1000, 0, B + 4095, 0
    )


def test_a_constant_that_looks_like_an_address_stays_what_it_is() -> None:
    """It is the same in a process whose buffer lies elsewhere."""
    ours = trace(Allocation(0, A, 64), launches=[launch(60, A, third=A + 8)])
    theirs = trace(Allocation(0, B, 64), launches=[launch(60, B, third=A + 8)])
    found = match(ours, [theirs])
    assert (pointers(found), found.constants, found.doubts) == ([IndexPointer(0, 0, 0)], 1, [])


def test_what_no_witness_has_elsewhere_is_not_believed() -> None:
    """Constant or address: both say the same there."""
    ours = trace(Allocation(0, A, 64), launches=[launch(60, A)])
    for witnesses in ([], [ours]):
        found = match(ours, witnesses)
        assert [one.why for one in found.doubts] == ["unproven"]
        told = r"unproven: word 0 of some_kernel .*in all 1 unproven of some_kernel"
        with pytest.raises(TraceRefused, match=told):
            require_certain(found)
    moved = trace(Allocation(0, B, 64), launches=[launch(60, B)])
    require_certain(match(ours, [ours, moved]))


def test_a_freed_buffer_is_refused_unless_it_is_a_constant() -> None:
    ours = trace(Allocation(0, A, 64, freed_at=1), launches=[launch(60, A)])
    theirs = trace(Allocation(0, B, 64, freed_at=1), launches=[launch(60, B)])
    assert [one.why for one in match(ours, [theirs]).doubts] == ["freed"]
    constant = trace(Allocation(0, B, 64, freed_at=1), launches=[launch(60, A)])
    assert match(ours, [constant]).doubts == []


def test_an_address_just_behind_a_buffer_is_not_its_neighbours() -> None:
    ours = trace(Allocation(0, A, 64), Allocation(1, A + 64, 64), launches=[launch(60, A + 64)])
    behind = trace(Allocation(0, B, 64), Allocation(1, C, 64), launches=[launch(60, B + 64)])
    neighbour = trace(Allocation(0, B, 64), Allocation(1, C, 64), launches=[launch(60, C)])
    assert pointers(match(ours, [behind])) == [IndexPointer(0, 0, 64)]
    assert pointers(match(ours, [neighbour])) == [IndexPointer(0, 1, 0)]
    both = trace(Allocation(0, B, 64), Allocation(1, B + 64, 64), launches=[launch(60, B + 64)])
    assert pointers(match(ours, [both])) == [IndexPointer(0, 1, 0)], "nobody reads behind a buffer"


def test_what_differs_and_is_no_buffers_is_refused_unless_it_is_known_to_be_dead() -> None:
    """Such as the address of the host's stack, in a place that no kernel reads."""
    ours = trace(Allocation(0, A, 64), launches=[launch(60, A, third=0x7FFE_0000_1000)])
    theirs = trace(Allocation(0, B, 64), launches=[launch(60, B, third=0x7FFD_0000_3000)])
    (doubt,) = match(ours, [theirs]).doubts
    assert (doubt.why, doubt.kernel, doubt.offset) == ("unexplained", "some_kernel", 16)
    assert match(ours, [theirs], dead=[("some_kernel", 16)]).doubts == []


def test_numbers_of_four_bytes_and_padding_are_no_words() -> None:
    ours = trace(Allocation(0, A, 64), launches=[launch(60, A, second=A)])
    theirs = trace(Allocation(0, B, 64), launches=[launch(60, B, second=7)])
    assert pointers(match(ours, [theirs])) == [IndexPointer(0, 0, 0)]


@pytest.mark.parametrize(
    "witness",
    [
        trace(launches=[launch(60, B)]),
        trace(Allocation(0, B, 65), launches=[launch(60, B)]),
        trace(Allocation(0, B, 64, freed_at=70), launches=[launch(60, B)]),
        trace(Allocation(0, B, 64), launches=[]),
        trace(Allocation(0, B, 64), launches=[launch(61, B)]),
        replace(
            trace(Allocation(0, B, 64), launches=[launch(60, B)]),
            layouts={"some_kernel": (Param(0, 8),)},
        ),
    ],
)
def test_a_witness_of_other_work_is_refused(witness: Trace) -> None:
    ours = trace(Allocation(0, A, 64), launches=[launch(60, A)])
    with pytest.raises(TraceRefused, match="witness"):
        match(ours, [witness])


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (replace(trace(launches=[]), format=2), "format"),
        (trace(Allocation(0, A, 8), Allocation(0, B, 8), launches=[]), "order"),
        (trace(Allocation(1, A, 8), Allocation(0, B, 8), launches=[]), "order"),
        (trace(Allocation(1, A, 8, freed_at=0), launches=[]), "allocation"),
        (trace(Allocation(1, A, -8), launches=[]), "allocation"),
        (trace(Allocation(1, 1 << 60, 8), launches=[]), "allocation"),
        (trace(Allocation(0, A, 8), Allocation(1, A + 7, 8), launches=[]), "overlap"),
        (trace(Allocation(0, A + 7, 8), Allocation(1, A, 8), launches=[]), "overlap"),
        (trace(launches=[Launch(60, "other", b"", 8)]), "kernel"),
        (trace(launches=[Launch(60, "some_kernel", b"short", 8)]), "parameters"),
        (trace(launches=[launch(40, A)]), "capture"),
        (trace(launches=[replace(launch(60, A), graph=None)]), "capture"),
        (trace(launches=[replace(launch(60, A), graph=9)]), "capture"),
        (trace(launches=[], began=9, ended=8), "capture"),
    ],
)
def test_a_trace_that_cannot_have_happened_is_refused(broken: Trace, name: str) -> None:
    with pytest.raises(TraceRefused) as refused:
        check_trace(broken)
    assert refused.value.what == name


def test_only_permanent_buffers_are_saved() -> None:
    """Given, temporary, permanent in the capture, permanent of the warm-up, and one not used."""

    def made(base: int) -> Trace:
        places = [base + number * 0x1000 for number in range(5)]
        return trace(
            Allocation(0, places[0], 1000),
            Allocation(1, places[1], 4),
            Allocation(51, places[2], 64, freed_at=90),
            Allocation(52, places[3], 8),
            Allocation(53, places[4], 512),
            launches=[launch(60, places[0], places[2], places[3]), launch(61, places[1])],
        )

    ours = made(A)
    buffers = buffers_of(ours, match(ours, [made(B)]), 8, filled=[0])
    assert buffers.classes == {
        0: BufferClass.GIVEN,
        1: BufferClass.PERMANENT,
        2: BufferClass.TEMPORARY,
        3: BufferClass.PERMANENT,
    }
    assert (buffers.saved, buffers.saved_bytes) == ([1, 3], 12)
    with pytest.raises(TraceRefused, match="graph: 9 was not captured"):
        buffers_of(ours, Matching({}, (), 0), 9, filled=())


def test_a_buffer_that_is_freed_before_the_graph_is_refused() -> None:
    """Taken before the capture: nobody has it when the graph runs."""
    ours = trace(Allocation(0, A, 64, freed_at=99), launches=[launch(60, A)])
    theirs = trace(Allocation(0, B, 64, freed_at=99), launches=[launch(60, B)])
    with pytest.raises(TraceRefused, match="orphan"):
        buffers_of(ours, match(ours, [theirs]), 8, filled=[0])


@dataclass(frozen=True)
class Truth:
    """What one word is: (allocation, inside), or a number."""

    allocation: int | None
    value: int


class Worker:
    """A process that does the work of a seed with an allocator of its own: what it frees is reused,
    the last first, and new memory begins where the process likes.
    """

    def __init__(self, seed: int, base: int, gap: int) -> None:
        self.work = random.Random(seed)
        self.base, self.gap = base, gap
        self.free: dict[int, list[int]] = {}
        self.rows: list[list[int | None]] = []
        self.live: list[int] = []
        self.launches: list[Launch] = []
        self.truth: list[list[Truth]] = []
        self.now = 0

    def take(self) -> None:
        size = self.work.choice([0x10, 0x40, 0x40, 0x1000])
        held, large = self.free.get(size), self.free.get(0x1000)
        address = held.pop() if held else self.base
        if large and size < 0x1000 and not held:
            # From within what was freed: the rest stays the last owner's.
            address = large.pop() + self.work.choice([0, 0x20, 0x1000 - size])
        if address == self.base:
            self.base += size + self.gap
        self.live.append(len(self.rows))
        self.rows.append([self.now, address, size, None])

    def give(self) -> None:
        if self.live:
            number = self.live.pop(self.work.randrange(len(self.live)))
            row = self.rows[number]
            row[3] = self.now
            self.free.setdefault(int(row[2] or 0), []).append(int(row[1] or 0))

    def launch(self, graph: int | None) -> None:
        said: list[Truth] = []
        for _ in range(3):
            dice, number = self.work.random(), self.work.random()
            if dice < 0.6 and self.live:
                allocation = self.live[int(number * len(self.live))]
                size = int(self.rows[allocation][2] or 0)
                said.append(Truth(allocation, self.work.randrange(size)))
            elif dice < 0.8:
                # The address of the first process' memory, as a number of all.
                said.append(Truth(None, A + self.work.randrange(0x4000)))
            else:
                said.append(Truth(None, self.work.randrange(1 << 20)))
        first, third, fourth = (self.word(one) for one in said)
        self.launches.append(Launch(self.now, "some_kernel", words(first, 0, third, fourth), graph))
        self.truth.append(said)

    def word(self, one: Truth) -> int:
        return one.value + (
            int(self.rows[one.allocation][1] or 0) if one.allocation is not None else 0
        )

    def trace(self, steps: int) -> Trace:
        began = steps // 2
        for self.now in range(steps):
            if self.now == began:
                continue
            dice = self.work.random()
            if dice < 0.35:
                self.take()
            elif dice < 0.55:
                self.give()
            else:
                self.launch(8 if self.now > began else None)
        allocations = [
            Allocation(at or 0, address or 0, size or 0, freed)
            for at, address, size, freed in self.rows
        ]
        return trace(*allocations, launches=self.launches, began=began, ended=steps)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 30), steps=st.integers(4, 120), count=st.integers(1, 3))
def test_every_word_of_a_random_process_is_restored_or_in_doubt(
    seed: int, steps: int, count: int
) -> None:
    """And nothing is in doubt that enough witnesses tell apart."""
    ours = Worker(seed, A, 0)
    recorded = ours.trace(steps)
    shifts = random.Random(seed)
    witnesses = [
        Worker(seed, shifts.choice([A, B, C]) + 0x10 * index, shifts.choice([0, 0x30])).trace(steps)
        for index in range(count)
    ]
    found = match(recorded, witnesses)
    restoring = Worker(seed, 0x7EEE_0000_0000, 0x500)
    theirs = restoring.trace(steps)
    doubtful = {(one.launch, one.offset) for one in found.doubts}
    for number, captured in enumerate(recorded.launches):
        if captured.graph is None:
            assert number not in found.pointers
            continue
        made = Launch(0, "", restored(captured, pointers(found, number), theirs.allocations))
        for offset in (0, 16, 24):
            if (number, offset) not in doubtful:
                assert made.word(offset) == theirs.launches[number].word(offset)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_witnesses_whose_memory_lies_elsewhere_leave_no_doubt(seed: int) -> None:
    recorded = Worker(seed, A, 0).trace(100)
    witnesses = [Worker(seed, base, gap).trace(100) for base, gap in ((B * 2, 0x70), (C * 2, 0))]
    require_certain(match(recorded, witnesses))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_owners_are_those_that_a_search_backwards_finds(seed: int) -> None:
    recorded = Worker(seed, A, 0).trace(150)
    owners, pick = Owners(recorded.allocations), random.Random(seed)
    for at in range(0, 151, 10):
        owners.advance(at)
        for _ in range(20):
            address = A + pick.randrange(-8, 0x5000)
            searched = [
                number
                for number, one in enumerate(recorded.allocations)
                if one.at < at and one.holds(address)
            ]
            assert owners.last(address) == (searched[-1] if searched else None)
            assert owners.ending(address, at) == [
                number
                for number, one in enumerate(recorded.allocations)
                if one.lives(at) and one.num_bytes and one.address + one.num_bytes == address
            ]
