"""One process of ``bench/medusa.py`` that goes MEDUSA's way whole: a line of JSON.

``python medusa_pointers.py WAY SHAPE FOLDER``:

* ``witness`` records a shape's steps with the arena elsewhere, ``pointers`` records them with it as
  the witness: an archive that says of each address what it points to;
* ``medusa`` is the paper's loading phase. Room for KV comes first; while the weights come, the
  first layer is run and captured at 35 sizes, and all kernels of the modules that this loads stand
  for images; the recorded memory is taken again, somewhere else than it was, addresses are written
  anew, and the graphs are built.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pilotlight.engine.cuda.kernel_store import STORE
from pilotlight.native.graphs import record_images

if __name__ == "__main__" and sys.argv[1] in ("witness", "pointers"):
    # Before the first kernel is loaded.
    record_images()
    STORE.noting = True

import structlog
import torch
from materialize_job import READY_S, SLOT, Model
from medusa_job import Stopwatch, first_parts

from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.engine.cuda.arena import ADDRESSES
from pilotlight.engine.cuda.kernels.caching import install
from pilotlight.engine.cuda.tracing import TracingRecorder
from pilotlight.engine.cuda.triggering import TriggeredGraphs
from pilotlight.policy.materialized import GraphLayout
from pilotlight.worker.engine_child.warmup import CUDA_PROBE, warm_up

WITNESS_SLOT, RESTORED_SLOT = SLOT + 1, SLOT + 3
"""Slots differ as the arenas do, so that distances are no powers of two."""
LOOK_S = 0.0005
Told = dict[str, Any]


def witness(shape: str, folder: Path) -> Told:
    """The steps of a process whose arena lies elsewhere."""
    plan = TracingRecorder()
    model = Model(shape, ADDRESSES[1:])
    model.begin(plan, slot=WITNESS_SLOT)
    model.place()
    began_s = time.perf_counter()
    archive = plan.record().archive
    (folder / f"{shape}.witness").write_bytes(archive)
    return {"record_s": time.perf_counter() - began_s, "archive_bytes": len(archive)}


def pointers(shape: str, folder: Path) -> Told:
    """The steps again, and of each of their addresses what it points to."""
    plan = TracingRecorder((folder / f"{shape}.witness").read_bytes())
    model = Model(shape)
    model.begin(plan)
    model.place()
    began_s = time.perf_counter()
    made = plan.record()
    (folder / f"{shape}.pointers.graphs").write_bytes(made.archive)
    (folder / f"{shape}.pointers.json").write_bytes(encode_json(made.layout))
    return {
        "record_s": time.perf_counter() - began_s,
        "archive_bytes": len(made.archive),
        "prompts": len(made.layout.prompts),
        "prompts_refused": made.layout.prompts_refused,
    }


class Offered:
    """Hears how many kernels stand for images."""

    def __init__(self) -> None:
        self.told: Told = {}

    def __call__(
        self, logger: object, method: str, event: MutableMapping[str, Any]
    ) -> Mapping[str, Any]:
        """A processor of structlog's."""
        if event.get("action") == "kernels_offered":
            self.told = {
                "kernels_taken": event["taken"],
                "kernels_from_images": event["from_images"],
            }
        raise structlog.DropEvent


def medusa(shape: str, folder: Path) -> Told:
    """The paper's loading phase: see above. The arena lies elsewhere than when it was recorded."""
    layout = decode_json((folder / f"{shape}.pointers.json").read_bytes(), GraphLayout)
    offered = Offered()
    structlog.configure(processors=[offered])
    model = Model(shape, ADDRESSES[2:])
    warm_up(model.engine, CUDA_PROBE)
    torch.cuda.synchronize()
    plan = TriggeredGraphs(layout, (folder / f"{shape}.pointers.graphs").read_bytes, anywhere=True)
    watch = Stopwatch()
    model.begin(plan, slot=RESTORED_SLOT)
    watch.stage("init")
    rest = first_parts(model, watch)
    began_s = time.perf_counter()
    plan.trigger()
    torch.cuda.current_stream().synchronize()
    triggered_s = time.perf_counter()
    until_s = triggered_s + READY_S
    while plan.news.ready < len(layout.digests):
        if plan.news.refused or time.perf_counter() > until_s:
            raise SystemExit(f"graphs are not restored: {plan.news}")
        time.sleep(LOOK_S)
    restored_s = time.perf_counter()
    rest.join()
    watch.stage("weights_and_graphs")
    told = watch.total()
    told |= {"trigger_s": triggered_s - began_s, "restore_s": restored_s - triggered_s}
    plan.prove()
    took = plan.took.steps
    rebuild_ms = sum(took[f"all_{part}"] for part in ("nodes", "instantiate", "upload"))
    told |= {"rebuild_s": rebuild_ms / 1e3, "images_s": took["all_images"] / 1e3}
    model.ask()
    at_s = model.answer()
    return {**told, **offered.told, "proved": plan.news.proved, "tokens": len(at_s)}


def main() -> None:
    """Runs the one that is asked for."""
    way, shape, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.zeros(1, device="cuda")
    if way != "medusa":
        install()
    ways: dict[str, Callable[[str, Path], Told]] = {
        "witness": witness,
        "pointers": pointers,
        "medusa": medusa,
    }
    print(json.dumps(ways[way](shape, folder)))
    sys.stdout.flush()
    os._exit(0)  # what the arena holds ends with the process


if __name__ == "__main__":
    main()
