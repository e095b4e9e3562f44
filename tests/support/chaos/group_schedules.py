"""Seeded schedules for a group of stages: what befalls which stage, and when."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from chaos.clients import ASKS, Running
from chaos.cut_links import cut_links
from chaos.group_system import SLO_MS, SOONEST_MS, GroupSystem
from chaos.processes import Found, Target, hold_stopped

FIRST_MOMENT = 4
"""Of the first event: the first round then cuts links and fetches while there are some."""
INSTANCES = 3
"""What a group of which several are wanted may become: each of its workers."""
MOMENT_DEADLINE_S = 30.0
POLL_S = 0.03
DRAIN_S = 3.0
"""For as long a node is kept from use; longer than a start takes to be decided elsewhere."""
STOPPED_S = 1.5
"""Shorter than silence that counts as death: a link that stalls."""


class Moment(StrEnum):
    """What a group has come to when it happens."""

    ASKED = "when its requests were sent"
    FORMED = "when its stages were told"
    FIRST_TOKEN = "when a client has its first token"
    MIGRATION = "while a stage grows"
    ALONE = "when one worker has the whole model, or two have it"
    SHARED_OUT = "when another of its workers is an instance, too"


class Event(StrEnum):
    """What happens."""

    LOADER_DIES = "the stage's loader is killed"
    WORKER_DIES = "the stage's worker is killed"
    ENGINE_DIES = "the stage's engine is killed"
    ENGINE_STALLS = "the stage's engine is stopped for a while"
    LINKS_CUT = "the stage's links to the others are cut"
    FETCHES_CUT = "its node's links to other nodes are cut"
    EVICTED = "an operator evicts the model"
    DRAINED = "the stage's node is drained for a while"
    CLIENTS_LEAVE = "all clients leave"
    SCHEDULER_DIES = "the scheduler is killed"
    CACHE_DIES = "the cache is killed"
    STAGE_EVICTED = "the stage's room is taken, as soon as it has no requests of its own"


ROUND = tuple(event for event in Event if event is not Event.STAGE_EVICTED)
"""What befalls the groups of the first schedules, in turn."""
FIRST = 200
"""Schedules whose groups become what a worker, or each, has room for; all others come behind."""
EVICTIONS = 2 * len(Moment)
"""Schedules behind them in which one stage is evicted: at each moment the one that leads, and the
last one."""
SHORTER_MOMENTS = tuple(one for one in Moment if one is not Moment.SHARED_OUT)
SHORTER = 2 * len(Event)
"""The last schedules: groups that become shorter pipelines; each event twice."""
SCHEDULES = FIRST + EVICTIONS + SHORTER
LAST = 0.999
"""Of ``Schedule.at``: the last stage, of however many."""
SHARED_OUT_SHARE = 0.3
"""Of the schedules at other moments, those whose group is to become several instances."""
_SPREAD_S = {
    Moment.ASKED: 0.4,
    Moment.FORMED: 2.5,
    Moment.FIRST_TOKEN: 0.6,
    Moment.MIGRATION: 2.0,
    Moment.ALONE: 0.6,
    Moment.SHARED_OUT: 0.6,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All that chance decides."""

    seed: int
    ttft_ms: float
    """Decides how many stages a start has."""
    asks: tuple[int, ...]
    """Which of ``ASKS`` are sent, at once."""
    moment: Moment
    after_s: float
    """From the moment on."""
    event: Event
    at: float
    """Which stage, in [0, 1): from the one that leads to the last one."""
    instances: int
    """That the model may have: 1, and the group becomes one worker; more, and it becomes several.
    """
    workers: int = 1
    """On which it lies then: 2, where none has room for all of it."""

    def __str__(self) -> str:
        return (
            f"{self.event.value}, {self.after_s:.2f} s after the moment {self.moment.value!r}, "
            f"stage {self.at:.2f}, TTFT {self.ttft_ms:g} ms, asks {self.asks}, "
            f"{self.instances} instances at most, of {self.workers} workers"
        )


def schedule_of(seed: int) -> Schedule:
    """The schedule of a seed."""
    if seed < FIRST:
        return _first(seed)
    number = seed - FIRST
    return _evicted(seed, number) if number < EVICTIONS else _shorter(seed, number - EVICTIONS)


def _evicted(seed: int, number: int) -> Schedule:
    """One stage of a group is evicted."""
    end, at_moment = divmod(number, len(Moment))
    moment = tuple(Moment)[at_moment]
    rng = random.Random(seed)
    shared_out = moment is Moment.SHARED_OUT or rng.random() < SHARED_OUT_SHARE
    return Schedule(
        seed=seed,
        ttft_ms=rng.choice(SLO_MS),
        asks=_asks(rng, 1 if shared_out else 0),
        moment=moment,
        after_s=rng.uniform(0.0, _SPREAD_S[moment]),
        event=Event.STAGE_EVICTED,
        at=(0.0, LAST)[end],
        instances=INSTANCES if shared_out else 1,
    )


def _shorter(seed: int, number: int) -> Schedule:
    """A group of three that becomes one of two; its start has as many as there are, for nothing is
    soon enough.
    """
    rng = random.Random(seed)
    turn, at_event = divmod(number, len(Event))
    moment = SHORTER_MOMENTS[(number + turn) % len(SHORTER_MOMENTS)]
    return Schedule(
        seed=seed,
        ttft_ms=SOONEST_MS,
        asks=_asks(rng, 0),
        moment=moment,
        after_s=rng.uniform(0.0, _SPREAD_S[moment]),
        event=tuple(Event)[at_event],
        at=(0.0, LAST)[turn % 2],
        instances=1,
        workers=2,
    )


def _asks(rng: random.Random, more: int) -> tuple[int, ...]:
    """One that tells when its first token has come, and as many others at least."""
    first = rng.choice([index for index, ask in enumerate(ASKS) if ask.stream])
    others = [index for index in range(len(ASKS)) if index != first]
    return (first, *rng.sample(others, rng.randint(more, len(others))))


def _first(seed: int) -> Schedule:
    """One of the first schedules.

    1. Events come in turn, each at another moment in the next turn: few schedules have many of
       them, and as many as there are pairs have each event at each moment, once.
    2. Such a round is about the stage that leads, the next one about the last stage, and those
       after it about any.
    """
    rng = random.Random(seed)
    events, moments = ROUND, tuple(Moment)
    turn, number = divmod(seed, len(events))
    moment = moments[(turn + number + FIRST_MOMENT) % len(moments)]  # 1
    ends = (0.0, LAST)
    round_number = seed // (len(events) * len(moments))
    shared_out = moment is Moment.SHARED_OUT or rng.random() < SHARED_OUT_SHARE
    # One at least tells when its first token has come.
    first = rng.choice([index for index, ask in enumerate(ASKS) if ask.stream])
    others = [index for index in range(len(ASKS)) if index != first]
    return Schedule(
        seed=seed,
        ttft_ms=rng.choice(SLO_MS),
        # One request makes no second instance.
        asks=(first, *rng.sample(others, rng.randint(1 if shared_out else 0, len(others)))),
        moment=moment,
        after_s=rng.uniform(0.0, _SPREAD_S[moment]),
        event=events[number],
        at=ends[round_number] if round_number < len(ends) else rng.random(),  # 2
        instances=INSTANCES if shared_out else 1,
    )


async def come(
    system: GroupSystem, model: str, moment: Moment, requests: list[Running]
) -> list[dict[str, Any]]:
    """Wait for a moment, or for the end of all requests; the stages that the model has then.

    Args:
        system: That is asked.
        model: Whose group it is about.
        moment: Which one.
        requests: That the group is to answer.
    """
    stages: list[dict[str, Any]] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(MOMENT_DEADLINE_S):
            while True:
                found = await system.instances(model)
                if found:
                    # A group that became one worker is remembered with all of its stages.
                    now = max((one["placements"] for one in found), key=len)
                    stages = now if len(now) >= len(stages) else stages
                there = _is_there(moment, found, requests, system.workers)
                if there or all(one.task.done() for one in requests):
                    return stages
                await asyncio.sleep(POLL_S)
    return stages


def _is_there(
    moment: Moment, found: list[dict[str, Any]], requests: list[Running], workers: int
) -> bool:
    match moment:
        case Moment.ASKED:
            return True
        case Moment.FORMED:
            return bool(found)
        case Moment.FIRST_TOKEN:
            return any(one.answer.tokens for one in requests)
        case Moment.MIGRATION:
            return any(one["state"] == "consolidating" for one in found)
        case Moment.ALONE:
            return any(
                one["state"] == "ready" and len(one["placements"]) == workers for one in found
            )
        case Moment.SHARED_OUT:
            return any(one["placements"][0]["grown_from"] for one in found)


@asynccontextmanager
async def befalling(
    system: GroupSystem,
    model: str,
    schedule: Schedule,
    stages: list[dict[str, Any]],
    requests: list[Running],
) -> AsyncIterator[None]:
    """Have it happen; what ends by itself has ended when the context is left.

    Args:
        system: To which.
        model: Whose group it is.
        schedule: Says what.
        stages: Of the group; none: a node is taken for a stage's.
        requests: Of the clients.
    """
    workers = await system.view("workers")
    ids = [one["node_id"] for one in stages] or sorted({one["node_id"] for one in workers})
    node_id = ids[int(schedule.at * len(ids))]
    worker = system.worker_at(node_id, workers)
    lasting: list[asyncio.Task[None]] = []
    match schedule.event:
        case Event.LOADER_DIES:
            _kill([found for found in system.processes.of(Target.LOADER) if _is_of(found, worker)])
        case Event.WORKER_DIES:
            _kill([worker] if worker else [])
        case Event.ENGINE_DIES:
            _kill(_engines(system, worker))
        case Event.ENGINE_STALLS:
            stalled = asyncio.to_thread(
                hold_stopped, system.processes, _engines(system, worker), STOPPED_S
            )
            lasting.append(asyncio.create_task(stalled))
        case Event.LINKS_CUT:
            everyone = [one.pid for one in system.processes.of(Target.ENGINE)]
            cut_links([one.pid for one in _engines(system, worker)], everyone)
        case Event.FETCHES_CUT:
            loaders = system.processes.of(Target.LOADER)
            mine = [one.pid for one in loaders if _is_of(one, worker)]
            cut_links(mine, [one.pid for one in loaders])
        case Event.EVICTED:
            answer = await system.admin("POST", f"/models/{model}/evict")
            assert answer.status_code in (202, 409), answer.text
        case Event.DRAINED:
            answer = await system.admin("POST", f"/nodes/{node_id}/drain")
            assert answer.status_code == 202, answer.text
            lasting.append(asyncio.create_task(_use_again(system, node_id)))
        case Event.CLIENTS_LEAVE:
            for one in requests:
                one.task.cancel()
        case Event.SCHEDULER_DIES:
            _kill(system.processes.of(Target.SCHEDULER))
        case Event.CACHE_DIES:
            _kill(system.processes.of(Target.CACHE))
        case Event.STAGE_EVICTED:
            ids = [one["worker_id"] for one in workers if one["node_id"] == node_id]
            lasting += [asyncio.create_task(system.evict_stage(model, one)) for one in ids]
    try:
        yield
    finally:
        await asyncio.gather(*lasting)


def _is_of(loader: Found, worker: Found | None) -> bool:
    """A loader starts the workers of its node."""
    return worker is not None and worker.parent == loader.pid


def _engines(system: GroupSystem, worker: Found | None) -> list[Found]:
    engine = system.engine_at(worker) if worker else None
    return [engine] if engine else []


def _kill(victims: list[Found]) -> None:
    for one in victims:
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)


async def _use_again(system: GroupSystem, node_id: str) -> None:
    await asyncio.sleep(DRAIN_S)
    answer = await system.admin("DELETE", f"/nodes/{node_id}/drain")
    assert answer.status_code in (200, 202, 204), answer.text
