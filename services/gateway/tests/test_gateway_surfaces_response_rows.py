"""Responses in the database: whose they are, how many, and what they may hold."""

import msgspec
import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.common.db.session import Database
from pilotlight.common.errors import NotFound
from pilotlight.gateway.admin.testing import database_away
from pilotlight.gateway.schema.requests import ChatMessage
from pilotlight.gateway.schema.responses import InputItem, Response, ResponseText
from pilotlight.gateway.surfaces.responses import store
from pilotlight.gateway.surfaces.responses.store import (
    ResponseRepository,
    StoredResponse,
    WaitingRoom,
)

pytestmark = pytest.mark.anyio


def stored(number, text="hello \x00 😀"):
    response = Response(
        id=f"resp_{number}",
        created_at=1,
        status="completed",
        instructions=None,
        max_output_tokens=None,
        model="fox",
        output=[],
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning={"effort": None},
        store=True,
        temperature=1.0,
        text=ResponseText(),
        tool_choice="auto",
        tools=[],
        top_p=1.0,
        user=None,
        metadata={},
    )
    return StoredResponse(
        response=response,
        items=msgspec.Raw(msgspec.json.encode([InputItem(role="user", content=text)])),
        messages=msgspec.Raw(msgspec.json.encode([ChatMessage(role="user", content=text)])),
        answer=ChatMessage(role="assistant", content=text),
    )


@pytest.fixture
async def clock():
    return ManualClock()


@pytest.fixture
async def repository(database_settings, clock):
    database = Database(database_settings("gateway"), "gateway", clock)
    yield ResponseRepository(database, clock, max_per_key=3)
    await database.stop()


async def test_what_is_stored_comes_back_to_its_key_alone(repository):
    one = stored(1)
    assert await repository.put("key-a", one)
    kept = await repository.get("key-a", "resp_1")
    assert (kept.response, kept.answer) == (one.response, one.answer)
    assert kept.asked() == one.asked()
    assert kept.conversation() == one.conversation()
    assert [turn.role for turn in kept.conversation()] == ["user", "assistant"]
    for ask in (repository.get, repository.remove):
        with pytest.raises(NotFound):
            await ask("key-b", "resp_1")
    await repository.remove("key-a", "resp_1")
    with pytest.raises(NotFound):
        await repository.get("key-a", "resp_1")


async def test_the_newest_of_a_key_are_kept(repository, clock):
    await repository.put("key-b", stored("other"))
    for number in range(6):
        clock.advance(1)
        assert await repository.put("key-a", stored(number))
    kept = []
    for number in range(6):
        try:
            kept.append((await repository.get("key-a", f"resp_{number}")).response.id)
        except NotFound:
            continue
    assert kept == ["resp_3", "resp_4", "resp_5"]
    assert await repository.get("key-b", "resp_other")


async def test_a_long_one_is_not_stored(repository, monkeypatch):
    monkeypatch.setattr(store, "MAX_STORED_BYTES", 10_000)
    assert not await repository.put("key-a", stored(1, "x" * 10_000))
    with pytest.raises(NotFound):
        await repository.get("key-a", "resp_1")


async def test_a_database_that_is_away_costs_the_storing_alone(repository, module_database):
    with database_away(module_database):
        assert not await repository.put("key-a", stored(1))
    assert await repository.put("key-a", stored(1))


async def test_what_is_kept_while_answers_are_made_is_bounded():
    room = WaitingRoom(100)
    assert room.take(60)
    assert not room.take(60)
    assert room.take(40)
    room.release(60)
    assert room.take(60)
    assert not WaitingRoom().take(store.MAX_STORED_BYTES + 1)
