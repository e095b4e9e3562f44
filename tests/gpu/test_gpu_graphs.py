"""Graphs that one process captures and another makes again: the same bytes come out, without a
capture and without a warm-up.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

Record = Callable[[str, object], None]
PREAMBLE = """
import hashlib, json, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[1].split(":")
folder = Path(sys.argv[2])
from pilotlight.native import graphs as native_graphs
if sys.argv[3] == "capture":
    native_graphs.record_images()
import torch
from pilotlight.engine.core.extents import Extent
from pilotlight.engine.cuda.arena import CudaArena

torch.zeros(1, device="cuda")
arena = CudaArena(0)
H, F, V, LAYERS, SIZES = 1024, 4096, 32_000, 3, (1, 8, 64)
place = 0

def tensor(*shape, dtype=torch.bfloat16):
    global place
    made = slot.tensor(place, shape, dtype)
    place += -(-made.nbytes // 256) * 256
    return made

slot = arena.open_slot(2)
slot.back(Extent(0, 256 << 20))
layers = [(tensor(F, H), tensor(F), tensor(F, H), tensor(H, F), tensor(H)) for _ in range(LAYERS)]
head, cache = tensor(V, H), tensor(4096, H)
ids, slots, out, best = tensor(64, dtype=torch.int64), tensor(64, dtype=torch.int64), tensor(64, V), tensor(64, dtype=torch.int64)
table = tensor(V, H)
generator = torch.Generator("cuda").manual_seed(1)
for weight in [head, cache, table, *(weight for layer in layers for weight in layer)]:
    weight.normal_(0, 0.05, generator=generator)

def work(n):
    hidden = table[ids[:n]]
    for gate, bias, up, down, norm in layers:
        normed = torch.nn.functional.rms_norm(hidden.float(), (H,)).bfloat16() * norm
        cache.index_copy_(0, slots[:n], normed)
        mixed = torch.softmax((normed @ cache[:512].T).float(), -1).bfloat16() @ cache[:512]
        acted = torch.nn.functional.silu(torch.addmm(bias, mixed, gate.T)) * (normed @ up.T)
        hidden = hidden + acted @ down.T
    out.zero_()
    out[:n].copy_(hidden @ head.T)
    best[:n].copy_(out[:n].argmax(-1))

def seed(turn):
    generator.manual_seed(turn)
    ids.copy_(torch.randint(V, (64,), device="cuda", generator=generator))
    slots.copy_(torch.randperm(4096, device="cuda", generator=generator)[:64])
    cache.normal_(0, 0.05, generator=generator)
    out.fill_(7)
    best.fill_(-1)
    torch.cuda.synchronize()

def digest():
    torch.cuda.synchronize()
    whole = b"".join(t.view(torch.uint8).cpu().numpy().tobytes() for t in (out, best, cache))
    return hashlib.sha256(whole).hexdigest()
"""
CAPTURE = """
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for n in SIZES:
        work(n)
torch.cuda.synchronize()
pool = arena.graph_pool(2)
captured = {}
for n in SIZES:
    captured[n] = torch.cuda.CUDAGraph(keep_graph=True)
    with pool.selected(), torch.cuda.graph(captured[n], pool=pool.id):
        work(n)
handles = {n: graph.raw_cuda_graph() for n, graph in captured.items()}
began = time.perf_counter()
whole = native_graphs.dump_graphs(handles, arena.native_arena, prune=False)
dump_s = time.perf_counter() - began
pruned = native_graphs.dump_graphs(handles, arena.native_arena)
(folder / "whole").write_bytes(whole.archive)
(folder / "pruned").write_bytes(pruned.archive)
expected = {}
for turn in (5, 6):
    for n in SIZES:
        seed(turn)
        captured[n].replay()
        expected[f"{turn} {n}"] = digest()
        seed(turn)
        work(n)
        expected[f"eager {turn} {n}"] = digest()
report = {k: getattr(pruned, k) for k in ("nodes", "kernels", "images", "image_bytes", "addresses_inside", "addresses_outside")}
print(json.dumps({"expected": expected, "pool_bytes": pool.mapped_bytes, "report": report, "whole_image_bytes": whole.image_bytes,
    "seen": native_graphs.recorded_images(), "archive_bytes": len(pruned.archive), "dump_ms": round(1e3 * dump_s, 1)}))
"""
REBUILD = """
from pilotlight.native.graphs import GraphArchive
facts = json.loads((folder / "facts").read_text())
start = arena.slot_bytes - arena.pool_bytes
slot.back(Extent(start, start + facts["pool_bytes"]))
slot.tensor(start, (facts["pool_bytes"],), torch.uint8).fill_(255)
torch.cuda.synchronize()
found, times = {}, {}
for name in ("pruned", "whole"):
    began = time.perf_counter()
    archive = GraphArchive(arena.native, (folder / name).read_bytes(), arena.native_arena)
    times[f"{name}: read"] = time.perf_counter() - began
    for n in archive.tags:
        began = time.perf_counter()
        archive.build(n)
        torch.cuda.synchronize()
        times[f"{name}: build {n}"] = time.perf_counter() - began
    for turn in (5, 6):
        for n in archive.tags:
            seed(turn)
            archive.launch(n)
            found[f"{name} {turn} {n}"] = digest()
    archive.close()
print(json.dumps({"found": found, "ms": {k: round(1e3 * v, 2) for k, v in times.items()}}))
"""


def child(program: str, folder: Path, mode: str) -> dict[str, dict[str, object]]:
    command = [sys.executable, "-c", PREAMBLE + program, ":".join(sys.path), str(folder), mode]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_another_process_makes_the_graphs_again_bit_for_bit(
    device: torch.device, tmp_path: Path, record_property: Record
) -> None:
    facts = child(CAPTURE, tmp_path, "capture")
    (tmp_path / "facts").write_text(json.dumps(facts))
    for name, value in facts.items():
        if name != "expected":
            record_property(name, value)
    assert facts["report"]["addresses_outside"] == 0
    assert facts["report"]["image_bytes"] < facts["whole_image_bytes"]
    expected = facts["expected"]
    captured = {name: value for name, value in expected.items() if not name.startswith("eager")}
    assert {name: expected[f"eager {name}"] for name in captured} == captured, "graphs equal eager"
    rebuilt = child(REBUILD, tmp_path, "rebuild")
    record_property("rebuild_ms", rebuilt["ms"])
    for kind in ("whole", "pruned"):
        assert {name: rebuilt["found"][f"{kind} {name}"] for name in captured} == captured, kind
