"""How often graphs were used, in files of a node: read by workers that come later or run beside,
whatever other processes do to them; garbage is as no file.
"""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.common.service import Background
from pilotlight.common.testing import until
from pilotlight.engine.cuda.fitting import RestoreNews
from pilotlight.policy.graphs.restoring import PROMPTS
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.worker.engine_child.graphs import USES_TOLD_AFTER, GraphPlans, _Restored
from pilotlight.worker.graph_uses import (
    MAX_BYTES,
    MOST_SIZES,
    MOST_TIMES,
    REMEMBERED,
    GraphUses,
    read_uses,
    write_uses,
)

STAGE = InstanceId("inst-1")
ONE, OTHER = Digest("1" * 64), Digest("2" * 64)
WRITER = """
import sys
from pathlib import Path
from pilotlight.worker.graph_uses import write_uses
path, size = Path(sys.argv[1]), int(sys.argv[2])
print("begins", flush=True)
while True:
    write_uses(path, dict.fromkeys(range(1, size), size))
"""


class Plan:
    """What a child asks its restored graphs."""

    news = RestoreNews()

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}


@pytest.fixture
async def background() -> AsyncIterator[Background]:
    made = Background()
    yield made
    assert not made.failed.done()
    await made.stop()


def file_of(folder: Path, digest: Digest = ONE) -> Path:
    return folder / f"{digest}.json"


def test_a_child_tells_what_ran_now_and_then_and_when_the_stage_goes() -> None:
    plans, plan = GraphPlans(), Plan()
    plans._restored[STAGE] = _Restored(cast("Any", plan), plan.news, False, lambda: None, set())
    told: list[tuple[int, dict[int, int]]] = []
    for turn in range(1, 5 * USES_TOLD_AFTER):
        plan.uses = {1: turn, **({8: 2} if turn > 3 * USES_TOLD_AFTER else {})}
        told += [(turn, news.uses) for news in plans.news()]
    assert told == [
        (USES_TOLD_AFTER, {1: USES_TOLD_AFTER}),
        (2 * USES_TOLD_AFTER, {1: USES_TOLD_AFTER}),
        (4 * USES_TOLD_AFTER, {1: 2 * USES_TOLD_AFTER, 8: 2}),
    ]
    plans.drop(STAGE)
    (last,) = plans.news()
    assert (last.instance_id, last.uses) == (STAGE, {1: USES_TOLD_AFTER - 1})
    plans.drop(STAGE)
    assert plans.news() == []


@pytest.mark.anyio
async def test_without_a_folder_memory_alone_remembers(background: Background) -> None:
    uses = GraphUses(background)
    assert await uses.of(ONE) == {}
    uses.add(ONE, {1: 8, 16: 1}, again=False)
    uses.add(ONE, {16: 1}, again=True)
    assert await uses.of(ONE) == {1: 8, 16: 2}
    uses.add(ONE, {16: 100}, again=False)
    assert await uses.of(ONE) == {1: 4, 16: 101}
    for number in range(REMEMBERED):
        uses.add(Digest(f"{number:064}"), {1: 1}, again=False)
    assert await uses.of(ONE) == {}


@pytest.mark.anyio
async def test_workers_of_a_node_add_to_each_others(background: Background, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "uses"
    one, other = GraphUses(background, folder), GraphUses(background, folder)
    one.add(ONE, {1: 100}, again=False)
    await until(lambda: read_uses(file_of(folder)) == {1: 100})
    other.add(ONE, {8: 9}, again=False)
    await until(lambda: read_uses(file_of(folder)) == {1: 50, 8: 9})
    assert await GraphUses(background, folder).of(ONE) == {1: 50, 8: 9}
    assert await one.of(ONE) == {1: 100}, "a start of what it knows does not wait for the file"
    assert await one.of(OTHER) == {}
    assert [path.name for path in folder.iterdir()] == [file_of(folder).name]
    assert stat.S_IMODE(file_of(folder).stat().st_mode) == 0o600


@pytest.mark.anyio
async def test_what_cannot_be_written_stays_in_memory(
    background: Background, tmp_path: Path
) -> None:
    folder = tmp_path / "file"
    folder.write_text("no folder")
    uses = GraphUses(background, folder)
    uses.add(ONE, {1: 8}, again=False)
    await until(lambda: not background._tasks)
    assert await uses.of(ONE) == {1: 8}


@pytest.mark.anyio
async def test_a_start_does_not_wait_for_a_slow_disk(
    background: Background, tmp_path: Path
) -> None:
    os.mkfifo(file_of(tmp_path))  # who opens it waits for a writer
    uses = GraphUses(background, tmp_path)
    assert await uses.of(ONE) == {}
    with file_of(tmp_path).open("wb"):
        await asyncio.sleep(0)  # the thread goes on


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    """Two write at the same time, files of other lengths, until they are killed."""
    path = file_of(tmp_path)
    for _ in range(2):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(path), str(size)], stdout=subprocess.PIPE
            )
            for size in (3, MOST_SIZES)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"begins\n"
        seen = {len(read_uses(path) or ()) for _ in range(300)}
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        assert seen <= {0, 2, MOST_SIZES - 1}
        assert len(read_uses(path) or ()) in (2, MOST_SIZES - 1)
    for number in range(2 * REMEMBERED):
        write_uses(file_of(tmp_path, Digest(f"{number:064}")), {1: 1})
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"{number:064}.json" for number in range(REMEMBERED, 2 * REMEMBERED)]


GARBAGE = [
    b"",
    b"\x00" * 100,
    b"\xff\xfe",
    b'{"\xe6ormat": 1, "uses": {"1": 1}}',
    b"[" * MAX_BYTES,
    b'{"format": 1}',
    b'{"format": 2, "uses": {"1": 1}}',
    b'{"format": 1, "uses": {"1": 1}, "more": ' + b"[" * 9000 + b"]" * 5000 + b"}",
    b'{"format": 1, "uses": {"1": -1}}',
    b'{"format": 1, "uses": {"0": 1}}',
    b'{"format": 1, "uses": {"x": 1}}',
    b'{"format": 1, "uses": {"1": 1.5}}',
    b'{"format": 1, "uses": {"1": 99999999999999999999999}}',
    b'{"format": 1, "uses": {"1": 1}}' + b" " * MAX_BYTES,
    json.dumps({"format": 1, "uses": dict.fromkeys(range(1, MOST_SIZES + 2), 1)}).encode(),
]


@pytest.mark.parametrize("data", GARBAGE)
def test_garbage_is_no_file(tmp_path: Path, data: bytes) -> None:
    file_of(tmp_path).write_bytes(data)
    assert read_uses(file_of(tmp_path)) is None


def test_what_is_no_file_is_none(tmp_path: Path) -> None:
    file_of(tmp_path).mkdir()
    assert read_uses(file_of(tmp_path)) is None
    assert read_uses(tmp_path / "nowhere" / "x.json") is None


@pytest.fixture(scope="module")
def uses_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For all examples of a property. Nothing else lies there: what is too old there goes."""
    return tmp_path_factory.mktemp("uses")


@given(data=st.binary(max_size=200) | st.text(alphabet='{}[]":,01-format uses', max_size=60))
def test_the_reader_raises_nothing(uses_folder: Path, data: Any) -> None:
    path = uses_folder / "garbage.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    found = read_uses(path)
    assert found is None or all(size > 0 and times > 0 for size, times in found.items())


@given(
    place=st.integers(0, 60),
    bit=st.integers(0, 7),
    length=st.integers(0, 61),
)
def test_a_file_that_was_changed_is_read_within_bounds_or_not_at_all(
    uses_folder: Path, place: int, bit: int, length: int
) -> None:
    path = uses_folder / "changed.json"
    write_uses(path, {1: 900, 8: 30, PROMPTS + 512: 7})
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data[:length])
    found = read_uses(path)
    assert found is None or all(
        0 < size < 2 * PROMPTS and 0 < times <= MOST_TIMES for size, times in found.items()
    )


@given(
    uses=st.dictionaries(
        st.integers(1, 2 * PROMPTS - 1), st.integers(0, 2 * MOST_TIMES), max_size=2 * MOST_SIZES
    )
)
def test_what_is_written_is_read_again(uses_folder: Path, uses: dict[int, int]) -> None:
    path = uses_folder / "whole.json"
    write_uses(path, uses)
    assert path.stat().st_size <= MAX_BYTES
    found = read_uses(path)
    assert found is not None
    used = {size: min(times, MOST_TIMES) for size, times in uses.items() if times}
    assert len(found) == min(len(used), MOST_SIZES)
    assert found.items() <= used.items()
    assert min(found.values(), default=0) >= max(
        (times for size, times in used.items() if size not in found), default=0
    )
