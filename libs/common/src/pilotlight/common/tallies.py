"""Counters that are added to with each request and looked at once in seconds.

prometheus_client takes a lock and four calls for each addition. Here one is an entry of a dict, and
what came together is added when the counter is collected.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.registry import Collector


class Tally(Collector):
    """A counter, for one thread: that which adds also collects."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        """Make it.

        Args:
            name: without ``_total``.
            documentation: what it counts.
            labels: their names; few values of each.
            registry: shows it.
        """
        self._counter = Counter(name, documentation, labels, registry=None)
        self._added: dict[tuple[str, ...], float] = {}
        """Since it was collected last."""
        registry.register(self)

    def add(self, *labels: str, amount: float = 1.0) -> None:
        """Count; ``labels`` are the values, in the order of their names."""
        self._added[labels] = self._added.get(labels, 0.0) + amount

    def describe(self) -> Iterable[Metric]:
        return self._counter.describe()

    def collect(self) -> Iterable[Metric]:
        added, self._added = self._added, {}
        for labels, amount in added.items():
            counter = self._counter.labels(*labels) if labels else self._counter
            counter.inc(amount)
        return self._counter.collect()
