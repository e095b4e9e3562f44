"""What a stage gives to the one that leads and takes its layers over: KV, and its parts, where both
are on devices of one host. The leader copies those from here, and needs its own bus for none.

::

    leader                                                     the stage that has part 7
    "part 7, lying like this, to that mailbox"  -- the ring -->
                                                               its device sums the part up
                                                <-- mailbox --  descriptors of the memory
                                                <-- the ring -- which bytes of it, and the sum

Nothing is kept for who copies. A stage may go, or its memory be another model's, at any moment: the
driver keeps memory for as long as somebody has it mapped, and the sum tells what lies there.
"""

import os
import secrets
from collections import deque
from dataclasses import dataclass

from pilotlight.engine.channel.channel import Frame
from pilotlight.engine.channel.mailbox import NONCE_BYTES, is_here, post
from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.device.lending import Lending, Sum
from pilotlight.engine.errors import EngineError
from pilotlight.engine.pipeline.frames import (
    KvCopied,
    KvWanted,
    LentChunk,
    PartLent,
    PartWanted,
    header_of,
    pack,
)
from pilotlight.engine.resident import ResidentStage
from pilotlight.policy.model import Stage


@dataclass(frozen=True, slots=True)
class _Asked:
    wanted: PartWanted
    total: Sum


class LentParts:
    """Of one stage that follows."""

    def __init__(self, resident: ResidentStage) -> None:
        """Nothing was asked for.

        Args:
            resident: the stage.
        """
        self._resident = resident
        self._asked: deque[_Asked] = deque()

    @property
    def due(self) -> bool:
        """Some answer is to be given soon: ``answers`` is to be looked at."""
        return bool(self._asked)

    def ask(self, wanted: PartWanted, frame: Frame, *, is_last: bool) -> list[Frame]:
        """Takes a question; what is to be sent on at once.

        Args:
            wanted: the question.
            frame: it came in this one, which goes on where the part is another stage's.
            is_last: no stage is behind this one.
        """
        resident = self._resident
        if wanted.part in resident.spec.parts_of(resident.stage):
            refusal = self._take(wanted)
            return [] if refusal is None else [pack(refusal)]
        return [pack(PartLent(part=wanted.part, why="no stage has it")) if is_last else frame]

    def _take(self, wanted: PartWanted) -> PartLent | None:
        """Why a part of the stage's own is not lent; None: ``answers`` gives the answer."""
        memory, lending = self._resident.memory, self._resident.memory.arena.lending
        why = self._objection(wanted, lending)
        if why or lending is None:
            return PartLent(part=wanted.part, why=why or "the device lends nothing")
        try:
            total = lending.sum(memory.extent(wanted.part))
        except EngineError as error:
            return PartLent(part=wanted.part, why=error.message)
        self._asked.append(_Asked(wanted, total))
        return None

    def answers(self) -> list[Frame]:
        """Those that can be given now, in the order of the questions."""
        given: list[Frame] = []
        while self._asked and self._asked[0].total.ready:
            given.append(pack(self._lend(self._asked.popleft())))
        return given

    def _objection(self, wanted: PartWanted, lending: Lending | None) -> str:
        resident = self._resident
        if lending is None or not is_here(wanted.mailbox):
            return "the stage is on another host, or on no device that lends"
        if not resident.vouched or wanted.part not in resident.parameters:
            return "the stage has not all of its parts"
        if wanted.form != resident.memory.form(wanted.part):
            return "the part lies differently in the stage that has it"
        return ""

    def _lend(self, asked: _Asked) -> PartLent:
        part, memory = asked.wanted.part, self._resident.memory
        lending = memory.arena.lending
        assert lending is not None, "the part was summed up"
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            lent = lending.export(memory.extent(part))
        except EngineError as error:
            return PartLent(part=part, why=error.message)
        try:
            post(asked.wanted.mailbox, nonce, *(one.descriptor for one in lent))
        except OSError as error:
            return PartLent(part=part, why=f"the leader cannot be reached: {error}")
        finally:
            for one in lent:
                os.close(one.descriptor)
        chunks = tuple(LentChunk(one.num_bytes, one.wanted.start, one.wanted.stop) for one in lent)
        return PartLent(part=part, nonce=nonce, chunks=chunks, total=asked.total.value)


def copy_of(resident: ResidentStage, wanted: KvWanted) -> Frame:
    """Blocks of one of a stage's layers, as all batches before this left them."""
    layer = Stage(wanted.layer, wanted.layer + 1)
    tensor = resident.kv.copy(layer, wanted.blocks, 0, len(wanted.blocks) * BLOCK_TOKENS)
    copied = KvCopied(layer=wanted.layer, blocks=wanted.blocks, tensor=header_of(tensor))
    return pack(copied, tensor)
