"""From what is seen of an engine to whether it hangs.

::

    looks ──> watched ──> hung ──> why, or nothing
              still_s     allowed_s: what it does, and what such steps take

An engine tells what it does whenever it turns to something else. One that turns to nothing else for
longer than what it does may take hangs: a step that never ends, a command that is not taken. How
that time counts depends on what the system says of the process, so that one that gets no processor
or waits for a disk is not taken for one that hangs. A process that is stopped does nothing,
whatever it told last. No I/O and no clock: the worker looks (``worker.hang_watch``), this judges.
"""

from dataclasses import dataclass
from enum import IntEnum

LARGEST_CLASS = 32
"""Steps are told apart by the power of two that holds their tokens."""
KEEP = 0.95
"""Of what is known of a class of steps, with each new one that took less: what is much faster now
is so for a hundred steps."""


class Doing(IntEnum):
    """What an engine says that it does."""

    WAITING = 0
    """For something to do."""
    OBEYING = 1
    """A command: loading, placing or freeing parameters, taking a request in."""
    STEPPING = 2
    """A batch."""
    COMPILING = 3
    """Kernels, or capturing a step: within a batch, once for each kind."""
    TELLING = 4
    """What it has done, to a worker that may be slow to hear it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Figures of the judgement."""

    floor_s: float = 8.0
    """Nothing hangs before: a machine that swaps, or a debugger, may stop a process for seconds."""
    factor: float = 10.0
    """Of what a step of this size took lately."""
    unknown_s: float = 60.0
    """For a model's first steps, of which nothing is known."""
    obeying_s: float = 90.0
    """Longer than what the engine itself gives a copy to the device (60 s): it knows better what it
    waits for."""
    compiling_s: float = 180.0
    telling_s: float = 300.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a model's steps take, by their size: a maximum that decays."""

    seconds: tuple[float, ...] = (0.0,) * (LARGEST_CLASS + 1)
    """By class; 0 where none ran."""

    def after(self, tokens: int, seconds: float) -> "StepTimes":
        """With one more step."""
        number = _class_of(tokens)
        known = self.seconds[number]
        mixed = max(seconds, KEEP * known + (1 - KEEP) * seconds)
        return StepTimes((*self.seconds[:number], mixed, *self.seconds[number + 1 :]))

    def expected_s(self, tokens: int) -> float | None:
        """How long a step of this number of tokens may take; None where nothing is known.

        1. No size is known (0 tokens): the longest of any.
        2. Steps of its class ran: as those.
        3. Smaller ones ran: as the largest of these, longer by as much as it is larger.
        4. Larger ones ran: as the smallest of these.
        """
        number = _class_of(tokens)
        if tokens <= 0:  # 1
            return max(self.seconds) or None
        for smaller in range(number, -1, -1):  # 2, 3
            if self.seconds[smaller]:
                return self.seconds[smaller] * 2.0 ** (number - smaller)
        return next((seconds for seconds in self.seconds[number:] if seconds), None)  # 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What is seen of an engine at one moment."""

    word: int
    """Number of its last word: another one each time that it turns to something else."""
    doing: Doing
    tokens: int = 0
    """Of the batch."""
    handed: bool = False
    """There are commands that it has not taken."""
    stopped: bool = False
    """By a signal or a debugger."""
    on_disk: bool = False
    """It waits for a disk or a driver, and cannot be interrupted."""
    computing: bool = False
    """It is on a processor or waits for one, and its processors do the work themselves: no device
    is waited for so."""
    starved_s: float = 0.0
    """How long it has waited for a processor so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What has been seen of an engine so far."""

    sight: Sight | None = None
    still_s: float = 0.0
    """That it has been at the same thing, as far as that time counts."""
    stopped_s: float = 0.0
    """In a row."""


SLOWLY = 0.25
"""How much time counts in which an engine computes, or waits for a disk: it may well come to an
end."""
LATE_S = 2.0
"""So much of the time before a look may be made good by it: that a process waits for a processor is
told when it gets one."""


def watched(before: Watched, sight: Sight, elapsed_s: float) -> Watched:
    """What has been seen with one more look, ``elapsed_s`` after the last.

    1. It has turned to something else, or waits and has nothing to do: the time begins anew.
    2. It is stopped: that counts for itself. What it was at goes on later, for all that this says.
    3. While it waits for a processor no time counts, also where that is told later.
    4. While it computes, or waits for a disk, time counts slowly.
    """
    stopped_s = (
        before.stopped_s + elapsed_s
        if sight.stopped and before.sight is not None and before.sight.stopped
        else 0.0
    )
    if (
        before.sight is None
        or sight.word != before.sight.word
        or (sight.doing is Doing.WAITING and not sight.handed)
    ):  # 1
        return Watched(sight=sight, stopped_s=stopped_s)
    if sight.stopped:  # 2
        return Watched(sight=sight, still_s=before.still_s, stopped_s=stopped_s)
    starved_s = min(elapsed_s + LATE_S, max(0.0, sight.starved_s - before.sight.starved_s))  # 3
    share = SLOWLY if sight.on_disk or sight.computing else 1.0  # 4
    return Watched(sight=sight, still_s=max(0.0, before.still_s + share * (elapsed_s - starved_s)))


def allowed_s(sight: Sight, times: StepTimes, patience: Patience) -> float:
    """How long an engine may be at what it does.

    ``times`` are those of the model whose batch it is.
    """
    match sight.doing:
        case Doing.WAITING:
            return patience.floor_s
        case Doing.OBEYING:
            return patience.obeying_s
        case Doing.COMPILING:
            return patience.compiling_s
        case Doing.TELLING:
            return patience.telling_s
        case Doing.STEPPING:
            expected_s = times.expected_s(sight.tokens)
            return (
                patience.unknown_s
                if expected_s is None
                else max(patience.floor_s, patience.factor * expected_s)
            )


def hung(seen: Watched, times: StepTimes, patience: Patience) -> str:
    """Why an engine is to be ended; empty while it is not."""
    sight = seen.sight
    if sight is None:
        return ""
    if seen.stopped_s >= patience.floor_s:
        return f"it has been stopped for {seen.stopped_s:.0f} s, by a signal or a debugger"
    limit_s = allowed_s(sight, times, patience)
    if seen.still_s < limit_s:
        return ""
    match sight.doing:
        case Doing.WAITING:
            return f"it has taken no command for {seen.still_s:.0f} s"
        case Doing.STEPPING:
            expected_s = times.expected_s(sight.tokens)
            known = (
                f"where {expected_s:.2g} s are usual"
                if expected_s is not None
                else "its model's first"
            )
            return (
                f"a step of {sight.tokens} tokens has not ended for {seen.still_s:.0f} s, {known}"
            )
        case Doing.OBEYING | Doing.COMPILING | Doing.TELLING:
            return f"it has been {sight.doing.name.lower()} for {seen.still_s:.0f} s"


def _class_of(tokens: int) -> int:
    return min(max(tokens, 0).bit_length(), LARGEST_CLASS)
