"""What the cache shows of itself: where requests found their models, what went, and what other
policies would have found.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Literal

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from pilotlight.cache.books import Books
from pilotlight.cache.lender import Lender
from pilotlight.policy.arrivals import Access
from pilotlight.policy.cluster import Tier
from pilotlight.policy.cost import stage_cost, stage_room
from pilotlight.policy.estimates import estimate_among_others
from pilotlight.policy.eviction.base import EvictionCandidate, Victim
from pilotlight.policy.eviction.forecast import Forecast, Order
from pilotlight.policy.eviction.shadows import Shadow, Shadows
from pilotlight.policy.ids import ModelName, NodeId
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Estimates

log = structlog.get_logger()

NOWHERE = "none"
FIRST_FOUND = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""Tiers in which a model is looked for, the fastest first."""


class CacheMeasures:
    """Counters, and the shadows of other policies."""

    def __init__(self, books: Books, registry: CollectorRegistry) -> None:
        """``books``: where models are; ``registry``: gets the metrics."""
        self._books = books
        self._shadows = Shadows()
        requests = Counter(
            "pilotlight_cache_requests",
            "Requests by the fastest tier in which their model was when they were told of",
            ["tier"],
            registry=registry,
        )
        request_bytes = Counter(
            "pilotlight_cache_request_bytes",
            "Bytes of the models of those requests, each as often as it was asked for",
            ["tier"],
            registry=registry,
        )
        saved = Counter(
            "pilotlight_cache_load_seconds_saved",
            "Seconds of fetching and loading that such requests did not wait for, as estimated",
            ["tier"],
            registry=registry,
        )
        named = ((tier, NOWHERE if tier is None else tier.value) for tier in (*FIRST_FOUND, None))
        self._of_tier = {
            tier: (requests.labels(name), request_bytes.labels(name)) for tier, name in named
        }
        self._saved_in = {tier: saved.labels(tier.value) for tier in FIRST_FOUND}
        self._costs: dict[ModelName, tuple[float, float]] = {}
        self._costed_by: Estimates = {}
        self._evictions = Counter(
            "pilotlight_cache_evictions",
            "Copies that were evicted for others",
            ["tier"],
            registry=registry,
        )
        self._evicted_bytes = Counter(
            "pilotlight_cache_evicted_bytes",
            "Their bytes",
            ["tier"],
            registry=registry,
        )
        self._evicted_loss = Counter(
            "pilotlight_cache_evicted_loss",
            "What their loss was thought to be: seconds of waiting for each second",
            ["tier"],
            registry=registry,
        )
        self._thrash = Counter(
            "pilotlight_cache_thrash",
            "Times that models were found to be evicted and loaded again in turn",
            registry=registry,
        )
        asked = Gauge(
            "pilotlight_cache_shadow_requests",
            "Requests for sampled models since this process began, as a policy's shadow heard of them",
            ["policy"],
            registry=registry,
        )
        hits = Gauge(
            "pilotlight_cache_shadow_hits",
            "Of them, those whose model a device would have had, had the policy decided",
            ["policy"],
            registry=registry,
        )
        load_s = Gauge(
            "pilotlight_cache_shadow_load_seconds",
            "Seconds of fetching and loading that the policy would have cost since this process began",
            ["policy"],
            registry=registry,
        )
        for policy, shadow in self._shadows.of.items():
            asked.labels(policy).set_function(partial(_figure, shadow, "requests"))
            hits.labels(policy).set_function(partial(_figure, shadow, "hits"))
            load_s.labels(policy).set_function(partial(_figure, shadow, "load_s"))
        self._orders = FollowedOrders(books, registry)

    def heard(self, accesses: Iterable[Access]) -> None:
        """Requests were told of."""
        for access in accesses:
            model = self._books.models.by_name.get(access.model)
            if model is None:
                continue
            tiers = self._books.pool.tiers(model.digest)
            found = next((tier for tier in FIRST_FOUND if tier in tiers), None)
            requests, request_bytes = self._of_tier[found]
            requests.inc(access.count)
            request_bytes.inc(access.count * model.spec.total_bytes)
            sampled = self._shadows.samples(model.name)
            if found is None and not sampled:
                continue
            fetch_s, load_s = self._load_s(model)
            if found is not None:
                saved_s = fetch_s + (load_s if found is Tier.DEVICE else 0.0)
                self._saved_in[found].inc(access.count * saved_s)
            if sampled:
                self._shadows.ask(access, _as_copy(model, fetch_s + load_s, access.at_s))

    def evicted(self, tier: Tier, victims: Iterable[Victim]) -> None:
        """Copies went for others."""
        for victim in victims:
            self._evictions.labels(tier.value).inc()
            self._evicted_bytes.labels(tier.value).inc(victim.size_bytes)
            self._evicted_loss.labels(tier.value).inc(victim.loss)

    def thrashed(self) -> None:
        """Models take each other's places."""
        self._thrash.inc()

    def follow(self) -> None:
        """Take the capacity of all devices that report, and the orders that are followed."""
        self._orders.follow()
        capacity_bytes = sum(
            view.facts.device.memory_bytes for view in self._books.roster.workers.values()
        )
        self._shadows.resize(capacity_bytes, len(self._books.models.by_name))

    def _load_s(self, model: Model) -> tuple[float, float]:
        """Seconds that fetching and loading take where there is nothing of the model: on the first
        worker that reports, by the estimates of now.
        """
        if self._costed_by is not self._books.estimates:
            self._costs, self._costed_by = {}, self._books.estimates
        known = self._costs.get(model.name)
        if known is not None:
            return known
        for view in self._books.roster.workers.values():
            node = self._books.roster.node(view.facts.node_id)
            if node is None:
                continue
            kind = view.facts.device.kind
            estimate = estimate_among_others(model, kind, self._books.estimates)
            cost = stage_cost(
                model, model.spec.whole, view.facts, replace(node, copies=()), estimate
            )
            found = self._costs[model.name] = (cost.fetch_s, cost.load_s)
            return found
        return 0.0, 0.0


class FollowedOrders:
    """Which of its orders the policy ``pilotlight`` follows, and what it knows of each. Other
    policies have one order, and show nothing.
    """

    def __init__(self, books: Books, registry: CollectorRegistry) -> None:
        """``books``: with a policy for each tier; ``registry``: gets the metrics."""
        followed = Gauge(
            "pilotlight_cache_order_followed",
            "1 for the order by which a tier's copies are evicted now, 0 for the others",
            ["tier", "order"],
            registry=registry,
        )
        cost_s = Gauge(
            "pilotlight_cache_order_cost_seconds",
            "Seconds of loads that the order would have cost lately",
            ["tier", "order"],
            registry=registry,
        )
        self._policies = {
            tier: policy
            for tier, policy in books.policies.each.items()
            if isinstance(policy, Forecast)
        }
        self._last = {tier: policy.order for tier, policy in self._policies.items()}
        for tier, policy in self._policies.items():
            for order in Order:
                followed.labels(tier.value, order.value).set_function(
                    partial(_is_followed, policy, order)
                )
                cost_s.labels(tier.value, order.value).set_function(partial(_cost_s, policy, order))

    def follow(self) -> None:
        """Log where another order is followed than when this was called last."""
        for tier, policy in self._policies.items():
            if policy.order is self._last[tier]:
                continue
            self._last[tier] = policy.order
            log.info(
                "another order has been cheaper, and is followed",
                action="order_followed",
                tier=tier.value,
                order=policy.order.value,
                costs_s={order.value: round(cost_s, 3) for order, cost_s in policy.costs_s.items()},
            )


def _is_followed(policy: Forecast, order: Order) -> float:
    return float(policy.order is order)


def _cost_s(policy: Forecast, order: Order) -> float:
    return policy.costs_s[order]


def _figure(shadow: Shadow, name: Literal["requests", "hits", "load_s"]) -> float:
    return float(getattr(shadow.count, name))


def _as_copy(model: Model, penalty_s: float, now_s: float) -> EvictionCandidate:
    """A copy of a model on a device, as a shadow has it."""
    return EvictionCandidate(
        subject=model.name,
        model=model.name,
        digest=model.digest,
        tier=Tier.DEVICE,
        node_id=NodeId(""),
        size_bytes=stage_room(model, model.spec.whole).least_bytes,
        resident_since_s=now_s,
        last_used_s=now_s,
        penalty_s=penalty_s,
    )


def add_metrics(books: Books, lender: Lender, registry: CollectorRegistry) -> None:
    """Gauges that read the books when they are scraped."""
    grants = Gauge("pilotlight_cache_grants", "Grants of room that are open", registry=registry)
    grants.set_function(lambda: len(books.grants))
    lent = Gauge(
        "pilotlight_cache_kv_lent_bytes",
        "Device memory that stages have for KV beyond their grants, by the last reports",
        registry=registry,
    )
    lent.set_function(lambda: lender.lent_bytes)
    offered = Gauge(
        "pilotlight_cache_kv_offered_bytes",
        "Device memory that stages may have for KV beyond their grants",
        registry=registry,
    )
    offered.set_function(lambda: lender.offered_bytes)
    changes = Gauge(
        "pilotlight_cache_kv_loan_changes",
        "Times that loans of a worker became others, since this process began",
        registry=registry,
    )
    changes.set_function(lambda: lender.changes)
    gateways = Gauge(
        "pilotlight_cache_arrival_gateways",
        "Gateways that tell the cache of arrivals",
        registry=registry,
    )
    gateways.set_function(lambda: books.arrivals.gateways)
    models = Gauge(
        "pilotlight_cache_arrival_models",
        "Models of which the cache knows when they were asked for last",
        registry=registry,
    )
    models.set_function(lambda: books.arrivals.models)
