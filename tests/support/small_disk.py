"""A whole system with a small disk and a small shared memory, in a home with an awkward name."""

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from confined import confined, inside
from embedded_system import DEADLINE_S, RunningSystem, free_port, pilotlight

from pilotlight.common.clock import SystemClock
from pilotlight.common.waiting import block

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def system_on(disk: Path) -> Iterator[RunningSystem]:
    """A system with 300 MiB of disk, 96 MiB of shared memory, and a soft limit of 256 files, as its
    user's shell might set it.
    """
    home = disk / "a home öäü %20 'n 火" / ("deep" * 30)
    command = confined(
        [pilotlight(), "up", "--json", "--worker-kind", "sim", "--port", str(free_port())],
        {disk: "300m", SHARED_MEMORY: "96m"},
    )
    variables = {
        **os.environ,
        "PILOTLIGHT_HOME": str(home),
        "PILOTLIGHT_EVENTS_BYTES": str(8 << 20),
        "PILOTLIGHT_HOLD_TIMEOUT_S": "8",
        "PILOTLIGHT_POOL_BYTES": str(64 << 20),
    }
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with (disk.parent / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)),
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (disk.parent / "stderr").read_text()
        ready = json.loads(line)
        assert ready.get("ready"), ready
        yield RunningSystem(home=inside(process.pid, home), url=ready["url"], process=process)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def until(what: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Return as soon as something holds."""
    clock = SystemClock()
    end_s = clock.monotonic_s() + deadline_s
    while not what():
        assert clock.monotonic_s() < end_s
        block(0.2)


def server_pid(system: RunningSystem, program: str) -> int:
    """The process of an embedded server that ``up`` has started."""
    for thread in Path(f"/proc/{system.process.pid}/task").iterdir():
        for pid in (thread / "children").read_text().split():
            if (
                Path(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])).name
                == program
            ):
                return int(pid)
    raise AssertionError(f"{program} does not run")


def remove(paths: list[Path]) -> None:
    """Give the room back."""
    for path in paths:
        path.unlink()
