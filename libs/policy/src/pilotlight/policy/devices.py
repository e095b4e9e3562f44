"""Several devices of one host as one, and how they are."""

from collections.abc import Iterable, Sequence

from pilotlight.policy.cluster import Device, DeviceHealth, HealthState

_WORST_FIRST = (
    HealthState.FAILED,
    HealthState.DEGRADED,
    HealthState.UNWATCHED,
    HealthState.HEALTHY,
)


def worst_of(healths: Iterable[DeviceHealth]) -> DeviceHealth:
    """How a worker's devices are together: as the worst of them is, since a model needs all.

    The first of the worst is quoted.

    Raises:
        ValueError: there is none.
    """
    return min(healths, key=lambda health: _WORST_FIRST.index(health.state))


def together(devices: Sequence[Device]) -> Device:
    """Devices of one host and one kind, each of which holds an equal share of every layer, as the
    one that policies count with.

    So the smallest bounds what all have, the slowest how soon all have it, and each share takes
    whole granules of its own device.

    Raises:
        ValueError: there is none, or they are of different kinds.
    """
    if len({device.kind for device in devices}) != 1:
        raise ValueError("a worker's devices are at least one, and of one kind")
    if len(devices) == 1:
        return devices[0]
    names = {device.name: None for device in devices}
    return Device(
        kind=devices[0].kind,
        name=f"{len(devices)} x {' + '.join(names)}",
        memory_bytes=len(devices) * min(device.memory_bytes for device in devices),
        load_bytes_per_s=len(devices) * min(device.load_bytes_per_s for device in devices),
        granule_bytes=len(devices) * max(device.granule_bytes for device in devices),
        memory_bytes_per_s=len(devices) * min(device.memory_bytes_per_s for device in devices),
    )
