"""Two processes that run the same model the same way have everything that its graphs name at the
same addresses.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

Record = Callable[[str, object], None]
CHILD = """
import json, os, sys
sys.path[:0] = sys.argv[1].split(":")
from pilotlight.native import graphs as native_graphs
if sys.argv[2] == "written":
    native_graphs.record_images()
import torch
from test_gpu_runner import NUM_BLOCKS, one_by_one, placed, spec_of, together
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.capture import CaptureOnSecondUse
from pilotlight.engine.cuda.graphs import GraphSet
from pilotlight.engine.cuda.runner import CudaRangeRunner
from pilotlight.policy.model import Dtype

kept = [torch.empty(int(size), device="cuda") for size in json.loads(sys.argv[3])]  # what else there may be in a process
arena = CudaArena(0)
told, resident = {"canonical": arena.canonical}, []
for kind, slot in (("llama", 0), ("gemma3", 1)):
    memory, parameters, kv = placed(arena, spec_of(kind, Dtype.BFLOAT16), 1, NUM_BLOCKS)
    scratch = memory.scratch()
    supplier = CaptureOnSecondUse(arena.device, scratch, keep=sys.argv[2] == "written")
    graphs = GraphSet(arena.device, scratch, supplier)
    runner = CudaRangeRunner(memory, parameters, kv, scratch.eager, graphs=graphs)
    digests = []
    for batch, inputs in [*together(), *one_by_one()] * 2:
        digests.append(float(runner.run(batch, inputs).double().sum()))
    torch.cuda.synchronize()
    found = {
        "kinds": [str(one) for one in graphs.graphs],
        "places": dict(runner.steps_of().places),
        "logits": graphs.logits(0, 0, torch.bfloat16).data_ptr(),
        "pool": graphs.sequence,
        "workspace": scratch.eager.sequence,
        "sums": digests,
        "physical_bytes": arena.physical_bytes,
    }
    inside = range(arena.address + slot * arena.slot_bytes, arena.address + (slot + 1) * arena.slot_bytes)
    found["inside"] = all(place in inside for place in [*found["places"].values(), found["logits"]])
    if sys.argv[2] == "written":
        handles = {number: graph.raw_cuda_graph() for number, graph in enumerate(graphs.graphs.values())}
        dump = native_graphs.dump_graphs(handles, arena.native_arena)
        names = ("nodes", "kernels", "images", "image_bytes", "addresses_inside", "addresses_outside")
        found["dump"] = {name: getattr(dump, name) for name in names}
    told[kind] = found
    resident.append((runner, graphs, memory))
print(json.dumps(told))
sys.stdout.flush()
os._exit(0)  # graphs, pools and the arena end with the process
"""


def child(mode: str, *, other_bytes: tuple[int, ...] = ()) -> dict[str, Any]:
    command = [
        sys.executable,
        "-c",
        CHILD,
        ":".join([__file__.rpartition("/")[0], *sys.path]),
        mode,
        json.dumps(other_bytes),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@cache
def first() -> dict[str, Any]:
    return child("run")


def test_graph_pool_workspace_and_inputs_lie_at_the_same_addresses(
    device: torch.device, record_property: Record
) -> None:
    """In the second process torch has memory of other sizes before, which moves what its own
    allocator gives.
    """
    second = child("run", other_bytes=(3 << 20, 1000, 50 << 20))
    assert first()["canonical"] is True
    for kind in ("llama", "gemma3"):
        found = first()[kind]
        assert found["inside"]
        assert len(found["kinds"]) > 6
        assert found["pool"][0] > 0
        record_property(
            kind, {name: found[name] for name in ("pool", "workspace", "physical_bytes")}
        )
    assert second == first()


def test_graphs_name_nothing_outside_the_arena(
    device: torch.device, record_property: Record
) -> None:
    """Whatever looks like an address in what their kernels are given lies in the arena: nothing has
    to be found again elsewhere.
    """
    written = child("written")
    for kind in ("llama", "gemma3"):
        record_property(kind, written[kind]["dump"])
        assert written[kind]["dump"]["addresses_inside"] > 0
        assert written[kind]["dump"]["addresses_outside"] == 0
