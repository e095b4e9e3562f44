import asyncio
from typing import Any

import pytest

from pilotlight.common import phase_reports
from pilotlight.common import phases as phases_module
from pilotlight.common.bus import Bus
from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import BadRequest, NotLeader, PilotlightError
from pilotlight.common.messages.phases import PHASES_SUBJECT, FirstToken, PhaseReport, PhasesKept
from pilotlight.common.phase_reports import reported_phases
from pilotlight.common.phases import PhaseRecorder
from pilotlight.common.service import Background
from pilotlight.common.testing import until
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.phase import PhaseName

ONE, TWO = InstanceId("inst-1"), InstanceId("inst-2")
DEADLINE_S = 5.0


class Leader:
    """The bus of a process, with the leader at its other end."""

    def __init__(self, *failures: PilotlightError) -> None:
        self.kept: asyncio.Queue[PhaseReport] = asyncio.Queue()
        self.asked = 0
        self._failures = list(failures)

    async def request(
        self, subject: str, message: PhaseReport, reply_type: type[Any], *, deadline_s: float
    ) -> Any:
        assert (subject, reply_type) == (PHASES_SUBJECT, PhasesKept)
        assert deadline_s > 0
        self.asked += 1
        if self._failures:
            raise self._failures.pop(0)
        self.kept.put_nowait(message)
        return PhasesKept()


async def next_of(leader: Leader) -> PhaseReport:
    return await asyncio.wait_for(leader.kept.get(), DEADLINE_S)


def recorder_of(
    leader: Leader, background: Background, clock: ManualClock | None = None
) -> PhaseRecorder:
    bus: Any = leader
    typed: Bus = bus
    return reported_phases(typed, clock or ManualClock(), background, "worker")


def names_of(
    recorder: PhaseRecorder, instance_id: InstanceId
) -> list[tuple[PhaseName, float, float]]:
    return [(phase.name, phase.start_s, phase.end_s) for phase in recorder.take(instance_id).phases]


@pytest.mark.anyio
async def test_a_recorded_phase_is_reported() -> None:
    leader, clock, background = Leader(), ManualClock(100.0), Background()
    recorder = recorder_of(leader, background, clock)
    clock.advance(0.25)
    recorder.record(ONE, PhaseName.LOAD, 100.0, detail="stage [0, 4)")
    token = FirstToken(request_id=RequestId("req"), at_s=1.0, wall_offset_s=0.0, arrived_s=0.5)
    recorder.first_token(ONE, token)
    report = await next_of(leader)
    (phase,) = report.phases
    assert (report.instance_id, phase.name, phase.start_s, phase.end_s) == (
        ONE,
        PhaseName.LOAD,
        100.0,
        100.25,
    )
    assert (phase.process, phase.detail) == ("worker", "stage [0, 4)")
    assert phase.wall_offset_s == pytest.approx(clock.wall().timestamp() - clock.monotonic_s())
    assert report.first_token == token
    await background.stop()


def test_neighbouring_intervals_become_one() -> None:
    recorder = PhaseRecorder(ManualClock(), "worker", "engine")
    for name, start_s, end_s in [
        (PhaseName.LOAD, 1.0, 1.1),
        (PhaseName.LOAD, 1.1005, 1.2),
        (PhaseName.LOAD, 1.3, 1.4),
        (PhaseName.CONVERT, 1.4, 1.5),
        (PhaseName.LOAD, 1.5, 1.6),
    ]:
        recorder.record(ONE, name, start_s, end_s)
    recorder.record(TWO, PhaseName.LOAD, 1.6, 1.7)
    assert names_of(recorder, ONE) == [
        (PhaseName.LOAD, 1.0, 1.2),
        (PhaseName.LOAD, 1.3, 1.4),
        (PhaseName.CONVERT, 1.4, 1.5),
        (PhaseName.LOAD, 1.5, 1.6),
    ]
    assert names_of(recorder, ONE) == [], "what was taken is gone"
    assert names_of(recorder, TWO) == [(PhaseName.LOAD, 1.6, 1.7)], "each instance has its own"


def test_phases_with_other_details_stay_apart() -> None:
    recorder = PhaseRecorder(ManualClock(), "gateway")
    for request in ("req-1", "req-2"):
        recorder.record(ONE, PhaseName.QUEUE, 1.0, 2.0, detail=request)
    assert [phase.detail for phase in recorder.take(ONE).phases] == ["req-1", "req-2"]


def test_an_interval_starts_with_the_end_of_the_one_before() -> None:
    recorder = PhaseRecorder(ManualClock(), "worker")
    assert recorder.start_s(ONE, 1.0) == 1.0
    recorder.record(ONE, PhaseName.LOAD, 1.0, 2.0)
    assert recorder.start_s(ONE, 1.5) == 2.0, "it was asked for while something else was done"
    assert recorder.start_s(ONE, 2.0005) == 2.0, "they touch"
    assert recorder.start_s(ONE, 2.5) == 2.5
    assert recorder.start_s(TWO, 1.5) == 1.5


def test_what_ends_before_it_begins_takes_no_time() -> None:
    recorder = PhaseRecorder(ManualClock(), "gateway")
    recorder.record(ONE, PhaseName.SUBMIT, 2.0, 1.0)
    assert names_of(recorder, ONE) == [(PhaseName.SUBMIT, 2.0, 2.0)]


def test_dropped_phases_are_forgotten_and_added_ones_are_not() -> None:
    recorder, other = (
        PhaseRecorder(ManualClock(), "worker"),
        PhaseRecorder(ManualClock(), "worker", "engine"),
    )
    recorder.record(ONE, PhaseName.INIT, 1.0, 2.0)
    recorder.drop(ONE)
    other.record(ONE, PhaseName.LOAD, 2.0, 3.0)
    recorder.add(ONE, *other.take(ONE).phases)
    assert names_of(recorder, ONE) == [(PhaseName.LOAD, 2.0, 3.0)]


@pytest.mark.anyio
async def test_reports_are_repeated_until_a_leader_answers() -> None:
    leader, background = Leader(NotLeader(), NotLeader()), Background()
    recorder = recorder_of(leader, background)
    recorder.record(ONE, PhaseName.FETCH, 1.0, 2.0)
    recorder.record(TWO, PhaseName.LOAD, 1.0, 2.0)
    await until(lambda: leader.asked == 1)
    recorder.record(ONE, PhaseName.LOAD, 1.0, 2.0)
    found = {
        report.instance_id: report.phases
        for report in (await next_of(leader), await next_of(leader))
    }
    names = {instance_id: [phase.name for phase in phases] for instance_id, phases in found.items()}
    assert names == {ONE: [PhaseName.FETCH, PhaseName.LOAD], TWO: [PhaseName.LOAD]}
    assert leader.kept.empty()
    await background.stop()


@pytest.mark.anyio
async def test_what_is_refused_for_good_is_dropped() -> None:
    leader, background = Leader(BadRequest()), Background()
    recorder = recorder_of(leader, background)
    recorder.record(ONE, PhaseName.FETCH, 1.0, 2.0)
    await until(lambda: leader.asked == 1)
    recorder.record(TWO, PhaseName.FETCH, 1.0, 2.0)
    assert (await next_of(leader)).instance_id == TWO
    await background.stop()


@pytest.mark.anyio
async def test_an_old_report_is_given_up() -> None:
    clock, background = ManualClock(), Background()
    leader = Leader(NotLeader(), NotLeader())
    recorder = recorder_of(leader, background, clock)
    recorder.record(ONE, PhaseName.FETCH, 1.0, 2.0)
    await until(lambda: leader.asked == 1)
    clock.advance(phase_reports.KEEP_FOR_S + 1)
    await until(lambda: leader.asked == 2)
    recorder.record(TWO, PhaseName.FETCH, 1.0, 2.0)
    assert (await next_of(leader)).instance_id == TWO
    await background.stop()


@pytest.mark.anyio
async def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases_module, "MAX_PENDING", 2)
    leader, background = Leader(), Background()
    recorder = recorder_of(leader, background)
    for name in ("a", "b", "c"):
        recorder.record(InstanceId(name), PhaseName.FETCH, 1.0, 2.0)
    assert [(await next_of(leader)).instance_id for _ in range(2)] == ["b", "c"]
    await background.stop()
