"""What a build measured is taken over from its row, is there for the cache, and gives way to a
start: on a real database.
"""

from typing import Any

import pytest
from sqlalchemy import func, insert, select

from pilotlight.common.clock import wall_offset_s
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import from_row_json, to_row_json
from pilotlight.common.messages.phases import PHASES_SUBJECT, FirstToken, PhaseReport, PhasesKept
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.ids import Digest, ModelName, RequestId
from pilotlight.policy.materialized import PrefillTime, Profile
from pilotlight.policy.phase import Phase, PhaseName
from pilotlight.policy.plan import Estimate
from pilotlight.policy.testing import model
from pilotlight.scheduler.shown import WRITE_EVERY_S
from pilotlight.scheduler.testing import DEADLINE_S, Rig
from pilotlight.scheduler.timing_rows import timings_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
MODEL, NAME, SIM = model(), ModelName("m"), DeviceKind.SIM
BYTES = MODEL.device_bytes(MODEL.spec.whole)
PROFILE = Profile(
    load_bytes_per_s=1e9,
    prefill=(PrefillTime(tokens=16, seconds=0.1),),
    decode=(),
    load_s=4.0,
    init_s=6.0,
    restore_s=2.0,
)


async def listed(rig: Rig, body: dict[str, Any]) -> None:
    """The materializer has written it, and says so."""
    async with rig.owner.unit_of_work() as work:
        await work.connection.execute(
            insert(tables.profiles).values(
                fingerprint=Digest("f" * 64),
                model=NAME,
                device_kind=SIM.value,
                body=body,
                created_at=func.now(),
            )
        )
    await rig.register(MODEL)


async def estimates(rig: Rig) -> list[Estimate]:
    found = await rig.rows(select(tables.estimates).order_by(tables.estimates.c.model))
    return [from_row_json(row.body, Estimate) for row in found]


async def written(rig: Rig, samples: int) -> Estimate:
    """The estimate that the cache reads, once it is of so many starts."""
    found: list[Estimate] = []

    async def look() -> None:
        await rig.later(WRITE_EVERY_S + 1.0)
        found[:] = await estimates(rig)

    await rig.passing(look, lambda: [one for one in found if one.samples == samples])
    return found[0]


async def init_s(rig: Rig) -> float:
    """What the next start takes beside its bytes, by the rows of the scheduler."""
    rows = await rig.rows(select(tables.timings.c.key, tables.timings.c.body))
    return timings_of((row.key, row.body) for row in rows).init_s(NAME, SIM)


async def first_token(rig: Rig, **took_s: float) -> None:
    """A cold start with these phases."""
    ready = await rig.ready()
    now_s, offset_s = rig.clock.monotonic_s(), wall_offset_s(rig.clock)
    phases = tuple(
        Phase(
            name=PhaseName(name),
            start_s=now_s,
            end_s=now_s + seconds,
            wall_offset_s=offset_s,
            process="worker",
        )
        for name, seconds in took_s.items()
    )
    first = FirstToken(
        request_id=RequestId("r"), at_s=now_s + 2, wall_offset_s=offset_s, arrived_s=now_s
    )
    report = PhaseReport(instance_id=ready.instance_id, phases=phases, first_token=first)
    await rig.bus.request(PHASES_SUBJECT, report, PhasesKept, deadline_s=DEADLINE_S)


async def test_a_profile_is_the_estimate_until_a_start_takes_its_place(rig: Rig) -> None:
    await listed(rig, to_row_json(PROFILE))
    offline = await written(rig, samples=0)
    assert (offline.model, offline.device_kind) == (NAME, SIM)
    assert (offline.load_bytes_per_s, offline.init_s) == (BYTES / 4.0, 2.0)
    assert await init_s(rig) == 2.0
    await first_token(rig, restore=0.25, load=0.5)
    shown = await written(rig, samples=1)
    assert shown.init_s == pytest.approx(0.25)
    assert shown.load_bytes_per_s == pytest.approx(BYTES / 0.5)
    assert shown.cold_ttft_s == pytest.approx(2.0)
    assert await init_s(rig) == pytest.approx(0.25)


async def test_a_start_that_was_not_restored_says_what_the_next_one_takes(rig: Rig) -> None:
    await listed(rig, to_row_json(PROFILE))
    await written(rig, samples=0)
    await first_token(rig, init=3.0)
    shown = await written(rig, samples=1)
    assert shown.init_s == pytest.approx(3.0), "not what its profile says of an artifact"
    assert shown.load_bytes_per_s == BYTES / 4.0, "of that it showed nothing"


async def test_a_profile_of_a_release_without_penalties_is_read(rig: Rig) -> None:
    body = to_row_json(PROFILE)
    for name in ("load_s", "init_s", "restore_s"):
        del body[name]
    await listed(rig, body)
    key = f'["model","{NAME}","{SIM}"]'
    learned = select(tables.timings).where(tables.timings.c.key == key)
    found: list[Any] = []

    async def look() -> None:
        await rig.later(WRITE_EVERY_S + 1.0)
        found[:] = await rig.rows(learned)

    await rig.passing(look, lambda: found)
    assert await init_s(rig) == 0.0
    assert await estimates(rig) == []
