"""What becomes of words that no reading of ``matching`` explains.

Kernels take structures by value whose ends nobody reads: there lies what the stack had. Such a word
differs between processes, and is nothing's address in any of them: it is kept as it was, which is
what restoring parameters verbatim does with all of them. But a descriptor that a kernel takes by
value may hold an address in another form, shifted or cut. That would be kept, too, and lead into
another's memory; so a word that differs as some buffer does, shifted by up to ``MOST_SHIFT`` bits,
is refused. A descriptor that holds the address as it is is foretold as any other word.
"""

from collections.abc import Sequence
from dataclasses import replace

from pilotlight.policy.graphs.matching import Doubt, Matching
from pilotlight.policy.graphs.trace import Trace

MOST_SHIFT = 16
"""Bits: descriptors count in pieces of so many bytes at most."""


def settled(trace: Trace, witnesses: Sequence[Trace], matching: Matching) -> Matching:
    """The matching without doubts of words that nobody reads.

    Doubts that stay are as they were, but for the reason ``encoded``: the word differs between
    processes as a buffer's address does in another form.

    Args:
        trace: what is restored later.
        witnesses: the same work in other processes, as ``match`` had them.
        matching: what it found.
    """
    moved = {
        one.address - there.address
        for witness in witnesses
        for one, there in zip(trace.allocations, witness.allocations, strict=True)
    } - {0}
    shifts = {
        sign * part
        for distance in moved
        for sign in (1, -1)
        for bits in range(MOST_SHIFT + 1)
        for part in (abs(distance) >> bits, abs(distance) << bits)
        if part
    }
    left: list[Doubt] = []
    for doubt in matching.doubts:
        if doubt.why != "unexplained":
            left.append(doubt)
            continue
        word = trace.launches[doubt.launch].word(doubt.offset)
        words = [one.launches[doubt.launch].word(doubt.offset) for one in witnesses]
        if any(word - other in shifts for other in words):
            left.append(replace(doubt, why="encoded"))
        elif _is_address(trace, word) or any(map(_is_address, witnesses, words)):
            left.append(doubt)
    return replace(matching, doubts=left)


def _is_address(trace: Trace, word: int) -> bool:
    return any(one.holds(word) for one in trace.allocations)
