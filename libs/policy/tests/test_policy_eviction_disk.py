"""The order in which disks let go of models."""

from dataclasses import replace

from pilotlight.policy.arrivals import Access, ModelArrivals, RecentArrivals
from pilotlight.policy.cluster import LinkSpeed, OriginKind
from pilotlight.policy.eviction.candidates import registered
from pilotlight.policy.eviction.choice import POLICIES, make_policy
from pilotlight.policy.eviction.disk import (
    MAX_ORDERED,
    DiskFacts,
    disk_order,
    measured_bytes_per_s,
)
from pilotlight.policy.ids import ModelName
from pilotlight.policy.testing import model, node

NOW_S = 1000.0
FAST, SLOW = 1e9, 1e8
NAMES = ("rare", "usual", "often")


def asked(**counts: int) -> RecentArrivals:
    """Each so often, all of them last at the same moment."""
    slots = ((int(NOW_S // 10) - 1, 1),)
    return RecentArrivals(
        models={
            ModelName(name): ModelArrivals(last_s=NOW_S - 1, slots=((slots[0][0], count),))
            for name, count in counts.items()
        }
    )


def order(policy: str = "iam", **facts: object) -> list[str]:
    """Names instead of digests."""
    models = [model(name) for name in NAMES]
    made = DiskFacts(now_s=NOW_S, models=registered(models), **facts)
    decides = make_policy(policy, 10**9)
    for name, arrivals in made.arrivals.models.items():
        for _ in range(arrivals.slots[0][1]):
            decides.on_access(Access(model=name, count=1, at_s=arrivals.last_s))
    return [digest.removeprefix("d-") for digest in disk_order(decides, made)]


def test_what_is_asked_for_most_often_stays_longest() -> None:
    assert order(arrivals=asked(often=50, rare=1, usual=10)) == ["rare", "usual", "often"]


def test_what_its_source_gives_as_fast_as_a_disk_goes_first() -> None:
    rates = {ModelName("often"): FAST, ModelName("rare"): SLOW, ModelName("usual"): SLOW}
    found = order(
        arrivals=asked(often=50, rare=1, usual=10),
        source_bytes_per_s=rates,
        disk_bytes_per_s=FAST,
    )
    assert found == ["often", "rare", "usual"]


def test_what_was_not_measured_counts_as_the_slowest() -> None:
    found = order(
        arrivals=asked(often=50, rare=49, usual=1),
        source_bytes_per_s={ModelName("often"): FAST, ModelName("usual"): SLOW},
    )
    assert found == ["usual", "often", "rare"]


def test_pinned_models_stay_and_what_nobody_asked_for_is_not_named() -> None:
    models = registered([model("rare", pinned=True), model("often"), model("unknown")])
    facts = DiskFacts(now_s=NOW_S, models=models, arrivals=asked(often=50))
    assert disk_order(make_policy("iam", 1), facts) == ("d-often", "d-rare")


def test_every_policy_orders_each_once_and_no_more_than_fit_a_message() -> None:
    for policy in POLICIES:
        assert sorted(order(policy, arrivals=asked(often=3, rare=1, usual=2))) == sorted(NAMES)
    names = [f"m{number}" for number in range(MAX_ORDERED + 5)]
    facts = DiskFacts(
        now_s=NOW_S,
        models=registered(model(name) for name in names),
        arrivals=asked(**dict.fromkeys(names, 1)),
    )
    found = disk_order(make_policy("lru", 1), facts)
    assert len(found) == MAX_ORDERED
    assert "d-m0" not in found, "it was asked for the longest ago"


def test_rates_are_means_over_nodes_that_measured_them() -> None:
    def measured(kind: OriginKind, name: str, rate: float) -> LinkSpeed:
        return LinkSpeed(kind=kind, name=name, bytes_per_s=rate)

    source = OriginKind.SOURCE
    nodes = [
        replace(node(), links=(measured(source, "s3://a", 1.0), measured(source, "s3://b", 0.0))),
        replace(node(), links=(measured(source, "s3://a", 3.0), measured(OriginKind.DISK, "d", 9))),
    ]
    assert measured_bytes_per_s(nodes, source) == {"s3://a": 2.0}
    assert measured_bytes_per_s(nodes, OriginKind.DISK) == {"d": 9.0}
