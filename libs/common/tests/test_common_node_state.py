"""A node's reports: whatever is lost, repeated or overtaken, a listener that asks knows the whole
state in the end, and knows when it does not.
"""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.common.messages.reports import (
    HEARTBEAT_S,
    LOADER_PART,
    WHOLE_EVERY_S,
    LoaderReport,
    NodeReport,
    WorkerReport,
)
from pilotlight.common.node_state import NodeReader, NodeTeller, aged_alike
from pilotlight.common.roster import VOUCHED_BEFORE_S, Roster
from pilotlight.policy.cluster import Liveness
from pilotlight.policy.ids import Epoch, NodeId, WorkerId
from pilotlight.policy.liveness import FORGET_AFTER_S, LAST_WORDS_S
from pilotlight.policy.testing import node, worker

NODE = node().node_id
KEYS = ("", "w0", "w1", "w2")
NOW_S = 1000.0


def sent(report: NodeReport) -> NodeReport:
    """As it arrives."""
    return decode_json(encode_json(report), NodeReport)


def parts_of(teller: NodeTeller, now_s: float) -> dict[str, bytes]:
    """Everything that a teller would say if it was asked; it is not."""
    teller.ask()
    return {key: bytes(part) for key, part in teller.report({}, now_s).parts.items()}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("put", "keep", "say", "ask", "restart")),
            st.sampled_from(KEYS),
            st.integers(0, 3),
            st.sampled_from(("deliver", "lose", "late", "twice")),
        ),
        max_size=60,
    )
)
def test_a_listener_knows_the_state_or_that_it_does_not(
    story: list[tuple[str, str, int, str]],
) -> None:
    now_s, life = NOW_S, 0
    teller, reader = NodeTeller(NODE, "0", now_s), NodeReader()
    known: dict[str, bytes] = {}
    late: list[NodeReport] = []

    def hear(report: NodeReport) -> bool:
        word = reader.hear(sent(report))
        if word is None:
            return False
        # What a roster does with it: it replaces parts that are new to it.
        known.update({key: bytes(part) for key, part in word.parts.items()})
        spoken = {LOADER_PART, *word.workers}
        for key in [key for key in known if key not in spoken]:
            del known[key]
        return word.complete

    for what, key, value, fate in story:
        now_s += 0.1
        if what == "put":
            teller.put(key, f'{{"{key}":{value}}}'.encode(), now_s)
        elif what == "keep":
            teller.keep({LOADER_PART, *(one for one in KEYS if one != key)})
        elif what == "ask":
            teller.ask()
        elif what == "restart":
            life += 1
            teller = NodeTeller(NODE, str(life), now_s)
            teller.put(LOADER_PART, b"{}", now_s)
        else:
            report = teller.report({}, now_s)
            if fate == "late":
                late.append(report)
            elif fate != "lose":
                told = hear(report)
                if told:
                    assert known == parts_of(teller, now_s)
                if fate == "twice":
                    assert not hear(report), "a repetition says nothing"
            while fate != "late" and late:
                hear(late.pop())
    if not hear(teller.report({}, now_s)):
        teller.ask()
        assert hear(teller.report({}, now_s)), "what was asked for is the whole"
    assert known == parts_of(teller, now_s)


def test_a_node_at_rest_says_a_digest_twice_a_second_and_the_whole_now_and_then() -> None:
    teller, now_s = NodeTeller(NODE, "a", NOW_S), NOW_S
    teller.put("w0", b"{}", now_s)
    assert teller.wait_s(now_s) == 0.0
    assert set(teller.report({}, now_s).parts) == {"w0"}
    assert teller.wait_s(now_s) == HEARTBEAT_S
    wholes = 0
    said: list[NodeReport] = []
    while now_s < NOW_S + 3 * WHOLE_EVERY_S:
        now_s += teller.wait_s(now_s)
        said.append(teller.report({}, now_s))
        wholes += said[-1].whole
    assert wholes == 3
    assert all(not one.parts for one in said if not one.whole)
    assert max(len(encode_json(one)) for one in said if not one.whole) < 120
    assert [one.ages_s["w0"] > 0 for one in said if one.whole] == [True] * 3


def test_an_age_that_only_went_on_is_no_change() -> None:
    assert aged_alike(0.0, 0.0, 5.0)
    assert aged_alike(1.0, 6.02, 5.0)
    assert not aged_alike(6.0, 0.5, 5.0), "it was used since"
    assert not aged_alike(0.0, 0.2, 5.0), "its use ended in between"


class Heard:
    """A node's teller, and a roster that hears it."""

    def __init__(self) -> None:
        self.roster = Roster()
        self.now_s = NOW_S
        self.teller = NodeTeller(NODE, "l", self.now_s)
        self.seq = 0

    def loader(self, *dead: str) -> None:
        self.seq += 1
        report = LoaderReport(
            facts=node(),
            incarnation="l",
            epoch_seen=Epoch(1),
            dead_workers=tuple(WorkerId(one) for one in dead),
            seq=self.seq,
        )
        self.teller.put(LOADER_PART, encode_json(report), self.now_s)

    def worker(self, index: int = 0, *, queue: int = 0) -> None:
        self.seq += 1
        report = WorkerReport(
            facts=replace(worker(index), queue_requests=queue),
            incarnation="a",
            epoch_seen=Epoch(1),
            seq=self.seq,
        )
        self.teller.put(f"w{index}", encode_json(report), self.now_s)

    def say(self, after_s: float = 0.0, **silent: float):
        self.now_s += after_s
        silent_s = {WorkerId(key): value for key, value in silent.items()}
        return self.roster.hear_node(sent(self.teller.report(silent_s, self.now_s)), self.now_s)

    def liveness(self, worker_id: str = "w0") -> Liveness | None:
        self.roster.check(self.now_s)
        view = self.roster.worker(WorkerId(worker_id))
        return view.facts.liveness if view is not None else None


def both() -> Heard:
    heard = Heard()
    heard.loader()
    heard.worker(0)
    heard.worker(1)
    news = heard.say()
    assert set(news.workers) == {"w0", "w1"}
    assert news.nodes == (NODE,)
    assert news.unknown is None
    return heard


def test_a_loader_is_the_word_of_its_workers_but_for_the_silent_ones() -> None:
    heard = both()
    for _ in range(4):
        news = heard.say(0.5, w1=1.0)
        assert (news.workers, news.nodes, news.unknown) == ((), (), None), "nothing is new"
    assert heard.liveness("w0") is Liveness.ALIVE
    assert heard.liveness("w1") is Liveness.SUSPECT
    for _ in range(2):
        heard.say(0.5, w1=3.0)
    assert heard.liveness("w1") is Liveness.DEAD
    assert heard.say(0.5).workers == (WorkerId("w1"),), "it lives after all"
    assert heard.liveness("w1") is Liveness.ALIVE


def test_a_silent_loader_makes_its_workers_suspect_unless_they_speak_themselves() -> None:
    heard = both()
    heard.now_s += 0.9
    own = WorkerReport(facts=worker(0), incarnation="a", epoch_seen=Epoch(1), seq=90)
    heard.roster.hear_worker(own, heard.now_s)
    heard.now_s += 0.9
    assert heard.liveness("w0") is Liveness.ALIVE
    assert heard.liveness("w1") is Liveness.SUSPECT
    assert heard.roster.nodes[NODE].liveness is Liveness.SUSPECT
    news = heard.say()
    assert news.nodes == (NODE,)
    assert heard.roster.nodes[NODE].liveness is Liveness.ALIVE


def test_ages_in_facts_are_of_when_they_were_said_and_silence_of_when_it_began() -> None:
    heard = both()
    at_s = heard.now_s
    heard.say(0.5)
    view = heard.roster.workers[WorkerId("w0")]
    assert view.facts_s == at_s
    assert view.heard_s == at_s + 0.5 - VOUCHED_BEFORE_S
    late = Roster()
    heard.teller.ask()
    heard.now_s += 7.0
    late.hear_node(sent(heard.teller.report({}, heard.now_s)), heard.now_s)
    assert late.workers[WorkerId("w0")].facts_s == at_s
    assert late.node_facts_s(NODE) == at_s


def test_that_nothing_changed_is_news_once_of_a_worker_that_was_told_something() -> None:
    heard = both()
    heard.say(0.5)
    heard.roster.expect([WorkerId("w0")], heard.now_s)
    assert heard.say(0.4).workers == (), "it may not have heard of it then"
    assert heard.say(0.5).workers == (WorkerId("w0"),)
    assert heard.say(0.5).workers == ()


def test_a_listener_that_begins_asks() -> None:
    heard = both()
    roster = Roster()
    heard.now_s += 0.5
    beat = sent(heard.teller.report({}, heard.now_s))
    assert roster.hear_node(beat, heard.now_s).unknown == NODE
    heard.teller.ask()
    whole = sent(heard.teller.report({}, heard.now_s))
    assert roster.hear_node(whole, heard.now_s).unknown is None
    assert set(roster.workers) == {"w0", "w1"}
    assert heard.roster.hear_node(whole, heard.now_s).workers == (), "others know it already"


def test_a_change_that_was_lost_confirms_nothing() -> None:
    heard = both()
    heard.worker(0, queue=5)
    heard.now_s += 0.5
    heard.teller.report({}, heard.now_s)  # Lost.
    before = heard.roster.workers[WorkerId("w0")]
    news = heard.say(0.5)
    assert news.unknown == NODE
    assert heard.roster.workers[WorkerId("w0")] == before
    assert heard.liveness("w0") is Liveness.ALIVE, "the loader says that it lives"
    heard.teller.ask()
    assert WorkerId("w0") in heard.say().workers
    assert heard.roster.workers[WorkerId("w0")].facts.queue_requests == 5


def test_a_worker_that_ended_and_says_hello_again_is_alive_after_its_last_words() -> None:
    heard = both()
    heard.loader("w0")
    heard.teller.keep({LOADER_PART, "w1"})
    assert [loss.worker_id for loss in heard.say(0.1).losses] == ["w0"]
    heard.loader()
    heard.worker(0)
    news = heard.say(0.1)
    assert heard.liveness() is Liveness.DEAD, "they may be its last words"
    assert heard.say(LAST_WORDS_S).unknown == NODE
    heard.teller.ask()
    assert WorkerId("w0") in heard.say().workers
    assert heard.liveness() is Liveness.ALIVE
    assert news.losses == ()


def test_what_was_forgotten_is_known_again_although_nothing_changed() -> None:
    heard = both()
    heard.now_s += FORGET_AFTER_S + 1.0
    heard.roster.check(heard.now_s)
    assert heard.roster.workers == {}
    heard.teller.report({}, heard.now_s)  # Lost, with all that it said.
    assert heard.say().unknown == NODE
    heard.teller.ask()
    assert heard.say().unknown is None
    assert heard.liveness("w0") is Liveness.ALIVE
    assert NodeId("n0") in heard.roster.nodes


def test_a_report_of_its_own_that_overtook_the_loaders_stays() -> None:
    heard = both()
    own = WorkerReport(
        facts=replace(worker(0), queue_requests=9), incarnation="a", epoch_seen=Epoch(1), seq=90
    )
    heard.roster.hear_worker(own, heard.now_s)
    heard.worker(0, queue=1)
    assert heard.say(0.1).unknown is None
    assert heard.roster.workers[WorkerId("w0")].facts.queue_requests == 9
