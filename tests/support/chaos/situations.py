"""The situations that a fault meets, each reached by events and not by waiting."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx2

from chaos.clients import ASKS, Running, ended, until
from chaos.system import WARM_MODEL, ChaosSystem

ARRANGE_DEADLINE_S = 60.0
STREAMED_TOKENS = 8


class Situation(StrEnum):
    """What goes on when the fault comes."""

    IDLE = "idle"
    HELD = "held"
    HALF = "cold start at 50 %"
    STREAMING = "streaming"
    WRITING = "admin write"
    LOAD = "under load"


@dataclass
class Write:
    """An admin write whose answer may never come."""

    kind: str
    name: str
    body: dict[str, Any]
    task: asyncio.Task[httpx2.Response]

    @property
    def succeeded(self) -> bool:
        """It was told so."""
        return (
            self.task.done()
            and not self.task.cancelled()
            and self.task.exception() is None
            and self.task.result().status_code < 300
        )


@dataclass
class Scene:
    """A situation that has been reached."""

    situation: Situation
    model: str
    before: "Before"
    requests: list[Running] = field(default_factory=list[Running])
    writes: list[Write] = field(default_factory=list[Write])
    worker_id: str | None = None
    """The worker that leads the instance, where there is one."""


@dataclass(frozen=True)
class Before:
    """What there was of the model before the scene began."""

    instances: frozenset[str]
    usage_id: int


async def arrange(system: ChaosSystem, situation: Situation) -> Scene:
    """Bring the system into a situation."""
    return await asyncio.wait_for(_ARRANGE[situation](system), ARRANGE_DEADLINE_S)


async def _before(system: ChaosSystem, model: str) -> Before:
    instances = await system.query(
        "SELECT instance_id FROM scheduler.instances WHERE model = %s", model
    )
    usage = await system.query("SELECT coalesce(max(id), 0) FROM gateway.usage")
    return Before(frozenset(row[0] for row in instances), usage[0][0])


async def _warm(system: ChaosSystem) -> None:
    """Have the warm model loaded: the last fault may have taken it away."""
    warming = system.ask(0, WARM_MODEL)
    assert not await ended([warming], ARRANGE_DEADLINE_S)
    assert warming.answer.same_as(system.reference(warming)), str(warming.answer)


async def _idle(system: ChaosSystem) -> Scene:
    await _warm(system)
    return Scene(
        Situation.IDLE,
        WARM_MODEL,
        await _before(system, WARM_MODEL),
        worker_id=await system.lead_of(WARM_MODEL),
    )


async def _held(system: ChaosSystem) -> Scene:
    model = system.new_name("cold")
    await system.register(model)
    scene = Scene(Situation.HELD, model, await _before(system, model))
    scene.requests = [system.ask(index, model) for index in range(len(ASKS))]
    # A comment is what a held client is sent; the whole answers are held with the streamed ones.
    await asyncio.gather(
        *(
            one.when(lambda answer: bool(answer.comments))
            for one in scene.requests
            if one.ask.stream
        )
    )
    return scene


async def _half(system: ChaosSystem) -> Scene:
    """Half of the bytes are there, and the requests run on the instance that loads, as far as it
    has come.
    """
    scene = await _held(system)
    scene.situation = Situation.HALF
    digest = next(
        one["digest"] for one in await system.view("models") if one["name"] == scene.model
    )

    async def fetched() -> str | None:
        transfers = [
            each
            for node in await system.view("nodes")
            for each in node["transfers"]
            if each["digest"] == digest
        ]
        done, total = (
            sum(each[key] for each in transfers) for key in ("done_bytes", "total_bytes")
        )
        if not total or done / total < 0.5:
            return f"{done} of {total} bytes are fetched"
        held = [
            stage
            for worker in await system.view("workers")
            for stage in worker["held"]
            if stage["digest"] == digest
        ]
        given = sum(stage["in_flight"] for stage in held if stage["state"] == "loading")
        return (
            None if given == len(scene.requests) else f"{given} requests are where it loads: {held}"
        )

    await until(fetched, ARRANGE_DEADLINE_S, "a cold start at 50 %")
    scene.worker_id = await system.lead_of(scene.model)
    return scene


async def _streaming(system: ChaosSystem, requests: int = len(ASKS)) -> Scene:
    await _warm(system)
    scene = Scene(Situation.STREAMING, WARM_MODEL, await _before(system, WARM_MODEL))
    scene.worker_id = await system.lead_of(WARM_MODEL)
    scene.requests = [system.ask(index % len(ASKS), WARM_MODEL) for index in range(requests)]
    streams = [one for one in scene.requests if one.ask.stream]
    await asyncio.gather(
        *(one.when(lambda answer: len(answer.tokens) >= STREAMED_TOKENS) for one in streams)
    )
    return scene


async def _load(system: ChaosSystem) -> Scene:
    scene = await _streaming(system, requests=8)
    scene.situation = Situation.LOAD
    return scene


async def _writing(system: ChaosSystem) -> Scene:
    """Several writes at once: when the first is answered, the others are at whatever point they
    are.
    """
    await _warm(system)
    scene = Scene(Situation.WRITING, WARM_MODEL, await _before(system, WARM_MODEL))
    doomed, pinned = system.new_name("doomed"), system.new_name("pinned")
    await asyncio.gather(system.register(doomed), system.register(pinned))
    new = [system.new_name("new") for _ in range(2)]
    bodies = [system.registration(name, system.copy_model(name)) for name in new]
    calls: list[tuple[str, str, str, str, dict[str, Any]]] = [
        ("register", "POST", "/models", name, body) for name, body in zip(new, bodies, strict=True)
    ]
    calls.insert(1, ("pin", "PATCH", f"/models/{pinned}", pinned, {"pinned": True}))
    calls.append(("delete", "DELETE", f"/models/{doomed}", doomed, {}))
    for kind, method, path, name, body in calls:
        options = {"json": body} if body else {}
        scene.writes.append(
            Write(kind, name, body, asyncio.create_task(system.admin(method, path, **options)))
        )
    await asyncio.wait([write.task for write in scene.writes], return_when=asyncio.FIRST_COMPLETED)
    return scene


_ARRANGE: dict[Situation, Callable[[ChaosSystem], Awaitable[Scene]]] = {
    Situation.IDLE: _idle,
    Situation.HELD: _held,
    Situation.HALF: _half,
    Situation.STREAMING: _streaming,
    Situation.WRITING: _writing,
    Situation.LOAD: _load,
}
