"""Whether one more request may wait, and whose place it takes where no more may."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar

from pilotlight.common.errors import TooManyHeld
from pilotlight.gateway.serving.lines import Line, Waits, all_holdings
from pilotlight.policy.admission import Admission, QueueBounds, QueueFacts, admit_held
from pilotlight.policy.fairness import FairShare, Holding, makes_way
from pilotlight.policy.ids import ModelName

W = TypeVar("W", bound=Waits)


class LineRoom(Generic[W]):
    """The bounds of all lines of a gateway, and how many wait in them."""

    def __init__(self, bounds: QueueBounds) -> None:
        self._bounds = bounds
        self.held = 0
        """Requests that wait, in all lines."""
        self.coming: dict[ModelName, int] = {}
        """Requests whose prompts are being prepared, by model: they come next."""

    @contextmanager
    def preparing(self, model: ModelName) -> Generator[None, None, None]:
        """Meanwhile one more of a model's is coming."""
        self.coming[model] = self.coming.get(model, 0) + 1
        try:
            yield
        finally:
            self.coming[model] -= 1
            if not self.coming[model]:
                del self.coming[model]

    def may_go(self, line: Line[W]) -> bool:
        """Whether nothing is lost with a line: nobody is in it, and it may not be longer than a new
        one.
        """
        least = self._bounds.model_requests
        return not line and not line.handed and line.room(0, least) == least

    def made_by(
        self,
        line: Line[W],
        lines: Iterable[Line[W]],
        share: FairShare,
        now_s: float,
        coming: int = 0,
    ) -> tuple[Line[W], W, TooManyHeld] | None:
        """Who has to go for one more, in which line, and what it is told; None: there is room.

        Nothing is gone through that grows with what waits, other than tenants: what is turned away
        costs little, or it would take the time of what is let in.

        Args:
            line: the newcomer's.
            lines: all of them.
            share: the newcomer's.
            now_s: the monotonic time.
            coming: how many more will be in the newcomer's line before it is.

        Raises:
            TooManyHeld: the newcomer.
        """
        bounds, waiting, held = self._bounds, len(line) + coming, self.held + coming
        room = line.room(waiting, bounds.model_requests)
        if held < bounds.total_requests and waiting < room:
            return None
        bounds = replace(bounds, model_requests=room)
        facts = QueueFacts(
            total_requests=held,
            model_requests=waiting,
            oldest_age_s=now_s - line.waits_since_s(now_s),
        )
        answer = admit_held(facts, bounds, None)
        those = [line] if waiting >= bounds.model_requests else [*lines]
        holdings = all_holdings(those)
        mine = holdings.get(share.tenant, Holding(share.tenant, 0))
        way = makes_way(holdings.values(), replace(mine, weight=share.weight))
        if way is None:
            raise _full(answer)
        longest = max(those, key=lambda each: each.places_of(way))
        return longest, longest.last_of(way), _full(answer)


def _full(answer: Admission) -> TooManyHeld:
    return TooManyHeld(answer.reason, retry_after_s=answer.retry_after_s)
