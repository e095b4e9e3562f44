"""Stop strings in streamed text."""

from collections.abc import Sequence

import msgspec

from pilotlight.common.errors import BadRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 1024


class Stopped(msgspec.Struct, frozen=True):
    """What may be shown, and the stop string that ended the text, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the stop string that begins first, and gives out what comes before it.

    The answer depends on the text alone, not on the pieces in which it comes: of two stop strings
    the one that begins first wins, also when the other one is complete earlier; of two that begin
    together, the shorter. What may yet become a stop string is held back. A character costs one
    step of a Knuth-Morris-Pratt automaton for each stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Prepare.

        Raises:
            BadRequest: too many stop strings, an empty one or one too long.
        """
        if len(stops) > MAX_STOPS:
            raise BadRequest(
                f"{len(stops)} stop strings; at most {MAX_STOPS} are taken", param="stop"
            )
        if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise BadRequest(f"a stop string needs 1 to {MAX_STOP_CHARS} characters", param="stop")
        # Shortest first: it is the first to be complete, and of two that begin together it wins.
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len)]
        self._held = ""
        self._found: tuple[int, str] | None = None
        """Where in the held text a stop string begins, while one that began earlier may still
        become complete."""
        self._ended = False

    @property
    def empty(self) -> bool:
        """There is no stop string."""
        return not self._automata

    def feed(self, text: str) -> Stopped:
        """Add text; get what can be shown now. After a stop string nothing more comes."""
        if self._ended:
            return Stopped("")
        if not self._automata:
            return Stopped(text)
        seen = len(self._held)
        self._held += text
        for end, char in enumerate(text, seen + 1):
            earliest = self._step(char, end)
            if self._found is not None and earliest >= self._found[0]:
                return self._end(*self._found)
        return self._release(
            min(len(self._held) - automaton.matched for automaton in self._automata)
        )

    def flush(self) -> Stopped:
        """What is held back, at the end of the text; also then a stop string may be found."""
        if self._found is not None:
            return self._end(*self._found)
        return self._release(len(self._held))

    def _step(self, char: str, end: int) -> int:
        """Feed one character; return where the earliest unfinished stop string begins, ``end`` if
        there is none.
        """
        earliest = end
        for automaton in self._automata:
            if automaton.step(char):
                start = end - len(automaton.stop)
                if self._found is None or start < self._found[0]:
                    self._found = (start, automaton.stop)
            earliest = min(earliest, end - automaton.matched)
        return earliest

    def _release(self, chars: int) -> Stopped:
        if self._found is not None:
            chars = min(chars, self._found[0])
            self._found = (self._found[0] - chars, self._found[1])
        shown, self._held = self._held[:chars], self._held[chars:]
        return Stopped(shown)

    def _end(self, start: int, stop: str) -> Stopped:
        self._ended = True
        return Stopped(self._held[:start], stop)


class _Automaton:
    """How much of one stop string the text ends with, at most."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Characters of ``stop`` that the text ends with, short of all of them."""
        self._borders = _borders(stop)

    def step(self, char: str) -> bool:
        """Add one character; true when the stop string is complete."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._borders[self.matched - 1]
        if self.stop[self.matched] == char:
            self.matched += 1
        complete = self.matched == len(self.stop)
        if complete:
            self.matched = self._borders[-1]
        return complete


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for end in range(1, len(stop)):
        while length and stop[end] != stop[length]:
            length = borders[length - 1]
        length += stop[end] == stop[length]
        borders[end] = length
    return borders
