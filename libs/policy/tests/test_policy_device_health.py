"""Readings of a device, and whether models may run on it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.common.device_health import (
    GOOD_READINGS,
    UNTOLD_READINGS,
    XIDS,
    DeviceReading,
    Judgement,
    Recovery,
    XidClass,
    judge,
    xid_of,
)
from pilotlight.policy.cluster import DeviceHealth, HealthState, WorkerFacts
from pilotlight.policy.ids import Epoch
from pilotlight.policy.parallelism import SchemeRules, choose_scheme
from pilotlight.policy.placement import PlacementRules, candidates
from pilotlight.policy.plan import Snapshot
from pilotlight.policy.testing import NOW_S, model, node, worker

GIB = 1 << 30
GOOD = DeviceReading(
    recovery=Recovery.NONE,
    uncorrected_errors=0,
    memory_bytes=80 * GIB,
    used_bytes=40 * GIB,
    own_bytes=39 * GIB,
)
SILENT = DeviceReading(memory_bytes=80 * GIB, used_bytes=40 * GIB)
"""Of a driver that says neither what is to be done nor which process uses what."""
UNTOLD = DeviceReading(untold="Unknown Error")

readings = st.builds(
    DeviceReading,
    late_s=st.none() | st.floats(0.1, 100),
    lost=st.sampled_from(["", "", "", "GPU is lost"]),
    untold=st.sampled_from(["", "", "", "Unknown Error"]),
    xids=st.lists(st.sampled_from([*XIDS, 7, 999]), max_size=3).map(tuple),
    recovery=st.sampled_from(Recovery),
    uncorrected_errors=st.none() | st.integers(0, 3),
    remap_pending=st.booleans(),
    remap_failed=st.sampled_from([False, False, False, True]),
    memory_bytes=st.none() | st.just(80 * GIB),
    used_bytes=st.none() | st.integers(0, 80 * GIB),
    own_bytes=st.none() | st.integers(0, 80 * GIB),
)


def judged(*row: DeviceReading, promised_bytes: int = 0) -> Judgement:
    judgement = Judgement()
    for reading in row:
        judgement = judge(judgement, reading, promised_bytes)
    return judgement


@pytest.mark.parametrize(
    ("reading", "state", "field"),
    [
        (GOOD, HealthState.HEALTHY, ""),
        (SILENT, HealthState.HEALTHY, ""),
        (DeviceReading(late_s=5.0), HealthState.FAILED, "wedged"),
        (DeviceReading(lost="GPU is lost"), HealthState.FAILED, "lost"),
        (DeviceReading(recovery=Recovery.RESET), HealthState.FAILED, "recovery"),
        (DeviceReading(recovery=Recovery.REBOOT), HealthState.FAILED, "recovery"),
        (DeviceReading(recovery=Recovery.IMEX), HealthState.FAILED, "recovery"),
        (DeviceReading(recovery=Recovery.DRAIN), HealthState.DEGRADED, "recovery"),
        (UNTOLD, HealthState.UNWATCHED, "untold"),
        (DeviceReading(remap_failed=True), HealthState.FAILED, "remap"),
        (DeviceReading(remap_pending=True), HealthState.DEGRADED, "remap"),
        (DeviceReading(uncorrected_errors=2), HealthState.DEGRADED, "ecc"),
        *((DeviceReading(xids=(number,)), HealthState.HEALTHY, "") for number in (13, 31, 43, 45)),
        *(
            (DeviceReading(xids=(number,)), HealthState.DEGRADED, "xid")
            for number in (63, 92, 94, 999)
        ),
        *(
            (DeviceReading(xids=(31, number, 45)), HealthState.FAILED, "xid")
            for number in (48, 64, 74, 79, 95, 119, 120)
        ),
        (DeviceReading(untold="Unknown Error", xids=(79,)), HealthState.FAILED, "xid"),
    ],
)
def test_each_reading_by_itself(reading: DeviceReading, state: HealthState, field: str) -> None:
    health = judged(reading).health
    assert health.state is state
    assert health.reason.partition(":")[0] == field


def test_memory_of_others_counts_where_it_was_promised_to_models() -> None:
    crowded = DeviceReading(memory_bytes=80 * GIB, used_bytes=50 * GIB, own_bytes=20 * GIB)
    assert judged(crowded, promised_bytes=40 * GIB).health.state is HealthState.HEALTHY
    health = judged(crowded, promised_bytes=70 * GIB).health
    assert health.state is HealthState.DEGRADED
    assert health.reason.startswith("memory: others use 30 GiB; 20 GiB")
    assert judged(SILENT, promised_bytes=79 * GIB).health.state is HealthState.HEALTHY, (
        "which process uses it is not known"
    )


@pytest.mark.parametrize(
    "bad",
    [
        DeviceReading(late_s=6.0),
        DeviceReading(lost="GPU is lost"),
        DeviceReading(remap_failed=True),
    ],
)
def test_what_readings_showed_ends_with_as_many_good_ones(bad: DeviceReading) -> None:
    for count in range(1, GOOD_READINGS):
        assert judged(bad, *[SILENT] * count).health == judged(bad).health
        assert not judged(bad, *[SILENT] * count, bad, *[SILENT] * (GOOD_READINGS - 1)).usable, (
            "not in a row"
        )
    assert judged(bad, *[SILENT] * GOOD_READINGS).health.state is HealthState.HEALTHY


def test_an_xid_of_the_device_stays_until_the_driver_says_that_nothing_is_to_be_done() -> None:
    fatal = DeviceReading(xids=(79,), recovery=Recovery.REBOOT)
    assert not judged(fatal, *[SILENT] * 100).usable
    assert not judged(fatal, *[GOOD] * (GOOD_READINGS - 1)).usable
    assert judged(fatal, *[GOOD] * GOOD_READINGS).health.state is HealthState.HEALTHY
    assert "79" in judged(DeviceReading(xids=(79,)), DeviceReading(xids=(13, 94))).health.reason


def test_wear_stays_until_the_worker_is_started_anew() -> None:
    worn = judged(DeviceReading(xids=(94,)), *[GOOD] * 50)
    assert worn.health.state is HealthState.DEGRADED
    assert "94" in worn.health.reason


@pytest.mark.parametrize(
    "before",
    [(GOOD,), (DeviceReading(uncorrected_errors=2),), (DeviceReading(lost="GPU is lost"), SILENT)],
)
def test_an_error_of_the_driver_is_a_finding_only_when_it_stays(
    before: tuple[DeviceReading, ...],
) -> None:
    for count in range(1, UNTOLD_READINGS):
        assert judged(*before, *[UNTOLD] * count).health == judged(*before).health
    health = judged(*before, *[UNTOLD] * UNTOLD_READINGS).health
    assert (health.state, health.reason) == (
        HealthState.FAILED,
        "untold: the driver answers with errors alone: Unknown Error",
    )
    assert (
        judged(*before, *[UNTOLD] * (UNTOLD_READINGS - 1), SILENT, UNTOLD).health.reason
        != health.reason
    ), "not in a row"
    assert (
        judged(*before, *[UNTOLD] * UNTOLD_READINGS, *[SILENT] * GOOD_READINGS).health.state
        is HealthState.HEALTHY
    )


def test_an_error_of_the_driver_is_no_good_reading() -> None:
    lost = DeviceReading(lost="GPU is lost")
    assert not judged(lost, SILENT, SILENT, UNTOLD, SILENT).usable
    assert judged(lost, SILENT, SILENT, UNTOLD, SILENT, SILENT, SILENT).usable


@pytest.mark.parametrize(
    "worn", [DeviceReading(xids=(94,)), DeviceReading(lost="GPU is lost", xids=(94,))]
)
def test_an_xid_that_comes_while_the_device_has_failed_is_remembered(worn: DeviceReading) -> None:
    after = judged(DeviceReading(lost="GPU is lost"), worn, *[SILENT] * GOOD_READINGS)
    assert (after.health.state, after.xid) == (HealthState.DEGRADED, 94)
    fatal = judged(DeviceReading(lost="GPU is lost", xids=(79,)), worn, *[SILENT] * 100)
    assert (fatal.usable, fatal.xid) == (False, 79), "the gravest"


@given(row=st.lists(readings, max_size=12), last=readings)
def test_the_last_reading_alone_can_fail_a_device_and_one_alone_cannot_restore_it(
    row: list[DeviceReading], last: DeviceReading
) -> None:
    before, after = judged(*row), judged(*row, last)
    if last.late_s is not None or last.lost or last.remap_failed:
        assert not after.usable
    if last.recovery in (Recovery.RESET, Recovery.REBOOT, Recovery.IMEX):
        assert not after.usable
    if any(xid_of(number).kind is XidClass.DEVICE for number in last.xids):
        assert not after.usable
    if after.usable and not before.usable:
        assert before.good_readings == GOOD_READINGS - 1
        assert not last.untold
    assert bool(after.health.reason) == (after.health.state is not HealthState.HEALTHY)
    # Errors of programs alone never change what is thought of a device.
    calm = DeviceReading(xids=(13, 31, 43, 45), recovery=Recovery.NONE)
    assert judge(Judgement(), calm) == judge(Judgement(), DeviceReading(recovery=Recovery.NONE))


def test_nothing_is_placed_on_a_failed_device_and_on_a_degraded_one_only_if_there_is_no_other() -> (
    None
):
    failed = worker(
        0,
        memory_bytes=10_000,
        health=DeviceHealth(state=HealthState.FAILED, reason="xid: 79, gone"),
    )
    degraded = worker(
        1,
        memory_bytes=10_000,
        health=DeviceHealth(state=HealthState.DEGRADED, reason="xid: 94, contained"),
    )
    healthy = worker(2, memory_bytes=10_000, health=DeviceHealth(state=HealthState.HEALTHY))
    asked = model("m")

    def world(*workers: WorkerFacts) -> Snapshot:
        return Snapshot(
            now_s=NOW_S, epoch=Epoch(1), models=(asked,), nodes=(node(),), workers=workers
        )

    def chosen(*workers: WorkerFacts) -> tuple[str | None, str]:
        choice = choose_scheme(asked, world(*workers), SchemeRules())
        return (choice.scheme.placements[0].worker_id if choice.scheme else None), choice.reason

    assert chosen(failed, degraded, healthy)[0] == "w2"
    assert chosen(failed, degraded)[0] == "w1"
    assert "degraded" in chosen(failed, degraded)[1]
    assert chosen(failed)[0] is None
    (rejection,) = candidates(asked, asked.spec.whole, world(failed), PlacementRules()).rejected
    assert rejection.reason == "its device has failed: xid: 79, gone"
