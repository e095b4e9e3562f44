"""The engine child's process: ``python -m pilotlight.worker.child --fd N``. Torch is imported here, and nowhere in the parent.

One Python thread, no asyncio. It never outlives its parent: the kernel kills it when the parent dies, and it ends by itself when the
socket closes.
"""

import argparse
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence

import structlog

from pilotlight.common.clock import SystemClock
from pilotlight.common.faults import Faults
from pilotlight.common.messages.codec import FrameBuffer, frame
from pilotlight.common.messages.engine import EngineUp, Promote, SpareReady, ToEngine
from pilotlight.common.telemetry import configure_logging
from pilotlight.worker.child_loop import RECEIVE_BYTES, ChildLoop

log = structlog.get_logger()

PROBE_BYTES = 32 * 1024 * 1024
"""Bytes that are copied to learn how fast parts can be placed: more than the caches hold."""
LOWEST_PRIORITY = 19
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> int:
    """Serve one parent until it ends the child or is gone; the exit status."""
    options = _options(arguments)
    configure_logging("engine", options.log_level)
    _die_with(options.parent)
    connection = socket.socket(fileno=options.fd)
    os.set_inheritable(options.fd, False)
    clock = SystemClock()
    faults = Faults.parse(os.environ.get("PILOTLIGHT_FAULTS", ""))
    if options.spare and not _wait_to_be_promoted(connection):
        return 0
    # Imported here: it takes a second or more, and a death meanwhile must not leave an orphan.
    from pilotlight.engine.device.arena import ARENA_ADDRESS, CpuArena
    from pilotlight.engine.engine import Engine
    from pilotlight.worker.child_warmup import warm_up

    engine = Engine(threads=options.threads, monotonic_s=clock.monotonic_s, arena=CpuArena(address=ARENA_ADDRESS))
    warm_up(engine)
    loop = ChildLoop(connection, engine, clock, faults)
    up = EngineUp(
        pid=os.getpid(),
        device_name=f"cpu ({options.threads} threads)",
        load_bytes_per_s=_copy_bytes_per_s(clock),
    )
    try:
        loop.run(up)
    except (BrokenPipeError, ConnectionResetError):
        log.info("the parent is gone", action="engine_orphaned")
    finally:
        engine.close()
    return 0


def _wait_to_be_promoted(connection: socket.socket) -> bool:
    """Import at low priority, say so, wait; False when the parent wants no engine of this child. Raises what the import does.

    A thread of its own imports: Linux gives each thread its priority, and none that is not privileged can raise its own again.
    """
    faults: list[BaseException] = []
    importing = threading.Thread(target=_import_engine, args=(faults,), name="import")
    importing.start()
    importing.join()
    if faults:
        raise faults[0]
    try:
        connection.sendall(frame(SpareReady()))
        buffer = FrameBuffer(ToEngine)
        # Nothing follows ``Promote`` until the child has said that it is up.
        while data := connection.recv(RECEIVE_BYTES):
            if commands := buffer.feed(data):
                return isinstance(commands[0], Promote)
    except (BrokenPipeError, ConnectionResetError):
        log.info("the parent is gone", action="engine_orphaned")
    return False


def _import_engine(faults: list[BaseException]) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        importlib.import_module("pilotlight.engine.engine")
        importlib.import_module("pilotlight.worker.child_warmup")
    except BaseException as fault:  # noqa: BLE001 - whatever it is, the thread that waits raises it
        faults.append(fault)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pilotlight.worker.child", description="A worker's engine; started by its worker.")
    parser.add_argument("--fd", type=int, required=True, help="socket to the parent")
    parser.add_argument("--parent", type=int, required=True, help="the parent's process id")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--spare", action="store_true", help="import, then wait to be promoted")
    parser.add_argument("--log-level", default="info")
    return parser.parse_args(arguments)


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies.

    Raises:
        SystemExit: the parent is dead already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def _copy_bytes_per_s(clock: SystemClock) -> float:
    source = bytearray(PROBE_BYTES)
    target = bytearray(PROBE_BYTES)
    start_s = clock.monotonic_s()
    target[:] = source
    return PROBE_BYTES / max(1e-6, clock.monotonic_s() - start_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
