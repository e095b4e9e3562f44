"""Seeded schedules of what befalls a group of stages before, during and after its first token,
while its workers take the model over, and when it has become one instance or several: clients get
every token once, nothing stays behind.

``make test-chaos`` goes through 236, ``make test-e2e`` through the first 11: each event of a round
once. From 200 on one stage of a group is evicted, and from 212 on a group becomes a shorter
pipeline, for no worker has room for all.

A failure names the command that runs its schedule again; ``PILOTLIGHT_CHAOS_LOG=1`` adds a line for
each schedule. ``make test-chaos-groups`` goes through the seeds that it is given, notes each in a
file, and leaves out those that stand there: so a run goes on where it was ended.
"""

import asyncio
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos.checks import END_DEADLINE_S
from chaos.clients import Running, ended, until
from chaos.group_runs import Gone, GroupKeeper, Lines
from chaos.group_schedules import (
    EVICTIONS,
    FIRST,
    LAST,
    ROUND,
    SCHEDULES,
    Event,
    Moment,
    Schedule,
    befalling,
    come,
    schedule_of,
)
from chaos.group_system import TIDY_DEADLINE_S, GroupSystem

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.chaos]

SEEDS = os.environ.get("PILOTLIGHT_CHAOS_SEEDS", "")
"""One seed, or the first and the last, instead of all."""
FAST = len(ROUND)
TOLD = "31545b398e54f37d"
"""What the first 200 seeds say, in few letters."""
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
def groups() -> Iterator[GroupKeeper]:
    keeper = GroupKeeper()
    yield keeper
    keeper.close()


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


async def go_through(system: GroupSystem, schedule: Schedule) -> Gone:
    """One schedule."""
    began_s = time.monotonic()
    moved_before, with_kv_before = system.requests_moved(), system.kv_came()
    evicted_before = system.evicted
    model = system.new_name("group")
    system.ttft_ms, system.max_instances = schedule.ttft_ms, schedule.instances
    await system.register(model)
    requests = [system.ask(index, model) for index in schedule.asks]
    stages = await come(system, model, schedule.moment, requests)
    await asyncio.sleep(schedule.after_s)
    done = sum(one.task.done() for one in requests)
    async with befalling(system, model, schedule, stages, requests):
        late = await ended(requests, END_DEADLINE_S)
    problems = [f"{one.ask.name} has not ended: {one.answer}" for one in late]
    decided: Counter[str] = Counter()
    problems += wrong_with(system, schedule, [one for one in requests if one not in late])
    try:
        await until(lambda: system.astray(model), TIDY_DEADLINE_S, "what serves")
        decided = await system.decided(model)
        await system.forget(model)
        await until(system.untidy, TIDY_DEADLINE_S, "what is left behind")
    except AssertionError as error:
        problems.append(str(error))
    return Gone(
        schedule=schedule,
        stages=len(stages),
        requests=len(requests),
        ended_before=done,
        moved=system.requests_moved() - moved_before,
        with_kv=system.kv_came() - with_kv_before,
        starts=decided["cold_start"],
        repairs=decided["repair"],
        evicted=system.evicted - evicted_before,
        took_s=time.monotonic() - began_s,
        problems=tuple(problems),
    )


@pytest.mark.parametrize("seeds", shards())
async def test_groups(
    seeds: range, groups: GroupKeeper, record_property: Callable[[str, object], None]
) -> None:
    failures: list[str] = []
    lines = Lines(os.environ.get("PILOTLIGHT_CHAOS_LINES", ""))
    ran = [seed for seed in seeds if seed not in lines.seeds]
    asked = moved = 0
    for seed in ran:
        schedule = schedule_of(seed)
        gone = await go_through(await groups.system(schedule.workers), schedule)
        lines.add(gone)
        asked, moved = asked + gone.requests, moved + gone.moved
        if os.environ.get("PILOTLIGHT_CHAOS_LOG"):
            print(f"seed {seed}: {gone}; {gone.problems}", file=sys.__stderr__)
        if gone.problems:
            # What is wrong with it must not be found again in each schedule that follows.
            groups.spoil()
            failures.append(
                f"PILOTLIGHT_CHAOS_SEEDS={seed} python -m pytest {Path(__file__)}: {gone}"
            )
            failures += [f"    {one}" for one in gone.problems]
    record_property("groups", {"schedules": len(ran), "requests": asked, "moved": moved})
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


def test_every_event_comes_at_every_moment_to_each_end() -> None:
    """To the stage that leads and to the last one, within what ``make test-chaos`` goes through."""
    pairs = len(ROUND) * len(Moment)
    for start, end in ((0, 0.0), (pairs, LAST)):
        schedules = [schedule_of(seed) for seed in range(start, start + pairs)]
        assert len({(one.event, one.moment) for one in schedules}) == pairs
        assert {one.at for one in schedules} == {end}
    assert 3 * pairs <= FIRST
    evictions = [schedule_of(seed) for seed in range(FIRST, FIRST + EVICTIONS)]
    assert {one.event for one in evictions} == {Event.STAGE_EVICTED}
    assert len({(one.moment, one.at) for one in evictions}) == EVICTIONS


def test_every_event_comes_to_each_end_of_a_group_that_becomes_a_shorter_pipeline() -> None:
    schedules = [schedule_of(seed) for seed in range(FIRST + EVICTIONS, SCHEDULES)]
    assert {one.workers for one in schedules} == {2}
    assert len({(one.event, one.at) for one in schedules}) == 2 * len(Event) == len(schedules)
    assert {one.moment for one in schedules} == set(Moment) - {Moment.SHARED_OUT}
    for event in Event:
        assert len({one.moment for one in schedules if one.event is event}) == 2


def test_what_a_seed_says_stays() -> None:
    """Runs of the first ones are written down, by their seeds."""
    schedules = [schedule_of(seed) for seed in range(FIRST)]
    told = [
        (one.ttft_ms, one.asks, one.moment.name, one.after_s, one.event.name, one.at, one.instances)
        for one in schedules
    ]
    assert hashlib.sha256(repr(told).encode()).hexdigest()[:16] == TOLD
    assert {one.workers for one in schedules} == {1}


def test_a_group_becomes_several_where_that_is_waited_for() -> None:
    schedules = [schedule_of(seed) for seed in range(FIRST + EVICTIONS)]
    for one in schedules:
        assert one.instances == 1 or len(one.asks) > 1, "one request makes no second instance"
        assert one.instances > 1 or one.moment is not Moment.SHARED_OUT
    others = {one.instances for one in schedules if one.moment is Moment.MIGRATION}
    assert len(others) == 2, "it migrates to one worker, and to several"


def test_a_run_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    gone = Gone(
        schedule=schedule_of(7),
        stages=3,
        requests=2,
        ended_before=0,
        moved=1,
        with_kv=1,
        starts=1,
        repairs=0,
        evicted=0,
        took_s=10.0,
        problems=("lost",),
    )
    Lines(str(path)).add(gone)
    assert Lines(str(path)).seeds == {7}
    (line,) = map(json.loads, path.read_text().splitlines())
    assert (line["seed"], line["problems"], line["moved"]) == (7, ["lost"], 1)
    assert Lines("").seeds == set()
