"""A stage's parameters in their places in the arena, filled part by part."""

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from pilotlight.engine.device.copying import Ordered, Source
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.errors import BadCheckpoint, BadRequest
from pilotlight.engine.models.layers import Weights
from pilotlight.engine.results import PlacedPart
from pilotlight.policy.model import Dtype

Following = tuple[int, Mapping[str, Source]]
"""A part's number, and its tensors."""


class Parameters:
    """Owns the tensors of a stage's parts."""

    def __init__(self, memory: StageMemory) -> None:
        self._memory = memory
        self._decoder = memory.decoder
        self.dtype = memory.dtype
        self._placed: dict[int, dict[str, Tensor]] = {}
        self._ordered: dict[int, Ordered] = {}
        """On their way, and not waited for yet."""

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts that belong here, in execution order."""
        return self._memory.parts

    @property
    def complete(self) -> bool:
        """Every part is in place."""
        return len(self._placed) == len(self.parts)

    def __contains__(self, part: int) -> bool:
        return part in self._placed

    def __getitem__(self, part: int) -> Weights:
        return self._placed[part]

    def keep(self, parts: Collection[int]) -> None:
        """Forgets all parts but these: their memory goes."""
        self._call_off(self._ordered.keys() - set(parts))
        self._placed = {part: tensors for part, tensors in self._placed.items() if part in parts}

    def close(self) -> None:
        """Waits until nothing is on its way any more: the memory goes."""
        self._call_off(set(self._ordered))

    @torch.inference_mode()
    def place(
        self,
        part: int,
        tensors: Mapping[str, Source],
        monotonic_s: Callable[[], float],
        following: Following | None = None,
        *,
        background: bool = False,
    ) -> PlacedPart:
        """Copies a part's tensors, and converts them where the stage runs in another dtype.

        A part that is in place stays as it is: a loader that reconnects may offer it again. The
        buffers are not needed afterwards; a device reads pinned ones until the last part is placed.
        Those of the part that follows have to stay until that is placed.

        Args:
            part: its number: 0 is the embedding, layer n is n + 1, the head comes last.
            tensors: all of the part's, named as in the checkpoint.
            monotonic_s: a clock, in seconds.
            following: the part that is placed next, if it has come.
            background: gives way to everything else that the device does, and nothing waits for it:
                where the device copies by itself, what has not arrived is to be placed again.

        Raises:
            BadCheckpoint: the tensors are not exactly those that the architecture has in this part.
            BadRequest: the stage has no such part.
        """
        if part not in self.parts:
            raise BadRequest(
                f"part {part} does not belong to the stage, whose parts are {self.parts}"
            )
        if part in self._placed:
            return PlacedPart(copy_s=0.0, convert_s=0.0, ready=self.complete)
        self._order(part, tensors, background=background)
        if following is not None:
            with suppress(BadCheckpoint):  # Said when it is placed.
                self._order(*following, background=background)
        ordered = self._ordered.get(part)
        if background and ordered is not None and not ordered.arrived:
            return PlacedPart(copy_s=0.0, convert_s=0.0, ready=False, waits=True)
        last = len(self._placed) + 1 == len(self.parts)
        ordered = self._ordered.pop(part, None)
        if ordered is not None:
            copy_s, convert_s = ordered.finish(monotonic_s, last=last), 0.0
        else:
            stored = self._stored(part, tensors)
            copy_s, convert_s = self._memory.copier.fill(
                stored, monotonic_s, last=last, background=background
            )
        self._placed[part] = self._memory.tensors(part) | self._memory.packs(part)
        return PlacedPart(copy_s=copy_s, convert_s=convert_s, ready=self.complete)

    def _order(self, part: int, tensors: Mapping[str, Source], *, background: bool) -> None:
        """Has a part's copies begin, where something copies by itself."""
        if part not in self.parts or part in self._placed or part in self._ordered:
            return
        stored = self._stored(part, tensors)
        if (ordered := self._memory.copier.order(stored, background=background)) is not None:
            self._ordered[part] = ordered

    def _stored(self, part: int, tensors: Mapping[str, Source]) -> list[tuple[Tensor, Source]]:
        """A part's places, and what comes to them.

        Raises:
            BadCheckpoint: as ``place``.
        """
        shapes = self._decoder.stored_shapes(part)
        names = {self._decoder.stored_name(part, name): name for name in shapes}
        expected = {
            stored: (self._decoder.stored_dtype_of(name), shapes[name])
            for stored, name in names.items()
        }
        _check(part, expected, tensors)
        placed = self._memory.tensors(part)
        return [(placed[names[name]], source) for name, source in tensors.items()]

    def _call_off(self, parts: Collection[int]) -> None:
        for part in parts:
            self._ordered.pop(part).wait()


def _check(
    part: int,
    expected: Mapping[str, tuple[Dtype, tuple[int, ...]]],
    tensors: Mapping[str, Source],
) -> None:
    """Raises ``BadCheckpoint`` unless the tensors are the expected ones, before a byte of them is
    read.
    """
    if missing := sorted(expected.keys() - tensors.keys()):
        raise BadCheckpoint(f"part {part} lacks {', '.join(missing)}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise BadCheckpoint(
            f"part {part} has {', '.join(unknown)}, which the architecture does not know"
        )
    for name, (stored_dtype, shape, buffer) in tensors.items():
        dtype, expected_shape = expected[name]
        if stored_dtype is not dtype:
            raise BadCheckpoint(
                f"{name} is stored as {stored_dtype.value}, the checkpoint as {dtype.value}"
            )
        if tuple(shape) != expected_shape:
            raise BadCheckpoint(
                f"{name} has shape {tuple(shape)}, the architecture needs {expected_shape}"
            )
        size_bytes = math.prod(shape) * dtype.size_bytes
        if buffer.nbytes != size_bytes:
            raise BadCheckpoint(f"{name} comes with {buffer.nbytes} bytes instead of {size_bytes}")
