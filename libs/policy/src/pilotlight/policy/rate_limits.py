"""Rates of requests and tokens: the generic cell rate algorithm, and how gateways share one limit.

GCRA (ITU-T I.371, annex A) keeps one number, the theoretical arrival time: the moment at which all
that was taken is paid back at the limit's rate. A minute's worth may be taken at once, so what is
taken is let in while that moment is at most a minute away. In no window of ``t`` seconds more is
let in than a minute's worth and ``t`` seconds' worth.

A request's tokens are not known when it comes. What was estimated is taken then, and what was not
used is given back at its end, as far as it is not paid back by time already: each charge has its
place on the line of time that is to be paid, the oldest first::

    now          end of A      end of B = free_at_s
     [ rest of A  )[ B          )

Then the line is as if the request had taken from the start what is left of its charge.
"""

from dataclasses import dataclass

BURST_S = 60.0
"""As much time's worth may be taken at once: a minute's."""
SLACK = 0.02
"""Of a limit: what a gateway lets in beyond its share of what is left, until others hear of it."""


@dataclass(frozen=True, slots=True)
class Meter:
    """What was taken of one limit."""

    free_at_s: float = 0.0
    """When everything that was taken is paid back: GCRA's theoretical arrival time."""
    given_back_s: float = 0.0
    """What was ever given back, by which charges that stand on the line have moved forward."""


@dataclass(frozen=True, slots=True)
class Charge:
    """One request's place on the line."""

    end_s: float
    given_back_s: float
    """As of the meter when it was taken."""


def owed(meter: Meter, per_minute: float, now_s: float) -> float:
    """Units that were taken and are not paid back."""
    return max(0.0, meter.free_at_s - now_s) * per_minute / 60


def left(meter: Meter, per_minute: float, now_s: float) -> float:
    """Units that may be taken now."""
    # What ``owed`` says, without a call: each answer tells what is left of each limit.
    return max(0.0, per_minute - max(0.0, meter.free_at_s - now_s) * per_minute / 60)


def wait_s(meter: Meter, per_minute: float, units: float, now_s: float) -> float:
    """Seconds until so many units may be taken; 0: now.

    More than a minute's worth never may: it waits until nothing is owed.

    Args:
        meter: of the limit.
        per_minute: the limit.
        units: how many.
        now_s: the time.
    """
    taken_s = min(units * 60 / per_minute, BURST_S)
    return max(0.0, max(meter.free_at_s, now_s) + taken_s - BURST_S - now_s)


def take(meter: Meter, per_minute: float, units: float, now_s: float) -> Meter:
    """Take units, whether they may be taken or not.

    Args:
        meter: of the limit.
        per_minute: the limit.
        units: how many.
        now_s: the time.
    """
    free_at_s = max(meter.free_at_s, now_s) + units * 60 / per_minute
    return Meter(free_at_s, meter.given_back_s)


def charge_of(meter: Meter) -> Charge:
    """The place of what was taken last."""
    return Charge(meter.free_at_s, meter.given_back_s)


def returnable(
    meter: Meter, charge: Charge, per_minute: float, units: float, now_s: float
) -> float:
    """As much of a charge's units as time has not paid back.

    What was given back since may have stood behind it on the line. It counts as if it had stood
    before: then less is returned, never too much.

    Args:
        meter: as it is now.
        charge: as it was taken.
        per_minute: the limit.
        units: that were not used.
        now_s: the time.
    """
    moved_s = meter.given_back_s - charge.given_back_s
    return min(units, max(0.0, charge.end_s - moved_s - now_s) * per_minute / 60)


def give_back(meter: Meter, per_minute: float, units: float, now_s: float) -> Meter:
    """Give units back; not more than is owed.

    Args:
        meter: of the limit.
        per_minute: the limit.
        units: how many.
        now_s: the time.
    """
    back_s = min(units * 60 / per_minute, max(0.0, meter.free_at_s - now_s))
    return Meter(meter.free_at_s - back_s, meter.given_back_s + back_s)


def rescaled(meter: Meter, before: float, per_minute: float, now_s: float) -> Meter:
    """The same units owed, of another limit.

    Args:
        meter: of the limit before.
        before: that limit.
        per_minute: the new one.
        now_s: the time.
    """
    return take(Meter(now_s, meter.given_back_s), per_minute, owed(meter, before, now_s), now_s)


def share_of(own: float, everyone: float, gateways: int) -> float:
    """A gateway's share of what is left, until the next exchange.

    Half of it is equal for all, and half follows who let in most of late. All shares together are
    1, where all know the same.

    Args:
        own: units that this gateway let in of late.
        everyone: units that all did.
        gateways: how many there are.
    """
    equal = 1 / gateways
    return equal if everyone <= 0 else (equal + own / everyone) / 2


def unheard_bound(limit: float, left_units: float, share: float) -> float:
    """Units that a gateway may let in before others hear of it.

    The first request after an exchange is let in also beyond it: else a share of a small limit
    would be less than one.

    Args:
        limit: per minute, or at a time.
        left_units: what was left at the exchange.
        share: of ``share_of``.
    """
    return share * left_units + SLACK * limit
