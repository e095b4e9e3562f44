"""Which words of a graph's parameters are addresses, and of what (MEDUSA, section 4.1).

A word that may be an address is matched backwards from its launch, with the last allocation before
it that has the address. That may be wrong in three ways: a constant looks like an address, an
address just behind a buffer is that of the next one, what was freed is meant after all. So each
word has its readings, the most probable first, and traces of the same work by other processes, the
*witnesses*, decide: the first reading that foretells every witness' word is right. A witness proves
something only where it has the buffer elsewhere. Of two buffers that lie side by side in all
processes, the address between them is the second one's: kernels do not read behind a buffer.

What no reading explains, or no witness proves, is refused by the kernel's name and the offset:
a graph with one wrong address reads or writes what is another's.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pilotlight.policy.graphs.owners import Owners
from pilotlight.policy.graphs.trace import (
    WORD_BYTES,
    Allocation,
    Launch,
    Param,
    Trace,
    TraceRefused,
    check_trace,
)


@dataclass(frozen=True, slots=True)
class IndexPointer:
    """MEDUSA's indirect index pointer: a word that is an address, as what it points to."""

    offset: int
    """Of the word, in the launch's parameters."""
    allocation: int
    """Its number."""
    inside: int
    """Bytes from the beginning of that allocation. Its length: just behind it."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A word that cannot be restored."""

    launch: int
    kernel: str
    offset: int
    why: str
    """``freed``: it points to what was freed before. ``unproven``: no witness has the buffer
    elsewhere. ``unexplained``: it differs between processes, and not as any buffer does."""


@dataclass(frozen=True, slots=True)
class Matching:
    """The words of all launches that were captured."""

    pointers: Mapping[int, Sequence[IndexPointer]]
    """By number of the launch; what is not among them is a constant."""
    doubts: Sequence[Doubt]
    constants: int
    """Words that look like addresses of buffers, and are none."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a word may mean; None: the number itself."""

    pointer: IndexPointer | None
    freed: bool = False


def match(
    trace: Trace, witnesses: Sequence[Trace], dead: Collection[tuple[str, int]] = ()
) -> Matching:
    """The addresses in all captured launches of a trace.

    The readings of a word, in this order:

    1. An address in the last allocation before the launch that has it, if that lives: MEDUSA's
       rule. Of buffers that had the address one after the other (Figure 6) it finds the last.
    2. A constant.
    3. The address just behind a buffer that lives.
    4. An address in the last allocation that had it, which was freed before the launch.

    Args:
        trace: what is restored later.
        witnesses: the same work in other processes.
        dead: offsets, by kernel, of words that are known not to be read: padding, and what the
            compiler left there. They are kept as they are.

    Raises:
        TraceRefused: a trace cannot have happened, or a witness did other work (``witness``).
    """
    for one in (trace, *witnesses):
        check_trace(one)
    for one in witnesses:
        _check_same_work(trace, one)
    pointers: dict[int, list[IndexPointer]] = {}
    doubts: list[Doubt] = []
    constants = 0
    owners = Owners(trace.allocations)
    for number, launch in enumerate(trace.launches):
        if launch.graph is None:
            continue
        owners.advance(launch.at)
        for offset in _offsets(trace.layouts[launch.kernel]):
            if (launch.kernel, offset) in dead:
                continue
            found = _read(trace, witnesses, number, offset, owners)
            if isinstance(found, str):
                doubts.append(Doubt(number, launch.kernel, offset, found))
            elif found is not None:
                pointers.setdefault(number, []).append(found)
            else:
                constants += owners.last(launch.word(offset)) is not None
    return Matching(pointers, doubts, constants)


def require_certain(matching: Matching) -> None:
    """Refuses a graph of which one word is in doubt.

    Raises:
        TraceRefused: by the reason of the first doubt; the message names kernel and offset, and how
            many words of which kernels are in doubt.
    """
    if matching.doubts:
        one = matching.doubts[0]
        counts = Counter((each.kernel, each.why) for each in matching.doubts)
        of_kernels = ", ".join(
            f"{count} {why} of {kernel}" for (kernel, why), count in counts.items()
        )
        raise TraceRefused(
            one.why, f"word {one.offset} of {one.kernel} (launch {one.launch}); in all {of_kernels}"
        )


def restored(
    launch: Launch, pointers: Sequence[IndexPointer], allocations: Sequence[Allocation]
) -> bytes:
    """A launch's parameters for a process that has its memory elsewhere.

    Args:
        launch: as recorded.
        pointers: its addresses.
        allocations: of the process that restores: the recorded sequence, replayed.

    Raises:
        TraceRefused: that process lacks one of them (``allocation``).
    """
    parameters = bytearray(launch.parameters)
    for one in pointers:
        if one.allocation >= len(allocations):
            raise TraceRefused("allocation", f"number {one.allocation} was not made")
        address = allocations[one.allocation].address + one.inside
        parameters[one.offset : one.offset + WORD_BYTES] = address.to_bytes(WORD_BYTES, "little")
    return bytes(parameters)


def _offsets(layout: Sequence[Param]) -> Iterator[int]:
    for param in layout:
        yield from param.words


def _read(
    trace: Trace, witnesses: Sequence[Trace], number: int, offset: int, owners: Owners
) -> IndexPointer | str | None:
    """What a word is: an address, None for a constant, or the reason of a doubt."""
    launch = trace.launches[number]
    word = launch.word(offset)
    readings = list(_readings(trace.allocations, launch, offset, owners))
    words = [one.launches[number].word(offset) for one in witnesses]
    holding = [
        reading
        for reading in readings
        if all(
            found == _foretold(reading, word, one.allocations)
            for one, found in zip(witnesses, words, strict=True)
        )
    ]
    if not holding:
        return "unexplained"
    live = [reading for reading in holding if reading.pointer and not reading.freed]
    numbers = [reading for reading in holding if reading.pointer is None]
    if numbers and len(holding) > 1:
        # They all foretell the same words here, and others as soon as the buffer lies elsewhere.
        return "unproven"
    if numbers:
        return None
    return live[0].pointer if live else "freed"


def _readings(
    allocations: Sequence[Allocation], launch: Launch, offset: int, owners: Owners
) -> Iterator[_Reading]:
    address = launch.word(offset)
    last = owners.last(address)
    lives = last is not None and allocations[last].lives(launch.at)
    if last is not None and lives:
        yield _Reading(IndexPointer(offset, last, address - allocations[last].address))  # 1
    yield _Reading(None)  # 2
    for number in owners.ending(address, launch.at):
        yield _Reading(IndexPointer(offset, number, allocations[number].num_bytes))  # 3
    if last is not None and not lives:
        inside = address - allocations[last].address
        yield _Reading(IndexPointer(offset, last, inside), freed=True)  # 4


def _foretold(reading: _Reading, word: int, allocations: Sequence[Allocation]) -> int:
    if reading.pointer is None:
        return word
    return allocations[reading.pointer.allocation].address + reading.pointer.inside


def _check_same_work(trace: Trace, witness: Trace) -> None:
    """Allocations and launches are the same, one by one, but for addresses and parameters.

    Raises:
        TraceRefused: at the first that is not.
    """
    ours = [(one.at, one.num_bytes, one.freed_at) for one in trace.allocations]
    theirs = [(one.at, one.num_bytes, one.freed_at) for one in witness.allocations]
    launched = [(one.at, one.kernel, len(one.parameters), one.graph) for one in trace.launches]
    seen = [(one.at, one.kernel, len(one.parameters), one.graph) for one in witness.launches]
    for what, mine, other in (("allocation", ours, theirs), ("launch", launched, seen)):
        if mine != other:
            place = next(
                (
                    index
                    for index, (one, two) in enumerate(zip(mine, other, strict=False))
                    if one != two
                ),
                min(len(mine), len(other)),
            )
            raise TraceRefused("witness", f"{what} {place} is another one there")
    if trace.layouts != witness.layouts:
        raise TraceRefused("witness", "kernels have other parameters there")
