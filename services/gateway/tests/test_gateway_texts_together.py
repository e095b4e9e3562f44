"""Short prompts that a text helper is handed together."""

import asyncio
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import QueueFull, TextFailed
from pilotlight.common.testing import until
from pilotlight.common.waiting import pause
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.testing import RESERVED_HELPERS
from pilotlight.gateway.texts import helper as helper_module
from pilotlight.gateway.texts import pool
from pilotlight.gateway.texts.frames import Chat, Conversation, Encoded, encoded, header
from pilotlight.gateway.texts.helper import Helper
from pilotlight.gateway.texts.pool import TOGETHER, TOGETHER_IN_LINE, HelperPool
from pilotlight.gateway.texts.process import HelperProcess, _Line
from pilotlight.gateway.texts.texts import build_texts
from pilotlight.text.bundle import TextBundle
from pilotlight.text.testing import byte_level_json

TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
ENDLESS = (
    "{% if messages[0].content == 'boom' %}{{ range(100000)|batch(1)|sum(start=[])|length }}{% endif %}"
    + TEMPLATE
)


def bundle_of(template: str) -> TextBundle:
    return TextBundle(
        tokenizer_json=byte_level_json(),
        chat_template=template,
        special_tokens={"eos_token": "</s>"},
    )


def job(world: Any, content: str) -> Chat:
    return Chat(
        digest=world.entry.model.text_digest,
        model="fox",
        context_tokens=1_000_000,
        conversation=Conversation([{"role": "user", "content": content}], None),
    )


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[tuple[str, int]]]]:
    """What was handed over: to which helper, for whom, how many bytes each."""
    seen: list[tuple[int, list[tuple[str, int]]]] = []
    begin = HelperPool._begin

    def begins(self: HelperPool, jobs: list[Any], helper: HelperProcess) -> None:
        begin(self, jobs, helper)
        seen.append((id(helper), [(each.lane.owner, len(each.data)) for each in jobs]))

    monkeypatch.setattr(HelperPool, "_begin", begins)
    return seen


async def test_prompts_of_one_turn_go_together(make_world, begun):
    world = await make_world(text=bundle_of(TEMPLATE))
    await world.texts.encode(job(world, "hello"), "one")
    begun.clear()
    contents = [f"prompt {number} " + "x" * (97 * number % 1500) for number in range(60)]
    owners = [("one", "another")[number % 7 == 0] for number in range(60)]
    found = await asyncio.gather(
        *(
            world.texts.encode(job(world, content), owner)
            for content, owner in zip(contents, owners, strict=True)
        )
    )
    assert found == [
        world.tokenizer.encode(f"[{content}]", add_special_tokens=False) for content in contents
    ]
    assert sum(len(jobs) for _, jobs in begun) == 60
    assert max(len(jobs) for _, jobs in begun) > 2
    for _, jobs in begun:
        assert len({owner for owner, _ in jobs}) == 1
        assert len(jobs) <= TOGETHER
        assert len(jobs) == 1 or sum(size for _, size in jobs) <= pool.TOGETHER_BYTES


async def test_of_a_line_more_go_together(make_world, begun):
    """An answer is taken once in a turn of the loop, however long that turn is."""
    world = await make_world(text=bundle_of(TEMPLATE + "{# of a line #}"), text_helpers=2)
    await world.texts.encode(job(world, "hello"), "one")
    begun.clear()
    found = await asyncio.gather(
        *(world.texts.encode(job(world, f"{number}"), "one") for number in range(400))
    )
    assert found[7] == world.tokenizer.encode("[7]", add_special_tokens=False)
    sizes = [len(jobs) for _, jobs in begun]
    assert sum(sizes) == 400
    assert TOGETHER < max(sizes) <= TOGETHER_IN_LINE
    assert sizes[-1] <= TOGETHER, "the end of a line is shared out again"


async def test_a_bundle_is_brought_once_to_each_helper(make_world, monkeypatch):
    """Though many prompts come at once for a model that no helper has met."""
    given: list[HelperProcess] = []
    begin = HelperProcess.begin

    def begins(self: HelperProcess, frames: list[bytes], *more: Any) -> None:
        if any(b"give" in frame[:16] for frame in frames):
            given.append(self)
        begin(self, frames, *more)

    monkeypatch.setattr(HelperProcess, "begin", begins)
    world = await make_world(text=bundle_of(TEMPLATE + "{# new #}"), text_helpers=3)
    await until(lambda: len(world.texts._pool._idle) == 4)
    encoding = [world.texts.encode(job(world, f"{number}"), "one") for number in range(40)]
    assert all(await asyncio.gather(*encoding))
    assert given
    assert len(given) == len({id(one) for one in given})


async def test_a_helper_that_has_let_go_of_a_bundle_is_given_it_again(make_world):
    world = await make_world(text=bundle_of(TEMPLATE + "{# gone #}"), text_helpers=3)
    await until(lambda: len(world.texts._pool._idle) == 4)
    for helper in world.texts._pool._idle:
        helper.held.add(world.entry.model.text_digest)
    encoding = [world.texts.encode(job(world, f"{number}"), "one") for number in range(5)]
    assert all(await asyncio.gather(*encoding))


async def test_what_ends_a_helper_fails_alone(make_world, begun):
    """Prompts that it had with them are done again, each by itself."""
    world = await make_world(text=bundle_of(ENDLESS), text_short_timeout_s=2.0)
    await world.texts.encode(job(world, "hello"), "one")
    begun.clear()
    contents = ["first", "boom", "second", "third"]
    found = await asyncio.gather(
        *(world.texts.encode(job(world, content), "one") for content in contents),
        return_exceptions=True,
    )
    assert len(begun[0][1]) == 4
    assert {len(jobs) for _, jobs in begun[1:]} == {1}
    assert [type(one) for one in found] == [list, TextFailed, list, list]
    world.texts._strikes.check(world.entry.model.text_digest)


@pytest.mark.parametrize("hold_s", [60.0, 0.0], ids=["held", "not held"])
async def test_a_helper_at_work_is_waited_for(make_world, begun, monkeypatch, hold_s):
    """By prompts of the same client and model, and not by others."""
    monkeypatch.setattr(pool, "HOLD_S", hold_s)
    world = await make_world(text=bundle_of(TEMPLATE), text_helpers=3)
    await until(lambda: len(world.texts._pool._idle) == 4)
    for helper in world.texts._pool._idle:
        helper.held.add(world.entry.model.text_digest)
    # Nothing is answered.
    monkeypatch.setattr(HelperProcess, "begin", lambda *_: None)
    waiting: list[asyncio.Task[list[int]]] = []

    async def comes(owner: str) -> list[str]:
        """Whose prompts are under way when another one has come."""
        waiting.append(asyncio.create_task(world.texts.encode(job(world, "hello"), owner)))
        await pause(0)
        world.texts._pool._begin_soon()
        return [jobs[0][0] for _, jobs in begun]

    assert await comes("one") == ["one"]
    expected = ["one"] if hold_s else ["one", "one"]
    assert await comes("one") == expected
    if hold_s:
        assert await comes("another") == [*expected, "another"]
    for task in waiting:
        task.cancel()


async def test_one_that_hangs_is_not_waited_for_long(make_world):
    world = await make_world(text=bundle_of(ENDLESS), text_helpers=3, text_short_timeout_s=20.0)
    await world.texts.encode(job(world, "hello"), "one")
    hanging = asyncio.create_task(world.texts.encode(job(world, "boom"), "one"))
    await pause(0)
    world.texts._pool._begin_soon()
    assert await world.texts.encode(job(world, "hello"), "one")
    assert not hanging.done()
    hanging.cancel()


async def test_what_waits_for_too_long_is_refused(make_context, tmp_path, world, monkeypatch):
    """Without a helper everything waits."""
    monkeypatch.setattr(pool, "MAX_WAIT_S", 0.0)
    monkeypatch.setattr(pool, "LOOK_S", 0.0)
    settings = GatewaySettings(run_dir=tmp_path)
    texts = build_texts(make_context("gateway", settings), RESERVED_HELPERS)
    with pytest.raises(QueueFull, match="within 0 s"):
        await texts.encode(job(world, "hello"), "one")
    await texts.stop()


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 200), min_size=1, max_size=8),
)
def test_answers_may_come_in_any_parts(sizes: list[int], cuts: list[int]):
    line = _Line()
    heard: list[Any] = []
    line.heard, line.jobs = heard.append, len(sizes)
    replies = [Encoded(bytes([number]) * size) for number, size in enumerate(sizes)]
    data = b"".join(
        header(answer, 1.5) + answer for answer in (encoded(reply) for reply in replies)
    )
    while data:
        assert not heard
        line.data_received(data[: cuts[0]])
        data, cuts = data[cuts[0] :], [*cuts[1:], cuts[0]]
    assert heard == [replies]
    assert line.worked_s == 1.5


class Pieces:
    """A socket on which bytes come in parts, and that knows what had been said by then."""

    def __init__(self, data: bytes, cuts: list[int]) -> None:
        self.left, self.cuts, self.sent = data, cuts, b""

    def recv_into(self, room: Any) -> int:
        part = self.left[: min(len(room), self.cuts[0])]
        self.cuts = [*self.cuts[1:], self.cuts[0]]
        room[: len(part)] = part
        self.left = self.left[len(part) :]
        return len(part)

    def sendall(self, data: bytes) -> None:
        self.sent += data


@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 200), min_size=1, max_size=8),
)
def test_a_helper_reads_exactly_what_was_sent(counts: list[int], cuts: list[int]):
    """And says what it has before it waits."""
    data = bytes(number % 251 for number in range(sum(counts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helper_module, "READ_BYTES", 64)
        pieces: Any = Pieces(data, cuts)
        helper = Helper(pieces, SystemClock(), 1 << 20)
        os.close(helper._sizes)
        got = b""
        for number, count in enumerate(counts):
            got += helper._exactly(count)
            helper._answers.append(b"%d," % number)
        assert got == data
        assert helper._exactly(8) == b""
    assert pieces.sent == b"".join(b"%d," % number for number in range(len(counts)))
