"""What a channel is, and what all of them share.

Both ends send and receive. An end may have ``window`` frames under way that the other has not
taken; a sender without credit waits. A frame is a header (what it says, encoded by the two ends of
the channel) and a payload (the bytes of a tensor, never looked at; on a device where the tensor is
on one)::

    sender   credit 2 ── frame ──> 1 ── frame ──> 0 (waits) ............. 1 ── frame ──>
    receiver                                        takes one ── credit ──^
"""

import select
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pilotlight.engine.errors import PeerLost, PeerSilent

if TYPE_CHECKING:
    from torch import Tensor

WINDOW_FRAMES = 16
"""More than an instance of four stages has micro-batches under way."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. The payload must not change after it was sent."""

    header: bytes
    payload: "memoryview | Tensor"
    """In the host's memory; or on a device, as a row of bytes that nothing there still writes."""

    @property
    def in_host(self) -> memoryview:
        """The payload's bytes; they are copied from a device."""
        if isinstance(self.payload, memoryview):
            return self.payload
        return self.payload.cpu().numpy().data


@dataclass(frozen=True, slots=True)
class PlacedFrame:
    """One that came, whose payload lies in device memory of the other end until it is taken."""

    header: bytes
    offset: int
    num_bytes: int


class Channel(Protocol):
    """One end of a channel. It is used by one thread."""

    @property
    def readable(self) -> bool:
        """``receive`` would not wait: there is a frame, or the other end is gone."""
        ...

    @property
    def lost(self) -> bool:
        """The other end is gone. What it sent before can still be received."""
        ...

    def send(self, frame: Frame, timeout_s: float) -> None:
        """Sends a frame, in order; waits while the other end has taken too few.

        Raises:
            PeerLost: the other end is gone.
            PeerSilent: it took none in time; the frame was not sent.
        """
        ...

    def receive(self, timeout_s: float) -> Frame:
        """The next frame. What was sent before the other end went away is still received.

        Raises:
            PeerLost: the other end is gone, or sent nonsense.
            PeerSilent: none came in time.
        """
        ...

    def interest(self) -> tuple[int, int]:
        """A file descriptor and the events of ``poll`` after which this end should be looked at
        again.
        """
        ...

    def close(self) -> None:
        """Lets go of this end; the other one notices. Closing twice is closing once."""
        ...


def wait_for_any(channels: Iterable[Channel], timeout_s: float) -> None:
    """Returns when one of the channels may have something new, or after the time."""
    poll = select.poll()
    for channel in channels:
        poll.register(*channel.interest())
    poll.poll(timeout_s * 1000)


class PolledChannel(ABC):
    """An end that moves bytes when it is looked at, and waits by ``poll``."""

    def __init__(self, monotonic_s: Callable[[], float], window: int) -> None:
        self._monotonic_s = monotonic_s
        self._credits = window
        """Frames that may be sent before the other end takes one."""
        self._inbox: deque[Frame | PlacedFrame] = deque()
        self._lost: str | None = None
        """Why nothing comes any more."""

    @abstractmethod
    def interest(self) -> tuple[int, int]: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _pump(self) -> None:
        """Moves what can be moved at once: into the inbox, the credits, and out."""

    @abstractmethod
    def _put(self, frame: Frame) -> None:
        """Hands a frame over, for which there is credit."""

    @abstractmethod
    def _grant(self) -> None:
        """Tells the other end that one of its frames was taken."""

    def _fetch(self, came: Frame | PlacedFrame) -> Frame:
        """A frame of the inbox, with its payload."""
        assert isinstance(came, Frame), "payloads are placed where the channel has a device path"
        return came

    @property
    def readable(self) -> bool:
        self._pump()
        return bool(self._inbox) or self._lost is not None

    @property
    def lost(self) -> bool:
        self._pump()
        return self._lost is not None

    def send(self, frame: Frame, timeout_s: float) -> None:
        self._wait_until(
            lambda: self._credits > 0 and self._lost is None, timeout_s, "took no frame"
        )
        self._credits -= 1
        self._put(frame)

    def receive(self, timeout_s: float) -> Frame:
        self._wait_until(lambda: bool(self._inbox), timeout_s, "sent nothing")
        frame = self._fetch(self._inbox.popleft())
        self._grant()
        return frame

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float, failing: str) -> None:
        deadline_s = self._monotonic_s() + timeout_s
        while True:
            self._pump()
            if condition():
                return
            if self._lost is not None:
                raise PeerLost(f"the other end of the channel is lost: {self._lost}")
            left_s = deadline_s - self._monotonic_s()
            if left_s <= 0:
                raise PeerSilent(f"the other end of the channel {failing} for {timeout_s} s")
            poll = select.poll()
            poll.register(*self.interest())
            poll.poll(max(1.0, left_s * 1000))
