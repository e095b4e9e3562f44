"""Kernels proved as another process will have them: one that has loaded none of them before.

What a driver takes in the process that recorded an image says little: modules are loaded lazily
there, beside the same kernels of the library that they come from.

``python -m pilotlight.native.proving DRIVER ORDINAL`` reads an archive and prints which of its
kernels it cannot load, and why.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from ctypes import c_void_p

from pilotlight.native.device import LIBCUDA, Device, DeviceArena
from pilotlight.native.graphs import GraphDump, dump_graphs
from pilotlight.native.library import MISUSED, NativeError, out

PROOF_S = 60.0
"""For a process to start, and to load all kernels: a second, where nothing is wrong."""


def dump_proved(
    graphs: Mapping[int, int], arena: DeviceArena, ordinal: int = 0, driver: str = LIBCUDA
) -> GraphDump:
    """Writes captured graphs down, with images that load in a process of their own: pruned, where
    they do so, and whole otherwise.

    Args:
        graphs: see ``dump_graphs``.
        arena: see ``dump_graphs``.
        ordinal: of the arena's device.
        driver: the library that is the driver.

    Raises:
        NativeError: see ``dump_graphs``; or a kernel does not load there from its whole image.
    """
    dump = dump_graphs(graphs, arena)
    refused = refused_kernels(dump.archive, ordinal, driver)
    if refused:
        dump = dump_graphs(graphs, arena, whole=refused)
        refused = refused_kernels(dump.archive, ordinal, driver)
    if refused:
        name, why = next(iter(refused.items()))
        raise NativeError(
            MISUSED,
            f"{len(refused)} kernels do not load in a process of their own, from their whole"
            f" images: {name}: {why}",
        )
    return dump


def refused_kernels(archive: bytes, ordinal: int = 0, driver: str = LIBCUDA) -> dict[str, str]:
    """Which kernels of an archive a new process cannot load, each at once, and why.

    Raises:
        NativeError: that process did not come to an end.
    """
    environment = {
        **os.environ,
        "CUDA_MODULE_LOADING": "EAGER",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pilotlight.native.proving", driver, str(ordinal)],
            input=archive,
            env=environment,
            capture_output=True,
            timeout=PROOF_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        raise NativeError(
            MISUSED, f"no process could prove the kernels: {error}: {said[-400:]!r}"
        ) from error
    lines = (line.partition("\t") for line in done.stdout.decode().splitlines())
    return {name: why for name, _, why in lines}


def _prove(archive: bytes, ordinal: int, driver: str) -> str:
    device = Device(ordinal, driver)
    pointer, text = out(c_void_p)
    device.library.call("archive_prove", device.context, archive, len(archive), pointer)
    try:
        return ctypes.string_at(text()).decode()
    finally:
        device.library.get("free", text())


if __name__ == "__main__":
    sys.stdout.write(_prove(sys.stdin.buffer.read(), int(sys.argv[2]), sys.argv[1]))
