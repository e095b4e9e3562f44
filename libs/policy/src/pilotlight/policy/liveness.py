"""From the age of the last report to what may be assumed of its sender."""

from pilotlight.policy.cluster import Liveness

SUSPECT_AFTER_S = 1.0
"""Five missed reports: no new work."""
DEAD_AFTER_S = 3.0
"""What it held is lost."""
FORGET_AFTER_S = 60.0
"""It is left out of every view: what it held has long been given up."""
LAST_WORDS_S = 0.5
"""Reports that a worker sent before its loader saw it die may arrive after the loader's."""


def liveness_of(age_s: float) -> Liveness:
    """Liveness of a worker or loader whose last report came ``age_s`` ago, by the receiver's
    monotonic clock.
    """
    if age_s >= DEAD_AFTER_S:
        return Liveness.DEAD
    if age_s >= SUSPECT_AFTER_S:
        return Liveness.SUSPECT
    return Liveness.ALIVE
