"""Flows that share links max-min fairly, as fluids.

A flow's rate changes only when a flow comes or goes with which it shares a link, directly or by way
of others. So a change looks at that component alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pilotlight.policy.coldstart.contention import LinkName
from pilotlight.sim.cluster.events import Events

ROUNDING = 1e-9
"""Of a flow's bytes: what is left after sums of floats is nothing."""


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way over some links."""

    links: tuple[LinkName, ...]
    total_bytes: float
    left_bytes: float
    done: Callable[[], None]
    limit_bytes_per_s: float = math.inf
    yields: bool = False
    """It gets what others leave, as a prefetch does."""
    bytes_per_s: float = 0.0
    as_of_s: float = 0.0
    version: int = 0

    def left_at(self, now_s: float) -> float:
        """Bytes that are missing at a time."""
        return max(0.0, self.left_bytes - self.bytes_per_s * (now_s - self.as_of_s))


@dataclass(slots=True)
class Network:
    """All flows. A link without a capacity is never the bottleneck."""

    events: Events
    capacities: Mapping[LinkName, float]
    _on: dict[LinkName, dict[Flow, None]] = field(
        default_factory=dict[LinkName, "dict[Flow, None]"]
    )

    def start(
        self,
        links: Sequence[LinkName],
        size_bytes: float,
        done: Callable[[], None],
        limit_bytes_per_s: float = math.inf,
        *,
        yields: bool = False,
    ) -> Flow:
        """Send bytes.

        Args:
            links: That they go over.
            size_bytes: How many.
            done: Called when the last one is there.
            limit_bytes_per_s: However free the links are; finite where no link has a capacity.
            yields: To flows that do not.
        """
        shared = tuple(link for link in links if link in self.capacities)
        flow = Flow(shared, size_bytes, size_bytes, done, limit_bytes_per_s, yields)
        flow.as_of_s = self.events.now_s
        for link in shared:
            self._on.setdefault(link, {})[flow] = None
        self._share(self._component([flow]))
        return flow

    def hurry(self, flow: Flow) -> None:
        """A flow yields to others no more: something waits for it."""
        if flow.yields:
            flow.yields = False
            self._share(self._component([flow]))

    def stop(self, flow: Flow) -> None:
        """Give a flow up, or take it away when it has ended."""
        flow.version += 1
        neighbours = self._component([flow])
        for link in flow.links:
            self._on[link].pop(flow, None)
        self._share(one for one in neighbours if one is not flow)

    def _component(self, first: Iterable[Flow]) -> dict[Flow, None]:
        """Flows that are joined by shared links."""
        found = dict.fromkeys(first)
        queue = list(found)
        while queue:
            for link in queue.pop().links:
                for other in self._on[link]:
                    if other not in found:
                        found[other] = None
                        queue.append(other)
        return found

    def _share(self, flows: Iterable[Flow]) -> None:
        """Give each of a component its max-min fair rate, by progressive filling."""
        now_s = self.events.now_s
        rates = shared(list(flows), self.capacities)
        for flow, rate in rates.items():
            if rate == flow.bytes_per_s and flow.version:
                continue
            flow.left_bytes, flow.as_of_s = flow.left_at(now_s), now_s
            flow.bytes_per_s = rate
            flow.version += 1
            if rate > 0:
                self._end_later(flow, now_s + flow.left_bytes / rate)

    def _end_later(self, flow: Flow, at_s: float) -> None:
        version = flow.version

        def end() -> None:
            if flow.version == version:
                self.stop(flow)
                flow.left_bytes = 0.0
                flow.done()

        self.events.at(at_s, end)


def shared(flows: Sequence[Flow], capacities: Mapping[LinkName, float]) -> dict[Flow, float]:
    """Max-min fair rates of flows, and then of those that yield, in what the others leave.

    Args:
        flows: All that share links with each other.
        capacities: Of the links, in bytes a second.
    """
    first = [one for one in flows if not one.yields]
    rates = max_min(first, capacities)
    behind = [one for one in flows if one.yields]
    if not behind:
        return rates
    left = {link: capacities[link] for one in behind for link in one.links}
    for flow, rate in rates.items():
        for link in flow.links:
            if link in left:
                left[link] -= rate
    least = {
        link: rate if rate > ROUNDING * capacities[link] else 0.0 for link, rate in left.items()
    }
    return {**rates, **max_min(behind, least)}


def max_min(flows: Sequence[Flow], capacities: Mapping[LinkName, float]) -> dict[Flow, float]:
    """Rates of which none can grow without a smaller or equal one that shrinks.

    Args:
        flows: All that share links with each other.
        capacities: Of the links, in bytes a second.
    """
    left = {link: capacities[link] for flow in flows for link in flow.links}
    counts: dict[LinkName, int] = {}
    for flow in flows:
        for link in flow.links:
            counts[link] = counts.get(link, 0) + 1
    rates: dict[Flow, float] = {}
    waiting = dict.fromkeys(flows)
    while waiting:
        share = min(
            (left[link] / count for link, count in counts.items() if count), default=math.inf
        )
        lowest = min(flow.limit_bytes_per_s for flow in waiting)
        if lowest <= share:
            share = lowest
            fixed = [one for one in waiting if one.limit_bytes_per_s <= share]
        else:
            full = {
                link
                for link, count in counts.items()
                if count and left[link] / count <= share * (1 + ROUNDING)
            }
            fixed = [one for one in waiting if not full.isdisjoint(one.links)]
        for flow in fixed:
            rates[flow] = share
            del waiting[flow]
            for link in flow.links:
                left[link] = max(0.0, left[link] - share)
                counts[link] -= 1
    return rates
