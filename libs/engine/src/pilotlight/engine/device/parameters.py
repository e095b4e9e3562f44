"""A stage's parameters in their places in the arena, filled part by part."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from pilotlight.engine.device.copying import Ordered, Source, is_as_stored
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.device.neighbour import Came, Neighbour
from pilotlight.engine.errors import BadCheckpoint, BadRequest, EngineError
from pilotlight.engine.models.layers import Weights
from pilotlight.engine.results import PlacedPart
from pilotlight.policy.model import Dtype

PEEK_BYTES = 256
"""Of each tensor that came from a neighbour, its last ones, which are compared with the
checkpoint's: a neighbour with another model of the same form would be noticed."""

Following = tuple[int, Mapping[str, Source]]
"""A part's number, and its tensors."""


class Early(Protocol):
    """Parts that have come when a stage has its places; they are placed later."""

    def first(self) -> Mapping[int, Mapping[str, Source]]:
        """The first of them, which may be waited for as long as that gains something; nothing, if
        there is none then.
        """
        ...

    def come(self) -> Mapping[int, Mapping[str, Source]]:
        """The first few, as many as have come."""
        ...


class Parameters:
    """Owns the tensors of a stage's parts."""

    def __init__(self, memory: StageMemory) -> None:
        self._memory = memory
        self._decoder = memory.decoder
        self.dtype = memory.dtype
        self._placed: dict[int, dict[str, Tensor]] = {}
        self._ordered: dict[int, Ordered] = {}
        """On their way, and not waited for yet."""
        self.neighbour: Neighbour | None = None
        """Where parts that come in the background may come from, too."""
        self.meanwhile: Callable[[], None] = _nothing
        """Called where a part is waited for, after its copies and those of the next have begun."""
        self.behind_last: Callable[[], None] = _nothing
        """Called where the last part is, when what this thread asks of the device comes behind all
        copies."""

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
        if self.neighbour is not None:
            self.neighbour.settle()
        self._call_off(self._ordered.keys() - set(parts))
        self._placed = {part: tensors for part, tensors in self._placed.items() if part in parts}

    def close(self) -> None:
        """Waits until nothing is on its way any more: the memory goes."""
        if self.neighbour is not None:
            self.neighbour.settle()
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
        why = ""
        if background and self.neighbour is not None:
            came = self._from_neighbour(self.neighbour, part, tensors, monotonic_s)
            if isinstance(came, PlacedPart):
                return came
            why = came
        self._order(part, tensors, background=background)
        if following is not None:
            behind = self.neighbour if background else None
            if behind is None or behind.look(following[0], monotonic_s) is Came.NOT:
                with suppress(BadCheckpoint):  # Said when it is placed.
                    self._order(*following, background=background)
        ordered = self._ordered.get(part)
        if background and ordered is not None and not ordered.arrived:
            return PlacedPart(copy_s=0.0, convert_s=0.0, ready=False, waits=True)
        if not background:
            self.meanwhile()
        last = len(self._placed) + 1 == len(self.parts)
        ordered = self._ordered.pop(part, None)
        if ordered is not None:
            copy_s, convert_s = 0.0, 0.0
            try:
                if last and not background:
                    copy_s = ordered.finish(monotonic_s, last=False)
                    self.behind_last()
            finally:
                copy_s += ordered.finish(monotonic_s, last=last)
        else:
            stored = self._stored(part, tensors)
            copy_s, convert_s = self._memory.copier.fill(
                stored, monotonic_s, last=last, background=background
            )
        self._placed[part] = self._memory.tensors(part) | self._memory.packs(part)
        return PlacedPart(copy_s=copy_s, convert_s=convert_s, ready=self.complete, why=why)

    def order(self, parts: Mapping[int, Mapping[str, Source]]) -> None:
        """Has copies of parts begin that are placed later, where something copies by itself, while
        no batches run. Their buffers have to stay until then. What is wrong with one is said when
        it is placed.
        """
        for part, tensors in parts.items():
            with suppress(EngineError):
                self._order(part, tensors, background=False, alone=True)

    def _from_neighbour(
        self,
        neighbour: Neighbour,
        part: int,
        tensors: Mapping[str, Source],
        monotonic_s: Callable[[], float],
    ) -> PlacedPart | str:
        """What has become of a part that a neighbour may have; a string where it is to come from
        the host's memory: why, if it was expected.
        """
        if part in self._ordered:
            return neighbour.why(part)
        start_s = monotonic_s()
        came = neighbour.look(part, monotonic_s)
        if came is Came.WAITS:
            return PlacedPart(copy_s=0.0, convert_s=0.0, ready=False, waits=True)
        if came is Came.HERE:
            stored = self._stored(part, tensors)
            if not (objection := self._objection(stored)):
                self._placed[part] = self._memory.tensors(part) | self._memory.packs(part)
                return PlacedPart(
                    copy_s=monotonic_s() - start_s,
                    convert_s=0.0,
                    ready=self.complete,
                    by_device_bytes=sum(place.nbytes for place, _ in stored),
                )
            neighbour.refuse(part, objection)
        return neighbour.why(part)

    def _objection(self, stored: Sequence[tuple[Tensor, Source]]) -> str:
        """Why places do not hold what the checkpoint has for them, as far as that is looked at;
        empty: they do.
        """
        same = [(place, source[2]) for place, source in stored if is_as_stored(place, source)]
        lending = self._memory.arena.lending
        assert lending is not None, "a neighbour has filled them"
        expected = b"".join(bytes(buffer[-PEEK_BYTES:]) for _, buffer in same)
        try:
            found = lending.peek([place for place, _ in same], PEEK_BYTES)
        except EngineError as error:
            return error.message
        return "" if found == expected else "what came is of another model"

    def _order(
        self,
        part: int,
        tensors: Mapping[str, Source],
        *,
        background: bool,
        alone: bool = False,
    ) -> None:
        """Has a part's copies begin, where something copies by itself."""
        if part not in self.parts or part in self._placed or part in self._ordered:
            return
        stored = self._stored(part, tensors)
        copier = self._memory.copier
        if ordered := copier.order(stored, background=background, alone=alone):
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


def _nothing() -> None:
    pass


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
