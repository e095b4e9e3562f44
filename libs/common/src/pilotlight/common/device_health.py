"""From what a device's driver says to whether models may run on it.

::

    readings ──> judge ──> healthy ── degraded ── failed
                   ^                                │ what is lost, late or unusable comes back: by as many good readings
                   └── the findings that stay ──────┘ what an Xid said stays, until the driver says that nothing is to be done

A finding names the reading that it is from. No I/O and no clock: the worker reads
(``worker.device_watch``), this judges.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pilotlight.policy.cluster import DeviceHealth, HealthState

GOOD_READINGS = 3
"""This many in a row end a failure that the readings themselves had shown."""
UNTOLD_READINGS = 6
"""This many in a row in which the driver answered with an error fail a device: one may be a hiccup
of the driver's."""
GIB = 1 << 30
CROWDED_SHARE = 0.02
"""Of the device's memory: as much of what was promised to models may be others' before that is
said."""


class XidClass(StrEnum):
    """Whose trouble an Xid is."""

    APPLICATION = "application"
    """The program's that ran, or its end: the device is well, and a new program can use it."""
    WEAR = "wear"
    """The device's, which goes on: a reset is due when it suits."""
    DEVICE = "device"
    """The device's, which cannot go on without a reset, a reboot or a repair."""


@dataclass(frozen=True, slots=True)
class Xid:
    """What NVIDIA's catalog of Xids says of one."""

    kind: XidClass
    meaning: str


_APP, _WEAR, _DEVICE = XidClass.APPLICATION, XidClass.WEAR, XidClass.DEVICE

XIDS: Mapping[int, Xid] = {
    8: Xid(_APP, "a channel of the program was idle for too long"),
    11: Xid(_APP, "an invalid command of the program"),
    13: Xid(_APP, "an exception in a kernel of the program"),
    31: Xid(_APP, "an invalid address in the program"),
    32: Xid(_APP, "an invalid or corrupted command of the program"),
    43: Xid(_APP, "the program's work was stopped"),
    45: Xid(_APP, "the program's channels were cleaned up"),
    46: Xid(_DEVICE, "the device stopped processing"),
    48: Xid(_DEVICE, "a double-bit ECC error"),
    61: Xid(_DEVICE, "the device's microcontroller stopped"),
    62: Xid(_DEVICE, "the device's microcontroller halted"),
    63: Xid(_WEAR, "a damaged row of memory is replaced at the next reset"),
    64: Xid(_DEVICE, "a damaged row of memory cannot be replaced"),
    68: Xid(_APP, "an exception in the program's video decoding"),
    69: Xid(_APP, "an error of a class of the program's"),
    74: Xid(_DEVICE, "an NVLink error"),
    79: Xid(_DEVICE, "the device has fallen off the bus"),
    92: Xid(_WEAR, "many single-bit ECC errors"),
    94: Xid(_WEAR, "an ECC error that is contained: the program that met it ends, others do not"),
    95: Xid(_DEVICE, "an ECC error that is not contained"),
    109: Xid(_DEVICE, "a switch between programs does not end"),
    110: Xid(_DEVICE, "a security fault"),
    119: Xid(_DEVICE, "the device's system processor does not answer"),
    120: Xid(_DEVICE, "an error of the device's system processor"),
    136: Xid(_DEVICE, "the device's links do not train"),
    137: Xid(_APP, "an invalid access of the program to another device"),
    140: Xid(_DEVICE, "an ECC error that is not recovered from"),
    143: Xid(_DEVICE, "the device does not start"),
    154: Xid(_APP, "what the driver says is to be done has changed"),
}
"""The classes follow the column of immediate actions: what asks for a new program is the program's,
what asks for a reset or more the device's. 154 is an announcement: what it announces is a reading
of its own (``Recovery``)."""
UNKNOWN = Xid(_WEAR, "not one of those that are known here")
_GRAVITY = {_DEVICE: 0, _WEAR: 1, _APP: 2}


class Recovery(StrEnum):
    """What the driver says is to be done with the device."""

    UNKNOWN = "unknown"
    """This driver does not say."""
    NONE = "none"
    RESET = "reset"
    REBOOT = "reboot"
    DRAIN = "drain"
    """It goes on with less; a reset, when nothing runs, gives the rest back."""
    IMEX = "imex"
    """The domain of machines that share their devices' memory is to be recovered, and the device
    with it."""


_ASKS = {
    Recovery.RESET: "a reset",
    Recovery.REBOOT: "a reboot",
    Recovery.IMEX: "a recovery of its IMEX domain",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """What was read of a device at one moment. What a driver or a device does not tell is None."""

    late_s: float | None = None
    """The driver has not answered for so long; then nothing else is known."""
    lost: str = ""
    """The driver's words, if it has no such device any more, or none that works."""
    untold: str = ""
    """The driver's words, if it answered with an error that says nothing of the device. Then only
    the Xids are known."""
    xids: tuple[int, ...] = ()
    """Since the reading before."""
    recovery: Recovery = Recovery.UNKNOWN
    uncorrected_errors: int | None = None
    """ECC, since the driver was loaded."""
    remap_pending: bool = False
    """A damaged row of memory is replaced at the next reset."""
    remap_failed: bool = False
    """One cannot be."""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    own_bytes: int | None = None
    """Of these, what the worker's own processes use."""

    @property
    def others_bytes(self) -> int | None:
        """Memory that other processes use, and the driver itself."""
        if self.used_bytes is None or self.own_bytes is None:
            return None
        return max(0, self.used_bytes - self.own_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How a device is, and what has to be remembered to say so the next time."""

    health: DeviceHealth = field(default_factory=DeviceHealth)
    xid: int | None = None
    """The gravest that stays."""
    good_readings: int = 0
    """In a row, since it failed."""
    untold_readings: int = 0
    """In a row, up to now."""

    @property
    def usable(self) -> bool:
        """An engine may run on it."""
        return self.health.state is not HealthState.FAILED


def judge(before: Judgement, reading: DeviceReading, promised_bytes: int = 0) -> Judgement:
    """How a device is after a reading.

    1. The driver does not answer: failed, ``wedged``.
    2. The driver has lost it: failed, ``lost``.
    3. The driver wants a reset, a reboot, or its domain recovered: failed, ``recovery``.
    4. A row of memory cannot be replaced: failed, ``remap``.
    5. The driver answered with errors in ``UNTOLD_READINGS`` in a row: failed, ``untold``.
    6. An Xid of the device came: failed, ``xid``.
    7. The driver answered with an error: as before; this is no good reading.
    8. It had failed, and not enough good readings came since: failed still, as before. After an Xid
       of the device only those are good that say that nothing is to be done; a driver that does not
       say so leaves it failed.
    9. The driver wants it drained, a row is to be replaced, ECC errors were not corrected, an Xid
       of wear came, now or earlier, or others use memory that was promised to models: degraded, by
       the first of these.
    10. Healthy.

    An Xid is remembered whatever else the reading says, and while the device has failed, too.

    Args:
        before: the judgement on the reading before; ``Judgement()`` at first.
        reading: what was read.
        promised_bytes: device memory that the worker gives to models.
    """
    came = _gravest(reading.xids)
    xid = _gravest(one for one in (came, before.xid) if one is not None)
    untold_readings = before.untold_readings + 1 if reading.untold else 0
    finding = _failure(reading, untold_readings)  # 1 - 5
    if not finding and came is not None and xid_of(came).kind is XidClass.DEVICE:  # 6
        finding = _of_xid(came)
    if finding:
        health = DeviceHealth(state=HealthState.FAILED, reason=finding)
        return Judgement(health=health, xid=xid, untold_readings=untold_readings)
    if reading.untold:  # 7
        known = before.health.state is not HealthState.UNWATCHED
        health = before.health if known else DeviceHealth(reason=f"untold: {reading.untold}")
        return Judgement(health=health, xid=xid, untold_readings=untold_readings)
    if not before.usable:  # 8
        by_xid = before.xid is not None and xid_of(before.xid).kind is XidClass.DEVICE
        good_readings = (
            0 if by_xid and reading.recovery is not Recovery.NONE else before.good_readings + 1
        )
        if good_readings < GOOD_READINGS:
            return replace(before, good_readings=good_readings, xid=xid, untold_readings=0)
        xid = came if by_xid else xid
    finding = _wear(reading, xid, promised_bytes)  # 9
    state = HealthState.DEGRADED if finding else HealthState.HEALTHY  # 10
    return Judgement(health=DeviceHealth(state=state, reason=finding), xid=xid)


def xid_of(number: int) -> Xid:
    """What is known of an Xid."""
    return XIDS.get(number, UNKNOWN)


def _gravest(numbers: Iterable[int]) -> int | None:
    """The first of the device's own, or else of wear; None where all are programs'."""
    found = sorted(numbers, key=lambda number: _GRAVITY[xid_of(number).kind])
    return found[0] if found and xid_of(found[0]).kind is not XidClass.APPLICATION else None


def _of_xid(number: int) -> str:
    return f"xid: {number}, {xid_of(number).meaning}"


def _failure(reading: DeviceReading, untold_readings: int) -> str:
    if reading.late_s is not None:
        return "wedged: the driver does not answer"
    if reading.lost:
        return f"lost: {reading.lost}"
    if asked := _ASKS.get(reading.recovery):
        return f"recovery: the driver asks for {asked}"
    if reading.remap_failed:
        return "remap: a damaged row of memory cannot be replaced"
    if untold_readings >= UNTOLD_READINGS:
        return f"untold: the driver answers with errors alone: {reading.untold}"
    return ""


def _wear(reading: DeviceReading, xid: int | None, promised_bytes: int) -> str:
    if reading.recovery is Recovery.DRAIN:
        return "recovery: the driver asks for a reset when nothing runs"
    if reading.remap_pending:
        return "remap: a damaged row of memory is replaced at the next reset"
    if reading.uncorrected_errors:
        return f"ecc: {reading.uncorrected_errors} errors that were not corrected since the driver was loaded"
    if xid is not None:
        return _of_xid(xid)
    others_bytes = reading.others_bytes
    if others_bytes is not None and reading.memory_bytes is not None:
        short_bytes = promised_bytes + others_bytes - reading.memory_bytes
        if short_bytes > CROWDED_SHARE * reading.memory_bytes:
            return f"memory: others use {others_bytes / GIB:.0f} GiB; {short_bytes / GIB:.0f} GiB of what is for models are not there"
    return ""
