"""Captured steps of small models, recorded by two processes whose arenas lie at different places
and restored by others in all ways: at their addresses or anywhere, with kernels from images, by
symbol or by triggering.

``python pointer_steps.py witness FOLDER``, ``record FOLDER`` or ``restore FOLDER WAY`` prints one
line of JSON.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from pilotlight.native.graphs import record_images

if __name__ == "__main__" and sys.argv[1] != "restore":
    # Before the first kernel is loaded.
    record_images()

import torch
from restored_steps import KINDS, OTHER_SLOT, SLOT, Stage
from structlog.testing import capture_logs

from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.engine.cuda.arena import ADDRESSES, CudaArena
from pilotlight.engine.cuda.graph_device import ArchiveOnDevice
from pilotlight.engine.cuda.indirect import Anywhere
from pilotlight.engine.cuda.restored import RestoredGraphs
from pilotlight.engine.cuda.tracing import TracingRecorder
from pilotlight.engine.cuda.triggering import TriggeredGraphs
from pilotlight.engine.errors import RestoreFailed
from pilotlight.native.handles import SymbolKernels
from pilotlight.native.pointers import nodes_of
from pilotlight.policy.materialized import GraphLayout

WAYS = ("addresses", "indirect", "symbol", "trigger", "indirect-trigger")
ELSEWHERE, WITNESS_SLOT = 1, 3
"""Of ``ADDRESSES``; slots differ, too, so that distances are no powers of two."""
READY_S = 120.0
ROWS_OF_TORCH = "indexSelect"
"""Kernels that take structures by value of which they read a part."""


def witness(folder: Path) -> dict[str, Any]:
    """What the recording process needs to tell addresses from everything else."""
    arena = CudaArena(0, addresses=ADDRESSES[ELSEWHERE:])
    for kind in KINDS:
        recorder = TracingRecorder()
        stage = Stage(arena, kind, WITNESS_SLOT, recorder)
        (folder / f"{kind}.witness").write_bytes(recorder.record().archive)
        stage.compute.close()
        stage.memory.close()
    return {"arena": arena.address}


def record(folder: Path) -> dict[str, Any]:
    """Records each kind's graphs with pointers, and what they give."""
    arena, told = CudaArena(0), {}
    for kind in KINDS:
        recorder = TracingRecorder((folder / f"{kind}.witness").read_bytes())
        stage = Stage(arena, kind, SLOT, recorder)
        began_s = time.perf_counter()
        recorded = recorder.record()
        (folder / f"{kind}.graphs").write_bytes(recorded.archive)
        (folder / f"{kind}.json").write_bytes(encode_json(recorded.layout))
        told[kind] = {
            "record_s": round(time.perf_counter() - began_s, 2),
            "archive_bytes": len(recorded.archive),
            "prompts_refused": recorded.layout.prompts_refused,
            "structures": sorted(
                {one.kernel for one in nodes_of(recorded.archive) if ROWS_OF_TORCH in one.kernel}
            ),
            "captured": dict(stage.digests()),
        }
        stage.compute.close()
        stage.memory.close()
    return {"arena": arena.address, "kinds": told}


def restore(folder: Path, way: str) -> dict[str, Any]:
    """Restores each kind's graphs in one of the ways; what they give, and which kernels come from
    images.
    """
    indirect = way.startswith("indirect")
    arena = CudaArena(0, addresses=ADDRESSES[2:] if indirect else ADDRESSES)
    told: dict[str, Any] = {}
    for kind in KINDS:
        layout = decode_json((folder / f"{kind}.json").read_bytes(), GraphLayout)
        plan = plan_of(way, layout, folder / f"{kind}.graphs")
        with capture_logs() as logs:
            stage = Stage(arena, kind, OTHER_SLOT if indirect else SLOT, plan)
            if isinstance(plan, TriggeredGraphs):
                plan.trigger()
            until_s = time.monotonic() + READY_S
            while plan.news.ready < len(layout.digests) and not plan.news.refused:
                if time.monotonic() > until_s:
                    break
                time.sleep(0.01)
            found: dict[str, str] = {}
            failed = ""
            try:
                whole = 0 if plan.news.refused else layout.pool_bytes
                found.update(stage.digests(whole))
            except RestoreFailed as error:
                failed = error.message
        news = plan.news
        offered = [one for one in logs if one.get("action") == "kernels_offered"]
        told[kind] = {
            "found": found,
            "failed": failed,
            "ready": news.ready,
            "proved": news.proved,
            "refused": news.refused,
            "message": news.message,
            "taken": offered[0]["taken"] if offered else 0,
            "from_images": offered[0]["from_images"] if offered else -1,
            "first_from_image": offered[0]["first_from_image"] if offered else "",
            "took_ms": dict(plan.took.steps),
        }
        if failed:
            break
        stage.compute.close()
        stage.memory.close()
    return {"arena": arena.address, "kinds": told}


def plan_of(way: str, layout: GraphLayout, archive: Path) -> RestoredGraphs:
    """The plan of one way."""
    if way.endswith("trigger"):
        return TriggeredGraphs(layout, archive.read_bytes, anywhere=way.startswith("indirect"))
    if way == "indirect":
        anywhere = Anywhere()
        return RestoredGraphs(
            layout, archive.read_bytes, open_archive=anywhere.open, fit=anywhere.fit
        )
    if way == "symbol":
        opened = partial(ArchiveOnDevice, kernels=SymbolKernels)
        return RestoredGraphs(layout, archive.read_bytes, open_archive=opened)
    return RestoredGraphs(layout, archive.read_bytes)


if __name__ == "__main__":
    torch.zeros(1, device="cuda")
    ways = {"witness": witness, "record": record, "restore": restore}
    print(json.dumps(ways[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])))
    sys.stdout.flush()
    os._exit(0)  # what failed half-way ends with the process
