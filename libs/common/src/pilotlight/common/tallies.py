"""Counters and histograms that are added to with each request and looked at once in seconds.

prometheus_client takes a lock and four calls for each addition. Here one is an entry of a dict, and
what came together is added when the counter is collected.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.metrics_core import HistogramMetricFamily
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


class Series:
    """One series of a ``HistogramTally``."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket; the last one has what is above all bounds."""
        self.total = 0.0

    def observe(self, *values: float) -> None:
        """Count."""
        bounds, counts = self._bounds, self.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)


class HistogramTally(Collector):
    """A histogram, as ``Tally``."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """Make it.

        Args:
            name: its own.
            documentation: what it shows.
            labels: their names; few values of each.
            bounds: of its buckets, rising.
            registry: shows it.
        """
        self._name, self._documentation = name, documentation
        self._labels, self._bounds = labels, bounds
        self._series: dict[tuple[str, ...], Series] = {}
        if not labels:
            self.series()
        registry.register(self)

    def series(self, *labels: str) -> Series:
        """That of these values, in the order of their names."""
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = Series(self._bounds)
        return found

    def describe(self) -> Iterable[Metric]:
        yield self._family()

    def collect(self) -> Iterable[Metric]:
        """As Prometheus wants it: each bucket has those below it, too."""
        family, bounds = self._family(), (*map(str, self._bounds), "+Inf")
        for labels, series in self._series.items():
            buckets = list(zip(bounds, accumulate(series.counts), strict=True))
            family.add_metric(labels, buckets=buckets, sum_value=series.total)
        yield family

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
