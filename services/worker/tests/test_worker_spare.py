"""A spare engine child: ready without a device, promoted when the engine dies, made again, never
left behind.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pilotlight.common.errors import EngineFailed
from pilotlight.common.testing import until
from pilotlight.common.waiting import Backoff
from pilotlight.worker.engine_child import child
from pilotlight.worker.engines.child_ahead import ChildAhead
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.child_process import Child
from pilotlight.worker.engines.client import EngineDied
from pilotlight.worker.engines.process import ProcessEngine
from pilotlight.worker.engines.spare import Spare

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

AT_ONCE = Backoff(first_s=0.01, limit_s=0.05)
NEVER = Backoff(first_s=1000.0, limit_s=1000.0)
READY_DEADLINE_S = 60.0


@pytest.fixture
def options(tmp_path: Path) -> ChildOptions:
    return ChildOptions(threads=1, log_path=tmp_path / "engine.log")


@pytest.fixture
async def engine(options: ChildOptions) -> AsyncIterator[ProcessEngine]:
    made = ProcessEngine(options, Spare(options, AT_ONCE))
    yield made
    await made.stop()


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def spare_of(engine: ProcessEngine, *, other_than: int | None = None) -> int:
    spare = engine._spare
    await until(lambda: spare.pid not in (None, other_than), deadline_s=READY_DEADLINE_S)
    return spare.pid


async def test_the_spare_becomes_the_engine_and_another_is_made(engine: ProcessEngine) -> None:
    events = engine.events()
    first = await engine.start()
    spare = await spare_of(engine)
    assert spare != first.pid
    # Its main thread keeps its priority: what it imported with has ended.
    assert os.getpriority(os.PRIO_PROCESS, spare) == os.getpriority(os.PRIO_PROCESS, first.pid)
    os.kill(first.pid, signal.SIGKILL)
    assert isinstance((await anext(events)).message, EngineDied)
    assert (await engine.start()).pid == spare == engine.pid
    assert lives(await spare_of(engine, other_than=spare))


async def test_an_engine_without_a_ready_spare_starts_as_ever(options: ChildOptions) -> None:
    engine = ProcessEngine(options, Spare(options, NEVER))
    events = engine.events()
    first = await engine.start()
    os.kill(first.pid, signal.SIGKILL)
    assert isinstance((await anext(events)).message, EngineDied)
    assert (await engine.start()).pid != first.pid
    await engine.stop()


async def test_a_spare_that_dies_unused_is_replaced(engine: ProcessEngine) -> None:
    up = await engine.start()
    spare = await spare_of(engine)
    os.kill(spare, signal.SIGKILL)
    assert await spare_of(engine, other_than=spare) != spare
    assert engine.pid == up.pid
    assert engine.alive


async def test_a_spare_that_died_a_moment_ago_is_no_spare(engine: ProcessEngine) -> None:
    events = engine.events()
    up = await engine.start()
    spare = await spare_of(engine)
    os.kill(spare, signal.SIGKILL)
    os.kill(up.pid, signal.SIGKILL)
    assert isinstance((await anext(events)).message, EngineDied)
    assert (await engine.start()).pid not in (up.pid, spare)


def test_a_spare_that_cannot_import_is_never_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pilotlight.engine.engine", None)
    ours, theirs = socket.socketpair()
    with ours:
        ours.shutdown(socket.SHUT_WR)
        with theirs, pytest.raises(ImportError):
            child._wait_to_be_promoted(theirs)
        assert ours.recv(100) == b""


async def test_nothing_is_left_after_the_stop(options: ChildOptions) -> None:
    engine = ProcessEngine(options, Spare(options, AT_ONCE))
    await engine.start()
    spare = await spare_of(engine)
    await engine.stop()
    assert not lives(spare)
    assert engine._spare.pid is None


async def test_a_stop_while_the_spare_is_promoted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    opened = tmp_path / "opened"
    opened.mkdir()
    monkeypatch.setenv("UNREADY_DIR", str(opened))
    options = ChildOptions(threads=1, log_path=tmp_path / "engine.log", module="unready_child")
    engine = ProcessEngine(options, Spare(options, AT_ONCE))
    events = engine.events()
    up = await engine.start()
    spare = await spare_of(engine)
    (opened / "hang").touch()
    os.kill(up.pid, signal.SIGKILL)
    assert isinstance((await anext(events)).message, EngineDied)
    starting = asyncio.create_task(engine.start())
    await until((opened / str(spare)).exists)
    async with asyncio.timeout(5):
        await engine.stop()
    assert starting.done()
    with pytest.raises(EngineFailed, match="stopped for good"):
        await starting
    assert not lives(spare)
    assert {path.name for path in opened.iterdir()} == {"hang", str(up.pid), str(spare)}, (
        "none in its place"
    )


class Hesitating(Spare):
    """None is ready, and the engine is killed when one is asked for: before another child is
    spawned, or while it is.
    """

    engine: ProcessEngine

    def __init__(self, options: ChildOptions, *, in_time: bool) -> None:
        super().__init__(options)
        self._in_time = in_time

    async def take(self) -> Child | None:
        kill = asyncio.create_task(self.engine.kill("lost: GPU is lost", "device_failed"))
        if self._in_time:
            await kill
        return None


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_kill_before_there_is_a_child_is_not_forgotten(
    options: ChildOptions, in_time: bool
) -> None:
    spare = Hesitating(options, in_time=in_time)
    spare.engine = engine = ProcessEngine(options, spare)
    with pytest.raises(EngineFailed, match="lost: GPU is lost"):
        await engine.start()
    assert not engine.alive
    assert engine.pids == frozenset()
    assert options.log_path.exists() is not in_time, "a child that is not spawned has no log"
    await engine.stop()


async def test_a_spare_never_outlives_its_parent(options: ChildOptions) -> None:
    program = f"""
import asyncio, os
from pathlib import Path
from pilotlight.common.waiting import Backoff, pause
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.spare import Spare

async def main():
    spare = Spare(ChildOptions(threads=1, log_path=Path({str(options.log_path)!r})), Backoff(first_s=0.01, limit_s=0.01))
    spare.keep()
    while spare.pid is None:
        await pause(0.01)
    print(spare.pid, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    parent = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    spare = int(parent.stdout.splitlines()[-1])
    await until(lambda: not lives(spare))


async def test_a_child_that_was_started_ahead_becomes_the_engine(options: ChildOptions) -> None:
    ahead = ChildAhead(options)
    engine = ProcessEngine(options, ahead=ahead)
    events = engine.events()
    pid = ahead.pid
    up = await engine.start()
    assert up.pid == pid == engine.pid
    os.kill(pid, signal.SIGKILL)
    assert isinstance((await anext(events)).message, EngineDied)
    assert (await engine.start()).pid != pid, "another one follows"
    await engine.stop()


async def test_a_child_that_was_started_ahead_and_has_died_is_told_of(
    options: ChildOptions,
) -> None:
    ahead = ChildAhead(options)
    os.kill(ahead.pid, signal.SIGKILL)
    engine = ProcessEngine(options, ahead=ahead)
    with pytest.raises(EngineFailed, match="did not start"):
        await engine.start()
    await engine.start()
    assert engine.pid != ahead.pid
    await engine.stop()


async def test_a_child_that_nobody_takes_ends_with_the_engine(options: ChildOptions) -> None:
    ahead = ChildAhead(options)
    engine = ProcessEngine(options, ahead=ahead)
    await engine.stop()
    assert not lives(ahead.pid)


async def test_a_child_that_was_started_ahead_and_cannot_import_says_why(
    options: ChildOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libtorch is broken')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    engine = ProcessEngine(options, ahead=ChildAhead(options))
    with pytest.raises(EngineFailed, match="libtorch is broken"):
        await engine.start()
    await engine.stop()
