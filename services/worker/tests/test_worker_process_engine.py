"""The real engine in a real child process: loads, runs, dies, comes back."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotlight.common.errors import EngineFailed
from pilotlight.common.messages.engine import (
    Abort,
    Prefilled,
    Run,
    StageFailed,
    StageLoaded,
    StageOpened,
    StepDone,
    UnloadStage,
)
from pilotlight.common.testing import until
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.phase import PhaseName
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.child_process import bury, kill_group, spawn
from pilotlight.worker.engines.client import EngineDied
from pilotlight.worker.engines.process import ProcessEngine

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class Listener:
    """Everything that an engine says."""

    def __init__(self, engine: ProcessEngine) -> None:
        self.engine = engine
        self.events = engine.events()
        self.tokens: dict[str, list[int]] = {}

    async def until(self, kind: type, matches: Callable[[Any], bool] = lambda _: True) -> Any:
        async with asyncio.timeout(30):
            async for told in self.events:
                event = told.message
                if isinstance(event, StepDone):
                    for produced in event.produced:
                        self.tokens.setdefault(produced.request_id, []).extend(produced.token_ids)
                if isinstance(event, kind) and matches(event):
                    return event
        raise AssertionError(f"no {kind.__name__} came")

    async def until_end(self, request_id: str) -> Any:
        def ended(step: StepDone) -> bool:
            return any(one.request_id == request_id and one.finish for one in step.produced)

        step = await self.until(StepDone, ended)
        return next(one for one in step.produced if one.request_id == request_id)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ProcessEngine]:
    made = ProcessEngine(ChildOptions(threads=1, log_path=tmp_path / "engine.log"))
    yield made
    await made.stop()
    assert not made.alive


def run(
    pool: Any, sampling: Sampling, request_id: str = "req-1", outputs: list[int] | None = None
) -> Run:
    return Run(
        request_id=RequestId(request_id),
        attempt=1,
        instance_id=InstanceId("inst-1"),
        prompt_ids=[1, 2, 3],
        output_ids=outputs or [],
        sampling=sampling,
    )


async def load(engine: ProcessEngine, listener: Listener, pool: Any) -> StageLoaded:
    await engine.load_stage(pool.load())
    for place in pool.places():
        await engine.place_part(place)
    return await listener.until(StageLoaded)


async def test_it_serves_dies_in_mid_stream_and_serves_the_same_tokens_again(
    engine: ProcessEngine, pool: Any, greedy: Callable[[int], Sampling]
) -> None:
    up = await engine.start()
    assert up.pid == engine.pid
    assert up.load_bytes_per_s > 1e6
    assert up.memory_bytes_per_s > 1e6
    assert await engine.start() == up, "starting what runs changes nothing"
    listener = Listener(engine)
    loaded = await load(engine, listener, pool)
    assert loaded.kv_capacity_tokens == 512

    await engine.run(run(pool, greedy(12)))
    assert (await listener.until(Prefilled)).request_id == "req-1"
    assert (await listener.until_end("req-1")).finish is FinishReason.LENGTH
    expected = listener.tokens["req-1"]
    assert len(expected) == 12

    # Resumed after five tokens, as a gateway does it, the rest is the same.
    await engine.run(run(pool, greedy(12), "req-2", expected[:5]))
    await listener.until_end("req-2")
    assert listener.tokens["req-2"] == expected[5:]

    await engine.run(run(pool, greedy(200), "req-3"))
    await listener.until(StepDone, lambda step: step.running == 1)
    os.kill(up.pid, signal.SIGKILL)
    died = await listener.until(EngineDied)
    assert "-9" in died.reason
    assert not engine.alive
    with pytest.raises(EngineFailed):
        await engine.run(run(pool, greedy(1), "req-4"))

    again = await engine.start()
    assert again.pid != up.pid
    await load(engine, listener, pool)
    await engine.run(run(pool, greedy(12), "req-5"))
    await listener.until_end("req-5")
    assert listener.tokens["req-5"] == expected

    await engine.load_stage(pool.load("inst-2", kv_tokens=1))
    assert (await listener.until(StageFailed)).code == "no_room"


async def test_requests_run_while_parts_come(
    engine: ProcessEngine, pool: Any, greedy: Callable[[int], Sampling]
) -> None:
    await engine.start()
    listener = Listener(engine)
    await load(engine, listener, pool)
    await engine.run(run(pool, greedy(12)))
    await listener.until_end("req-1")
    await engine.unload_stage(UnloadStage(instance_id=InstanceId("inst-1")))

    await engine.load_stage(pool.load())
    assert (await listener.until(StageOpened)).kv_capacity_tokens == 512
    for name in ("req-2", "req-3", "req-4"):
        await engine.run(run(pool, greedy(12), name))
    late = msgspec.structs.replace(run(pool, greedy(12), "req-5"), deadline_in_s=0.1)
    await engine.run(late)
    for place in pool.places()[:-1]:
        await engine.place_part(place)
    await listener.until(StepDone, lambda step: step.running == 1 or step.running == 4)
    await engine.abort(Abort(request_id=RequestId("req-3"), attempt=1))
    assert (await listener.until_end("req-3")).finish is FinishReason.CANCELLED
    assert (await listener.until_end("req-5")).code == "deadline_exceeded", (
        "nothing came, and it ended all the same"
    )
    await engine.place_part(pool.places()[-1])
    loaded = await listener.until(StageLoaded)
    prefilled = await listener.until(Prefilled)
    await listener.until_end("req-4")
    assert listener.tokens["req-2"] == listener.tokens["req-4"] == listener.tokens["req-1"]
    assert PhaseName.PREFILL in {phase.name for phase in loaded.phases}, (
        "what ran before it was loaded"
    )
    assert all(
        phase.end_s <= prefilled.phase.start_s for phase in (*prefilled.earlier, *loaded.phases)
    )

    # Called off, they can run elsewhere.
    await engine.load_stage(pool.load("inst-2"))
    await engine.run(
        msgspec.structs.replace(run(pool, greedy(12), "req-6"), instance_id=InstanceId("inst-2"))
    )
    await engine.place_part(pool.places("inst-2")[0])
    await engine.unload_stage(UnloadStage(instance_id=InstanceId("inst-2")))
    assert (await listener.until_end("req-6")).code == "not_loaded"


async def test_the_child_never_outlives_its_parent(tmp_path: Path) -> None:
    program = f"""
import asyncio, os
from pathlib import Path
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.process import ProcessEngine

async def main():
    engine = ProcessEngine(ChildOptions(threads=1, log_path=Path({str(tmp_path / "log")!r})))
    print((await engine.start()).pid, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    parent = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    child = int(parent.stdout.splitlines()[-1])
    try:
        descriptor = os.pidfd_open(child)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    async with asyncio.timeout(5):
        await ended.wait()
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)


async def test_a_child_that_ends_at_its_start_says_so(tmp_path: Path) -> None:
    engine = ProcessEngine(ChildOptions(threads=1, log_path=tmp_path / "log", faults="nonsense=1"))
    with pytest.raises(EngineFailed, match="status 1"):
        await engine.start()
    assert "nonsense" in (tmp_path / "log").read_text()
    await engine.stop()


async def test_a_child_writes_where_its_worker_does_even_if_that_is_a_socket() -> None:
    """As under systemd. A socket cannot be opened by the name of a descriptor."""
    program = """
import asyncio
from pilotlight.common.machine import STANDARD_ERROR
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.child_process import bury, spawn

async def main():
    child = await spawn(ChildOptions(threads=1, log_path=STANDARD_ERROR, faults="nonsense=1"))
    await child.process.wait()
    await bury(child)

asyncio.run(main())
"""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", program]
        await asyncio.to_thread(subprocess.run, command, stderr=theirs, timeout=60, check=True)
        assert b"nonsense" in ours.recv(1 << 16, socket.MSG_DONTWAIT)


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def test_a_child_inherits_no_credentials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "PILOTLIGHT_SECRETS_DIR",
    ):
        monkeypatch.setenv(name, "secret")
    child = await spawn(ChildOptions(threads=1, log_path=tmp_path / "log"), spare=True)
    try:
        # The kernel shows none for a moment after it has begun to run the program.
        await until(lambda: environment_of(child.process.pid))
        environment = environment_of(child.process.pid)
        assert b"OMP_NUM_THREADS=1" in environment
        assert b"secret" not in environment
    finally:
        kill_group(child.process)
        await bury(child)


async def test_what_it_says_of_a_prompt_crosses_the_socket(
    engine: ProcessEngine, pool: Any, greedy: Callable[[int], Sampling]
) -> None:
    await engine.start()
    listener = Listener(engine)
    await load(engine, listener, pool)
    await engine.run(run(pool, replace(greedy(1), prompt_logprobs=2)))
    told = (await listener.until_end("req-1")).prompt
    assert (len(told.logprobs), len(told.ranks), len(told.top)) == (2, 2, 2)
    assert all(len(place) == 2 for place in told.top)
