"""What becomes of words that no reading of ``matching`` explains.

Kernels take structures by value whose ends nobody reads: there lies what the stack had. Such a word
differs between processes, and is nothing's address in any of them: it is kept as it was, which is
what restoring parameters verbatim does with all of them. But a descriptor that a kernel takes by
value may hold an address in another form, shifted or cut. That would be kept, too, and lead into
another's memory; so a word is refused that differs as some buffer does, and, where that is shifted,
by up to ``MOST_SHIFT`` bits, whose lower half is that of such an address. A descriptor that holds
the address as it is is foretold as any other word.

The difference alone says little: arenas lie a power of two apart, and so, by chance, do halves of
what the host's memory had, which begins at multiples of megabytes.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pilotlight.policy.graphs.matching import Doubt, Matching
from pilotlight.policy.graphs.trace import Allocation, Trace

MOST_SHIFT = 16
"""Bits: descriptors count in pieces of so many bytes at most."""
HALF, WORD = 1 << 32, 1 << 64


def settled(trace: Trace, witnesses: Sequence[Trace], matching: Matching) -> Matching:
    """The matching without doubts of words that nobody reads.

    Doubts that stay are as they were, but for the reason ``encoded``: the word differs between
    processes as a buffer's address does in another form.

    Args:
        trace: what is restored later.
        witnesses: the same work in other processes, as ``match`` had them.
        matching: what it found.
    """
    forms = [_forms(trace, witness) for witness in witnesses]
    left: list[Doubt] = []
    for doubt in matching.doubts:
        if doubt.why != "unexplained":
            left.append(doubt)
            continue
        word = trace.launches[doubt.launch].word(doubt.offset)
        words = [one.launches[doubt.launch].word(doubt.offset) for one in witnesses]
        if any(
            _holds(one, word, form)
            for other, found in zip(words, forms, strict=True)
            for one, form in found.get((word - other) % WORD, ())
        ):
            left.append(replace(doubt, why="encoded"))
        elif _is_address(trace, word) or any(map(_is_address, witnesses, words)):
            left.append(doubt)
    return replace(matching, doubts=left)


@dataclass(frozen=True, slots=True)
class _Form:
    """A way to write an address down."""

    sign: int
    shift: int
    """Bits, to the left; negative: to the right."""

    def of(self, address: int) -> int:
        """An address, or a distance, in this form."""
        shifted = address << self.shift if self.shift > 0 else address >> -self.shift
        return self.sign * shifted


FORMS = tuple(
    _Form(sign, shift) for sign in (1, -1) for shift in range(-MOST_SHIFT, MOST_SHIFT + 1)
)


def _forms(trace: Trace, witness: Trace) -> dict[int, list[tuple[Allocation, _Form]]]:
    """By how far a word of both processes is apart, as words go: of which buffers it may be an
    address, and in which form.
    """
    found: dict[int, list[tuple[Allocation, _Form]]] = defaultdict(list)
    for one, there in zip(trace.allocations, witness.allocations, strict=True):
        distance = one.address - there.address
        for form in FORMS:
            # The distance as the form has it: of a negative one not what is next below.
            apart = form.of(abs(distance)) * (1 if distance > 0 else -1)
            if apart:
                found[apart % WORD].append((one, form))
    return found


def _holds(one: Allocation, word: int, form: _Form) -> bool:
    """Whether a word's lower half is that of an address of a buffer, or near it, in a form. An
    address that is not shifted may lie anywhere: kernels take some less what they add.
    """
    if not form.shift:
        return True
    # As far beside it as it is long.
    ends = one.address - one.num_bytes, one.address + 2 * one.num_bytes
    first, last = sorted(map(form.of, ends))
    return (word - first) % HALF <= last - first


def _is_address(trace: Trace, word: int) -> bool:
    return any(one.holds(word) for one in trace.allocations)
