"""Parameters on their way from the host's memory to the device.

::

    part 3  [ tensor )[ tensor )[ tensor )      part 4 ...
    units   [ 16 MiB )[ 16 MiB )[ ...           two of them on their way at once
    place() returns      ^ when the rest of the part is on its way; what computes afterwards waits for it on the device

The next part is ordered before that is waited for, so that the bus has something to do while the
host starts what computes.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from pilotlight.engine.device.copying import Source, is_as_stored
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.errors import EngineFailed
from pilotlight.native.copier import Copier, CopierCounts, Copy
from pilotlight.native.device import Device
from pilotlight.native.library import NativeError
from pilotlight.policy.model import Dtype

SLAB_BYTES = 1 << 30
"""Of a host pool, pinned at once."""
SMALL_BYTES = 1 << 20
"""A tensor up to this size is converted on the host: for the device, the copies before it would
have to end first."""


class Streamer:
    """Copies parts to a device, from where they lie if that is pinned, else through a pinned ring.

    See ``PartCopier``.
    """

    def __init__(
        self, native: Device, device: torch.device, *, num_movers: int | None = None
    ) -> None:
        """Starts the copying thread.

        Args:
            native: the device by its driver.
            device: the same, by torch.
            num_movers: threads that fill the ring; as the library does, if not given.

        Raises:
            EngineFailed: the driver gives no streams or no pinned memory.
        """
        self._device = device
        try:
            self._copier = (
                Copier(native) if num_movers is None else Copier(native, num_movers=num_movers)
            )
        except NativeError as error:
            raise EngineFailed(f"no copies to {device}: {error}") from error

    @property
    def counts(self) -> CopierCounts:
        """What has been copied so far."""
        return self._copier.counts

    def pin(self, buffer: memoryview) -> None:
        """Makes memory of the host one that the device reads directly; whole pages.

        Takes longer where it was not touched before.

        Raises:
            EngineFailed: it is pinned already, or the driver refuses.
        """
        try:
            self._copier.pin(_address(buffer), buffer.nbytes)
        except NativeError as error:
            raise EngineFailed(f"{buffer.nbytes} bytes cannot be pinned: {error}") from error

    def unpin(self, buffer: memoryview) -> None:
        """Takes back a ``pin``, after the copies that were ordered before.

        Raises:
            EngineFailed: it is not pinned.
        """
        try:
            self._copier.unpin(_address(buffer))
        except NativeError as error:
            raise EngineFailed(f"{buffer.nbytes} bytes cannot be unpinned: {error}") from error

    def order(
        self,
        stored: Sequence[tuple[Tensor, Source]],
        *,
        background: bool = False,
        alone: bool = False,
    ) -> "OrderedCopies | None":
        """See ``PartCopier.order``.

        Raises:
            EngineFailed: the device took no copy.
        """
        if not all(is_as_stored(place, source) for place, source in stored):
            return None
        try:
            ticket = self._copier.submit(_copies(stored), background=background, alone=alone)
        except NativeError as error:
            raise EngineFailed(f"parameters do not come to {self._device}: {error}") from error
        return OrderedCopies(self, ticket)

    def fill(
        self,
        stored: Sequence[tuple[Tensor, Source]],
        monotonic_s: Callable[[], float],
        *,
        last: bool,
        background: bool = False,
    ) -> tuple[float, float]:
        """See ``PartCopier.fill``.

        Afterwards only what is pinned is still read: its pages stay the device's until ``unpin``.

        Raises:
            EngineFailed: the device took no copy.
        """
        start_s, convert_s = monotonic_s(), 0.0
        direct: list[tuple[Tensor, Source]] = []
        small: list[tuple[Tensor, Source]] = []
        large: list[tuple[Tensor, Source]] = []
        for place, source in stored:
            if is_as_stored(place, source):
                direct.append((place, source))
            else:
                (small if place.nbytes <= SMALL_BYTES else large).append((place, source))
        # They are read before this call ends, so nothing has to keep them.
        direct += [(place, _converted(place, source)) for place, source in small]
        convert_s += monotonic_s() - start_s if small else 0.0
        try:
            for place, source in large:
                convert_s += self._convert(place, source, monotonic_s)
            ticket = self._copier.submit(_copies(direct), background=background)
        except NativeError as error:
            raise EngineFailed(f"parameters do not come to {self._device}: {error}") from error
        self.finish(ticket, last=last)
        return monotonic_s() - start_s - convert_s, convert_s

    def finish(self, ticket: int, *, last: bool) -> None:
        """Has what computes from now on wait for an order, and returns when that is on its way; at
        the ``last`` part when it has arrived.

        Raises:
            EngineFailed: a copy failed.
        """
        try:
            self._copier.order_before(ticket, self._stream())
            if last:
                self._copier.wait_done(ticket)
        except NativeError as error:
            raise EngineFailed(f"parameters do not come to {self._device}: {error}") from error

    def is_over(self, ticket: int) -> bool:
        """Whether an order has arrived, or failed."""
        return self._copier.is_over(ticket)

    def wait(self, ticket: int) -> None:
        """Returns when an order has arrived, or has failed: nothing is read or written for it."""
        with suppress(NativeError):
            self._copier.wait_done(ticket)

    def close(self) -> None:
        """Ends the copying thread."""
        self._copier.close()

    def _convert(self, place: Tensor, source: Source, monotonic_s: Callable[[], float]) -> float:
        """Copies a tensor as it is stored, and lets the device convert it; how long that took."""
        dtype, shape, buffer = source
        staged = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=self._device)
        self._settle()  # The memory may have been another tensor's, which the device still reads.
        self._copier.wait_done(
            self._copier.submit([Copy(_address(buffer), staged.data_ptr(), buffer.nbytes)])
        )
        copied_s = monotonic_s()
        place.copy_(staged)
        self._settle()
        return monotonic_s() - copied_s

    def _stream(self) -> int:
        return (
            torch.cuda.current_stream(self._device).cuda_stream
            if self._device.type == "cuda"
            else 0
        )

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class OrderedCopies:
    """See ``Ordered``."""

    def __init__(self, streamer: Streamer, ticket: int) -> None:
        self._streamer = streamer
        self._ticket = ticket

    @property
    def arrived(self) -> bool:
        """See ``Ordered.arrived``."""
        return self._streamer.is_over(self._ticket)

    def finish(self, monotonic_s: Callable[[], float], *, last: bool) -> float:
        """See ``Ordered.finish``.

        Raises:
            EngineFailed: a copy failed.
        """
        start_s = monotonic_s()
        self._streamer.finish(self._ticket, last=last)
        return monotonic_s() - start_s

    def wait(self) -> None:
        """See ``Ordered.wait``."""
        self._streamer.wait(self._ticket)


class PinnedSlabs:
    """Pins a host pool slab by slab, what is wanted most first, while nothing else is to be done: a
    slab takes a while.
    """

    def __init__(self, streamer: Streamer, pool: memoryview, slab_bytes: int = SLAB_BYTES) -> None:
        """Pins nothing yet.

        Args:
            streamer: reads what is pinned where it lies, the rest through its ring.
            pool: whole pages.
            slab_bytes: whole pages.
        """
        self._streamer = streamer
        self._slabs = [
            pool[start : start + slab_bytes] for start in range(0, pool.nbytes, slab_bytes)
        ]
        self._slab_bytes = slab_bytes
        self._pinned = set[int]()

    def pin_next(self, wanted: Iterable[int] = ()) -> bool:
        """Pins one more slab: the first that holds one of the wanted offsets in the pool, or else
        the lowest.

        Returns:
            Whether there are more.

        Raises:
            EngineFailed: the driver refuses.
        """
        order = [*(offset // self._slab_bytes for offset in wanted), *range(len(self._slabs))]
        number = next((number for number in order if number not in self._pinned), None)
        if number is not None:
            self._streamer.pin(self._slabs[number])
            self._pinned.add(number)
        return len(self._pinned) < len(self._slabs)

    def close(self) -> None:
        """Takes all of it back, after the copies that were ordered before."""
        while self._pinned:
            self._streamer.unpin(self._slabs[self._pinned.pop()])
        self._slabs.clear()


def _copies(stored: Sequence[tuple[Tensor, Source]]) -> list[Copy]:
    """In the order of the sources, so that small ones that lie side by side in both memories go as
    one.
    """
    return sorted(
        Copy(_address(buffer), place.data_ptr(), buffer.nbytes) for place, (_, _, buffer) in stored
    )


def _converted(place: Tensor, source: Source) -> Source:
    """A stored tensor as its place takes it, in memory of the host."""
    dtype, shape, buffer = source
    stored = torch.from_dlpack(np.frombuffer(buffer, dtype=np.uint8).copy())
    made = np.empty(place.nbytes, dtype=np.uint8)
    there = torch.from_dlpack(made).view(place.dtype).view(place.shape)
    there.copy_(stored.view(TORCH_DTYPES[dtype]).view(shape))
    return Dtype(str(place.dtype).removeprefix("torch.")), tuple(place.shape), made.data


def _address(buffer: memoryview) -> int:
    return (
        int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])
        if buffer.nbytes
        else 0
    )
