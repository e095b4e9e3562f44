"""One process that compiles some kernels: ``kernel_caching.py WAY ARCHIVE`` says a line of JSON.

* ``record``: notes what is used, and writes it down;
* ``restore``: has what was written down, and then needs the same;
* ``only``: as ``restore``, with triton's own cache left aside;
* ``plain``: neither.

``triton`` is the real one where there is one, which compiles for a device that need not be there,
and else what stands in for it (``stand_in_triton``).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from graph_archives import ImageMaker

from pilotlight.engine.cuda.compiled import pack
from pilotlight.engine.cuda.kernel_store import STORE

WIDTHS = (32, 64)


def stand_ins() -> list[tuple[bytes, bool]]:
    """Two kernels and a library."""
    import triton

    image = ImageMaker(["kernel"]).image()
    return [triton.compiled(f"_scale_{width}", image) for width in WIDTHS] + [
        triton.library("launcher")
    ]


def real() -> list[tuple[bytes, bool]]:
    """Two kernels of one function."""
    import real_kernels

    return [real_kernels.compiled(width) for width in WIDTHS]


def main() -> None:
    import triton

    from pilotlight.engine.cuda.kernels.caching import install

    way, archive = sys.argv[1], Path(sys.argv[2])
    if way != "plain":
        install()
    STORE.noting = way == "record"
    if way in ("restore", "only"):
        STORE.restore(archive.read_bytes())
        STORE.only = way == "only"
    started: list[str] = []
    sys.addaudithook(lambda event, given: _note(started, event, given))
    found = stand_ins() if triton.__version__ == "0.0.1" else real()
    if way == "record":
        archive.write_bytes(pack(STORE.noted()))
    told: dict[str, Any] = {
        "images": [image.hex()[:4096] for image, _ in found],
        "fresh": [fresh for _, fresh in found],
        "compiled": STORE.compiled,
        "restored": STORE.restored,
        "entries": len(STORE.noted()) if way == "record" else 0,
        "started": started,
        "cached": sorted(
            {path.name for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")}
        ),
    }
    print(json.dumps(told))


def _note(started: list[str], event: str, given: tuple[Any, ...]) -> None:
    """Compilers that are run; asking one for its version is none."""
    if event == "subprocess.Popen":
        command = [str(word) for word in given[1]]
        if "--version" not in command:
            started.append(Path(command[0]).name)


def path_of(*, stand_in: bool) -> str:
    """Where a process finds modules."""
    here = Path(__file__).parent
    paths = [str(here / "stand_in_triton")] if stand_in else []
    return os.pathsep.join([*paths, str(here), *sys.path])


def run(way: str, archive: Path, cache: Path, *, stand_in: bool) -> dict[str, Any]:
    """What a process of its own says."""
    done = subprocess.run(
        [sys.executable, __file__, way, str(archive)],
        env={
            **os.environ,
            "PYTHONPATH": path_of(stand_in=stand_in),
            "TRITON_CACHE_DIR": str(cache),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
