"""Who of those that wait is taken up for a step."""

from collections.abc import Callable
from dataclasses import dataclass

from pilotlight.engine.core.lifecycle import RequestEvent, RequestState
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.promises import Outlook, Promises
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.sharing import Sharing, TakenUp, left_behind
from pilotlight.engine.core.tables import BlockTables
from pilotlight.engine.core.waiting import WaitingRow
from pilotlight.policy.request import RequestKey

NOBODY = TakenUp({}, 0, 0)


def anybody(_: Request) -> bool:
    """Each may run in a step."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomers:
    """One stage's."""

    limits: BatchLimits
    tables: BlockTables
    sharing: Sharing
    promises: Promises
    running: dict[RequestKey, Request]
    """The stage's, oldest first; those that are taken up join them."""
    queue: WaitingRow

    def take_up(
        self,
        now_s: float,
        left: int,
        places: int,
        cap: int,
        may_run: Callable[[Request], bool] = anybody,
    ) -> TakenUp:
        """Takes requests up in order, as long as the first one fits; none behind one that gets only
        a part of what it wants.

        A block for each that runs already is left free, so that a newcomer does not drive another
        out in the next step. One that asks the same as one that is being run waits for that one's
        blocks, and so do those behind it: with the next step they are there.

        Args:
            now_s: on the engine's clock, when the step begins.
            left: tokens of the step that they may have.
            places: as many may join it.
            cap: see ``StepShare``.
            may_run: whether one may be in this step; others wait behind one that may not.
        """
        counts: dict[RequestKey, int] = {}
        looked_up = hits = 0
        while (
            self.queue
            and left > 0
            and len(counts) < places
            and len(self.running) < self.limits.running
        ):
            request = self.next(now_s)
            if not may_run(request) or self.tables.worth_waiting(request, self.running.values()):
                break
            if self.promises.crowded(self.running.values(), request, now_s):
                break
            if not self.sharing.portion(
                request.wanted or 1, left, cap, first=not (self.running or counts)
            ):
                break
            in_place = self.tables.open(request, spare_blocks=len(self.running))
            if in_place is None:
                break
            if request.state is RequestState.WAITING:
                request.taken_s = now_s
                request.cached_tokens = min(in_place, request.prompt_tokens)
                looked_up += len(request.token_ids)
                hits += in_place
            self.queue.serve(request)
            self.run(request, in_place)
            count = self.sharing.portion(request.wanted, left, cap, first=not counts)
            counts[request.key] = count
            left = left_behind(request, count, left)
        return TakenUp(counts, looked_up, hits)

    def next(self, now_s: float) -> Request:
        """Whose turn it is of those that wait; there is one."""
        return self.queue.first(Outlook(self.promises, self.running.values(), now_s))

    def run(self, request: Request, in_place: int) -> None:
        """One of them runs from now on.

        Args:
            request: which has its blocks.
            in_place: of its tokens.
        """
        request.on(RequestEvent.TAKE_UP)
        request.takes += 1
        request.computed = in_place
        self.running[request.key] = request

    def have_no_place(self, now_s: float) -> bool:
        """The next one has no place or no room, or would make others late; there is one."""
        running = len(self.running)
        if running >= self.limits.running:
            return True
        request = self.next(now_s)
        return self.promises.crowded(
            self.running.values(), request, now_s
        ) or not self.tables.could_open(request, running)
