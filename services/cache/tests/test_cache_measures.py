"""What the cache counts: where requests found their models, what went, what others would have."""

import random
from dataclasses import replace

import pytest
from evicted_copies import SmallCache
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from pilotlight.cache.books import Books
from pilotlight.cache.measures import CacheMeasures
from pilotlight.cache.testing import hear
from pilotlight.policy.arrivals import Access
from pilotlight.policy.cluster import Tier
from pilotlight.policy.eviction.base import Victim
from pilotlight.policy.eviction.candidates import registered
from pilotlight.policy.eviction.forecast import Forecast, Order
from pilotlight.policy.eviction.shadows import RIVALS
from pilotlight.policy.eviction.tiers import TierPolicies
from pilotlight.policy.ids import ModelName
from pilotlight.policy.testing import NOW_S, copy, held, model, node, worker


class Rig:
    """A model on a device, one in a host pool, one nowhere; each has 60 bytes."""

    def __init__(self) -> None:
        self.books = Books(models=registered(model(name) for name in ("warm", "near", "far")))
        hear(self.books, worker(held_stages=(held("warm"),)), NOW_S)
        hear(self.books, node(copies=(copy("near"), copy("warm"))), NOW_S)
        self.registry = CollectorRegistry()
        self.measures = CacheMeasures(self.books, self.registry)
        self.measures.follow()

    def figure(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"pilotlight_cache_{name}", labels)

    def asked(self, *names: str, at_s: float = NOW_S, count: int = 1) -> None:
        self.measures.heard(Access(model=ModelName(name), count=count, at_s=at_s) for name in names)


def test_requests_are_counted_by_the_fastest_tier_that_has_their_model() -> None:
    rig = Rig()
    rig.asked("warm", "warm", "near", "far", "unregistered", count=2)
    tiers = ("device", "host", "disk", "none")
    assert [rig.figure("requests_total", tier=tier) for tier in tiers] == [4, 2, 0, 2]
    assert [rig.figure("request_bytes_total", tier=tier) for tier in tiers] == [240, 120, 0, 120]
    # 60 bytes at 100 a second over the link, and at 1,000 a second onto the device.
    assert rig.figure("load_seconds_saved_total", tier="device") == pytest.approx(4 * (0.6 + 0.06))
    assert rig.figure("load_seconds_saved_total", tier="host") == pytest.approx(2 * 0.6)


def test_a_model_that_has_gone_is_a_miss_from_then_on() -> None:
    rig = Rig()
    hear(rig.books, worker(), NOW_S + 1)
    rig.asked("warm")
    hear(rig.books, node(), NOW_S + 1)
    rig.asked("warm")
    assert rig.figure("requests_total", tier="device") == 0
    assert rig.figure("requests_total", tier="host") == 1
    assert rig.figure("requests_total", tier="none") == 1


def test_evictions_are_counted_with_their_loss() -> None:
    rig = Rig()
    victim = Victim(
        subject="i",
        model=ModelName("m"),
        size_bytes=7,
        idle_s=1.0,
        penalty_s=2.0,
        arrivals_per_s=0.5,
        loss=1.0,
        reason="r",
    )
    rig.measures.evicted(Tier.HOST, [victim, replace(victim, loss=0.5)])
    names = ("evictions_total", "evicted_bytes_total", "evicted_loss_total")
    assert [rig.figure(name, tier="host") for name in names] == [2, 14, 1.5]


def test_every_rival_has_a_shadow() -> None:
    rig = Rig()
    rig.asked("warm", at_s=NOW_S)
    rig.asked("warm", at_s=NOW_S + 5)
    for policy in RIVALS:
        assert rig.figure("shadow_requests", policy=policy) == 2
        assert rig.figure("shadow_hits", policy=policy) == 1
        assert rig.figure("shadow_load_seconds", policy=policy) == pytest.approx(0.66)


def shown_orders(registry: CollectorRegistry) -> dict[Order, float | None]:
    name = "pilotlight_cache_order_followed"
    return {
        order: registry.get_sample_value(name, {"tier": "device", "order": order.value})
        for order in Order
    }


def test_the_order_that_ours_follows_is_shown_and_another_one_logged() -> None:
    """In sessions recency is cheaper than what a model is worth for long."""
    books, registry = Books(policies=TierPolicies("pilotlight")), CollectorRegistry()
    policy = books.policies.of(Tier.DEVICE)
    assert isinstance(policy, Forecast)
    policy.resize(10)
    measures, cache = CacheMeasures(books, registry), SmallCache(policy, 10)
    measures.follow()
    assert shown_orders(registry) == {order: order is Order.IMPORTANCE for order in Order}
    sessions = (random.Random(number).sample(range(200), 8) * 3 for number in range(200))
    while policy.order is Order.IMPORTANCE:
        for number in next(sessions):
            cache.ask(f"m{number}")
    with capture_logs() as logs:
        measures.follow()
        measures.follow()
    assert shown_orders(registry) == {order: order is policy.order for order in Order}
    (said,) = logs
    assert (said["action"], said["tier"]) == ("order_followed", "device")
    assert said["costs_s"][policy.order] < said["costs_s"][Order.IMPORTANCE]
    cost_s = registry.get_sample_value(
        "pilotlight_cache_order_cost_seconds", {"tier": "device", "order": policy.order.value}
    )
    assert cost_s == policy.costs_s[policy.order]


def test_a_policy_with_one_order_shows_none() -> None:
    registry = CollectorRegistry()
    CacheMeasures(Books(policies=TierPolicies("iam")), registry).follow()
    assert set(shown_orders(registry).values()) == {None}
