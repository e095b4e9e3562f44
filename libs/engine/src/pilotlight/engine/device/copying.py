"""How a checkpoint's tensors come to their places in an arena."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.policy.model import Dtype

Source = tuple[Dtype, tuple[int, ...], memoryview]
"""A tensor as a checkpoint stores it: row-major, in a buffer that may be read-only and need not be
aligned."""


class Ordered(Protocol):
    """Copies that go on by themselves."""

    @property
    def arrived(self) -> bool:
        """``finish`` would not wait."""
        ...

    def finish(self, monotonic_s: Callable[[], float], *, last: bool) -> float:
        """As the end of ``PartCopier.fill``; how long it waited."""
        ...

    def wait(self) -> None:
        """Returns when no buffer is read and no place is written any more."""
        ...


class PartCopier(Protocol):
    """Fills places with stored tensors."""

    def order(
        self,
        stored: Sequence[tuple[Tensor, Source]],
        *,
        background: bool = False,
        alone: bool = False,
    ) -> Ordered | None:
        """Has copies begin behind those that were ordered before, and waits for none of them.

        The buffers have to stay until they are waited for.

        Args:
            stored: as for ``fill``.
            background: as for ``fill``.
            alone: nothing else that a device does wants the bus meanwhile.

        Returns:
            None where nothing copies by itself, or something is to be converted.
        """
        ...

    def fill(
        self,
        stored: Sequence[tuple[Tensor, Source]],
        monotonic_s: Callable[[], float],
        *,
        last: bool,
        background: bool = False,
    ) -> tuple[float, float]:
        """Copies each source into its place, and converts where the dtypes differ.

        What comes to the device afterwards finds the places filled. Buffers that the device reads
        itself may still be read then, until a call with ``last`` has returned.

        Args:
            stored: places, and what comes to them.
            monotonic_s: a clock, in seconds.
            last: the stage lacks no part after these: returns when no buffer is read any more.
            background: gives way to everything else that a device does.

        Returns:
            How long copying took, and how long converting.
        """
        ...


def is_as_stored(place: Tensor, source: Source) -> bool:
    """Whether a place takes a tensor's bytes as they are; otherwise its values are converted, and
    repeated where the place has more of them.
    """
    dtype, shape, _ = source
    return TORCH_DTYPES[dtype] is place.dtype and tuple(shape) == tuple(place.shape)


class HostCopier:
    """Copies within the host's memory."""

    def order(
        self,
        stored: Sequence[tuple[Tensor, Source]],
        *,
        background: bool = False,
        alone: bool = False,
    ) -> None:
        """See ``PartCopier.order``: the thread that asks is the one that copies."""

    def fill(
        self,
        stored: Sequence[tuple[Tensor, Source]],
        monotonic_s: Callable[[], float],
        *,
        last: bool,
        background: bool = False,
    ) -> tuple[float, float]:
        """See ``PartCopier.fill``; nothing is read afterwards."""
        start_s, convert_s = monotonic_s(), 0.0
        for place, source in stored:
            dtype, shape, buffer = source
            if is_as_stored(place, source):
                _copy(buffer, place)
            else:
                # Two passes, so that the time of either is known; only one tensor is held twice at
                # a time.
                staged = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
                _copy(buffer, staged)
                copied_s = monotonic_s()
                place.copy_(staged)
                convert_s += monotonic_s() - copied_s
        return monotonic_s() - start_s - convert_s, convert_s


def _copy(buffer: memoryview, place: Tensor) -> None:
    """Fills a tensor with a checkpoint's bytes.

    torch copies, because it does so with all of its threads: in fresh memory most of the time goes
    into page faults, and numpy's copy took three times as long. It gets the buffer through DLPack,
    because ``torch.frombuffer`` warns of every read-only one; as bytes, because a place in a file
    may be unaligned.
    """
    place.view(-1).view(torch.uint8).copy_(torch.from_dlpack(np.frombuffer(buffer, dtype=np.uint8)))
