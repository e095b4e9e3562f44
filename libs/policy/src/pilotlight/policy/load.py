"""How full the instances of a model are, and will be.

::

    requests    one instance        two
      16  ┤─ ─ ─ ─ ─ ─ ─ ─ ─┐
          │  a start ahead: │ these, and those that come while it is under way, are too many
       8  ┤─ ─ ─ ─ ─ ─ ─ ─ ─│─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─┐
          │                                        │ a surplus: for the keep-alive time these
       0  └──────────────────                        were so few that one less is half full

What adds an instance lies above what takes one away, so neither follows from the other.
"""

from collections.abc import Iterable

from pilotlight.policy.instance import SERVING
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance, Snapshot


def promised(instances: Iterable[Instance]) -> int:
    """How many instances some are, or are to become: a group stands for its targets."""
    return sum(max(1, one.targets) for one in instances)


def carried(instances: Iterable[Instance]) -> tuple[int, int]:
    """How many of some instances serve, and the requests that run on them."""
    serving = [one for one in instances if one.state in SERVING]
    return len(serving), sum(one.in_flight for one in serving)


def start_s(model: Model, snapshot: Snapshot) -> float:
    """How long a start of a model takes, in seconds: as its cold starts took, or else its SLO."""
    known = snapshot.estimates.get(model.name, ())
    # A profile says nothing of that.
    seen = (one.cold_ttft_s for one in known if one.samples)
    return min(seen, default=model.slo.ttft_ms / 1000)


def expected_requests(model: Model, snapshot: Snapshot) -> float:
    """Requests that come while a start is under way, if they come as they did in the last seconds:
    the sliding window of ``arrivals``, its newest slots alone, so that a burst is seen at once.

    It is asked for models for which requests wait: no instance of theirs has room.

    Args:
        model: Which.
        snapshot: Arrivals, and how long its cold starts took.
    """
    return start_s(model, snapshot) * snapshot.arrivals.burst_per_s(model.name, snapshot.now_s)


def further_requests(model: Model, snapshot: Snapshot) -> float:
    """By how much the requests that run grow while a start is under way: arrivals of the last
    seconds beyond those of the whole window. What comes as it came before takes the place of what
    ends.

    Args:
        model: Which.
        snapshot: Arrivals, and how long its cold starts took.
    """
    arrivals, now_s = snapshot.arrivals, snapshot.now_s
    more_per_s = arrivals.burst_per_s(model.name, now_s) - arrivals.rate_per_s(model.name, now_s)
    return start_s(model, snapshot) * max(0.0, more_per_s)


def may_need_another(
    model: Model, instances: int, requests: int, low_requests: float, snapshot: Snapshot
) -> bool:
    """Whether the next instance of a model may soon be asked for: those that there are have more
    than the low load, or will have while a start is under way.

    What costs no device time, such as a copy in a host pool, is begun by this; a start ahead needs
    more.

    Args:
        model: Which.
        instances: That serve or start.
        requests: That run on them.
        low_requests: What one of them has at low load.
        snapshot: Arrivals, and how long its cold starts took.
    """
    if not 0 < instances < model.scaling.max_instances:
        return False
    return requests + further_requests(model, snapshot) > low_requests * instances
