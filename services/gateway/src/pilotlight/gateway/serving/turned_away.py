"""Who is turned away before anything is done for them: no place is there, or they come too late."""

from pilotlight.common.errors import TooManyHeld
from pilotlight.gateway.serving.request_parts import RequestParts
from pilotlight.policy.fairness import FairShare
from pilotlight.policy.instance import STARTING
from pilotlight.policy.model import Model
from pilotlight.policy.pace import too_late_by_s


def check_room(
    parts: RequestParts, model: Model, share: FairShare, wait_s: float, due_s: float
) -> None:
    """Whether a request that came now would be turned away.

    1. There is no place for it.
    2. An instance serves its model and no other starts, and by the pace of the lines before it, it
       would begin later than its first token is due. Those that wait for a start are not asked.

    Args:
        parts: what requests share.
        model: that it asks for.
        share: its tenant's.
        wait_s: how long its prompt would wait to be prepared.
        due_s: until its first token is due.

    Raises:
        TooManyHeld: it would.
    """
    wait_s += parts.queue.check_room(model.name, share)  # 1
    late_s = too_late_by_s(wait_s, due_s)
    if late_s is not None and _serves(parts, model):  # 2
        raise TooManyHeld(
            f"{wait_s:.1f} s would pass before this request begins; "
            f"its first token is due within {due_s:g} s",
            retry_after_s=max(1.0, late_s),
        )


def _serves(parts: RequestParts, model: Model) -> bool:
    if not parts.fleet.serving(model.name):
        return False
    return all(seen.instance.state not in STARTING for seen in parts.fleet.instances(model.name))
