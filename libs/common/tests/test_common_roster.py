"""The roster: one rule for which workers and nodes live, whatever order reports, silence and losses
of the bus come in.
"""

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.common.messages.reports import LoaderReport, WorkerReport
from pilotlight.common.roster import Loss, News, Roster
from pilotlight.policy.cluster import Liveness
from pilotlight.policy.ids import Epoch, WorkerId
from pilotlight.policy.liveness import DEAD_AFTER_S, FORGET_AFTER_S, SUSPECT_AFTER_S, liveness_of
from pilotlight.policy.testing import node, worker

NOW_S = 1000.0
W0, N0 = worker().worker_id, node().node_id
STARTED_ANEW = "the worker was started anew"
SEEN_TO_END = "its node's loader saw it end"


def report(
    index: int = 0, *, incarnation: str = "a", seq: int = 0, epoch_seen: int = 0
) -> WorkerReport:
    return WorkerReport(
        facts=worker(index), incarnation=incarnation, epoch_seen=Epoch(epoch_seen), seq=seq
    )


def loader(*dead: str, epoch_seen: int = 0) -> LoaderReport:
    ended = tuple(WorkerId(worker_id) for worker_id in dead)
    return LoaderReport(
        facts=node(), incarnation="l", epoch_seen=Epoch(epoch_seen), dead_workers=ended
    )


def liveness(roster: Roster, worker_id: WorkerId = W0) -> Liveness | None:
    view = roster.worker(worker_id)
    return view.facts.liveness if view is not None else None


def losses(news: News) -> list[str]:
    return [loss.why for loss in news.losses]


def test_a_silent_worker_becomes_suspect_then_dead_once_and_lives_again_when_heard() -> None:
    roster = Roster()
    assert roster.hear_worker(report(), NOW_S) == News(workers=(W0,))
    assert roster.check(NOW_S + 0.9) == News()
    assert roster.check(NOW_S + 1.5) == News(workers=(W0,))
    assert liveness(roster) is Liveness.SUSPECT
    assert roster.check(NOW_S + 3.5) == News(
        workers=(W0,), losses=(Loss(worker_id=W0, why="it has been silent for 3.5 s"),)
    )
    assert roster.check(NOW_S + 4.0) == News()
    assert losses(roster.hear_worker(report(), NOW_S + 4.1)) == []
    assert liveness(roster) is Liveness.ALIVE


def test_silent_nodes_and_workers_are_forgotten_in_the_end() -> None:
    roster = Roster()
    roster.hear_worker(report(), NOW_S)
    roster.hear_loader(loader(), NOW_S)
    roster.check(NOW_S + 3.0)
    news = roster.check(NOW_S + FORGET_AFTER_S)
    assert (news.workers, news.nodes, news.losses) == ((W0,), (N0,), ())
    assert (roster.workers, roster.nodes) == ({}, {})


def test_a_loader_tells_of_a_death_at_once_and_only_of_that_run() -> None:
    roster = Roster()
    roster.hear_worker(report(), NOW_S)
    assert losses(roster.hear_loader(loader("w0"), NOW_S + 0.1)) == [SEEN_TO_END]
    assert roster.hear_worker(report(), NOW_S + 0.2) == News(), "its last words"
    assert losses(roster.hear_loader(loader("w0"), NOW_S + 0.3)) == []
    assert losses(roster.hear_worker(report(incarnation="b"), NOW_S + 0.4)) == [], (
        "its death was told"
    )
    assert losses(roster.hear_loader(loader("w0"), NOW_S + 0.5)) == [], (
        "the list still names the run before"
    )
    assert liveness(roster) is Liveness.ALIVE


def test_who_goes_on_reporting_was_not_dead() -> None:
    roster = Roster()
    roster.hear_worker(report(), NOW_S)
    roster.hear_loader(loader("w0"), NOW_S + 0.1)
    assert roster.check(NOW_S + 0.5) == News(), "a declared death is no silence"
    roster.hear_worker(report(), NOW_S + 0.7)
    assert liveness(roster) is Liveness.ALIVE


def test_a_worker_that_is_started_anew_has_lost_what_it_held() -> None:
    roster = Roster()
    roster.hear_worker(report(), NOW_S)
    assert losses(roster.hear_worker(report(incarnation="b"), NOW_S + 0.1)) == [STARTED_ANEW]
    roster.check(NOW_S + 4.0)
    assert losses(roster.hear_worker(report(incarnation="c"), NOW_S + 4.1)) == [], (
        "that run was dead already"
    )


def test_a_report_that_was_overtaken_replaces_nothing() -> None:
    roster = Roster()
    roster.hear_worker(report(seq=2), NOW_S)
    assert roster.hear_worker(report(seq=1, epoch_seen=9), NOW_S + 2.0) == News()
    assert roster.epoch_seen == 9, (
        "an epoch that a worker has obeyed is one, however late the word of it"
    )
    roster.check(NOW_S + 2.0)
    assert liveness(roster) is Liveness.SUSPECT


def test_ages_stand_still_while_nothing_can_be_heard() -> None:
    roster = Roster()
    roster.hear_worker(report(), NOW_S)
    roster.hear_loader(loader(), NOW_S)
    roster.hear_connection(False, NOW_S + 0.2)
    roster.hear_connection(False, NOW_S + 5)
    assert roster.check(NOW_S + 30) == News()
    roster.hear_connection(True, NOW_S + 30)
    assert roster.check(NOW_S + 30.5) == News()
    news = roster.check(NOW_S + 33)
    assert (news.workers, news.nodes) == ((W0,), (N0,))
    assert liveness(roster) is Liveness.DEAD
    assert roster.nodes[N0].liveness is Liveness.DEAD
    assert roster.workers[W0].heard_s == NOW_S, "when it was heard is not made up"


def test_who_was_dead_before_the_bus_was_lost_does_not_come_back_by_that() -> None:
    roster = Roster()
    roster.hear_loader(loader(), NOW_S)
    roster.check(NOW_S + 3.1)
    roster.hear_connection(False, NOW_S + 3.2)
    roster.hear_connection(True, NOW_S + 10.0)
    roster.check(NOW_S + 10.1)
    assert roster.nodes[N0].liveness is Liveness.DEAD


def test_a_process_that_stood_still_takes_its_own_absence_for_nobody_s_death() -> None:
    roster = Roster()
    roster.hear_worker(report(), NOW_S)
    roster.hear_worker(report(1), NOW_S + 20.0)
    roster.was_away(19.9, NOW_S + 20.0)
    assert roster.check(NOW_S + 20.0) == News()
    news = roster.check(NOW_S + 23.0)
    assert len(news.losses) == 2


LIMITS_S = (SUSPECT_AFTER_S, DEAD_AFTER_S, FORGET_AFTER_S)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["w0", "w1", "check", "deaf", "hears", "dies", "anew"]), st.floats(0.0, 2.0)
    ),
    max_size=40,
)


@given(STEPS)
def test_liveness_is_that_of_the_time_in_which_a_worker_could_be_heard(
    steps: list[tuple[str, float]],
) -> None:
    """Against the rule written down plainly: every age is summed up from the intervals in which the
    bus was there.
    """
    roster, now_s, deaf = Roster(), NOW_S, False
    ages_s: dict[str, float] = {}
    run = {"w0": 0, "w1": 0}
    last_words: dict[str, float] = {}
    dead: set[str] = set()
    told: list[str] = []
    for step, delay_s in steps:
        now_s += delay_s
        if not deaf:
            ages_s = {name: age_s + delay_s for name, age_s in ages_s.items()}
        news = News()
        if step in ("deaf", "hears"):
            deaf = step == "deaf"
            roster.hear_connection(not deaf, now_s)
        elif step == "dies":
            roster.hear_loader(loader(), now_s)
            news = roster.hear_loader(loader("w0"), now_s)
            if "w0" in ages_s and "w0" not in last_words:
                last_words["w0"] = now_s
        elif step in ("w0", "w1", "anew"):
            name = "w0" if step == "anew" else step
            run[name] += step == "anew"
            news = roster.hear_worker(report(int(name[1]), incarnation=str(run[name])), now_s)
            if step == "anew" or now_s - last_words.get(name, now_s - 1.0) >= 0.5:
                last_words.pop(name, None)
                ages_s[name] = 0.0
        for found in (news, roster.check(now_s)):
            told += [loss.worker_id for loss in found.losses]
        # Sums of the same intervals in another order differ in their last bits.
        if any(abs(age_s - limit_s) < 1e-6 for age_s in ages_s.values() for limit_s in LIMITS_S):
            return
        ages_s = {name: age_s for name, age_s in ages_s.items() if age_s < FORGET_AFTER_S}
        expected = {
            name: Liveness.DEAD if name in last_words else liveness_of(age_s)
            for name, age_s in ages_s.items()
        }
        assert {name: view.facts.liveness for name, view in roster.workers.items()} == expected
        dead = {name for name, judged in expected.items() if judged is Liveness.DEAD}
    assert all(
        told.count(name) <= 1 + sum(step in (name, "anew") for step, _ in steps) for name in dead
    )
    assert set(told) >= dead
