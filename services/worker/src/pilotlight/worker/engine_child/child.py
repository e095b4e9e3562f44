"""The engine child's process, behind ``worker.engine_main``.

Torch is imported here, and nowhere in the parent.

One Python thread, no asyncio. It never outlives its parent: the kernel kills it when the parent
dies, and it ends by itself when the socket closes. A GPU's child is shown that one device alone
(``CUDA_VISIBLE_DEVICES``), and opens it when it becomes the engine; one that was started ahead
makes the context before, where the machine has one GPU only.
"""

import argparse
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import structlog

from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.envelope import Timed
from pilotlight.common.faults import Faults
from pilotlight.common.logs import write_logs
from pilotlight.common.messages.codec import FrameBuffer, frame
from pilotlight.common.messages.engine import CommandFrame, EngineUp, Promote, SpareReady
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.shown import EngineStart
from pilotlight.worker.engine_child.ahead import (
    WarmUp,
    beside,
    context_ahead,
    import_engine,
    open_context,
    read_compiler,
)
from pilotlight.worker.engine_child.inbox import RECEIVE_BYTES
from pilotlight.worker.engine_child.kernels import compiling_until, note_kernels
from pilotlight.worker.engine_child.loop import ChildLoop
from pilotlight.worker.engine_child.neighbours import Neighbours
from pilotlight.worker.engine_child.slate import Slate
from pilotlight.worker.engine_child.told import last_words

if TYPE_CHECKING:
    from pilotlight.engine.device.arena_protocol import Arena
    from pilotlight.native.started import NativeStart
    from pilotlight.native.starting import Begun
    from pilotlight.worker.engine_child.start_record import StartRecord

log = structlog.get_logger()

LOWEST_PRIORITY = 19
FAULT_STATUS = 70
"""Exit status of a child that could not go on: its last frame says why."""
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str], begun: "Begun | None" = None) -> int:
    """Serve one parent until it ends the child or is gone; the exit status.

    Args:
        arguments: of the command line.
        begun: what the library does of the start by itself.
    """
    options = _options(arguments)
    write_logs("engine", options.log_level)
    _die_with(options.parent)
    connection = socket.socket(fileno=options.fd)
    for descriptor in (options.fd, options.slate_fd):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    clock = SystemClock()
    faults = Faults.parse(os.environ.get("PILOTLIGHT_FAULTS", ""))
    kind = DeviceKind(options.device)
    if options.spare and not _wait_to_be_promoted(connection, kind):
        return 0
    importing = context = None
    if options.ahead:
        cuda = kind is DeviceKind.CUDA
        importing = beside("import", partial(import_engine, cuda=cuda))
        alone = cuda and not options.record_images and begun is None
        context = context_ahead() if alone else None
        if not _is_promoted(connection):
            return 0
    try:
        _serve(connection, options, kind, clock, faults, importing, context, begun)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent is told before this process ends
        _end_at_once(connection, error)
    return 0


def _serve(
    connection: socket.socket,
    options: argparse.Namespace,
    kind: DeviceKind,
    clock: Clock,
    faults: Faults,
    importing: threading.Thread | None,
    context: threading.Thread | None,
    begun: "Begun | None",
) -> None:
    """Open the device, and be the engine until the parent ends it or is gone.

    Raises whatever makes it impossible to go on.
    """
    if options.record_images:
        _record_images()
    if options.note_kernels:
        note_kernels()
    began_s = clock.monotonic_s()
    cuda = kind is DeviceKind.CUDA
    # Images are kept from before there is a context. A spare has all of this behind it but for the
    # context, for which it imports nothing meanwhile.
    ahead = context is None and begun is None
    if cuda and ahead and not options.spare and not options.record_images:
        context = beside("context", open_context)
    # Here and not above: it takes a second or more, and a death meanwhile must not leave an orphan.
    if importing is not None:
        importing.join()
    # What failed in a thread fails here again, and is told.
    import_engine(cuda=cuda)
    from pilotlight.engine.engine import Engine
    from pilotlight.worker.engine_child.device import open_device
    from pilotlight.worker.engine_child.environment import environment_of
    from pilotlight.worker.engine_child.warmup import warm_up

    imported_s = clock.monotonic_s()
    if cuda and not options.spare:
        beside("compiler", read_compiler)
    if context is not None:
        context.join()
    device = open_device(
        kind,
        options.threads,
        options.step_tokens,
        options.device_bytes,
        clock,
        witness=options.witness,
        started=_attached(begun),
    )
    engine = Engine(
        threads=options.threads,
        monotonic_s=clock.monotonic_s,
        limits=device.limits,
        arena=device.arena,
    )
    # On a GPU a first model does for itself what a probe would do before it, and with an artifact
    # it needs less: kernels of a probe are nobody's. So one that comes at once does not wait for
    # that. What is written down begins in a process that is warm.
    later = cuda and not (options.record_images or options.note_kernels)
    if not later:
        warm_up(engine, device.probe)

    def warm_up_meanwhile(interrupted: Callable[[], bool]) -> bool:
        with compiling_until(interrupted):
            return warm_up(engine, device.probe, interrupted)

    # torch's objects stay: a collection that looks at all of them holds up every stream.
    gc.freeze()
    loop = ChildLoop(
        connection,
        engine,
        clock,
        faults,
        device.pins,
        _slate(options.slate_fd),
        Neighbours(clock.monotonic_s, device.peer_memory),
        warm_up=WarmUp(clock, warm_up_meanwhile if later else None),
        record=_record(options.start, device.arena) if later else None,
    )
    up = EngineUp(
        pid=os.getpid(),
        device_name=device.name,
        load_bytes_per_s=device.load_bytes_per_s,
        device_bytes=device.device_bytes,
        granule_bytes=device.arena.granule_bytes if device.arena.whole_granules else 1,
        memory_bytes_per_s=device.memory_bytes_per_s,
        environment=environment_of(device),
        beside_bytes=device.beside_bytes,
        start=EngineStart(
            context_s=clock.monotonic_s() - imported_s,
            # A spare has imported them before.
            libraries_s=0.0 if options.spare else imported_s - began_s,
        ),
    )
    try:
        loop.run(up)
    except (BrokenPipeError, ConnectionResetError):
        log.info("the parent is gone", action="engine_orphaned")
    # Not after an error: see ``_end_at_once``.
    engine.close()


def _record_images() -> None:
    """Keep the image of every kernel from the first one on; where that cannot be, graphs are
    refused when they are to be written down.
    """
    from pilotlight.native.graphs import record_images
    from pilotlight.native.library import NativeError, NativeUnavailable

    try:
        record_images()
    except (NativeError, NativeUnavailable) as error:
        log.warning("no images of kernels", action="images_not_recorded", error=str(error))


def _attached(begun: "Begun | None") -> "NativeStart | None":
    if begun is None:
        return None
    from pilotlight.worker.engine_child.started import attached

    return attached(begun)


def _record(folder: Path | None, arena: "Arena") -> "StartRecord | None":
    if folder is None:
        return None
    from pilotlight.engine.cuda.arena import CudaArena
    from pilotlight.worker.engine_child.start_record import StartRecord
    from pilotlight.worker.engine_child.started import layout_hash

    assert isinstance(arena, CudaArena)
    return StartRecord(folder, arena, partial(layout_hash, arena.device))


def _slate(descriptor: int | None) -> Slate:
    slate = Slate(descriptor)
    if descriptor is not None:
        os.close(descriptor)
    return slate


def _end_at_once(connection: socket.socket, error: Exception) -> NoReturn:
    """Say why, and be gone: with a device whose context is lost an orderly end may wait for
    ever.
    """
    log.error("the engine cannot go on", action="engine_fault", exc_info=error)
    with suppress(OSError):
        last_words(connection, error)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(FAULT_STATUS)


def _wait_to_be_promoted(connection: socket.socket, kind: DeviceKind = DeviceKind.CPU) -> bool:
    """Import at low priority, say so, wait; False when the parent wants no engine of this child.

    Raises what the import does.

    A thread of its own imports: Linux gives each thread its priority, and none that is not
    privileged can raise its own again.
    """
    faults: list[BaseException] = []
    importing = threading.Thread(target=_import_engine, args=(faults, kind), name="import")
    importing.start()
    importing.join()
    if faults:
        raise faults[0]
    try:
        connection.sendall(frame(Timed(SpareReady(device_open=_device_open()))))
    except (BrokenPipeError, ConnectionResetError):
        log.info("the parent is gone", action="engine_orphaned")
        return False
    return _is_promoted(connection)


def _is_promoted(connection: socket.socket) -> bool:
    """Wait for the parent's word; False when it wants no engine of this child."""
    try:
        buffer = FrameBuffer(CommandFrame)
        # Nothing follows ``Promote`` until the child has said that it is up.
        while data := connection.recv(RECEIVE_BYTES):
            if commands := buffer.feed(data):
                promoted = commands[0].message
                if isinstance(promoted, Promote):
                    _show(promoted.cuda_devices)
                    return True
                return False
    except ConnectionResetError:
        log.info("the parent is gone", action="engine_orphaned")
    return False


def _show(cuda_devices: Sequence[str]) -> None:
    """Before there is a context: the driver reads what it may show when it starts."""
    if cuda_devices:
        from pilotlight.common.machine import shown_gpus

        os.environ.update(shown_gpus(cuda_devices))


def _import_engine(faults: list[BaseException], kind: DeviceKind) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        import_engine(cuda=kind is DeviceKind.CUDA)
        if kind is DeviceKind.CUDA:
            read_compiler()
    except BaseException as fault:  # noqa: BLE001 - whatever it is, the thread that waits raises it
        faults.append(fault)


def _device_open() -> bool:
    """Whether torch has a context on a device; importing it must make none."""
    import torch

    return torch.cuda.is_initialized()


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pilotlight.worker.engine_main",
        description="A worker's engine; started by its worker.",
    )
    parser.add_argument("--fd", type=int, required=True, help="socket to the parent")
    parser.add_argument("--parent", type=int, required=True, help="the parent's process id")
    parser.add_argument(
        "--slate-fd",
        type=int,
        default=None,
        help="memory in which the parent looks for what is being done",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--device-bytes",
        type=int,
        default=None,
        help="memory for models; what a GPU has, by default",
    )
    parser.add_argument(
        "--step-tokens",
        type=int,
        default=None,
        help="most tokens of a forward pass; as the device likes, by default",
    )
    parser.add_argument("--spare", action="store_true", help="import, then wait to be promoted")
    parser.add_argument(
        "--ahead", action="store_true", help="import, and be the engine when the parent says so"
    )
    parser.add_argument(
        "--record-images", action="store_true", help="keep images of kernels, to write graphs down"
    )
    parser.add_argument(
        "--note-kernels", action="store_true", help="note compiled kernels, to write them down"
    )
    parser.add_argument(
        "--witness", action="store_true", help="an arena elsewhere, to tell addresses of graphs"
    )
    parser.add_argument(
        "--start", type=Path, default=None, help="a folder for what the next start can begin with"
    )
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
