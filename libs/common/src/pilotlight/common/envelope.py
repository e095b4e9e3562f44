"""When a message was sent: it stands beside the message, not in it.

A phase of a cold start begins with the message that leads to it, so the receiver has to know when
that message left. Both transports carry the moment in their envelope:

=======================  =========================================================================
the bus                  the header ``Pilotlight-Sent``, on notifications and values of buckets
                         whose sender gives ``sent``; others have none: a header costs about 10 µs
worker and engine child  every frame is a ``Timed`` message: both ends are of one release
=======================  =========================================================================

A process that passes something on gives the moment at which it was sent there, so that the time
in between is no gap. A receiver that asks for ``Timed[X]`` instead of ``X`` gets message and moment
together.
"""

import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from pilotlight.common.clock import Clock, moment_of
from pilotlight.policy.coverage import departed_s
from pilotlight.policy.phase import Moment

SENT_HEADER = "Pilotlight-Sent"
"""``AT_S WALL_OFFSET_S``: a ``Moment`` as two floats."""

T = TypeVar("T")


class Timed(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """A message, and when it was sent; None where its sender does not say."""

    message: T
    sent: Moment | None = None

    def sent_s(self, clock: Clock) -> float:
        """When it was sent, on the receiver's clock; now, if that is missing or not credible."""
        return departed_s(self.sent, moment_of(clock))


def stamped(headers: dict[str, str], sent: Moment | None) -> dict[str, str]:
    """Add the moment to headers, and return them."""
    if sent is not None:
        headers[SENT_HEADER] = f"{sent.at_s!r} {sent.wall_offset_s!r}"
    return headers


def opened(
    data: bytes,
    headers: Mapping[str, str] | None,
    as_type: type[T],
    decode: Callable[[bytes, Any], Any],
) -> T:
    """A message as its receiver asks for it: ``X``, or ``Timed[X]`` with the moment in the headers.

    Args:
        data: the bytes of an ``X``.
        headers: those that came with it.
        as_type: ``X`` or ``Timed[X]``.
        decode: makes an ``X`` of the bytes.

    Raises:
        MessageUndecodable: the bytes are not a valid ``X``.
    """
    bare = _timed_type(as_type)
    if bare is None:
        return decode(data, as_type)
    timed: Any = Timed(decode(data, bare), _sent_of(headers or {}))
    return timed


@functools.cache
def _timed_type(as_type: Any) -> Any:
    """``X`` of a ``Timed[X]``; None for anything else."""
    return typing.get_args(as_type)[0] if typing.get_origin(as_type) is Timed else None


def _sent_of(headers: Mapping[str, str]) -> Moment | None:
    try:
        at_s, wall_offset_s = map(float, headers.get(SENT_HEADER, "").split())
    except ValueError:
        return None
    return Moment(at_s=at_s, wall_offset_s=wall_offset_s)
