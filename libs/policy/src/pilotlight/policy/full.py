"""How many requests go to a worker that has refused one, because it had as many as it may.

It has a place again as soon as one of its requests ends, and who sent that one hears of it: so for
each that ends, one goes. What others sent, and ends, is not heard: once in a while one goes to see,
and while such are taken, twice as many each time. Without a rule, all would go at once and be
refused; with a pause behind each refusal, all that runs there ends meanwhile, and the worker has
nothing to do.

::

    refused ──> one for each that ends ──> refused ──> ...
                 |  retry_after_s later        ^
                 '──> one, 2, 4 ... more ──────'
"""

from dataclasses import dataclass, replace

FORGET_S = 10.0
"""A worker that has refused nothing for so long has room."""
GROWTH = 2
"""Places for each that was sent to see, and taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullWorker:
    """What one that sends requests knows of a worker that refused one."""

    refused_s: float
    """When it did so last."""
    look_at_s: float
    """When one may go to see whether there is room."""
    places: int = 0
    """That are known to be there, or hoped for."""
    looking: bool = False
    """What is taken says that there are more."""

    def takes(self, now_s: float) -> bool:
        """Whether one more may go."""
        return self.places > 0 or now_s >= self.look_at_s

    def forgotten(self, now_s: float) -> bool:
        """Nothing is known of it any more."""
        return now_s - self.refused_s >= FORGET_S


def refused(before: FullWorker | None, now_s: float, retry_after_s: float) -> FullWorker:
    """It has refused one. Places that were heard of stay, those that were hoped for do not.

    Args:
        before: what was known.
        now_s: the monotonic time.
        retry_after_s: until one may go to see.
    """
    places = 0 if before is None or before.looking else before.places
    return FullWorker(refused_s=now_s, look_at_s=now_s + retry_after_s, places=places)


def sent(full: FullWorker, now_s: float, retry_after_s: float) -> FullWorker:
    """One is on its way, to a place that is known, or to see."""
    if full.places > 0:
        return replace(full, places=full.places - 1)
    return replace(full, looking=True, look_at_s=now_s + retry_after_s)


def taken(full: FullWorker) -> FullWorker:
    """One that was sent has been accepted."""
    return replace(full, places=full.places + GROWTH) if full.looking else full


def freed(full: FullWorker) -> FullWorker:
    """One that ran there has ended, or one that was to go there does not."""
    return replace(full, places=full.places + 1)
