"""What is known of a worker by its last report."""

from dataclasses import replace

from pilotlight.policy.cluster import WorkerView
from pilotlight.policy.ids import Epoch
from pilotlight.policy.testing import held, worker


def test_what_nobody_asks_grows_older_and_what_runs_does_not() -> None:
    idle, busy = replace(held("a"), idle_s=2.0), held("b", in_flight=1)
    view = WorkerView(
        facts=worker(held_stages=(idle, busy)),
        heard_s=100.0,
        incarnation="one",
        epoch_seen=Epoch(1),
        unchanged_for_s=30.0,
    )
    assert [one.idle_s for one in view.facts_at(105.0).held] == [37.0, 0.0]
    assert view.facts_at(0.0) == view.facts, "a clock that lags makes nothing younger"
