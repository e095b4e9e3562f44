"""Books of fetches: the paper's rules, and a fluid network in which nothing that they admit is
late.
"""

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.coldstart.contention import (
    FetchBooks,
    FetchKey,
    LinkName,
    Newcomer,
    disk,
    incoming,
    outgoing,
)
from pilotlight.policy.ids import NodeId

NODE, SOURCE = incoming(NodeId("n")), outgoing("s3://models")
BOOKS = FetchBooks(capacities={NODE: 100.0, SOURCE: 150.0})


def newcomer(
    key: str, size: float, deadline_s: float, links: tuple[LinkName, ...] = (NODE,)
) -> Newcomer:
    return Newcomer(key=FetchKey(key), links=links, fetch_bytes=size, deadline_s=deadline_s)


def pending(books: FetchBooks, key: str, now_s: float) -> float:
    return books.fetches[FetchKey(key)].pending_at(now_s)


def test_links_have_names_of_their_own() -> None:
    node = NodeId("n")
    assert len({incoming(node), outgoing(node), disk(node)}) == 3


def test_equation_3_for_those_that_run() -> None:
    books = BOOKS.admit([newcomer("a", 500, 10.0)], 0.0)
    assert books.share((NODE,), {NODE: 1}) == 50.0
    assert books.refusal([newcomer("b", 100, 100.0)], 0.0) is None
    late = BOOKS.admit([newcomer("a", 501, 10.0)], 0.0)
    assert late.refusal([newcomer("b", 100, 100.0)], 0.0) == "a would be late"


def test_the_newcomer_is_checked_too() -> None:
    books = BOOKS.admit([newcomer("a", 100, 100.0)], 0.0)
    assert books.refusal([newcomer("b", 100, 2.0)], 0.0) is None
    assert books.refusal([newcomer("b", 101, 2.0)], 0.0) == "b would be late itself"


def test_equation_4_at_each_change() -> None:
    books = BOOKS.admit([newcomer("a", 500, 100.0)], 0.0)
    books = books.admit([newcomer("b", 500, 100.0)], 2.0)  # a had 100 a second, then 50.
    assert pending(books, "a", 2.0) == 300.0
    assert pending(books, "a", 4.0) == 200.0
    books = books.done([FetchKey("b")], 4.0)
    assert pending(books, "a", 5.0) == 100.0


def test_what_has_ended_by_the_books_is_no_longer_counted() -> None:
    books = BOOKS.admit([newcomer("a", 100, 10.0), newcomer("b", 500, 100.0)], 0.0)
    assert books.forward([NODE], 1.0) is books
    books = books.forward([NODE], 2.0)
    assert set(books.fetches) == {"b"}
    assert pending(books, "b", 3.0) == 300.0


def test_a_fetch_that_is_late_even_alone_does_not_veto() -> None:
    books = BOOKS.admit([newcomer("a", 2000, 10.0)], 0.0)
    assert books.refusal([newcomer("b", 10, 10.0)], 0.0) is None


def test_a_newcomer_that_is_late_already_is_taken_where_it_harms_nothing() -> None:
    hopeless = newcomer("b", 10_000, math.inf)
    assert BOOKS.admit([newcomer("a", 100, 10.0)], 0.0).refusal([hopeless], 0.0) is None
    assert BOOKS.admit([newcomer("a", 800, 10.0)], 0.0).refusal([hopeless], 0.0) is not None


def test_sources_have_books_too() -> None:
    other = incoming(NodeId("other"))
    books = FetchBooks(capacities={NODE: 100.0, other: 100.0, SOURCE: 150.0})
    books = books.admit([newcomer("a", 800, 10.0, (NODE, SOURCE))], 0.0)
    assert books.refusal([newcomer("b", 10, 10.0, (other,))], 0.0) is None
    assert books.refusal([newcomer("b", 10, 10.0, (other, SOURCE))], 0.0) == "a would be late"


def test_a_fetch_from_which_newcomers_take_nothing_has_no_say() -> None:
    """Late beside another one, in time alone: that closes its own link, not the source that all
    models share and that is never the bottleneck.
    """
    other, everyone = incoming(NodeId("other")), outgoing("s3://all")
    books = FetchBooks(capacities={NODE: 100.0, other: 100.0}).admit(
        [newcomer("a", 800, 10.0, (NODE, everyone)), newcomer("b", 800, math.inf, (NODE,))], 0.0
    )
    assert books.refusal([newcomer("c", 10, math.inf, (NODE, everyone))], 0.0) is not None
    assert books.refusal([newcomer("c", 10, math.inf, (other, everyone))], 0.0) is None


def test_newcomers_of_one_decision_are_counted_together() -> None:
    one = newcomer("a", 300, 10.0, (SOURCE,))
    three = [newcomer(key, 600, 10.0, (SOURCE,)) for key in "abc"]
    assert BOOKS.refusal([one], 0.0) is None
    assert BOOKS.refusal(three[:2], 0.0) is None
    assert BOOKS.refusal(three, 0.0) == "a would be late itself"


def test_reports_replace_what_was_computed() -> None:
    books = BOOKS.admit([newcomer("a", 500, 10.0)], 0.0)
    behind = books.progress(FetchKey("a"), 450, 2.0)
    assert pending(behind, "a", 3.0) == 350.0
    assert not behind.progress(FetchKey("a"), 0, 3.0).fetches
    assert behind.progress(FetchKey("unknown"), 7, 3.0) is behind


def test_a_link_that_gives_less_than_it_said() -> None:
    books = BOOKS.admit([newcomer("a", 900, 10.0)], 0.0).with_capacity(NODE, 50.0, 2.0)
    assert pending(books, "a", 2.0) == 700.0
    assert pending(books, "a", 4.0) == 600.0
    assert books.refusal([newcomer("b", 10, 20.0)], 2.0) is None  # a is late even alone.


@given(
    st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=4),
    st.lists(st.floats(1.0, 1000.0), max_size=4),
)
def test_what_is_expected_is_what_equal_shares_come_to(new: list[float], old: list[float]) -> None:
    """Against a link that is shared out step by step; the bound that is promised is no less."""
    books = BOOKS.admit([newcomer(f"old{at}", one, math.inf) for at, one in enumerate(old)], 0.0)
    newcomers = [newcomer(f"new{at}", one, math.inf) for at, one in enumerate(new)]
    left, ends_s, now_s = dict(enumerate([*new, *old])), dict[int, float](), 0.0
    while left:
        least = min(left.values())
        now_s += least * len(left) / 100.0
        ends_s |= {at: now_s for at, size in left.items() if size <= least + 1e-9}
        left = {at: size - least for at, size in left.items() if at not in ends_s}
    expected_s = books.expected_s(newcomers, 0.0)
    assert expected_s == pytest.approx([ends_s[at] for at in range(len(new))])
    share = books.share((NODE,), {NODE: len(new)})
    assert all(took_s <= size / share + 1e-9 for took_s, size in zip(expected_s, new, strict=True))


def test_nothing_is_expected_below_a_fetchs_own_limit_or_on_a_link_without_books() -> None:
    limited = Newcomer(
        key=FetchKey("a"),
        links=(NODE, outgoing("s3://other")),
        fetch_bytes=100,
        deadline_s=math.inf,
        limit_bytes_per_s=10.0,
    )
    nothing = newcomer("b", 0, math.inf)
    assert BOOKS.expected_s([limited, nothing], 0.0) == [10.0, 0.0]


def test_a_fetch_with_a_limit_is_not_believed_to_be_faster() -> None:
    slow = Newcomer(
        key=FetchKey("a"),
        links=(NODE,),
        fetch_bytes=100,
        deadline_s=20.0,
        limit_bytes_per_s=10.0,
    )
    books = BOOKS.admit([slow], 0.0)
    assert pending(books, "a", 5.0) == 50.0
    assert books.refusal([newcomer("b", 10, 20.0)], 0.0) is None


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5), st.booleans()), max_size=12),
    st.integers(0, 1000),
)
def test_books_and_their_index_agree(steps: list[tuple[int, int, bool]], seed: int) -> None:
    """Whatever comes and goes: each fetch is on its links, at the least share of them."""
    rng, books, now_s = random.Random(seed), BOOKS, 0.0
    for size, number, ends in steps:
        now_s += rng.random()
        key = FetchKey(str(number))
        if ends:
            books = books.done([key], now_s)
        elif key not in books.fetches:
            links = rng.choice([(NODE,), (SOURCE,), (NODE, SOURCE)])
            books = books.admit([newcomer(key, size, now_s + 10, links)], now_s)
        on = {
            link: frozenset(key for key, one in books.fetches.items() if link in one.links)
            for link in (NODE, SOURCE)
        }
        assert books.on == {link: keys for link, keys in on.items() if keys}
        for one in books.fetches.values():
            assert one.bytes_per_s == books.share(one.links, {})


@dataclass
class Flow:
    links: tuple[LinkName, ...]
    left_bytes: float
    deadline_s: float


@dataclass
class FluidNetwork:
    """Flows that share links max-min fairly: the truth, of which the books know nothing."""

    capacities: dict[LinkName, float]
    now_s: float = 0.0
    flows: dict[FetchKey, Flow] = field(default_factory=dict[FetchKey, Flow])
    ended: int = 0
    missed: int = 0

    def rates(self) -> dict[FetchKey, float]:
        """Water filling: the link with the least share left fixes its flows, and so on."""
        left, open_ = dict(self.capacities), dict(self.flows)
        rates: dict[FetchKey, float] = {}
        while open_:
            counts: dict[LinkName, int] = {}
            for flow in open_.values():
                for link in flow.links:
                    counts[link] = counts.get(link, 0) + 1
            share, tightest = min((left[link] / count, link) for link, count in counts.items())
            for key in [key for key, flow in open_.items() if tightest in flow.links]:
                rates[key] = share
                for link in open_.pop(key).links:
                    left[link] -= share
        return rates

    def run_until(self, at_s: float) -> list[FetchKey]:
        """Flows that end until then."""
        over: list[FetchKey] = []
        while self.flows:
            rates = self.rates()
            step_s = min(self.flows[key].left_bytes / rate for key, rate in rates.items())
            step_s = min(step_s, at_s - self.now_s)
            self.now_s += step_s
            for key, rate in rates.items():
                flow = self.flows[key]
                flow.left_bytes -= rate * step_s
                if flow.left_bytes <= 1e-6:
                    del self.flows[key]
                    over.append(key)
                    self.ended += 1
                    self.missed += self.now_s > flow.deadline_s + 1e-6
            if self.now_s >= at_s:
                break
        self.now_s = at_s
        return over


def played(seed: int, wanted: int, *, exaggerated: float = 1.0, told: bool = True) -> FluidNetwork:
    """Fetches come in groups with any deadlines; those that the books admit run in the network.

    ``exaggerated``: what the books believe of the links, over the truth. ``told``: some ends and
    some progress are reported.
    """
    rng = random.Random(seed)
    nodes = [incoming(NodeId(f"n{number}")) for number in range(4)]
    sources = [outgoing(f"s{number}") for number in range(2)]
    network = FluidNetwork({link: rng.uniform(50, 200) for link in (*nodes, *sources)})
    books = FetchBooks(
        capacities={link: exaggerated * rate for link, rate in network.capacities.items()}
    )
    number = 0
    while network.ended < wanted:
        over = network.run_until(network.now_s + rng.expovariate(1.2))
        now_s = network.now_s
        if told:
            books = books.done([key for key in over if rng.random() < 0.7], now_s)
            for key in [key for key in network.flows if rng.random() < 0.1]:
                books = books.progress(key, network.flows[key].left_bytes, now_s)
        group: list[Newcomer] = []
        source = rng.choice(sources)
        for node in rng.sample(nodes, rng.choice([1, 1, 1, 2, 3])):
            number += 1
            size = rng.uniform(10, 300)
            within_s = size / 100 * rng.uniform(0.5, 6)
            links = rng.choice([(node,), (node, source), (node, source)])
            group.append(newcomer(f"f{number}", size, now_s + within_s, links))
        books = books.forward([link for one in group for link in one.links], now_s)
        if books.refusal(group, now_s) is None:
            books = books.admit(group, now_s)
            for one in group:
                network.flows[one.key] = Flow(one.links, one.fetch_bytes, one.deadline_s)
    return network


@pytest.mark.parametrize("seed", range(8))
def test_no_admitted_fetch_misses_its_deadline(seed: int) -> None:
    """50,000 fetches in all, with reports and without."""
    network = played(seed, 6_500, told=seed % 2 == 0)
    assert network.ended >= 6_500
    assert network.missed == 0


def test_the_network_shows_when_the_books_promise_too_much() -> None:
    assert played(1, 1_000, exaggerated=1.3).missed > 0
