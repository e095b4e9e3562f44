"""Words that no reading explains: what nobody reads stays, and an address in another form is
refused.
"""

from collections.abc import Sequence

import pytest

from pilotlight.policy.graphs.matching import match, require_certain
from pilotlight.policy.graphs.settling import settled
from pilotlight.policy.graphs.trace import Allocation, Capture, Launch, Param, Trace, TraceRefused

OURS, THEIRS = 0x6000_0000_0000, 0x5000_0000_0000
BYTES = 1 << 20


def trace(base: int, *words: int) -> Trace:
    """One kernel that was captured, and one buffer; a word for each parameter."""
    parameters = b"".join(word.to_bytes(8, "little") for word in words)
    return Trace(
        source="by hand",
        layouts={"kernel": [Param(8 * place, 8) for place in range(len(words))]},
        allocations=[Allocation(1, base, BYTES)],
        launches=[Launch(3, "kernel", parameters, 1)],
        captures=[Capture(1, 2, 4)],
    )


def doubts(ours: Sequence[int], theirs: Sequence[int]) -> list[tuple[int, str]]:
    """Offsets and reasons of those that are left."""
    one, other = trace(OURS, *ours), trace(THEIRS, *theirs)
    matching = match(one, [other])
    return [(doubt.offset, doubt.why) for doubt in settled(one, [other], matching).doubts]


def test_what_lies_on_a_stack_is_kept_as_it_is() -> None:
    ours = OURS + 64, 0x7FFC_1234_5678, 17, 0xDEAD_BEEF_0000_0001
    theirs = THEIRS + 64, 0x7FFD_8765_4320, 23, 5
    assert doubts(ours, theirs) == []
    matching = match(trace(OURS, *ours), [trace(THEIRS, *theirs)])
    assert len(matching.doubts) == 3, "before"
    assert [one.offset for one in matching.pointers[0]] == [0]


@pytest.mark.parametrize("bits", [0, 1, 4, 16])
def test_an_address_in_another_form_is_refused(bits: int) -> None:
    """As a descriptor that counts in pieces of so many bytes has it, beside other fields."""
    ours = ((OURS + 4096) >> bits) + (3 << 60) if bits else OURS - 8
    theirs = ((THEIRS + 4096) >> bits) + (3 << 60) if bits else THEIRS - 8
    assert doubts([ours, 5], [theirs, 5]) == [(0, "encoded")]
    one, other = trace(OURS, ours), trace(THEIRS, theirs)
    with pytest.raises(TraceRefused, match=r"encoded: word 0 of kernel \(launch 0\)"):
        require_certain(settled(one, [other], match(one, [other])))


@pytest.mark.parametrize("bits", [-3, -16, 4, 12, 16])
@pytest.mark.parametrize("inside", [0, 4096, BYTES, -BYTES, 2 * BYTES])
@pytest.mark.parametrize("sign", [1, -1])
def test_near_a_buffer_any_form_of_its_address_is_refused(
    bits: int, inside: int, sign: int
) -> None:
    def form(base: int) -> int:
        address = base + inside
        shifted = address << -bits if bits < 0 else address >> bits
        return (sign * shifted + (3 << 61)) % (1 << 64)

    ours, theirs = form(OURS), form(THEIRS)
    assert doubts([ours, 5], [theirs, 5]) == [(0, "encoded")]


@pytest.mark.parametrize("bits", range(12, 17))
def test_halves_of_a_stack_that_lie_as_far_apart_by_chance_are_kept(bits: int) -> None:
    """As cuBLAS's parameters have them, behind 32 bits that are none: the host's memory begins at
    multiples of 4 MiB, so such differences come in some starts of a hundred.
    """
    apart = (OURS - THEIRS) >> bits
    ours = (1 << 32) + 0x4AE2_6300 + apart
    theirs = (1 << 32) + 0x4AE2_6300
    assert doubts([ours, 5], [theirs, 5]) == []
    assert doubts([theirs, 5], [ours, 5]) == []


def test_a_word_that_is_a_buffers_address_in_one_process_stays_in_doubt() -> None:
    assert doubts([OURS + 64], [THEIRS + 72]) == [(0, "unexplained")]
    assert doubts([OURS + 64], [17]) == [(0, "unexplained")]
    assert doubts([17], [THEIRS + 64]) == [(0, "unexplained")]


def test_other_doubts_stay_as_they_are() -> None:
    """A witness with the same addresses proves nothing."""
    one = trace(OURS, OURS + 64)
    matching = match(one, [one])
    assert settled(one, [one], matching) == matching
    assert [doubt.why for doubt in matching.doubts] == ["unproven"]
