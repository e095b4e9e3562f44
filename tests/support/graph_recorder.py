"""Records graphs of a small model into a folder that tests read (``recorded_folder.py``): decode
steps of one, two and four requests and one prompt, by three processes.

``python graph_recorder.py gpu FOLDER`` on a machine with a device; ``python graph_recorder.py fake
FOLDER`` over the fake driver, whose graphs are made by hand. What was recorded on a device belongs
to ``libs/engine/tests/data/recorded/NAME``. FOLDER must not be there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pilotlight.native.graphs import record_images

if __name__ == "__main__" and sys.argv[1] in ("witness", "third", "ours"):
    # Before the first kernel is loaded.
    record_images()

import recorded_folder
import torch
from recorders import Shifting, Whole

from pilotlight.engine.cuda.arena import ADDRESSES, CudaArena
from pilotlight.engine.cuda.tracing import TracingRecorder

KIND, ROWS, LENGTHS = "llama", (1, 2, 4), (16,)
"""Of ``random_models``; of decode steps; of prompts."""
PLACES = {"witness": (1, 3), "third": (2, 5), "ours": (0, 2)}
"""The first of ``ADDRESSES`` that each process tries, and its slot; the witness comes first."""
PROCESS_S = 300.0


def recorded_by(process: str, work: Path) -> None:
    """What one process of three does, on a device."""
    # Only here: kernels are compiled by what comes with torch for devices alone.
    from restored_steps import Stage

    torch.zeros(1, device="cuda")
    place, slot = PLACES[process]
    recorder: TracingRecorder
    if process == "ours":
        recorder = Whole((work / "witness").read_bytes(), ROWS, LENGTHS)
    else:
        recorder = (Shifting if process == "third" else TracingRecorder)(None, ROWS, LENGTHS)
    arena = CudaArena(0, addresses=ADDRESSES[place:])
    # It holds what the recorder looks at.
    stage = Stage(arena, KIND, slot, recorder)
    made = recorder.record()
    (work / process).write_bytes(made.archive)
    if isinstance(recorder, Whole):
        (work / "whole").write_bytes(recorder.whole)
    told = {
        "arena": hex(arena.address),
        "layers": stage.num_layers,
        "prompts": [one.rows for one in made.layout.prompts],
        "prompts_refused": made.layout.prompts_refused,
    }
    print(json.dumps(told))


def on_a_device(folder: Path) -> None:
    """Three processes, one after the other, and the folder."""
    facts: dict[str, Any] = {
        "source": f"decode steps and a prompt of {KIND} of tests/support/random_models.py",
        "rows": ROWS,
        "lengths": LENGTHS,
        **machine(),
    }
    told: dict[str, Any] = {}
    with TemporaryDirectory(prefix="recording-") as work:
        for process in PLACES:
            done = subprocess.run(
                [sys.executable, str(Path(__file__).resolve()), process, work],
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                text=True,
                timeout=PROCESS_S,
                check=True,
            )
            told[process] = json.loads(done.stdout.splitlines()[-1])
        archives = {process: (Path(work) / process).read_bytes() for process in PLACES}
        facts["processes"] = told
        recorded_folder.write(folder, archives, (Path(work) / "whole").read_bytes(), facts)


def machine() -> dict[str, str]:
    """Versions of what recorded."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name, _, driver = said.splitlines()[0].partition(", ")
    return {
        "device": name,
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "python": sys.version.split()[0],
    }


def over_the_fake(folder: Path) -> None:
    """The same in this process, whose graphs are made by hand."""
    from fake_cuda import fake_cuda
    from fake_recording import HERE, OURS, THEIRS, Process

    fake_cuda().reset()
    archives: dict[str, bytes] = {}
    whole = b""
    for name, address, slot, stale in (
        ("witness", THEIRS, 1, 0x7FFC_0000_1234),
        ("third", HERE, 1, 0x7FFB_1111_9ABC),
        ("ours", OURS, 0, 0x7FFD_8888_5678),
    ):
        process = Process(address, slot, busy=name == "third", stale=stale)
        archives[name] = process.record(archives["witness"] if name == "ours" else None)
        whole = process.whole
        process.close()
    facts = {"source": "graphs made by hand over a fake driver", "device": "none"}
    recorded_folder.write(folder, archives, whole, facts)


def main(arguments: Sequence[str]) -> None:
    """Records."""
    what, place = arguments[0], Path(arguments[1])
    if what in PLACES:
        recorded_by(what, place)
        sys.stdout.flush()
        os._exit(0)  # what the arena holds ends with the process
    {"gpu": on_a_device, "fake": over_the_fake}[what](place)
    files = sorted(place.iterdir())
    num_bytes = sum(file.stat().st_size for file in files)
    print(json.dumps({"folder": str(place), "files": len(files), "bytes": num_bytes}))


if __name__ == "__main__":
    main(sys.argv[1:])
