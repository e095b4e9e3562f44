"""Which fetches may share a link: books of pending bytes and deadlines (ParaServe, algorithm 2).

Pure. A fetch uses links: its node's incoming one, its source's outgoing one, a disk. It gets of
each an equal share at least, so its rate is no less than the least share::

    in:n1   16 ── f1, f2, newcomer      f1 gets min(16/3, 12/2) at least once the newcomer is there,
    out:n7  12 ── f1, newcomer          f2 gets 16/3

The paper keeps books of nodes alone and takes it that a source is never the bottleneck; here each
source has its books, too (design 6.1, 6.2). Its slips are mended: ``GetNodeBandwidth`` answers
B/(N+1); the newcomer is checked, too; books are brought forward before they are asked; and a fetch
that is late even alone does not veto, or it would close its links to everybody.

**No admitted fetch misses its deadline** while links give what they are booked with, share max-min
fairly, and carry nothing else: a max-min fair rate is no less than the least equal share of the
flow's links, and books that run behind count too many flows, never too few.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NewType

from pilotlight.policy.cost import transfer_s
from pilotlight.policy.ids import NodeId

LinkName = NewType("LinkName", str)
FetchKey = NewType("FetchKey", str)
"""Of one stage's fetch: its instance and its worker."""
INTO = "in:"
ROUNDING_S = 1e-9
"""A deadline is met if it is missed by no more: sums of floats round."""


def incoming(node_id: NodeId) -> LinkName:
    """What a node receives over."""
    return LinkName(f"{INTO}{node_id}")


def outgoing(source: str) -> LinkName:
    """What a node, or a model's own source, sends over."""
    return LinkName(f"out:{source}")


def disk(node_id: NodeId) -> LinkName:
    """What a node reads its disk tier over."""
    return LinkName(f"disk:{node_id}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """A fetch that would begin now."""

    key: FetchKey
    links: tuple[LinkName, ...]
    """Those that it shares with others, each once."""
    fetch_bytes: float
    deadline_s: float
    """D: when its bytes have to be there. Infinite: it is late already, and may not veto."""
    limit_bytes_per_s: float = math.inf
    """What it gets at most, however free its links are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookedFetch:
    """A fetch that runs."""

    links: tuple[LinkName, ...]
    pending_bytes: float
    """S, at ``as_of_s``: no less than what is really missing."""
    deadline_s: float
    as_of_s: float
    bytes_per_s: float
    """Its guaranteed rate since then: the least share of its links."""
    limit_bytes_per_s: float = math.inf

    def pending_at(self, now_s: float) -> float:
        """S at a later time: equation 4."""
        if now_s <= self.as_of_s:
            return self.pending_bytes
        return max(0.0, self.pending_bytes - self.bytes_per_s * (now_s - self.as_of_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchBooks:
    """Fetches that run, and the links that they share. Immutable."""

    capacities: Mapping[LinkName, float] = field(default_factory=dict[LinkName, float])
    """B, in bytes a second. A link without an entry is never the bottleneck."""
    fetches: Mapping[FetchKey, BookedFetch] = field(default_factory=dict[FetchKey, BookedFetch])
    on: Mapping[LinkName, frozenset[FetchKey]] = field(
        default_factory=dict[LinkName, frozenset[FetchKey]]
    )

    def share(self, links: Sequence[LinkName], newcomers: Mapping[LinkName, int]) -> float:
        """The least share of some links once newcomers are there, in bytes a second.

        Args:
            links: Those of one fetch.
            newcomers: How many begin together, by link; the fetch that is asked for among them.
        """
        return min(
            (
                self.capacities[link] / max(1, len(self.on.get(link, ())) + newcomers.get(link, 0))
                for link in links
                if link in self.capacities
            ),
            default=math.inf,
        )

    def expected_s(self, newcomers: Sequence[Newcomer], now_s: float) -> list[float]:
        """How long each of some newcomers that begin together will take, if nothing else comes.

        On a link that is shared equally a fetch waits for no more bytes of another than it has
        itself: those that end before it leave it their share. ``share`` is the bound that deadlines
        are promised by, as if all of them ran until it ends; this is what a client will see.
        """
        found: list[float] = []
        for one in newcomers:
            took_s = transfer_s(one.fetch_bytes, one.limit_bytes_per_s)
            for link in one.links if one.fetch_bytes > 0 else ():
                if link not in self.capacities:
                    continue
                others = [self.fetches[key].pending_at(now_s) for key in self.on.get(link, ())]
                others += [
                    other.fetch_bytes
                    for other in newcomers
                    if other is not one and link in other.links
                ]
                shared = one.fetch_bytes + sum(min(each, one.fetch_bytes) for each in others)
                took_s = max(took_s, transfer_s(shared, self.capacities[link]))
            found.append(took_s)
        return found

    def refusal(self, newcomers: Sequence[Newcomer], now_s: float) -> str | None:
        """Why newcomers that begin together may not; None: they may.

        Equation 3, S <= B/(N+k) (D - T), for each fetch on their links and for themselves. The
        books are those of ``now_s`` (``forward``).

        1. a running fetch that would be late, though alone it would not be; one from which the
           newcomers take nothing has no say: it is as late without them. Else one such fetch would
           close the source of all models to the whole cluster
        2. a newcomer that would be late
        """
        counts = link_counts(newcomers)
        # On a link that is never the bottleneck newcomers take nothing: all models of one source
        # share such a one.
        tight = (link for link in counts if link in self.capacities)
        for key in dict.fromkeys(key for link in tight for key in self._sorted(link)):
            fetch = self.fetches[key]
            pending, left_s = fetch.pending_at(now_s), fetch.deadline_s - now_s
            limit = fetch.limit_bytes_per_s
            share = min(limit, self.share(fetch.links, counts))
            if share >= min(limit, self.share(fetch.links, {})):
                continue
            alone = min(limit, self._alone(fetch.links))
            late = pending > 0 and not _in_time(pending, share, left_s)
            if late and _in_time(pending, alone, left_s):  # 1
                return f"{key} would be late"
        for one in newcomers:
            rate = min(one.limit_bytes_per_s, self.share(one.links, counts))
            if not _in_time(one.fetch_bytes, rate, one.deadline_s - now_s):  # 2
                return f"{one.key} would be late itself"
        return None

    def admit(self, newcomers: Sequence[Newcomer], now_s: float) -> "FetchBooks":
        """With newcomers; those that have nothing to fetch leave no trace. The books are those of
        ``now_s``.
        """
        added = {
            one.key: BookedFetch(
                links=one.links,
                pending_bytes=one.fetch_bytes,
                deadline_s=one.deadline_s,
                as_of_s=now_s,
                bytes_per_s=0.0,
                limit_bytes_per_s=one.limit_bytes_per_s,
            )
            for one in newcomers
            if one.fetch_bytes > 0
        }
        return self._changed(added, (), now_s)

    def done(self, keys: Iterable[FetchKey], now_s: float) -> "FetchBooks":
        """Without fetches that have ended, or were given up."""
        return self._changed({}, [key for key in keys if key in self.fetches], now_s)

    def progress(self, key: FetchKey, pending_bytes: float, now_s: float) -> "FetchBooks":
        """With what a report says is missing: it replaces what was computed."""
        known = self.fetches.get(key)
        if known is None:
            return self
        if pending_bytes <= 0:
            return self.done((key,), now_s)
        news = replace(known, pending_bytes=pending_bytes, as_of_s=now_s)
        return self._changed({key: news}, (), now_s)

    def with_capacity(self, link: LinkName, bytes_per_s: float, now_s: float) -> "FetchBooks":
        """With another bandwidth of a link: a measurement that contradicts the one it had."""
        return self.with_capacities({link: bytes_per_s}, now_s)

    def with_capacities(self, capacities: Mapping[LinkName, float], now_s: float) -> "FetchBooks":
        """As ``with_capacity``, of several links."""
        known = self.capacities
        news = {link: rate for link, rate in capacities.items() if known.get(link) != rate}
        if not news:
            return self
        return replace(self, capacities={**known, **news})._changed({}, (), now_s, touched=news)

    def forward(self, links: Iterable[LinkName], now_s: float) -> "FetchBooks":
        """Without the fetches of some links that have ended by the books; the others on those links
        get what they leave.

        The paper's ``HandleBandwidthChange``.
        """
        over = {
            key
            for link in links
            for key in self.on.get(link, ())
            if self.fetches[key].pending_at(now_s) <= 0
        }
        return self._changed({}, sorted(over), now_s) if over else self

    def _alone(self, links: Sequence[LinkName]) -> float:
        return min(
            (self.capacities[link] for link in links if link in self.capacities), default=math.inf
        )

    def _sorted(self, link: LinkName) -> list[FetchKey]:
        return sorted(self.on.get(link, ()))

    def _settled(self, keys: Iterable[FetchKey], now_s: float) -> dict[FetchKey, BookedFetch]:
        """Fetches brought forward at the rate that they had."""
        return {
            key: replace(known, pending_bytes=known.pending_at(now_s), as_of_s=now_s)
            for key in keys
            if (known := self.fetches[key]).as_of_s < now_s
        }

    def _changed(
        self,
        news: Mapping[FetchKey, BookedFetch],
        gone: Sequence[FetchKey],
        now_s: float,
        touched: Iterable[LinkName] = (),
    ) -> "FetchBooks":
        """With fetches that came and went; whose links are touched is brought forward at its old
        rate and has its new one from now on.
        """
        links = {link for key in gone for link in self.fetches[key].links}
        links.update(link for one in news.values() for link in one.links)
        links.update(touched)
        on = dict(self.on)
        for key in gone:
            for link in self.fetches[key].links:
                on[link] -= {key}
        for key, one in news.items():
            for link in one.links:
                on[link] = on.get(link, frozenset()) | {key}
        kept = {link: keys for link, keys in on.items() if keys}
        fetches = {**self.fetches, **news}
        for key in gone:
            del fetches[key]
        there = FetchBooks(capacities=self.capacities, fetches=fetches, on=kept)
        affected = {
            key for link in links if link in self.capacities for key in kept.get(link, ())
        } | news.keys()
        fetches.update(there._settled(affected - news.keys(), now_s))
        for key in affected:
            one = fetches[key]
            rate = min(one.limit_bytes_per_s, there.share(one.links, {}))
            fetches[key] = replace(one, bytes_per_s=rate)
        return there


def link_counts(newcomers: Iterable[Newcomer]) -> Mapping[LinkName, int]:
    """How many of them use each link."""
    counts: dict[LinkName, int] = {}
    for one in newcomers:
        if one.fetch_bytes > 0:
            for link in one.links:
                counts[link] = counts.get(link, 0) + 1
    return counts


def _in_time(size_bytes: float, bytes_per_s: float, within_s: float) -> bool:
    return transfer_s(size_bytes, bytes_per_s) <= within_s + ROUNDING_S
