"""A worker's first engine child, started before there is anything else of the worker: imports take
an engine longer than all that the worker does before it wants one.

Imports nothing that takes time, as ``child_command``.
"""

import os
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pilotlight.common.machine import log_file
from pilotlight.policy.cluster import DeviceKind
from pilotlight.worker.engines.child_command import ChildOptions, prepared, start_folder

ENV_PREFIX = "PILOTLIGHT_"
"""As ``common.settings`` has it, which imports pydantic: as long as half of an engine's own
imports."""
LOG_DIR = ".pilotlight/logs"


class ChildAhead:
    """A child that was started before there was a loop to speak with it: it imports, and has
    no device before it is taken (``child_process.begun``), but for the context of an only GPU.
    """

    def __init__(self, options: ChildOptions) -> None:
        """Starts it.

        Raises:
            OSError: no process can be started.
        """
        self.options = options
        with ExitStack() as on_failure, ExitStack() as always:
            self.connection, slate_fd, command, how = prepared(
                options, ("--ahead",), on_failure, always
            )
            self.slate_fd = os.dup(slate_fd)
            on_failure.callback(os.close, self.slate_fd)
            self.process = subprocess.Popen[bytes](command, **how)
            on_failure.pop_all()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def fits(self, options: ChildOptions) -> bool:
        """Whether it can be a child with these: it is told its device when it is taken, and all
        else when it starts.
        """
        return replace(options, cuda_devices=self.options.cuda_devices) == self.options


def options_ahead(environment: Mapping[str, str]) -> ChildOptions | None:
    """What ``options.child_options`` will make of the settings, as far as variables say it. None:
    no engine, or no settings that could be right. The worker, which reads its settings in earnest
    afterwards, takes only a child that fits them.
    """

    def said(name: str) -> str:
        return environment.get(ENV_PREFIX + name, "")

    def number(name: str) -> int | None:
        return int(said(name)) if said(name) else None

    try:
        device = DeviceKind(said("DEVICE") or DeviceKind.CPU)
        cores = len(os.sched_getaffinity(0)) // (number("WORKERS") or 1)
        threads, step_tokens = number("THREADS"), number("STEP_TOKENS")
        device_bytes = number("DEVICE_BYTES")
    except ValueError:
        return None
    if device is DeviceKind.SIM:
        return None
    folder = Path(environment.get(ENV_PREFIX + "LOG_DIR", LOG_DIR))
    worker_id = said("WORKER_ID") or f"{said('NODE_ID') or 'node-local'}-w0"
    return ChildOptions(
        threads=threads or max(1, cores),
        log_path=log_file(folder, f"engine-{worker_id}.log"),
        faults=said("FAULTS"),
        log_level=said("LOG_LEVEL") or "info",
        device=device,
        device_bytes=device_bytes,
        step_tokens=step_tokens,
        start=start_folder(Path(said("STATE_DIR")) if said("STATE_DIR") else None, worker_id),
    )


def engine_ahead(environment: Mapping[str, str] = os.environ) -> ChildAhead | None:
    """The engine's process. None: there is to be none, or it cannot be started now, which is said
    when it is tried again.
    """
    options = options_ahead(environment)
    try:
        return ChildAhead(options) if options is not None else None
    except OSError:
        return None
