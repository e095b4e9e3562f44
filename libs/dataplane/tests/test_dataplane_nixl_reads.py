"""Which memory reads may land in. Nothing is read here."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.checkpoint.digests import UNIT_BYTES
from pilotlight.dataplane.link.nixl_reads import Reads, UnitRead

SLOTS = 4


def a_read(on_end: Callable[[UnitRead], None] = lambda _: None) -> UnitRead:
    return UnitRead(peer=1, address=0, size_bytes=8, deadline_s=1.0, on_end=on_end)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "done", "break", "late", "release", "give up"]),
            st.integers(0, 99),
        ),
        max_size=80,
    )
)
def test_a_slot_is_used_again_only_when_nothing_can_be_written_to_it(
    steps: list[tuple[str, int]],
) -> None:
    """Against a model of what a library may still do: it writes to the slot of each read that it
    has not said is done.
    """
    reads, landing = Reads(memoryview(bytearray(SLOTS * UNIT_BYTES)), SLOTS), dict[int, UnitRead]()
    may_be_written: dict[int, int] = {}
    ended: list[UnitRead] = []
    landed: list[UnitRead] = []
    for what, which in steps:
        numbers = list(landing)
        if what == "add":
            reads.add(a_read(ended.append))
        elif what in ("done", "break") and numbers:
            number = numbers[which % len(numbers)]
            read = landing.pop(number)
            if what == "done":
                del may_be_written[number]
                landed.append(read)
            reads.done(number, "" if what == "done" else "broke")
        elif what == "late" and numbers:
            reads.late(numbers[which % len(numbers)])
        elif what == "release" and landed:
            reads.release(landed.pop(which % len(landed)))
        elif what == "give up" and numbers:
            reads.release(landing[numbers[which % len(numbers)]])
        while (begun := reads.next()) is not None:
            number, read = begun
            assert read.slot not in may_be_written.values()
            assert all(read.slot != other.slot for other in landed if other.view is not None)
            landing[number], may_be_written[number] = read, read.slot
    assert all((read.view is None) != (read.error is None) or not read.is_wanted for read in ended)
    assert len(ended) == len(set(ended))
    assert 0 <= reads.out_of_use <= SLOTS
    assert reads.is_spent == (reads.out_of_use >= SLOTS / 2)


def test_reads_that_are_late_or_broke_off_use_it_up_and_one_that_is_done_after_all_does_not() -> (
    None
):
    reads = Reads(memoryview(bytearray(SLOTS * UNIT_BYTES)), SLOTS)
    ended: list[UnitRead] = []
    for _ in range(SLOTS):
        reads.add(a_read(ended.append))
    numbers = [number for number, _ in iter(reads.next, None)]
    reads.late(numbers[0])
    reads.late(numbers[0])
    assert (reads.out_of_use, reads.is_spent) == (1, False)
    reads.done(numbers[0])
    assert (reads.out_of_use, reads.free) == (0, 1)
    reads.done(numbers[1], "broke")
    reads.late(numbers[2])
    assert (reads.out_of_use, reads.is_spent) == (2, True)
    reads.end("it was ended")
    assert [read.error for read in ended] == [
        "a read was not done within 1 s",
        "broke",
        "a read was not done within 1 s",
        "it was ended",
    ]
