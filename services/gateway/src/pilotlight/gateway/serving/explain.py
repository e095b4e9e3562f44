"""Why a held request got no instance by its deadline: always a 503, with the reason as far as it is
known.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from pilotlight.common.clock import Clock
from pilotlight.common.errors import (
    BusFull,
    ControlPlaneUnavailable,
    DeadlineExceeded,
    PilotlightError,
    TransientError,
    error_of,
)
from pilotlight.common.waiting import within
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.policy.instance import STARTING
from pilotlight.policy.model import Model

LOOK_UP_DEADLINE_S = 3.0
STANDING_S = 120.0
"""A refusal stands for so long unless something newer was decided: while it stands the scheduler
writes it down each minute (``ControlRules.refusal_again_s``), not for each request.
"""


class Decisions(Protocol):
    """Where the scheduler's decisions can be read."""

    async def decisions(self, model: str | None, limit: int) -> Sequence[Mapping[str, Any]]:
        """The newest first, each with ``at``, ``reasons`` and ``outcome``."""
        ...


class Explainer:
    """Asks the view first, then the record of decisions."""

    def __init__(
        self, fleet: Fleet, decisions: Decisions, clock: Clock, unwritable: Callable[[], str | None]
    ) -> None:
        """Make it.

        Args:
            fleet: instances and workers, as this gateway sees them.
            decisions: the scheduler's, from its rows.
            clock: tells how long a request has waited.
            unwritable: says why NATS stores nothing: no instance that starts then becomes known.
                None: it stores.
        """
        self._unwritable = unwritable
        self._fleet = fleet
        self._decisions = decisions
        self._clock = clock

    async def why(self, model: Model, since_s: float) -> PilotlightError:
        """The error for a request that has waited since ``since_s``.

        1. Instances are ready, and none took it: it is their queues.
        2. NATS stores nothing: nothing can start.
        3. A start failed while the request waited: that is the reason, also when the next one is
           under way.
        4. A start is under way: it is too slow.
        5. The last start failed: that is the reason.
        6. The scheduler decided something while the request waited, or its refusal stands: its
           reasons; that they cannot be read where they cannot.
        7. Nothing was done at all: no scheduler leads.
        """
        waited_s = self._clock.monotonic_s() - since_s
        waited = f"{model.name} took no request within {waited_s:.0f} s"
        if self._fleet.serving(model.name):  # 1
            return DeadlineExceeded(
                f"{waited}: its instances' queues are full, or their workers cannot be reached"
            )
        if (unwritable := self._unwritable()) is not None:  # 2
            return BusFull(f"{waited}: {unwritable}")
        failed = self._fleet.failed_start(model.name, model.digest)
        if failed is not None and failed.reason and failed.at_s >= since_s:  # 3
            return _unavailable(waited, failed.reason)
        instances = [seen.instance for seen in self._fleet.instances(model.name)]
        if any(instance.state in STARTING for instance in instances):  # 4
            return DeadlineExceeded(
                f"{waited}: its start is still in phase {self._fleet.progress(model.name, model.digest).phase}"
            )
        if failed is not None and failed.reason:  # 5
            return _unavailable(waited, failed.reason)
        reason = await self._last_reason(model, waited_s)
        if reason:  # 6
            return _unavailable(waited, reason)
        return ControlPlaneUnavailable(f"{waited}: no scheduler has acted on it")  # 7

    async def _last_reason(self, model: Model, waited_s: float) -> str:
        # Before the look-up, which takes a while: what was decided as the request came counts.
        now = self._clock.wall()
        try:
            found = await within(
                LOOK_UP_DEADLINE_S, self._decisions.decisions(model.name, 1), "reading decisions"
            )
        except PilotlightError as error:
            return f"{error.code}: why cannot be read: {error}"
        if not found:
            return ""
        age_s = (now - found[0]["at"]).total_seconds()
        if age_s > (max(waited_s, STANDING_S) if "refused" in found[0]["outcome"] else waited_s):
            return ""
        reasons: Any = found[0]["reasons"]
        return (
            "; ".join(map(str, cast("list[Any]", reasons)))
            if isinstance(reasons, list)
            else str(reasons)
        )


def _unavailable(waited: str, reason: str) -> PilotlightError:
    """A reason is a code of the taxonomy and a sentence, or a sentence alone."""
    code, colon, sentence = reason.partition(": ")
    error = error_of(code, f"{waited}: {sentence}") if colon else None
    if isinstance(error, TransientError) and error.code == code:
        return error
    return DeadlineExceeded(f"{waited}: {reason}")
