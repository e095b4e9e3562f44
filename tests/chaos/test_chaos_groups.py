"""Seeded schedules of what befalls a group of stages before, during and after its first token, and
while one of its workers takes the model over: clients get every token once, nothing stays behind.

``make test-chaos`` goes through 200, ``make test-e2e`` through the first 11: each event once. A
failure names the command that runs its schedule again; ``PILOTLIGHT_CHAOS_LOG=1`` adds a line for
each schedule.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos.checks import END_DEADLINE_S
from chaos.clients import Running, ended, until
from chaos.group_schedules import Event, Moment, Schedule, befalling, come, schedule_of
from chaos.group_system import TIDY_DEADLINE_S, GroupSystem

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.chaos]

SEEDS = os.environ.get("PILOTLIGHT_CHAOS_SEEDS", "")
"""One seed, or the first and the last, instead of all."""
FAST = len(Event)
SCHEDULES = 200
SHARD = 63
"""Schedules of one test: ten minutes."""


def shards() -> list[object]:
    """Ranges of seeds, each with its marks."""
    if SEEDS:
        first, _, last = SEEDS.partition("-")
        return [pytest.param(range(int(first), int(last or first) + 1), id=SEEDS)]
    starts = [0, *range(FAST, SCHEDULES, SHARD)]
    ranges = [
        range(start, end) for start, end in zip(starts, [*starts[1:], SCHEDULES], strict=True)
    ]
    return [
        pytest.param(
            seeds, id=f"{seeds[0]}-{seeds[-1]}", marks=[pytest.mark.e2e] if seeds[-1] < FAST else []
        )
        for seeds in ranges
    ]


@pytest.fixture(scope="module")
def groups(request: pytest.FixtureRequest) -> Iterator[GroupSystem]:
    failed_before = request.session.testsfailed
    system = GroupSystem()
    try:
        asyncio.run(system.calm_down())
        yield system
    finally:
        system.spoiled = request.session.testsfailed > failed_before
        system.close()


def wrong_with(system: GroupSystem, schedule: Schedule, requests: list[Running]) -> list[str]:
    """Every client that stayed has the whole answer, whatever happened; none has a token too
    many.
    """
    problems: list[str] = []
    for one in requests:
        reference = system.reference(one)
        if schedule.event is Event.CLIENTS_LEAVE and one.task.cancelled():
            right = one.answer.begins(reference)
        else:
            right = one.answer.same_as(reference)
        if not right:
            problems.append(f"{one.ask.name}: expected {reference}, got {one.answer}")
    return problems


async def go_through(system: GroupSystem, schedule: Schedule) -> tuple[list[str], int, str]:
    """What went wrong in one schedule, how many requests it had, and what it found."""
    model = system.new_name("group")
    system.ttft_ms = schedule.ttft_ms
    await system.register(model)
    requests = [system.ask(index, model) for index in schedule.asks]
    stages = await come(system, model, schedule.moment, requests)
    await asyncio.sleep(schedule.after_s)
    done = sum(one.task.done() for one in requests)
    async with befalling(system, model, schedule, stages, requests):
        late = await ended(requests, END_DEADLINE_S)
    problems = [f"{one.ask.name} has not ended: {one.answer}" for one in late]
    problems += wrong_with(system, schedule, [one for one in requests if one not in late])
    try:
        await until(lambda: system.astray(model), TIDY_DEADLINE_S, "what serves")
        await system.forget(model)
        await until(system.untidy, TIDY_DEADLINE_S, "what is left behind")
    except AssertionError as error:
        problems.append(str(error))
    return problems, len(requests), f"{len(stages)} stages, {done} requests had ended"


@pytest.mark.parametrize("seeds", shards())
async def test_groups(
    seeds: range, groups: GroupSystem, record_property: Callable[[str, object], None]
) -> None:
    failures: list[str] = []
    asked = 0
    for seed in seeds:
        schedule = schedule_of(seed)
        problems, requests, found = await go_through(groups, schedule)
        asked += requests
        if os.environ.get("PILOTLIGHT_CHAOS_LOG"):
            print(f"seed {seed}: {schedule}; {found}; {problems}", file=sys.__stderr__)
        if problems:
            failures.append(
                f"PILOTLIGHT_CHAOS_SEEDS={seed} python -m pytest {Path(__file__)}: {schedule}; {found}"
            )
            failures += [f"    {one}" for one in problems]
    record_property("groups", {"schedules": len(seeds), "requests": asked})
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


def test_every_event_comes_at_every_moment() -> None:
    """Within the rounds that ``make test-chaos`` goes through several times."""
    schedules = [schedule_of(seed) for seed in range(len(Event) * len(Moment))]
    met = {(one.event, one.moment) for one in schedules}
    assert len(met) == len(schedules)
    assert len(schedules) <= SCHEDULES // 3
