"""Attaching to a start that the library began by itself: what of it is what is wanted now is taken,
the rest is given back.
"""

from contextlib import suppress
from ctypes import c_uint64, c_void_p
from pathlib import Path
from typing import Final

from pilotlight.native.device import Device, DeviceArena
from pilotlight.native.graphs import OpenArchive
from pilotlight.native.library import MISUSED, NativeError, library, out
from pilotlight.native.starting import Begun

STEPS = ("context", "arena", "memory", "archive", "graphs")
"""What is done, in this order."""
WAIT_S = 30.0
"""A driver that takes longer hangs."""


class NativeStart:
    """A start, seen by who attaches. Used by one thread at a time, but for ``archive``."""

    def __init__(self, begun: Begun) -> None:
        """Attaches.

        Raises:
            NativeUnavailable: there is no library.
            NativeError: another one than this process uses has begun it.
        """
        self._library: Final = library()
        self.plan: Final = begun.plan
        self._pointer = 0
        if self._library.path != Path(begun.plan.library):
            raise NativeError(MISUSED, f"{begun.plan.library} is not the library of this release")
        self._pointer = begun.pointer
        self.free_bytes = 0
        """Of the device, when its context was new; 0 until the arena is taken."""
        self.made = 0
        """Graphs that were ready when the archive was taken."""

    def wait(self, step: str) -> None:
        """Returns when a step is over.

        Raises:
            TooSlow: the driver hangs.
            NativeError: the step came to nothing.
        """
        self._library.call("start_wait", self._pointer, STEPS.index(step), WAIT_S)

    def arena(self, device: Device) -> DeviceArena:
        """The arena, with its idle memory.

        Raises:
            TooSlow: the driver hangs.
            NativeError: something else is at its addresses, or it was taken.
        """
        (place, pointer), (free, free_bytes) = out(c_void_p), out(c_uint64)
        self._library.call("start_take_arena", self._pointer, place, free, WAIT_S)
        self.free_bytes = free_bytes()
        return DeviceArena(device, self.plan.num_bytes, self.plan.address, pointer())

    def archive(self, data: bytes) -> OpenArchive | None:
        """The archive, with the graphs that are made; None: it is another one, which is given back
        then, or was taken.
        """
        place, pointer = out(c_void_p)
        (count, num_graphs), (ready, made) = out(c_uint64), out(c_uint64)
        with suppress(NativeError):
            given = data, len(data), place, count, ready
            self._library.call("start_take_archive", self._pointer, *given)
            self.made = made()
            return OpenArchive(pointer(), num_graphs(), self)
        return None

    @property
    def took_ms(self) -> dict[str, float]:
        """When each step was over, in milliseconds since the beginning; those that are not over are
        left out.
        """
        ended = (c_uint64 * len(STEPS))()
        self._library.get("start_times", self._pointer, ended)
        return {name: round(ns / 1e6, 1) for name, ns in zip(STEPS, ended, strict=True) if ns}

    def close(self) -> None:
        """Gives back what was not taken."""
        if self._pointer:
            self._library.get("start_end", self._pointer)
            self._pointer = 0

    def __del__(self) -> None:
        self.close()
