"""Memory for the bodies of requests: one budget for all that arrive or are being decoded, and each
request's room in it.
"""

import asyncio
import ctypes
from collections.abc import Callable, MutableMapping
from typing import Any

from pilotlight.common.errors import BodiesFull, TooLarge
from pilotlight.policy.bodies import SMALL_BYTES, BodiesHeld, admit_body, part_bytes

RETRY_AFTER_S = 1.0
TRIM_BYTES = 32 * 1024 * 1024
TRIM_AFTER_S = 1.0
_STATE = "body_room"


class FreedMemory:
    """Returns freed memory to the system, some time after much of it was freed.

    glibc keeps blocks that were freed below one that is still in use. Where there is another C
    library, nothing happens here.
    """

    def __init__(self) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, freed_bytes: int) -> None:
        """So much is freed, or will be in a moment."""
        self._bytes += freed_bytes
        if self._bytes >= TRIM_BYTES and self._timer is None and self._trim is not None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._return)

    def _return(self) -> None:
        self._timer, self._bytes = None, 0
        if self._trim is not None:
            self._trim(0)


class _Part:
    """What bodies hold of one part of the budget."""

    __slots__ = ("by_owner", "held_bytes")

    def __init__(self) -> None:
        self.held_bytes = 0
        self.by_owner: dict[str, int] = {}
        """Of it, what those of each key hold; nobody holds nothing."""

    def add(self, body_bytes: int, owner: str) -> None:
        """Hold so much more; negative: less."""
        self.held_bytes += body_bytes
        held_bytes = self.by_owner.get(owner, 0) + body_bytes
        if held_bytes:
            self.by_owner[owner] = held_bytes
        else:
            self.by_owner.pop(owner, None)


class BodyBudget:
    """Counts what bodies hold. Whether more fits is policy (``policy.bodies``)."""

    def __init__(self, total_bytes: int, pause_s: float) -> None:
        self.total_bytes = total_bytes
        self.pause_s = pause_s
        """How long no byte of a body may arrive."""
        self.freed = FreedMemory()
        self._small, self._large = _Part(), _Part()

    @property
    def held_bytes(self) -> int:
        """By all bodies."""
        return self._small.held_bytes + self._large.held_bytes

    def held(self, body_bytes: int, owner: str) -> BodiesHeld:
        """What stands beside a body of this size."""
        part = self._small if body_bytes <= SMALL_BYTES else self._large
        return BodiesHeld(
            part_bytes=part_bytes(self.total_bytes, body_bytes),
            held_bytes=part.held_bytes,
            owner_bytes=part.by_owner.get(owner, 0),
        )

    def add(self, body_bytes: int, owner: str, sign: int) -> None:
        """Count a body, or, with the sign -1, count it no more."""
        part = self._small if body_bytes <= SMALL_BYTES else self._large
        part.add(sign * body_bytes, owner)


class BodyRoom:
    """What one request holds of the budget: nothing until its body is read, nothing any more when
    its answer begins to be made.
    """

    __slots__ = ("_bytes", "_owner", "budget")

    def __init__(self, budget: BodyBudget) -> None:
        self.budget = budget
        self._owner = ""
        self._bytes = 0

    def take(self, owner: str, body_bytes: int) -> None:
        """Hold this many bytes, in all, for the owner of a key.

        What was held before stays held if that fails.

        Raises:
            TooLarge: no budget of this size ever has room for it.
            BodiesFull: other bodies leave no room now.
        """
        if body_bytes <= self._bytes:
            return
        budget, before = self.budget, self._bytes
        room = part_bytes(budget.total_bytes, body_bytes)
        if body_bytes > room:
            raise TooLarge(
                f"the body takes {body_bytes} bytes of memory once it is decoded; {room} are for bodies"
            )
        if before:
            budget.add(before, self._owner, -1)
        fits = admit_body(budget.held(body_bytes, owner), body_bytes)
        self._owner, self._bytes = owner, body_bytes if fits else before
        if self._bytes:
            budget.add(self._bytes, owner, 1)
        if not fits:
            raise BodiesFull(
                f"bodies that arrive hold {budget.held_bytes} of the {budget.total_bytes} bytes for them",
                retry_after_s=RETRY_AFTER_S,
            )

    def release(self) -> None:
        """Hold nothing."""
        if self._bytes:
            self.budget.add(self._bytes, self._owner, -1)
            self.budget.freed.add(self._bytes)
            self._bytes = 0

    def put_into(self, scope: MutableMapping[str, Any]) -> None:
        """Let the handler of this request find it."""
        scope.setdefault("state", {})[_STATE] = self


def room_of(scope: MutableMapping[str, Any]) -> BodyRoom:
    """The room of a request, which ``edge.http`` has put there."""
    room = scope["state"][_STATE]
    assert isinstance(room, BodyRoom)
    return room
