"""How an engine child's process is started. Imports nothing that takes time: a worker starts its
engine before all else, and a cold start waits for that process longer than for any other.
"""

import mmap
import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, BinaryIO

from pilotlight.common.machine import STANDARD_ERROR, STANDARD_ERROR_DESCRIPTOR, shown_gpus
from pilotlight.policy.cluster import DeviceKind

PRIVATE = ("PILOTLIGHT_", "AWS_", "HF_", "HUGGING_FACE_")
"""What a child does not inherit: our settings, and the credentials of object stores and hubs."""
KEPT_KERNELS = "128"
"""Kernels that torch compiles for shapes of matrices on a CPU and keeps, 0.5 MiB each; 1,024 by
default. They outlast the model: nothing empties the caches. One model has some 170 shapes
(``engine.models.layers.padded_rows``); most traffic has fewer."""
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
    start: Path | None = None
    """A folder for what a GPU's next start can begin with, before Python does (``engine_main``)."""
    module: str = "pilotlight.worker.engine_main"
    """The child's program."""


def start_folder(state_dir: Path | None, worker_id: str) -> Path | None:
    """Where a worker's engine finds what its start can begin with; None: nothing is kept."""
    return None if state_dir is None else state_dir / "starts" / worker_id


def prepared(
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
    slate_fd = new_slate()
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
    builds = options.record_images or options.note_kernels or options.witness
    if options.start is not None and options.device is DeviceKind.CUDA and not builds:
        command += ["--start", str(options.start)]
    output = always.enter_context(open_log(options.log_path))
    how: dict[str, Any] = {
        "pass_fds": (theirs.fileno(), slate_fd),
        "start_new_session": True,
        "stdin": DEVNULL,
        "stdout": output,
        "stderr": output,
        "env": _child_environment(options),
    }
    return ours, slate_fd, command, how


def open_log(path: Path) -> BinaryIO:
    """A child's log, for its standard output; what takes everything, where there can be none."""
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
        import structlog

        structlog.get_logger().error(
            "the engine has no log", action="engine_log_failed", path=str(path), error=str(error)
        )
        return Path(os.devnull).open("ab")
    return output


def _child_environment(options: ChildOptions) -> dict[str, str]:
    """The parent's, but for what is ``PRIVATE``: the child has no use for credentials."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}
    if options.device is DeviceKind.CUDA and options.cuda_devices:
        inherited |= shown_gpus(options.cuda_devices)
    return {
        # oneDNN's cache, and that of torch in front of it.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": KEPT_KERNELS,
        "LRU_CACHE_CAPACITY": KEPT_KERNELS,
        **inherited,
        "PILOTLIGHT_FAULTS": options.faults,
        "OMP_NUM_THREADS": str(options.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def new_slate() -> int:
    """A descriptor of memory for a child's slate (``engine_child.slate``). The caller closes it.

    Raises:
        OSError: there is none.
    """
    descriptor = os.memfd_create("slate", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor
