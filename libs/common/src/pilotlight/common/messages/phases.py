"""All services to the scheduler: the leaf intervals of a cold start."""

from pilotlight.common.messages.codec import Message
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.phase import Phase

PHASES_SUBJECT = "v1.scheduler.phases"
"""Request/reply to the leader: ``PhaseReport`` → ``PhasesKept``; repeated until it is answered."""


class FirstToken(Message, frozen=True, kw_only=True):
    """The end of a cold start: when the gateway had its first token in hand, on its monotonic
    clock.
    """

    request_id: RequestId
    at_s: float
    wall_offset_s: float
    arrived_s: float
    """When the request arrived at the gateway, on the same clock."""


class PhaseReport(Message, frozen=True, kw_only=True):
    """Phases of one instance's cold start.

    Reports of one process may repeat intervals; the scheduler keeps a set.
    """

    instance_id: InstanceId
    phases: tuple[Phase, ...]
    first_token: FirstToken | None = None
    place: str = ""
    """The worker or the node that measured, by id. Empty: neither, or a release that does not
    say."""


class PhasesKept(Message, frozen=True, kw_only=True):
    """The report is in the database, or belongs to no cold start that is still open."""
