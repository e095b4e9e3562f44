"""Stopping the system that another process runs."""

import os
import select
import signal

from pilotlight.cli.home import Home, RunningSystem
from pilotlight.cli.output import say
from pilotlight.common.errors import DeadlineExceeded

STOP_DEADLINE_S = 90.0


def stop_running(home: Home, *, as_json: bool) -> int:
    """Stop the system and say so.

    Raises:
        DeadlineExceeded: it is still there after the deadline.
    """
    pid = stop_process(home)
    if pid is None:
        say({"stopped": False}, f"no system runs on {home.root}", as_json=as_json)
    else:
        say({"stopped": True, "pid": pid}, "stopped", as_json=as_json)
    return 0


def stop_process(home: Home) -> int | None:
    """Ask the process on the state folder to stop, and wait until it is gone; its id, or None when
    there is none.

    Raises:
        DeadlineExceeded: it is still there after the deadline.
    """
    running = home.running()
    handle = _handle_of(running) if running is not None else None
    # Looked up again: the handle is then surely of the process that announced itself, whatever
    # became of its id.
    if running is None or handle is None or home.running() != running:
        return None
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        ended = poll.poll(STOP_DEADLINE_S * 1000)
    finally:
        os.close(handle)
    if not ended:
        raise DeadlineExceeded(
            f"process {running.pid} did not stop within {STOP_DEADLINE_S:g} s; see {home.logs}"
        )
    return running.pid


def _handle_of(running: RunningSystem) -> int | None:
    try:
        return os.pidfd_open(running.pid)
    except ProcessLookupError:
        return None
