"""Policies by the names that settings, records and the command line have for them."""

from collections.abc import Callable, Mapping

from pilotlight.policy.eviction.base import EvictionPolicy
from pilotlight.policy.eviction.forecast import Forecast
from pilotlight.policy.eviction.iam import Iam
from pilotlight.policy.eviction.iam_paper import IamPaper
from pilotlight.policy.eviction.lru import Lru
from pilotlight.policy.eviction.rates import EwmaRates, WindowRates
from pilotlight.policy.eviction.rivals.arc import Arc
from pilotlight.policy.eviction.rivals.frequency import Gdsf, Lfu
from pilotlight.policy.eviction.rivals.idle import IdleOverCost, TimeToLive
from pilotlight.policy.eviction.rivals.lhd import Lhd
from pilotlight.policy.eviction.rivals.s3fifo import S3Fifo
from pilotlight.policy.eviction.rivals.srrip import Srrip
from pilotlight.policy.eviction.stated import Stated

POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda _: Lru(),
    "lfu": lambda _: Lfu(),
    "arc": Arc,
    "srrip": lambda _: Srrip(),
    "gdsf": lambda _: Gdsf(),
    "lhd": lambda _: Lhd(),
    "s3-fifo": S3Fifo,
    "idle-over-cost": lambda _: IdleOverCost(),
    "ttl": lambda _: TimeToLive(),
    "iam-paper": lambda _: IamPaper(),
    "iam": lambda _: Iam(),
    "iam-window": lambda _: Iam(WindowRates(), name="iam-window"),
    "iam-ewma": lambda _: Iam(EwmaRates(), name="iam-ewma"),
    "pilotlight": Forecast,
}
"""How each is made for a cache of some bytes. The first is the simplest, the last is ours."""


EXPECTED: Mapping[str, Callable[[], EvictionPolicy]] = {"lru": Lru, "stated": Stated}
"""Policies that answer from the candidates alone, by name."""


def expected_policy(name: str) -> EvictionPolicy:
    """What a scheduler expects of a cache with a policy: a pure function of the candidates.

    Args:
        name: One of ``POLICIES``, the cache's.
    """
    return EXPECTED["lru" if name == "lru" else "stated"]()


def make_policy(name: str, capacity_bytes: int) -> EvictionPolicy:
    """A fresh policy.

    Args:
        name: One of ``POLICIES``.
        capacity_bytes: Of the cache that it is for: some policies divide it.

    Raises:
        KeyError: there is no such policy.
    """
    return POLICIES[name](capacity_bytes)
