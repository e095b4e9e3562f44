"""Builds that wait for room: they are seen, and are no tries."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, delete, insert, text
from sqlalchemy.pool import NullPool

from pilotlight.common.bus import Bus
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.messages.artifacts import (
    ASK_MATERIALS_SUBJECT,
    CLAIM_BUILD_SUBJECT,
    END_BUILD_SUBJECT,
    MATERIALIZE_SUBJECT,
    AskMaterials,
    BuildClaimed,
    BuildFact,
    BuildHeard,
    ClaimBuild,
    EndBuild,
    Materialize,
    Materials,
)
from pilotlight.policy.builds import needed_bytes
from pilotlight.policy.ids import ModelName, WorkerId
from pilotlight.policy.testing import environment, model

pytestmark = pytest.mark.anyio

DEADLINE_S = 5.0
HERE, MODEL = environment(), model("a")
TWIN = replace(MODEL, name=ModelName("twin"))
"""The same checkpoint by another name."""
NEEDED = needed_bytes(MODEL, HERE)


@dataclass(kw_only=True)
class Rig:
    """A materializer, and workers that ask it."""

    bus: Bus

    async def claim(
        self, leased_bytes: int | None, room_bytes: int = NEEDED, worker_id: str = "w1"
    ) -> BuildClaimed:
        message = ClaimBuild(
            worker_id=WorkerId(worker_id),
            environment=HERE,
            room_bytes=room_bytes,
            leased_bytes=leased_bytes,
        )
        return await self.bus.request(
            CLAIM_BUILD_SUBJECT, message, BuildClaimed, deadline_s=DEADLINE_S
        )

    async def ask(self, name: ModelName = MODEL.name) -> None:
        message = Materialize(model=name)
        await self.bus.request(MATERIALIZE_SUBJECT, message, Materials, deadline_s=DEADLINE_S)

    async def build(self) -> BuildFact | None:
        message = AskMaterials(model=MODEL.name)
        found = await self.bus.request(
            ASK_MATERIALS_SUBJECT, message, Materials, deadline_s=DEADLINE_S
        )
        assert len(found.builds) <= 1
        return found.builds[0] if found.builds else None

    async def end(self, claimed: BuildClaimed, **changes: Any) -> bool:
        assert claimed.build is not None
        message = EndBuild(
            fingerprint=claimed.build.fingerprint.digest,
            worker_id=WorkerId("w1"),
            attempt=claimed.build.attempt,
            **changes,
        )
        heard = await self.bus.request(
            END_BUILD_SUBJECT, message, BuildHeard, deadline_s=DEADLINE_S
        )
        return heard.yours


@pytest.fixture
async def rig(running: Any, module_database: URL) -> AsyncIterator[Rig]:
    engine = create_engine(module_database, poolclass=NullPool)
    now = {"created_at": text("now()"), "updated_at": text("now()")}
    rows = [
        {"name": one.name, "digest": one.digest, "body": to_row_json(one), **now}
        for one in (MODEL, TWIN)
    ]
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE materializer.builds, materializer.wants"))
        connection.execute(delete(tables.models))
        connection.execute(insert(tables.models).values(rows))
    async with running() as (context, _):
        yield Rig(bus=context.bus)
    engine.dispose()


async def test_a_worker_is_told_what_room_a_build_takes_and_claims_it_when_it_has_that(
    rig: Rig,
) -> None:
    assert await rig.claim(0) == BuildClaimed()
    assert await rig.build() is None, "nothing is wanted"
    await rig.ask()
    for leased_bytes in (0, NEEDED - 1):
        assert await rig.claim(leased_bytes) == BuildClaimed(needed_bytes=NEEDED)
        fact = await rig.build()
        assert fact is not None
        assert (fact.state, fact.attempt, fact.worker_id) == ("waiting", 0, "w1")
        assert fact.reason.startswith(f"no_room: waiting for room: {NEEDED} bytes of w1")
    claimed = await rig.claim(NEEDED)
    assert claimed.build is not None
    assert claimed.build.attempt == 1, "to wait was no try"
    fact = await rig.build()
    assert fact is not None
    assert (fact.state, fact.reason) == ("building", "")
    assert await rig.claim(0, worker_id="w2") == BuildClaimed(), "it is another's"


async def test_one_for_which_no_worker_could_have_room_says_so(rig: Rig) -> None:
    await rig.ask()
    assert await rig.claim(0, NEEDED - 1) == BuildClaimed(needed_bytes=NEEDED)
    fact = await rig.build()
    assert fact is not None
    assert fact.reason.endswith(f"{NEEDED} bytes of w1, which could have {NEEDED - 1}")
    assert await rig.claim(0, NEEDED - 2, "w2") == BuildClaimed(needed_bytes=NEEDED)
    fact = await rig.build()
    assert fact is not None
    assert (fact.attempt, fact.worker_id) == (0, "w2")


async def test_one_checkpoint_of_two_names_waits_once(rig: Rig) -> None:
    await rig.ask()
    await rig.ask(TWIN.name)
    assert await rig.claim(0, NEEDED - 1) == BuildClaimed(needed_bytes=NEEDED)
    fact = await rig.build()
    assert fact is not None
    assert fact.state == "waiting"


async def test_a_build_that_gives_its_room_back_is_taken_up_again(rig: Rig) -> None:
    await rig.ask()
    claimed = await rig.claim(NEEDED)
    assert await rig.end(claimed, yielded=True, code="no_room", message="the pool is full")
    fact = await rig.build()
    assert fact is not None
    assert (fact.state, fact.reason) == ("waiting", "no_room: the pool is full")
    assert not await rig.end(claimed, yielded=True), "once"
    assert await rig.claim(0) == BuildClaimed(needed_bytes=NEEDED)
    assert (await rig.claim(NEEDED)).build is not None


async def test_one_that_failed_waits_for_room_when_it_is_asked_for_again(rig: Rig) -> None:
    await rig.ask()
    claimed = await rig.claim(NEEDED)
    assert await rig.end(claimed, code="engine_failed", message="it fell over")
    assert await rig.claim(0) == BuildClaimed(), "its pause is not over"
    fact = await rig.build()
    assert fact is not None
    assert fact.state == "failed"
    await rig.ask()
    assert await rig.claim(0) == BuildClaimed(needed_bytes=NEEDED)
    fact = await rig.build()
    assert fact is not None
    assert (fact.state, fact.attempt) == ("waiting", 1)
    again = await rig.claim(NEEDED)
    assert again.build is not None
    assert again.build.attempt == 2


async def test_a_release_that_leases_nothing_is_given_a_build_at_once(rig: Rig) -> None:
    await rig.ask()
    assert (await rig.claim(None)).build is not None
