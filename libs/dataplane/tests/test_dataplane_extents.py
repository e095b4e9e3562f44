from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from pilotlight.dataplane.extents import Extent, Extents

UNIT = 64
UNITS = 48


class ExtentsMachine(RuleBasedStateMachine):
    """Whatever is taken and given back: nothing overlaps, nothing leaks, and free neighbours are
    one range.
    """

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(UNIT * UNITS + 7, UNIT)
        self.model: set[Extent] = set()

    @rule(target=held, size_bytes=st.integers(0, UNIT * 20), behind=st.none() | held)
    def take(self, size_bytes: int, behind: Extent | None):
        largest = self.extents.largest_free_bytes
        after = behind.stop if behind is not None else None
        free_there = after is not None and self._is_free(
            Extent(after, self.extents.rounded(size_bytes))
        )
        assert self.extents.fits([size_bytes], after) == (
            self.extents.rounded(size_bytes) <= largest
        )
        extent = self.extents.take(size_bytes, after)
        assert not free_there or (extent is not None and extent.offset == after)
        if extent is None:
            assert self.extents.rounded(size_bytes) > largest, "room was there"
            return multiple()
        assert extent.size_bytes == self.extents.rounded(size_bytes) >= size_bytes
        self.model.add(extent)
        return extent

    @rule(
        sizes=st.lists(st.integers(1, UNIT * 8), max_size=6),
        after=st.none() | st.integers(0, UNITS).map(lambda unit: unit * UNIT),
    )
    def fits(self, sizes: list[int], after: int | None) -> None:
        """Just when they can be taken one after the other."""
        fits, taken = self.extents.fits(sizes, after), list[Extent]()
        for size_bytes in sizes:
            extent = self.extents.take(size_bytes, after)
            if extent is None:
                break
            taken.append(extent)
            after = extent.stop
        assert fits == (len(taken) == len(sizes))
        for extent in taken:
            self.extents.give_back(extent)

    def _is_free(self, wanted: Extent) -> bool:
        return wanted.stop <= UNIT * UNITS and all(
            other.stop <= wanted.offset or wanted.stop <= other.offset for other in self.model
        )

    @rule(
        target=held,
        unit=st.integers(-1, UNITS),
        size_bytes=st.integers(1, UNIT * 4),
        shift=st.sampled_from([0, 0, 0, 1]),
    )
    def take_at(self, unit: int, size_bytes: int, shift: int):
        wanted = Extent(unit * UNIT + shift, self.extents.rounded(size_bytes))
        extent = self.extents.take_at(wanted.offset, size_bytes)
        fits = shift == 0 and unit >= 0 and wanted.stop <= UNIT * UNITS
        free = fits and all(
            other.stop <= wanted.offset or wanted.stop <= other.offset for other in self.model
        )
        assert (extent == wanted) if free else extent is None
        if extent is None:
            return multiple()
        self.model.add(extent)
        return extent

    @rule(extent=consumes(held))
    def give_back(self, extent: Extent) -> None:
        self.extents.give_back(extent)
        self.model.remove(extent)
        with pytest.raises(ValueError, match="not taken"):
            self.extents.give_back(extent)

    @invariant()
    def nothing_overlaps_or_leaks(self) -> None:
        taken = self.extents.taken
        assert set(taken) == self.model
        assert all(first.stop <= second.offset for first, second in pairwise(taken))
        assert all(extent.offset >= 0 and extent.stop <= UNIT * UNITS for extent in taken)
        assert sum(extent.size_bytes for extent in taken) + self.extents.free_bytes == UNIT * UNITS

    @invariant()
    def free_ranges_are_coalesced(self) -> None:
        edges = [
            0,
            *(edge for extent in self.extents.taken for edge in (extent.offset, extent.stop)),
            UNIT * UNITS,
        ]
        gaps = [stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        assert self.extents.largest_free_bytes == max(gaps)
        assert 0.0 <= self.extents.fragmentation < 1.0


ExtentsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestExtents = ExtentsMachine.TestCase


def test_everything_given_back_is_one_range() -> None:
    extents = Extents(10 * UNIT, UNIT)
    taken = [extents.take(UNIT) for _ in range(10)]
    assert extents.take(1) is None
    for extent in [*taken[1::2], *taken[::2]]:
        assert extent is not None
        extents.give_back(extent)
    assert (extents.largest_free_bytes, extents.fragmentation) == (10 * UNIT, 0.0)


def test_fragmentation_is_the_share_outside_the_largest_range() -> None:
    extents = Extents(4 * UNIT, UNIT)
    first, _, third, _ = (extents.take(UNIT) for _ in range(4))
    assert first is not None
    assert third is not None
    extents.give_back(first)
    extents.give_back(third)
    assert extents.fragmentation == 0.5
