"""The stage that leads copies parts of its longer range from devices of the stages that have them,
where all are on one host, in place of what the loader offers in the host's memory.

::

    WANTED ── question ──> ASKED ── answer ──> COPIED ── sums are equal ──> HERE
       │ no stage lends      │ refused, late     │ they are not
       └─────────────────────┴───────────────────┴──────────────> NOT: from the host's memory

What does not come in time, or comes wrong, is copied from the host's memory as soon as the loader
offers it there; what is here before that waits for it, so that a loader decides as ever when a
stage has its parts. Nothing waits for the device or for the other stage.
"""

import os
from collections.abc import Callable, Sequence

from pilotlight.engine.channel.channel import Frame
from pilotlight.engine.channel.mailbox import Mailbox
from pilotlight.engine.core.extents import Extent
from pilotlight.engine.device.lending import Borrowed, Lent
from pilotlight.engine.device.neighbour import Came
from pilotlight.engine.errors import EngineError, EngineFailed
from pilotlight.engine.pipeline.frames import PartLent, PartWanted, StageHello, pack
from pilotlight.engine.resident import ResidentStage
from pilotlight.policy.model import Stage

ASKED_AT_ONCE = 2
"""Parts that are asked for or being copied: one is on its way while the next one is asked for, and
no batch finds more than that beside it on the device."""
PATIENCE_S = 1.0
"""How long a part that the loader offers waits for its neighbour: a long prompt may be in the way.
After that nothing more is asked for."""


class BorrowedParts:
    """Of the leader of one pipeline. A ``Neighbour`` of its parameters."""

    def __init__(self, resident: ResidentStage) -> None:
        """Nobody is asked before the stages are known.

        Args:
            resident: the stage that leads.
        """
        self._resident = resident
        self._lenders: tuple[Stage, ...] = ()
        self._target: Stage | None = None
        """What the rest is about."""
        self._wanted: list[int] = []
        """Not asked for yet, in execution order."""
        self._asked: set[int] = set()
        self._copied: dict[int, tuple[Borrowed, int]] = {}
        """On their way, each with the sum that it should have."""
        self._here: set[int] = set()
        self._since_s: dict[int, float] = {}
        self._why: dict[int, str] = {}
        self._mailbox: Mailbox | None = None

    def meet(self, stages: Sequence[StageHello]) -> None:
        """Learns what the stages are: questions go through all of them, so that all of them have to
        know what it is about.
        """
        others = stages[1:]
        knows = self._resident.memory.arena.lending is not None
        self._lenders = (
            tuple(hello.stage for hello in others)
            if knows and all(hello.lends for hello in others)
            else ()
        )

    @property
    def due(self) -> bool:
        """``next_frame`` would give one."""
        self._look()
        return bool(self._wanted) and len(self._asked) + len(self._copied) < ASKED_AT_ONCE

    def next_frame(self) -> Frame | None:
        """What goes to the stages behind now, if anything."""
        if not self.due:
            return None
        memory = self._resident.memory
        try:
            self._mailbox = self._mailbox or Mailbox()
        except OSError as error:
            self._give_up(f"there is no mailbox: {error}")
            return None
        part = self._wanted.pop(0)
        self._asked.add(part)
        return pack(PartWanted(part=part, form=memory.form(part), mailbox=self._mailbox.address))

    def take_in(self, lent: PartLent) -> None:
        """Begins to copy what a stage lends; nothing, where that is not waited for any more."""
        if lent.part not in self._asked:
            return
        self._asked.remove(lent.part)
        if lent.why:
            self._why[lent.part] = lent.why
            return
        try:
            self._copied[lent.part] = self._borrow(lent), lent.total
        except EngineError as error:
            self._why[lent.part] = error.message
            self._give_up(error.message)

    def look(self, part: int, monotonic_s: Callable[[], float]) -> Came:
        """See ``Neighbour.look``."""
        self._look()
        if part in self._here:
            return Came.HERE
        if part in self._copied:
            return Came.WAITS
        if part in self._wanted:
            # The loader's order may be another one.
            self._wanted.remove(part)
            self._wanted.insert(0, part)
        if part in self._asked or part in self._wanted:
            now_s = monotonic_s()
            if now_s - self._since_s.setdefault(part, now_s) < PATIENCE_S:
                return Came.WAITS
            self._give_up(f"no answer within {PATIENCE_S} s")
        return Came.NOT

    def refuse(self, part: int, why: str) -> None:
        """See ``Neighbour.refuse``."""
        self._here.discard(part)
        self._why[part] = why

    def why(self, part: int) -> str:
        """See ``Neighbour.why``."""
        return self._why.get(part, "")

    def close(self) -> None:
        """The pipeline is over, or another one begins, whose stages are to be met. Closing twice is
        closing once.
        """
        self.settle()
        self._lenders = ()
        self._close_mailbox()

    def settle(self) -> None:
        """See ``Neighbour.settle``."""
        for borrowed, _ in self._copied.values():
            borrowed.close()
        self._copied.clear()
        self._wanted.clear()
        self._asked.clear()
        self._here.clear()
        self._target = None

    def _look(self) -> None:
        """Looks at what is being copied, and begins anew where the stage is to have another range
        than before.
        """
        resident = self._resident
        if resident.target != self._target:
            self.settle()
            self._target = resident.target
            self._since_s.clear()
            self._why.clear()
            self._wanted = self._parts_of(self._target) if self._target is not None else []
        ready = [part for part, (borrowed, _) in self._copied.items() if borrowed.ready]
        for part in ready:
            borrowed, total = self._copied.pop(part)
            if borrowed.value == total:
                self._here.add(part)
            else:
                self._why[part] = "what came is not what was lent"
            borrowed.close()

    def _parts_of(self, target: Stage) -> list[int]:
        """Those that the stage lacks and others lend, in execution order."""
        spec, placed = self._resident.spec, self._resident.parameters
        lent = {part for stage in self._lenders for part in spec.parts_of(stage)}
        return [part for part in spec.parts_of(target) if part in lent and part not in placed]

    def _borrow(self, lent: PartLent) -> Borrowed:
        memory = self._resident.memory
        lending, mailbox = memory.arena.lending, self._mailbox
        assert lending is not None, "it is asked for by those who can"
        assert mailbox is not None, "so is it"
        descriptors = mailbox.fetch_all(lent.nonce, len(lent.chunks))
        if descriptors is None:
            raise EngineFailed("the descriptors did not come")
        found = [
            Lent(descriptor, chunk.num_bytes, Extent(chunk.start, chunk.stop))
            for descriptor, chunk in zip(descriptors, lent.chunks, strict=True)
        ]
        try:
            return lending.borrow(found, memory.extent(lent.part))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _give_up(self, why: str) -> None:
        """Asks for nothing more of this range."""
        for part in (*self._wanted, *self._asked):
            self._why[part] = why
        self._wanted.clear()
        self._asked.clear()
        self._close_mailbox()

    def _close_mailbox(self) -> None:
        """Memory whose descriptors still come is in use no more."""
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None
