"""How many chunks are read from one origin at once, by what the link gives. Pure.

A link gives a single connection less than all of it, and too many cost more than they bring::

    throughput          ______________      more are tried as long as each step brings GAIN more; one that does not is taken back,
              _________/                    and the next is tried after a while, each time a longer one
       ______/
    reads  4    5    7    8 7 7 7 8 7
"""

from dataclasses import dataclass

GAIN = 1.05
"""What a step up has to bring to be kept."""
LOSS = 0.5
"""A throughput below this share of the last one means another link than before: what was learned of
it is forgotten."""
STEP_SHARE = 4
"""A step is a quarter of what there is, at least one."""
FIRST_REST = 4
LONGEST_REST = 64
"""Measurements between a step that was taken back and the next."""


@dataclass(slots=True)
class Concurrency:
    """How many reads one origin gets. Begins with ``limit``, by default the least, and stays
    within its bounds.
    """

    least: int
    most: int
    limit: int = 0
    _before: float | None = None
    """Throughput before the last step; None: no step is on trial."""
    _steady: float | None = None
    """Throughput at ``limit``, when it was last looked at."""
    _from: int = 0
    _rest: int = 0
    _next_rest: int = FIRST_REST

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ValueError: there is nothing between them.
        """
        if not 1 <= self.least <= self.most:
            raise ValueError(
                f"from {self.least} to {self.most} reads at once: give 1 <= least <= most"
            )
        self.limit = min(max(self.limit, self.least), self.most)

    def measured(self, bytes_per_s: float) -> int:
        """Throughput with ``limit`` reads at work all the time; how many there are to be from now
        on.
        """
        if self._before is not None:
            self._judge(bytes_per_s, self._before)
        elif self._steady is not None and bytes_per_s < LOSS * self._steady:
            self._rest, self._next_rest, self._steady = 0, FIRST_REST, bytes_per_s
        else:
            self._steady = bytes_per_s
        if self._before is None:
            self._rest -= 1
            if self._rest <= 0 and self.limit < self.most:
                self._step(bytes_per_s)
        return self.limit

    def broke(self) -> int:
        """The origin broke a read off, as a server does that is asked for too much: half as many
        from now on.
        """
        self._before = self._steady = None
        self.limit = max(self.least, self.limit // 2)
        self._rest = self._next_rest
        return self.limit

    def _judge(self, bytes_per_s: float, before: float) -> None:
        self._before = None
        if bytes_per_s >= GAIN * before:
            self._steady, self._rest, self._next_rest = bytes_per_s, 0, FIRST_REST
            return
        self.limit, self._steady = self._from, before
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)

    def _step(self, bytes_per_s: float) -> None:
        self._from, self._before = self.limit, bytes_per_s
        self.limit = min(self.most, self.limit + max(1, self.limit // STEP_SHARE))
