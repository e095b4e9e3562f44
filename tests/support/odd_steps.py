"""Captured steps of a small model that do something that no model's do, in processes of their own:
recorded, refused, and restored by others.

``python odd_steps.py refused WAY``, ``witness FOLDER``, ``record FOLDER``, or ``restore
FOLDER`` prints one line of JSON; ``restore FOLDER bare`` restores without the permanent buffers'
contents.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pilotlight.native.graphs import record_images

if __name__ == "__main__" and sys.argv[1] != "restore":
    # Before the first kernel is loaded.
    record_images()

import torch
from pointer_steps import ELSEWHERE, WITNESS_SLOT
from restored_steps import OTHER_SLOT, SLOT, Stage
from torch import Tensor

from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.engine.cuda.arena import ADDRESSES, CudaArena
from pilotlight.engine.cuda.graphs import GraphStep, GraphSupplier, Kind
from pilotlight.engine.cuda.indirect import Anywhere
from pilotlight.engine.cuda.recording import GraphRecorder, NotRecorded
from pilotlight.engine.cuda.restored import RestoredGraphs
from pilotlight.engine.cuda.tracing import TracingRecorder
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.errors import RestoreFailed
from pilotlight.native.pointers import NEVER, PointerTable, pointers_of, with_pointers
from pilotlight.policy.materialized import GraphLayout

KIND, ROWS, LENGTHS = "llama", (1, 2, 4), (16,)
KEPT = 3.0
Odd = Callable[[Tensor], Tensor]


def draws(given: Tensor) -> Tensor:
    """What was given, behind numbers of torch's generator."""
    drawn = torch.rand(given.shape, device=given.device)
    return torch.where(drawn < 2, given, 0)


def calls(given: Tensor) -> Tensor:
    """What was given, behind a call of a function on the host: ``free(NULL)``, which does
    nothing.
    """
    free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    refused = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(stream, free, None)
    assert refused == 0, refused
    return given


class Keeps:
    """What was given, if a buffer that the first captured step fills is as that left it."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def __call__(self, given: Tensor) -> Tensor:
        """What a captured step gives: nothing but zeros where the buffer holds anything else."""
        if self.buffer is None:
            self.buffer = torch.full((64,), KEPT, device=given.device)
        return torch.where(self.buffer[:1] == KEPT, given, 0)


class OddSupplier:
    """A ``GraphSupplier`` whose graphs do something more than the steps; all else is another's."""

    def __init__(self, of: GraphSupplier, odd: Odd) -> None:
        self._of, self._odd = of, odd

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def supply(
        self, kind: Kind, step: Callable[[], Tensor], output: Callable[[], Tensor]
    ) -> GraphStep | None:
        """See ``GraphSupplier``."""
        return self._of.supply(kind, lambda: self._odd(step()), output)


class OddRecorder(GraphRecorder):
    """Records such graphs."""

    odd: Odd = staticmethod(draws)

    def supplier(self, memory: StageMemory, scratch: Scratch) -> GraphSupplier:
        """See ``GraphPlan``."""
        made: Any = OddSupplier(super().supplier(memory, scratch), self.odd)
        return made


class KeepingRecorder(OddRecorder, TracingRecorder):
    """Records graphs that need a buffer, and what their addresses point to."""


def refused(way: str) -> dict[str, str]:
    """The name by which graphs of one way are refused."""
    recorder = OddRecorder(ROWS, LENGTHS)
    ways: dict[str, Odd] = {"draws": draws, "calls": calls, "keeps": Keeps()}
    recorder.odd = ways[way]
    # It holds what the recorder looks at.
    stage = Stage(CudaArena(0), KIND, SLOT, recorder)
    try:
        recorder.record()
    except NotRecorded as error:
        return {"field": error.field, "message": str(error), "layers": str(stage.num_layers)}
    return {"field": "", "message": "", "layers": str(stage.num_layers)}


def recorded(folder: Path, *, witness: bool) -> dict[str, Any]:
    """What a process writes down; of two the first is the witness."""
    seen = None if witness else (folder / "witness").read_bytes()
    recorder = KeepingRecorder(seen, ROWS, LENGTHS)
    recorder.odd = Keeps()
    arena = CudaArena(0, addresses=ADDRESSES[ELSEWHERE if witness else 0 :])
    stage = Stage(arena, KIND, WITNESS_SLOT if witness else SLOT, recorder)
    made = recorder.record()
    (folder / ("witness" if witness else "graphs")).write_bytes(made.archive)
    (folder / "layout.json").write_bytes(encode_json(made.layout))
    kept = [one for one in pointers_of(made.archive).allocations if one.contents is not None]
    return {
        "layers": stage.num_layers,
        "prompts_refused": made.layout.prompts_refused,
        "contents": [one.num_bytes for one in kept],
        "given_back": [one.given != NEVER for one in kept],
    }


def restored(folder: Path, *, bare: bool) -> dict[str, Any]:
    """What becomes of all graphs, each proved with the graph pool full of nonsense."""
    layout = decode_json((folder / "layout.json").read_bytes(), GraphLayout)
    archive = (folder / "graphs").read_bytes()
    if bare:
        archive = without_contents(archive)
    anywhere = Anywhere()
    plan = RestoredGraphs(layout, lambda: archive, open_archive=anywhere.open, fit=anywhere.fit)
    stage = Stage(CudaArena(0, addresses=ADDRESSES[2:]), KIND, OTHER_SLOT, plan)
    failed = ""
    try:
        plan.prove()
    except RestoreFailed as error:
        failed = error.message
    news = plan.news
    told = {"ready": news.ready, "proved": news.proved, "refused": news.refused}
    return {**told, "message": news.message, "failed": failed, "layers": stage.num_layers}


def without_contents(archive: bytes) -> bytes:
    """The archive, its permanent buffers full of zeros."""
    table = pointers_of(archive)
    emptied = tuple(
        one if one.contents is None else replace(one, contents=bytes(one.num_bytes))
        for one in table.allocations
    )
    return with_pointers(archive, PointerTable(emptied, table.captures, table.words))


def main(what: str, *arguments: str) -> None:
    """Does what it is told, and ends."""
    torch.zeros(1, device="cuda")
    if what == "refused":
        told: dict[str, Any] = refused(arguments[0])
    elif what == "restore":
        told = restored(Path(arguments[0]), bare="bare" in arguments)
    else:
        told = recorded(Path(arguments[0]), witness=what == "witness")
    print(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # what failed half-way ends with the process


if __name__ == "__main__":
    main(*sys.argv[1:])
