import asyncio
from typing import Any

import pytest

from pilotlight.common import phases as phases_module
from pilotlight.common.bus import Bus
from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import BadRequest, NotLeader, PilotlightError
from pilotlight.common.messages.phases import PHASES_SUBJECT, FirstToken, PhaseReport, PhasesKept
from pilotlight.common.phases import PhaseReporter
from pilotlight.common.service import Background
from pilotlight.common.testing import until
from pilotlight.policy.types import InstanceId, PhaseName, RequestId

ONE, TWO = InstanceId("inst-1"), InstanceId("inst-2")
DEADLINE_S = 5.0


class Leader:
    """The bus of a process, with the leader at its other end."""

    def __init__(self, *failures: PilotlightError) -> None:
        self.kept: asyncio.Queue[PhaseReport] = asyncio.Queue()
        self.asked = 0
        self._failures = list(failures)

    async def request(self, subject: str, message: PhaseReport, reply_type: type[Any], *, deadline_s: float) -> Any:
        assert (subject, reply_type) == (PHASES_SUBJECT, PhasesKept)
        assert deadline_s > 0
        self.asked += 1
        if self._failures:
            raise self._failures.pop(0)
        self.kept.put_nowait(message)
        return PhasesKept()


async def next_of(leader: Leader) -> PhaseReport:
    return await asyncio.wait_for(leader.kept.get(), DEADLINE_S)


def raise_after(clock: ManualClock, seconds: float) -> None:
    clock.advance(seconds)
    raise RuntimeError


def reporter_of(leader: Leader, background: Background, clock: ManualClock | None = None) -> PhaseReporter:
    bus: Any = leader
    typed: Bus = bus
    return PhaseReporter(typed, clock or ManualClock(), background, "worker")


@pytest.mark.anyio
async def test_a_measured_phase_is_reported() -> None:
    leader, clock, background = Leader(), ManualClock(100.0), Background()
    reporter = reporter_of(leader, background, clock)
    with pytest.raises(RuntimeError), reporter.measure(ONE, PhaseName.LOAD, "stage [0, 4)"):
        raise_after(clock, 0.25)
    token = FirstToken(request_id=RequestId("req"), at_s=1.0, wall_offset_s=0.0, arrived_s=0.5)
    reporter.first_token(ONE, token)
    report = await next_of(leader)
    (phase,) = report.phases
    assert (report.instance_id, phase.name, phase.start_s, phase.end_s) == (ONE, PhaseName.LOAD, 100.0, 100.25)
    assert (phase.process, phase.detail) == ("worker", "stage [0, 4)")
    assert phase.wall_offset_s == pytest.approx(clock.wall().timestamp() - clock.monotonic_s())
    assert report.first_token == token
    await background.stop()


@pytest.mark.anyio
async def test_reports_are_repeated_until_a_leader_answers() -> None:
    leader, background = Leader(NotLeader(), NotLeader()), Background()
    reporter = reporter_of(leader, background)
    first, second = (reporter.phase(name, 1.0, 2.0) for name in (PhaseName.FETCH, PhaseName.LOAD))
    reporter.record(ONE, first)
    reporter.record(TWO, second)
    await until(lambda: leader.asked == 1)
    reporter.record(ONE, second)
    found = {report.instance_id: report.phases for report in (await next_of(leader), await next_of(leader))}
    assert found == {ONE: (first, second), TWO: (second,)}
    assert leader.kept.empty()
    await background.stop()


@pytest.mark.anyio
async def test_what_is_refused_for_good_is_dropped() -> None:
    leader, background = Leader(BadRequest()), Background()
    reporter = reporter_of(leader, background)
    reporter.record(ONE, reporter.phase(PhaseName.FETCH, 1.0, 2.0))
    await until(lambda: leader.asked == 1)
    reporter.record(TWO, reporter.phase(PhaseName.FETCH, 1.0, 2.0))
    assert (await next_of(leader)).instance_id == TWO
    await background.stop()


@pytest.mark.anyio
async def test_an_old_report_is_given_up() -> None:
    clock, background = ManualClock(), Background()
    leader = Leader(NotLeader(), NotLeader())
    reporter = reporter_of(leader, background, clock)
    reporter.record(ONE, reporter.phase(PhaseName.FETCH, 1.0, 2.0))
    await until(lambda: leader.asked == 1)
    clock.advance(phases_module.KEEP_FOR_S + 1)
    await until(lambda: leader.asked == 2)
    reporter.record(TWO, reporter.phase(PhaseName.FETCH, 1.0, 2.0))
    assert (await next_of(leader)).instance_id == TWO
    await background.stop()


@pytest.mark.anyio
async def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases_module, "MAX_PENDING", 2)
    leader, background = Leader(), Background()
    reporter = reporter_of(leader, background)
    for name in ("a", "b", "c"):
        reporter.record(InstanceId(name), reporter.phase(PhaseName.FETCH, 1.0, 2.0))
    assert [(await next_of(leader)).instance_id for _ in range(2)] == ["b", "c"]
    await background.stop()
