"""Several devices of one host as the one that policies count with."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.cluster import (
    Device,
    DeviceHealth,
    DeviceKind,
    HealthState,
)
from pilotlight.policy.cost import stage_room, transfer_s
from pilotlight.policy.devices import together, worst_of
from pilotlight.policy.testing import model

H200 = Device(
    kind=DeviceKind.CUDA, name="H200", memory_bytes=100, load_bytes_per_s=50.0, granule_bytes=2
)


def test_one_device_counts_as_what_it_is() -> None:
    assert together([H200]) is H200


def test_the_least_of_each_bounds_what_all_do_together() -> None:
    other = replace(H200, memory_bytes=80, load_bytes_per_s=60.0, granule_bytes=4)
    expected = Device(
        kind=DeviceKind.CUDA,
        name="2 x H200",
        memory_bytes=160,
        load_bytes_per_s=100.0,
        granule_bytes=8,
    )
    assert together([H200, other]) == expected
    assert together([H200, replace(other, name="H100")]).name == "2 x H200 + H100"


@pytest.mark.parametrize("devices", [[], [H200, replace(H200, kind=DeviceKind.CPU)]])
def test_devices_of_two_kinds_are_no_worker(devices: list[Device]) -> None:
    with pytest.raises(ValueError, match="of one kind"):
        together(devices)


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 20), st.floats(1.0, 1e6), st.sampled_from([1, 2, 4096])),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 1 << 16),
)
def test_what_fits_all_together_fits_each_with_its_share(
    sizes: list[tuple[int, float, int]], part_bytes: int
) -> None:
    """Room for whole granules of every part on each device, and no share is there later than is
    said.
    """
    devices = [
        replace(H200, memory_bytes=memory, load_bytes_per_s=speed, granule_bytes=granule)
        for memory, speed, granule in sizes
    ]
    all_of_them, count = together(devices), len(devices)
    wanted = model(part_bytes=part_bytes * count)
    room = stage_room(wanted, wanted.spec.whole, all_of_them.granule_bytes).least_bytes
    for device in devices:
        share = [
            -(-size // count // device.granule_bytes) * device.granule_bytes
            for size in wanted.spec.part_bytes
        ]
        if room <= all_of_them.memory_bytes:
            assert sum(share) <= device.memory_bytes
        told_s = transfer_s(wanted.spec.total_bytes, all_of_them.load_bytes_per_s)
        assert transfer_s(wanted.spec.total_bytes / count, device.load_bytes_per_s) <= told_s * (
            1 + 1e-9
        )


def test_devices_are_together_as_well_as_the_worst_of_them() -> None:
    healthy, unwatched = DeviceHealth(state=HealthState.HEALTHY), DeviceHealth(reason="no driver")
    degraded, failed = (
        DeviceHealth(state=state, reason=state.value)
        for state in (HealthState.DEGRADED, HealthState.FAILED)
    )
    ladder = [healthy, unwatched, degraded, failed]
    assert [worst_of(ladder[: stop + 1]) for stop in range(4)] == ladder
    assert worst_of([replace(failed, reason="first"), failed]).reason == "first"
