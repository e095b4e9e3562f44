import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pilotlight.common.clock import SystemClock
from pilotlight.common.messages.pool import Hello
from pilotlight.common.service import Background
from pilotlight.common.testing import until
from pilotlight.common.waiting import Backoff
from pilotlight.loader.metrics import LoaderMetrics
from pilotlight.loader.processes import Process, ProcessFile, ProcessRecord
from pilotlight.loader.reports import Changes
from pilotlight.loader.supervise import WorkerPlan, WorkerSupervisor
from pilotlight.policy.ids import WorkerId

pytestmark = pytest.mark.anyio

WORKER = WorkerId("node-1-w0")
FOREVER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"


def command_of(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


def says(path: Path, text: str):
    return lambda: path.exists() and text in path.read_text()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Supervised:
    """A supervisor of one worker, and what it reads and writes."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        self.plan = WorkerPlan(
            worker_id=WORKER,
            command=command_of(script),
            environment={**os.environ, "WHO": "worker"},
            log_path=folder / "logs" / "worker-0.log",
            pid_path=folder / "workers" / "0.json",
        )
        self.metrics = LoaderMetrics(CollectorRegistry())
        self.changes = Changes()
        self.background = Background()

    def supervisor(
        self, *, handover: bool = False, plan: WorkerPlan | None = None
    ) -> WorkerSupervisor:
        return WorkerSupervisor(
            plans=[plan or self.plan],
            handover=handover,
            changes=self.changes,
            metrics=self.metrics,
            clock=SystemClock(),
            background=self.background,
            terminate_s=0.2,
            backoff=Backoff(first_s=0.001, limit_s=0.01),
        )

    @property
    def pid(self) -> int:
        record = ProcessFile(self.plan.pid_path).read()
        return record.pid if record is not None else 0


async def test_a_process_is_found_again_and_another_one_with_its_pid_is_not(tmp_path: Path) -> None:
    process = Process.spawn(command_of(FOREVER), os.environ, tmp_path / "log")
    file = ProcessFile(tmp_path / "state" / "0.json")
    assert file.read() is None
    file.write(process.record)
    assert file.read() == process.record
    adopted = Process.adopt(process.record)
    assert adopted is not None
    reused = ProcessRecord(pid=process.record.pid, start_ticks=process.record.start_ticks - 1)
    assert Process.adopt(reused) is None
    assert os.getsid(process.record.pid) == process.record.pid
    process.signal(signal.SIGKILL)
    async with asyncio.timeout(10):
        await asyncio.gather(process.ended(), adopted.ended())
    assert process.exit_code == -signal.SIGKILL
    assert Process.adopt(process.record) is None
    process.signal(signal.SIGTERM)
    await process.ended()


def test_output_goes_where_ours_does_even_if_that_is_a_socket() -> None:
    """As under systemd. A socket cannot be opened by the name of a descriptor."""
    script = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
    program = f"""
import os
from pilotlight.common.machine import STANDARD_ERROR
from pilotlight.loader.processes import Process
process = Process.spawn({command_of(script)!r}, os.environ, STANDARD_ERROR)
os.waitpid(process.record.pid, 0)
"""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        subprocess.run([sys.executable, "-c", program], stderr=theirs, timeout=60, check=True)
        assert ours.recv(100, socket.MSG_DONTWAIT) == b"out\nerr\n"


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff"])
async def test_a_damaged_pid_file_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "0.json").write_bytes(content)
    assert ProcessFile(tmp_path / "0.json").read() is None


async def test_a_worker_that_ends_is_reported_and_started_again(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, FOREVER)
    supervisor = supervised.supervisor()
    await supervisor.start()
    await until(says(supervised.plan.log_path, "up"))
    first = supervised.pid
    supervisor.on_hello(Hello(worker_id=WORKER, pid=first))
    assert supervisor.dead_workers == frozenset()
    supervised.changes.report.clear()

    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(10):
        await supervised.changes.report.wait()
    assert supervisor.dead_workers == {WORKER}
    await until(lambda: supervised.pid not in (0, first))
    supervisor.on_hello(Hello(worker_id=WORKER, pid=supervised.pid))
    assert supervisor.dead_workers == frozenset()
    second = supervised.pid
    await supervisor.stop()
    assert not alive(second)
    assert (supervisor.dead_workers, supervised.pid) == ({WORKER}, 0)
    await supervised.background.stop()


async def test_a_closed_connection_is_a_dead_worker_until_it_says_hello(tmp_path: Path) -> None:
    supervisor = Supervised(tmp_path, FOREVER).supervisor()
    old, new = Hello(worker_id=WORKER, pid=1), Hello(worker_id=WORKER, pid=2)
    supervisor.on_hello(old)
    supervisor.on_goodbye(old)
    assert supervisor.dead_workers == {WORKER}
    supervisor.on_hello(new)
    supervisor.on_goodbye(old)
    assert supervisor.dead_workers == frozenset(), (
        "the close of an old connection says nothing of the new one"
    )


async def test_workers_are_handed_over(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, FOREVER)
    first = supervised.supervisor(handover=True)
    await first.start()
    await until(says(supervised.plan.log_path, "up"))
    pid = supervised.pid
    await first.stop()
    assert alive(pid)

    second = supervised.supervisor()
    await second.start()
    await until(lambda: second._processes)
    assert supervised.metrics.worker_starts._value.get() == 1
    assert supervised.pid == pid
    assert second.dead_workers == frozenset()
    # It is not the second one's child, and still its death is noticed.
    os.kill(pid, signal.SIGKILL)
    await until(lambda: second.dead_workers == {WORKER})
    await until(lambda: supervised.pid not in (0, pid))
    await second.stop()
    await supervised.background.stop()


async def test_a_stubborn_worker_and_its_children_are_killed(tmp_path: Path) -> None:
    child = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {FOREVER!r}]);{STUBBORN}"
    )
    supervised = Supervised(tmp_path, child)
    supervisor = supervised.supervisor()
    await supervisor.start()
    await until(
        lambda: (
            supervised.plan.log_path.exists()
            and supervised.plan.log_path.read_text().count("up") == 2
        )
    )
    pid = supervised.pid
    session = [
        int(entry) for entry in os.listdir("/proc") if entry.isdigit() and sid_of(int(entry)) == pid
    ]
    assert len(session) == 2
    await supervisor.stop()
    await until(lambda: not any(alive(member) for member in session))
    await supervised.background.stop()


def sid_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


async def test_what_cannot_start_is_tried_again(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, FOREVER)
    program = tmp_path / "program"
    supervisor = supervised.supervisor(plan=replace(supervised.plan, command=(str(program),)))
    await supervisor.start()
    await asyncio.sleep(0)
    program.write_text(f"#!{sys.executable}\n{FOREVER}\n")
    program.chmod(0o755)
    await until(says(supervised.plan.log_path, "up"))
    await supervisor.stop()
    await supervised.background.stop()


async def test_a_worker_that_is_stopped_for_good_is_replaced(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, FOREVER)
    supervisor = supervised.supervisor()
    supervisor.stopped_s = 1.0
    await supervisor.start()
    await until(lambda: supervised.pid)
    first = supervised.pid
    os.kill(first, signal.SIGSTOP)
    await until(lambda: supervised.pid not in (0, first))
    assert not alive(first)
    await supervisor.stop()
    await supervised.background.stop()


async def test_a_worker_that_the_next_loader_could_not_find_is_not_handed_over(
    tmp_path: Path,
) -> None:
    supervised = Supervised(tmp_path, FOREVER)
    # No file can be made in the place of its folder, as on a full disk.
    supervised.plan.pid_path.parent.touch()
    supervisor = supervised.supervisor(handover=True)
    await supervisor.start()
    await until(says(supervised.plan.log_path, "up"))
    (process,) = supervisor._processes.values()
    assert alive(process.record.pid)
    assert supervised.metrics.write_failures._value.get() >= 1
    await supervisor.stop()
    assert not alive(process.record.pid)
    await supervised.background.stop()


async def test_a_worker_that_a_killed_loader_left_without_a_record_ends(tmp_path: Path) -> None:
    stranger = Process.spawn(command_of(FOREVER), os.environ, tmp_path / "log")
    supervised = Supervised(tmp_path, FOREVER)
    supervisor = supervised.supervisor()
    await supervisor.start()
    await until(lambda: supervised.pid)
    supervisor.on_hello(Hello(worker_id=WORKER, pid=supervised.pid))
    supervisor.on_hello(Hello(worker_id=WORKER, pid=stranger.record.pid))
    async with asyncio.timeout(10):
        await stranger.ended()
    supervisor.on_goodbye(Hello(worker_id=WORKER, pid=stranger.record.pid))
    assert supervisor.dead_workers == frozenset()
    assert alive(supervised.pid)
    await supervisor.stop()
    await supervised.background.stop()


async def test_a_stranger_that_came_first_is_ended_too(tmp_path: Path) -> None:
    """Its loader could not write down that it is the worker, and it says hello before the next one
    has looked for it.
    """
    stranger = Process.spawn(command_of(FOREVER), {}, tmp_path / "stranger.log")
    supervised = Supervised(tmp_path, FOREVER)
    supervisor = supervised.supervisor()
    supervisor.on_hello(Hello(worker_id=WORKER, pid=stranger.record.pid))
    await supervisor.start()
    async with asyncio.timeout(10):
        await stranger.ended()
    supervisor.on_goodbye(Hello(worker_id=WORKER, pid=stranger.record.pid))
    assert supervisor.dead_workers == {WORKER}
    await until(lambda: supervised.pid)
    supervisor.on_hello(Hello(worker_id=WORKER, pid=supervised.pid))
    assert supervisor.dead_workers == frozenset()
    assert alive(supervised.pid)
    await supervisor.stop()
    await supervised.background.stop()


async def test_a_worker_without_a_log_serves(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    supervised = Supervised(tmp_path, FOREVER)
    supervisor = supervised.supervisor()
    await supervisor.start()
    await until(lambda: supervised.pid and alive(supervised.pid))
    await supervisor.stop()
    await supervised.background.stop()
