"""The threads that read: what they bring back, and what happens to them when nothing waits any
more."""

import asyncio
import subprocess
import sys
import threading

import pytest

from pilotlight.dataplane.read_threads import ReadThreads

HANGING = """
import asyncio, threading
from pilotlight.dataplane.read_threads import ReadThreads

async def main():
    begun = threading.Event()
    def hang():
        begun.set()
        threading.Event().wait()
    ReadThreads("fetch").submit(hang)
    await asyncio.to_thread(begun.wait)

asyncio.run(main())
print("ended")
"""


def running(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


@pytest.mark.anyio
async def test_each_piece_of_work_ends_once_with_what_it_gave() -> None:
    threads = ReadThreads("many")
    futures = [threads.submit(lambda number=number: 100 // number) for number in range(200)]
    async with asyncio.timeout(30):
        found = await asyncio.gather(*futures, return_exceptions=True)
    assert isinstance(found[0], ZeroDivisionError)
    assert found[1:] == [100 // number for number in range(1, 200)]
    assert 1 <= len(running("many")) <= 200
    threads.stop()


@pytest.mark.anyio
async def test_a_thread_is_used_again_and_one_that_hangs_holds_up_no_other() -> None:
    threads, wake = ReadThreads("again"), threading.Event()
    async with asyncio.timeout(30):
        hanging = threads.submit(wake.wait)
        names = {await threads.submit(lambda: threading.current_thread().name) for _ in range(20)}
        assert len(names) == 1
        assert len(running("again")) == 2
        wake.set()
        assert await hanging
    threads.stop()


@pytest.mark.anyio
async def test_stopped_threads_end_and_take_no_work() -> None:
    threads, wake = ReadThreads("stopped"), threading.Event()
    hanging = threads.submit(wake.wait)
    async with asyncio.timeout(30):
        await threads.submit(lambda: None)
        threads.stop()
        threads.stop()
        with pytest.raises(RuntimeError, match="stopped"):
            threads.submit(lambda: None)
        wake.set()
        assert await hanging, "what has begun goes on"
    for thread in running("stopped"):
        thread.join(30)
    assert not running("stopped")


def test_a_thread_that_outlives_its_loop_ends_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    loud: list[object] = []
    monkeypatch.setattr(threading, "excepthook", loud.append)
    threads, wake = ReadThreads("late"), threading.Event()

    async def begin() -> None:
        threads.submit(wake.wait)

    asyncio.run(begin())
    (thread,) = running("late")
    wake.set()
    thread.join(30)
    assert not thread.is_alive()
    assert loud == []


def test_a_process_ends_while_one_hangs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "ended\n"
