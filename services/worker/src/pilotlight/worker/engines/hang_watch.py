"""Looks at an engine child now and then, and ends one that hangs.

What to make of what is seen is ``policy.hang``'s.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pilotlight.common.clock import Clock
from pilotlight.common.messages.engine import FromEngine, StageUnloaded, StepDone
from pilotlight.common.procfs import look_at, starved_s
from pilotlight.common.waiting import every
from pilotlight.policy.hang import Doing, Patience, Sight, StepTimes, Watched, hung, watched
from pilotlight.worker.engine_child.slate import Slate, mark_of

LOOK_S = 0.25
LONGEST_LOOK_S = 2 * LOOK_S
"""As much counts of the time between two looks: when this process itself stood still, that is not
the child's fault."""
COMPUTES_SHARE = 0.25
"""Of the time on one processor, from which on a process does something."""


@dataclass(frozen=True, slots=True)
class _Look:
    at_s: float
    cpu_s: float


class HangWatch:
    """Watches one child, from its start to its end."""

    def __init__(
        self,
        pid: int,
        slate: Slate,
        clock: Clock,
        *,
        sent: Callable[[], int],
        on_cores: bool,
        patience: Patience,
    ) -> None:
        """Nothing is watched yet.

        Args:
            pid: Of the engine's process.
            slate: Where it writes how far it is.
            clock: Tells how long it has been still.
            sent: Commands that it was sent so far.
            on_cores: It computes with its own processors, and waits for no device.
            patience: How long it may be still.
        """
        self.verdict = ""
        """Why it was found hanging."""
        self._pid = pid
        self._slate = slate
        self._clock = clock
        self._sent = sent
        self._on_cores = on_cores
        self._patience = patience
        self._times: dict[int, StepTimes] = {}
        """Of each instance's steps, by its mark."""
        self._seen = Watched()
        self._last: _Look | None = None

    def heard(self, event: FromEngine) -> None:
        """Learn from what it says."""
        if isinstance(event, StepDone) and event.turn_of is not None and event.batch_tokens > 0:
            mark = mark_of(event.turn_of)
            self._times[mark] = self._times.get(mark, StepTimes()).after(
                event.batch_tokens, event.step_time_s
            )
        elif isinstance(event, StageUnloaded):
            self._times.pop(mark_of(event.instance_id), None)

    async def until_hung(self) -> str:
        """Look until it hangs; why it is taken to."""
        async for _ in every(LOOK_S):
            self.verdict = self._look()
            if self.verdict:
                break
        return self.verdict

    def _look(self) -> str:
        process = look_at(self._pid)
        if process is None:
            return ""  # Its end is heard elsewhere.
        note, now = self._slate.read(), _Look(self._clock.monotonic_s(), process.cpu_s)
        before, self._last = self._last or now, now
        elapsed_s = min(now.at_s - before.at_s, LONGEST_LOOK_S)
        handed = self._sent() > note.obeyed
        same = self._seen.sight is not None and note.word == self._seen.sight.word
        sight = Sight(
            word=note.word,
            doing=note.doing,
            tokens=note.tokens,
            handed=handed,
            stopped=process.state in "Tt",
            on_disk=process.state == "D",
            computing=self._on_cores
            and (process.state == "R" or now.cpu_s - before.cpu_s >= COMPUTES_SHARE * elapsed_s),
            # Asked for where it matters: a process has many threads, and nearly always goes on or
            # has nothing to do.
            starved_s=starved_s(self._pid)
            if same and (handed or note.doing is not Doing.WAITING)
            else 0.0,
        )
        self._seen = watched(self._seen, sight, elapsed_s)
        return hung(self._seen, self._times.get(note.mark, StepTimes()), self._patience)
