"""One engine child: its process, its socket, its end. ``engines.process`` speaks with it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import structlog

from pilotlight.common.envelope import Timed
from pilotlight.common.errors import DeadlineExceeded
from pilotlight.common.machine import STANDARD_ERROR, STANDARD_ERROR_DESCRIPTOR
from pilotlight.common.messages.codec import write_frame
from pilotlight.common.messages.engine import EngineUp, Promote
from pilotlight.common.waiting import within
from pilotlight.policy.cluster import DeviceKind
from pilotlight.worker.engine_child.slate import Slate, new_file

log = structlog.get_logger()

PRIVATE = ("PILOTLIGHT_", "AWS_", "HF_", "HUGGING_FACE_")
"""What a child does not inherit: our settings, and the credentials of object stores and hubs."""
KEPT_KERNELS = "128"
"""Kernels that torch compiles for shapes of matrices on a CPU and keeps, 0.5 MiB each; 1,024 by
default. They outlast the model: nothing empties the caches. One model has some 170 shapes
(``engine.models.layers.padded_rows``); most traffic has fewer."""
REAP_DEADLINE_S = 2.0
END_GRACE_S = 1.0
"""From the close of its socket to the process's end; then it is killed."""
MAX_LOG_BYTES = 8 * 1024 * 1024
"""A log that is longer is begun anew when the next child starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOptions:
    """How to start an engine child."""

    threads: int
    log_path: Path
    """Its standard output and error: never an inherited pipe, which a grandchild would hold open.
    """
    faults: str = ""
    log_level: str = "info"
    device: DeviceKind = DeviceKind.CPU
    cuda_devices: tuple[str, ...] = ()
    """UUIDs or indexes of the GPUs that the child is shown. Empty: those that this process is
    shown."""
    device_bytes: int | None = None
    """Memory for models, where a GPU shall not give what it has."""
    step_tokens: int | None = None
    record_images: bool = False
    """Keep images of kernels, so that graphs can be written down (``LoadStage.record``)."""
    note_kernels: bool = False
    """Note compiled kernels, so that they can be written down (``Precomputed.record_kernels``)."""
    witness: bool = False
    """Its arena lies elsewhere, to tell addresses in graphs from all else (``GraphWays``)."""
    module: str = "pilotlight.worker.engine_child.child"
    """The child's program."""


class Process(Protocol):
    """A child's process. ``asyncio.subprocess.Process`` is one."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Child:
    """A child, and this end of its socket."""

    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    slate: Slate
    """What it does at this moment, in its own words."""


async def spawn(options: ChildOptions, *, spare: bool = False) -> Child:
    """Start a child; ``spare`` has it import what an engine needs, and then wait to be promoted.

    Raises:
        OSError: no process can be started.
    """
    with ExitStack() as on_failure, ExitStack() as always:
        ours, slate_fd, command, how = _prepared(
            options, ("--spare",) if spare else (), on_failure, always
        )
        process = await asyncio.create_subprocess_exec(*command, **how)
        slate = Slate(slate_fd)
        on_failure.pop_all()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    return Child(process, reader, writer, slate)


class ChildAhead:
    """A child that was started before there was a loop to speak with it: it imports, and opens no
    device before it is taken.
    """

    def __init__(self, options: ChildOptions) -> None:
        """Starts it.

        Raises:
            OSError: no process can be started.
        """
        with ExitStack() as on_failure, ExitStack() as always:
            self._ours, slate_fd, command, how = _prepared(
                options, ("--ahead",), on_failure, always
            )
            self._process = subprocess.Popen[bytes](command, **how)
            self._slate = Slate(slate_fd)
            on_failure.pop_all()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def take(self) -> Child:
        """The child, told that it is the engine; once."""
        child = await self._connected()
        # One that is gone already says so as any other that ends at its start.
        write_frame(child.writer, Timed(Promote()))
        return child

    async def end(self) -> None:
        """Nobody takes it."""
        await bury(await self._connected())

    async def _connected(self) -> Child:
        reader, writer = await asyncio.open_unix_connection(sock=self._ours)
        return Child(_Started(self._process), reader, writer, self._slate)


class _Started:
    """A ``Process`` that no loop has started."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it lives."""
        return self._process.poll()

    async def wait(self) -> int:
        """Its exit status, when it has ended."""
        if self._process.poll() is None:
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            descriptor = os.pidfd_open(self._process.pid)
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        return self._process.wait()


def _prepared(
    options: ChildOptions, flags: tuple[str, ...], on_failure: ExitStack, always: ExitStack
) -> tuple[socket.socket, int, list[str], dict[str, Any]]:
    """This end of a child's socket, the slate's descriptor, the command, and how to start it.

    Args:
        options: the child's.
        flags: more arguments.
        on_failure: takes what is to be closed if it does not start.
        always: takes what is to be closed at any rate.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    on_failure.callback(ours.close)
    always.enter_context(theirs)
    slate_fd = new_file()
    always.callback(os.close, slate_fd)
    arguments = {
        "--fd": theirs.fileno(),
        "--slate-fd": slate_fd,
        "--parent": os.getpid(),
        "--threads": options.threads,
        "--log-level": options.log_level,
        "--device": options.device.value,
        **({"--device-bytes": options.device_bytes} if options.device_bytes is not None else {}),
        **({"--step-tokens": options.step_tokens} if options.step_tokens is not None else {}),
    }
    command = [
        sys.executable,
        "-m",
        options.module,
        *(str(word) for pair in arguments.items() for word in pair),
        *flags,
        *(("--record-images",) if options.record_images else ()),
        *(("--note-kernels",) if options.note_kernels else ()),
        *(("--witness",) if options.witness else ()),
    ]
    output = always.enter_context(_open_log(options.log_path))
    how: dict[str, Any] = {
        "pass_fds": (theirs.fileno(), slate_fd),
        "start_new_session": True,
        "stdin": DEVNULL,
        "stdout": output,
        "stderr": output,
        "env": _child_environment(options),
    }
    return ours, slate_fd, command, how


def _open_log(path: Path) -> BinaryIO:
    if path == STANDARD_ERROR:
        # Not by its name: where it is a socket, as under systemd, it cannot be opened.
        return os.fdopen(os.dup(STANDARD_ERROR_DESCRIPTOR), "ab")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        output = os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab"
        )
        if output.seekable() and output.tell() > MAX_LOG_BYTES:
            output.truncate(0)
    except OSError as error:
        # On a disk that is full, or can only be read. An engine without a log serves; no engine
        # does not.
        log.error(
            "the engine has no log", action="engine_log_failed", path=str(path), error=str(error)
        )
        return Path(os.devnull).open("ab")
    return output


def _child_environment(options: ChildOptions) -> dict[str, str]:
    """The parent's, but for what is ``PRIVATE``: the child has no use for credentials."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}
    if options.device is DeviceKind.CUDA and options.cuda_devices:
        # Indexes count as nvidia-smi does, and not the fastest first.
        inherited |= {
            "CUDA_VISIBLE_DEVICES": ",".join(options.cuda_devices),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
    return {
        # oneDNN's cache, and that of torch in front of it.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": KEPT_KERNELS,
        "LRU_CACHE_CAPACITY": KEPT_KERNELS,
        **inherited,
        "PILOTLIGHT_FAULTS": options.faults,
        "OMP_NUM_THREADS": str(options.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def with_process(up: EngineUp, took_s: float) -> EngineUp:
    """What a child says of itself, with what its process took: the rest of ``took_s``, from its
    spawn until it was up.
    """
    if up.start is None:
        return up
    create_s = max(0.0, took_s - up.start.context_s - up.start.libraries_s)
    return msgspec.structs.replace(up, start=replace(up.start, create_s=create_s))


def said_of(up: EngineUp) -> dict[str, Any]:
    """What a log says of an engine that is up."""
    said: dict[str, Any] = {"pid": up.pid, "device": up.device_name}
    if up.start is not None:
        said |= {
            "libraries_s": round(up.start.libraries_s, 3),
            "context_s": round(up.start.context_s, 3),
        }
    return said


async def bury(child: Child) -> int | None:
    """Make sure that it is dead, and leave nothing of it behind; its exit status."""
    child.writer.close()
    child.slate.close()
    with suppress(DeadlineExceeded):
        # It ends by itself, and then its status says why.
        await within(END_GRACE_S, child.process.wait(), "the engine's own end")
    kill_group(child.process)
    try:
        return await within(REAP_DEADLINE_S, child.process.wait(), "reaping the engine")
    except DeadlineExceeded:
        log.error("engine cannot be reaped", action="engine_unreaped", pid=child.process.pid)
        return None


def kill_group(process: Process) -> None:
    """Kill a child and everything that it started."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        # Its own session makes its process id that of its group.
        os.killpg(process.pid, signal.SIGKILL)
