"""What must hold after every fault."""

import asyncio
from collections import Counter
from dataclasses import dataclass

import httpx2
import psycopg

from chaos.clients import Running, ended, until
from chaos.machine_time import OwnTime
from chaos.processes import Fault, Target
from chaos.situations import Scene, Situation, Write
from chaos.system import WORKERS, ChaosSystem
from chaos.tally import TALLY, Cost

END_DEADLINE_S = 60.0
"""For interrupted requests to come to their end."""
HEALTHY_S = 10.0
NOTICED_S = 15.0
"""That a process hangs, and not only pauses."""
SETTLE_S = 15.0
"""For books, usage and events, which are written behind."""
COLD = frozenset({Situation.HELD, Situation.HALF})
"""No instance has been ready yet."""
HELD_STATES = frozenset({"loading", "ready", "draining"})
SERVICES = (
    Target.GATEWAY,
    Target.SCHEDULER,
    Target.CACHE,
    Target.MATERIALIZER,
    Target.LOADER,
    Target.WORKER,
)


@dataclass(frozen=True)
class Allowed:
    """What a fault may cost."""

    gateway_dies: bool = False
    """Clients are cut off, and ask again."""
    instances: int = 0
    """More than were there before: one for a cold model, and one for each that the fault destroys.
    """
    healthy_s: float = HEALTHY_S


async def check(system: ChaosSystem, scene: Scene, allowed: Allowed, cell: str) -> None:
    """Everything, in the order in which a user would notice it."""
    own_time = OwnTime(system.processes)
    healthy = asyncio.create_task(
        until(lambda: _unhealthy(system), allowed.healthy_s, "health", own_time.seconds)
    )
    try:
        retried = await _requests(system, scene, allowed)
        healthy_s = await healthy
    finally:
        healthy.cancel()
    await _writes(system, scene)
    fresh = await _fresh(system, scene)
    await until(
        lambda: _misbilled(system, scene, [*scene.requests, *retried, *fresh], allowed),
        SETTLE_S,
        "usage",
    )
    await _loaded_once(system, scene, allowed)
    await until(lambda: _unbalanced(system), SETTLE_S, "the cache's books")
    await until(lambda: _strays(system), SETTLE_S, "processes")
    await until(lambda: _unsent(system), SETTLE_S, "events")
    TALLY.costs[cell] = _cost(scene, retried, healthy_s)


def _cost(scene: Scene, retried: list[Running], healthy_s: float) -> Cost:
    """What the streams of a scene noticed of its fault: in front of their first token, or after
    it.
    """
    streams = [one.answer for one in scene.requests if one.ask.stream and one.answer.complete]
    waiting = [one.answer for one in retried] + (streams if scene.situation in COLD else [])
    waited = [one.first_token_s for one in waiting if one.first_token_s is not None]
    paused = (
        []
        if scene.situation in COLD
        else [one.pause_s for one in streams if one.pause_s is not None]
    )
    return Cost(healthy_s, max(waited, default=None), max(paused, default=None))


async def _requests(system: ChaosSystem, scene: Scene, allowed: Allowed) -> list[Running]:
    late = await ended(scene.requests, END_DEADLINE_S)
    TALLY.requests += len(scene.requests)
    TALLY.lost += len(late)
    assert not late, f"without an end: {[f'{one.ask.name}: {one.answer}' for one in late]}"
    cut_off = [one for one in scene.requests if not one.answer.complete]
    silent = [one for one in cut_off if "Timeout" in one.answer.broken]
    TALLY.lost += len(silent)
    assert not silent, (
        f"they were not told of the end: {[f'{one.ask.name}: {one.answer}' for one in silent]}"
    )
    for one in scene.requests:
        reference = system.reference(one)
        right = (
            one.answer.same_as(reference) if one.answer.complete else one.answer.begins(reference)
        )
        TALLY.wrong_tokens += not right
        assert right, f"{one.ask.name}: expected {reference}, got {one.answer}"
    if not allowed.gateway_dies:
        TALLY.lost += len(cut_off)
        assert not cut_off, f"lost: {[f'{one.ask.name}: {one.answer}' for one in cut_off]}"
    return [await _again(system, one) for one in cut_off]


async def _again(system: ChaosSystem, cut_off: Running) -> Running:
    """A client whose connection broke asks again, as its library would."""
    TALLY.retried += 1

    async def answers() -> str | None:
        try:
            async with httpx2.AsyncClient(base_url=system.running.url, timeout=2.0) as http:
                ready = await http.get("/readyz")
        except httpx2.HTTPError as error:
            return repr(error)
        return None if ready.status_code == 200 else ready.text

    await until(answers, HEALTHY_S, "the gateway's return", OwnTime(system.processes).seconds)
    again = system.begin(cut_off.ask, cut_off.model)
    late = await ended([again], END_DEADLINE_S)
    fine = not late and again.answer.complete
    TALLY.lost += not fine
    assert fine, f"the retry failed: {again.answer}"
    right = again.answer.same_as(system.reference(again))
    TALLY.wrong_tokens += not right
    assert right, f"the retry gave {again.answer}"
    return again


async def _unhealthy(system: ChaosSystem) -> str | None:
    """Why not everything is as it should be: every process there, ready by its own socket, every
    worker's engine up.
    """
    census = system.processes.census()
    missing = system.census - census
    if missing:
        return f"missing: {dict(missing)}"
    for target in SERVICES:
        for found in system.processes.of(target):
            complaint = await system.socket_says(target.value, found.pid)
            if complaint is not None:
                return complaint
    try:
        async with httpx2.AsyncClient(base_url=system.running.url, timeout=2.0) as http:
            ready = await http.get("/readyz")
        if ready.status_code != 200:
            return f"gateway: {ready.text}"
        workers = await system.view("workers")
    except (httpx2.HTTPError, AssertionError) as error:
        return f"gateway: {error!r}"
    up = [one for one in workers if one["engine_up"] and one["liveness"] == "alive"]
    return None if len(up) == WORKERS else f"{len(up)} workers are up: {workers}"


async def _fresh(system: ChaosSystem, scene: Scene) -> list[Running]:
    """A request that begins when all is over: to the model of the scene, which may be loaded or
    not.
    """
    fresh = [system.ask(index, scene.model) for index in (0, 3)]
    late = await ended(fresh, END_DEADLINE_S)
    assert not late, "a fresh request did not end"
    for one in fresh:
        assert one.answer.same_as(system.reference(one)), f"a fresh request gave {one.answer}"
    return fresh


async def _misbilled(
    system: ChaosSystem, scene: Scene, requests: list[Running], allowed: Allowed
) -> str | None:
    rows = await system.query(
        "SELECT request_id, status, output_tokens FROM gateway.usage WHERE model = %s AND id > %s",
        scene.model,
        scene.before.usage_id,
    )
    counts = Counter(row[0] for row in rows)
    if any(count > 1 for count in counts.values()):
        return f"billed twice: {counts}"
    billed = {row[0]: (row[1], row[2]) for row in rows}
    for one in requests:
        if one.answer.complete and billed.get(one.answer.request_id) != (
            "ok",
            one.answer.usage_tokens,
        ):
            # What a gateway has not written when it is killed is gone with it: in the client's
            # favour.
            if (
                allowed.gateway_dies
                and one in scene.requests
                and one.answer.request_id not in billed
            ):
                continue
            return f"{one.answer} is billed as {billed.get(one.answer.request_id)}"
    strangers = set(billed) - {one.answer.request_id for one in system.asked}
    return (
        f"billed, and of no request: {strangers}"
        if strangers and not allowed.gateway_dies
        else None
    )


async def _loaded_once(system: ChaosSystem, scene: Scene, allowed: Allowed) -> None:
    rows = await system.query(
        "SELECT instance_id, state, body->>'reason' FROM scheduler.instances WHERE model = %s ORDER BY created_at",
        scene.model,
    )
    new = [row for row in rows if row[0] not in scene.before.instances]
    assert len(new) <= allowed.instances, (
        f"{len(new)} instances were started, {allowed.instances} are justified: {new}"
    )
    alive = [row for row in rows if row[1] not in ("gone", "failed")]
    assert len(alive) <= 1, f"at the same time: {alive}"
    twice = {instance_id: count for instance_id, count in system.stage_loads().items() if count > 1}
    assert not twice, f"loaded more than once: {twice}"


async def _unbalanced(system: ChaosSystem) -> str | None:
    """Every grant belongs to a stage that is held, and the other way round."""
    try:
        grants = {
            (row[0], row[1])
            for row in await system.query("SELECT instance_id, worker_id FROM cache.grants")
        }
        workers = await system.view("workers")
    except (psycopg.Error, httpx2.HTTPError) as error:
        return repr(error)
    held = {
        (stage["instance_id"], worker["worker_id"])
        for worker in workers
        for stage in worker["held"]
        if stage["state"] in HELD_STATES
    }
    return (
        None
        if grants == held
        else f"granted and not held: {grants - held}; held and not granted: {held - grants}"
    )


async def _strays(system: ChaosSystem) -> str | None:
    orphans = system.processes.orphans()
    if orphans:
        return f"orphans: {orphans}"
    surplus = system.processes.census() - system.census
    if surplus:
        return f"too many: {dict(surplus)}"
    crowds = system.processes.crowds()
    return f"too many engines: {crowds}" if crowds else None


async def _unsent(system: ChaosSystem) -> str | None:
    for owner in ("gateway", "scheduler", "cache", "materializer"):
        left = (await system.query(f"SELECT count(*) FROM {owner}.outbox"))[0][0]
        if left:
            return f"{left} events of {owner} are not sent"
    return None


# Admin writes.


async def _writes(system: ChaosSystem, scene: Scene) -> None:
    """Each happened wholly or not at all; one that was confirmed happened; each can be repeated."""
    if not scene.writes:
        return
    await asyncio.wait([write.task for write in scene.writes], timeout=END_DEADLINE_S)
    for write in scene.writes:
        assert write.task.done(), f"{write.kind} of {write.name} has no end"
        await _whole(system, write)
    await _usable(system, [write for write in scene.writes if write.kind == "register"])
    for write in scene.writes:
        await system.forget(write.name)


async def _whole(system: ChaosSystem, write: Write) -> None:
    succeeded = write.succeeded
    found = await system.admin("GET", f"/models/{write.name}")
    assert found.status_code in (200, 404), found.text
    there = found.status_code == 200
    match write.kind:
        case "register":
            assert there or not succeeded, f"{write.name} was registered, and is not there"
            again = await system.admin("POST", "/models", json=write.body)
            assert again.status_code == (409 if there else 201), again.text
        case "pin":
            assert there, f"{write.name} is gone"
            assert found.json()["pinned"] or not succeeded, f"{write.name} was pinned, and is not"
            again = await system.admin("PATCH", f"/models/{write.name}", json=write.body)
            assert again.status_code == 200, again.text
            assert again.json()["pinned"]
        case _:
            assert not (there and succeeded), f"{write.name} was deleted, and is there"
            again = await system.admin("DELETE", f"/models/{write.name}")
            assert again.status_code == (204 if there else 404), again.text


async def _usable(system: ChaosSystem, registered: list[Write]) -> None:
    """What is registered after a fault can be served: its manifest and text are where its row
    says.
    """
    asked = [system.ask(0, write.name) for write in registered]
    late = await ended(asked, END_DEADLINE_S)
    assert not late, "a model that was registered under a fault does not answer"
    for one in asked:
        assert one.answer.same_as(system.reference(one)), f"{one.model}: {one.answer}"


def justified(target: Target, situation: Situation, fault: Fault) -> Allowed:
    """What a fault may cost.

    A cold model needs one instance. Another one is needed where the first is destroyed: its engine
    or worker killed, or its worker silent for longer than a dead one is waited for. A stopped
    engine belongs to a worker that still speaks for it, until it has been stopped for too long.
    """
    cold = situation in COLD
    destroys = target is Target.WORKER or (
        target is Target.ENGINE and fault in (Fault.KILL, Fault.HANG)
    )
    gateway_dies = target is Target.GATEWAY and fault is not Fault.STOP
    # No request waits while the gateway is away, so the cold start may be cancelled; it begins anew
    # when the clients ask again.
    cancelled = gateway_dies and cold
    # What it has promised and not written ends the start that was written meanwhile, before any of
    # it is commanded.
    promised = target is Target.CACHE and cold
    healthy_s = HEALTHY_S + NOTICED_S if fault is Fault.HANG else HEALTHY_S
    return Allowed(
        gateway_dies=gateway_dies,
        instances=int(cold) + int(destroys) + int(cancelled) + int(promised),
        healthy_s=healthy_s,
    )
