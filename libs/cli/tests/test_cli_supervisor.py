"""The supervisor with tiny children: readiness, crashes, the order of the end, and no process left
behind.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pilotlight.cli.supervisor import (
    PR_SET_CHILD_SUBREAPER,
    START_TRIES,
    ChildFailed,
    ChildSpec,
    Supervisor,
)
from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import BusUnavailable, InternalError, PilotlightError, PortTaken
from pilotlight.common.machine import END_WITH_PARENT
from pilotlight.common.testing import until

pytestmark = pytest.mark.anyio

BEGIN = "import os, signal, socket, subprocess, sys\nopen('pids', 'a').write(f'{os.getpid()}\\n')\n"
READY = (
    "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\ns.connect(os.environ['NOTIFY_SOCKET'])\n"
    "s.send(b'STATUS=almost')\ns.send(b'READY=1')\n"
)
WAIT = "while True: signal.pause()\n"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


@dataclass
class Rig:
    """A supervisor of children that run in a folder of their own, where each notes its pid."""

    supervisor: Supervisor
    folder: Path
    changes: "asyncio.Queue[tuple[str, str]]"

    def spec(self, program: str, name: str = "child", **changes: float) -> ChildSpec:
        """A child that runs a few lines."""
        argv = (
            sys.executable,
            "-ISc",
            f"import os\nos.chdir({str(self.folder)!r})\n{BEGIN}{program}",
        )
        return ChildSpec(
            name=name,
            argv=argv,
            environment={"GREETING": "hello"},
            log_path=self.folder / f"{name}.log",
            **changes,
        )

    @property
    def pids(self) -> list[int]:
        """The children that were ever started, in order."""
        file = self.folder / "pids"
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    def alive(self) -> list[int]:
        """Those of them that are still there."""
        return [pid for pid in self.pids if Path(f"/proc/{pid}").exists()]


def _children() -> set[int]:
    """Children of the test run that others own: servers that tests share."""
    return {
        int(pid)
        for file in Path("/proc/self/task").glob("*/children")
        for pid in file.read_text().split()
    }


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    others = _children()
    changes: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    supervisor = Supervisor(
        tmp_path,
        SystemClock(),
        lambda name, state: changes.put_nowait((name, state)),
        lambda: others,
        orphan_patience_s=1.0,
    )
    supervisor.adopt_orphans()
    made = Rig(supervisor, tmp_path, changes)
    try:
        yield made
    finally:
        await supervisor.stop()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        left = made.alive()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert left == []
        assert [name for name in os.listdir(tmp_path) if name.endswith(".sock")] == []


async def test_a_child_is_started_when_it_says_so(rig: Rig) -> None:
    tells = f"print(os.environ['GREETING'], os.environ[{END_WITH_PARENT!r}], flush=True)\n"
    await rig.supervisor.start(
        rig.spec(tells + READY + "print('more', file=sys.stderr, flush=True)\n" + WAIT)
    )
    assert len(rig.alive()) == 1
    (pid,) = rig.pids
    assert os.getsid(pid) == pid
    await until(lambda: (rig.folder / "child.log").read_text() == f"hello {os.getpid()}\nmore\n")
    await rig.supervisor.stop()
    assert rig.alive() == []
    await rig.supervisor.stop()


async def test_a_child_that_ends_before_it_is_ready(rig: Rig) -> None:
    with pytest.raises(ChildFailed, match=r"child ended with status 7; its log is .*child\.log"):
        await rig.supervisor.start(rig.spec("sys.exit(7)"))


@pytest.mark.parametrize(
    ("said", "kind", "tries"),
    [
        ({"action": "start_failed", "code": "bus_unavailable"}, BusUnavailable, START_TRIES),
        ({"action": "start_failed", "code": "port_taken"}, PortTaken, 1),
        ({"action": "task_died", "task": "work"}, InternalError, 1),
    ],
)
async def test_a_child_that_says_why_it_cannot_start(
    rig: Rig, said: dict[str, str], kind: type[PilotlightError], tries: int
) -> None:
    line = json.dumps({**said, "error": "it is so"})
    with pytest.raises(kind, match="child cannot start: it is so"):
        await rig.supervisor.start(rig.spec(f"print({line!r}, flush=True)\nsys.exit(1)\n"))
    assert len(rig.pids) == tries


async def test_a_start_that_another_try_can_help_is_tried_again(rig: Rig) -> None:
    line = json.dumps({"action": "start_failed", "code": "bus_unavailable", "error": "too late"})
    fails_once = (
        f"if len(open('pids').readlines()) == 1: print({line!r}, flush=True); sys.exit(1)\n"
    )
    await rig.supervisor.start(rig.spec(fails_once + READY + WAIT))
    assert len(rig.pids) == 2
    assert rig.alive() == rig.pids[1:]


async def test_the_status_of_a_child_is_not_lost(rig: Rig) -> None:
    starts = (
        rig.supervisor.start(rig.spec("os._exit(7)", f"child-{number}")) for number in range(8)
    )
    failures = await asyncio.gather(*starts, return_exceptions=True)
    assert {str(failure).partition("; ")[0].partition(" ")[2] for failure in failures} == {
        "ended with status 7"
    }


async def test_a_child_that_is_never_ready_is_ended(rig: Rig) -> None:
    with pytest.raises(ChildFailed, match=r"not ready within 0\.3 s"):
        await rig.supervisor.start(rig.spec(WAIT, ready_deadline_s=0.3))
    assert rig.alive() == []


async def test_a_program_that_is_not_there(rig: Rig) -> None:
    spec = ChildSpec(
        name="child", argv=("/nowhere/at-all",), environment={}, log_path=rig.folder / "child.log"
    )
    with pytest.raises(ChildFailed, match="/nowhere/at-all"):
        await rig.supervisor.start(spec)


async def test_a_start_that_is_given_up_leaves_nothing(rig: Rig) -> None:
    starting = asyncio.create_task(rig.supervisor.start(rig.spec(WAIT)))
    await until(lambda: len(rig.pids) == 1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await rig.supervisor.stop()
    assert rig.alive() == []


@pytest.mark.slow
async def test_a_child_that_dies_is_started_again(rig: Rig) -> None:
    await rig.supervisor.start(rig.spec(READY + WAIT))
    for number in range(2):
        os.kill(rig.pids[-1], signal.SIGKILL)
        async with asyncio.timeout(10):
            assert await rig.changes.get() == ("child", "restarting")
            assert await rig.changes.get() == ("child", "ready")
        assert len(rig.pids) == number + 2
        assert rig.alive() == rig.pids[-1:]


@pytest.mark.slow
async def test_a_restart_that_fails_is_tried_again(rig: Rig) -> None:
    breaks_once = "if len(open('pids').readlines()) == 2: sys.exit(1)\n"
    await rig.supervisor.start(rig.spec(breaks_once + READY + WAIT))
    os.kill(rig.pids[0], signal.SIGKILL)
    async with asyncio.timeout(10):
        assert [await rig.changes.get() for _ in range(2)] == [
            ("child", "restarting"),
            ("child", "ready"),
        ]
    assert len(rig.pids) == 3


@pytest.mark.slow
async def test_stopping_in_the_middle_of_a_restart(rig: Rig) -> None:
    await rig.supervisor.start(
        rig.spec(
            "first = len(open('pids').readlines()) == 1\nif first:\n "
            + READY.replace("\n", "\n ")
            + "\n"
            + WAIT
        )
    )
    os.kill(rig.pids[0], signal.SIGKILL)
    await until(lambda: len(rig.pids) == 2)
    await rig.supervisor.stop()
    assert rig.alive() == []


async def test_children_stop_in_reverse_order_each_after_the_other(rig: Rig) -> None:
    for name in ("first", "second", "third"):
        notes = f"def end(*_):\n open('ends', 'a').write('{name} ')\n sys.exit()\nsignal.signal(signal.SIGTERM, end)\n"
        await rig.supervisor.start(rig.spec(notes + READY + WAIT, name))
    await rig.supervisor.stop()
    assert (rig.folder / "ends").read_text() == "third second first "


async def test_a_child_that_does_not_listen_is_killed(rig: Rig) -> None:
    await rig.supervisor.start(rig.spec(DEAF + READY + WAIT, stop_deadline_s=0.1))
    await rig.supervisor.stop()
    assert rig.alive() == []


def _grandchild(program: str) -> str:
    """Start a process that outlives its parent, and wait until it has noted its pid."""
    child = f"subprocess.Popen([sys.executable, '-ISc', {BEGIN + program!r}], start_new_session=True, stdout=subprocess.PIPE)"
    return f"{child}.stdout.readline()\n"


SAYS_SO = "print('here', flush=True)\n"


async def test_orphans_of_a_killed_child_are_ended(rig: Rig) -> None:
    await rig.supervisor.start(rig.spec(_grandchild(SAYS_SO + WAIT) + READY + WAIT))
    child, orphan = rig.pids
    os.kill(child, signal.SIGKILL)
    await until(lambda: child not in rig.alive())
    assert orphan in rig.alive()
    await rig.supervisor.stop()
    assert rig.alive() == []


@pytest.mark.slow
async def test_deaf_orphans_and_their_children_are_killed(rig: Rig) -> None:
    below = _grandchild(DEAF + SAYS_SO + WAIT)
    await rig.supervisor.start(rig.spec(_grandchild(DEAF + below + SAYS_SO + WAIT) + READY + WAIT))
    assert len(rig.alive()) == 3
    await rig.supervisor.stop()
    assert rig.alive() == []


async def test_orphans_that_end_by_themselves_are_reaped(rig: Rig) -> None:
    ends = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit())\n"
    await rig.supervisor.start(rig.spec(_grandchild(ends + SAYS_SO + WAIT) + READY + WAIT))
    child, orphan = rig.pids
    os.kill(child, signal.SIGKILL)
    await until(lambda: child not in rig.alive())
    os.kill(orphan, signal.SIGUSR1)
    await until(lambda: orphan not in rig.alive())
