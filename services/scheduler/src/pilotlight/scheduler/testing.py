"""A scheduler's surroundings for tests: a cache, a worker, a loader and a gateway that the test
plays, on a real bus and database.

Time is set by hand: nothing grows old, and no lease of a worker ends, unless a test says so.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import delete, func, insert

from pilotlight.common.bus import Bus
from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.db.session import Database
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import DeadlineExceeded, PilotlightError
from pilotlight.common.messages.demand import DemandVector, demand_subject
from pilotlight.common.messages.events import Event
from pilotlight.common.messages.hold import NodeHold, WorkerHold
from pilotlight.common.messages.phases import PHASES_SUBJECT, FirstToken, PhaseReport, PhasesKept
from pilotlight.common.messages.reports import (
    LoaderReport,
    WorkerReport,
    loader_report_subject,
    worker_report_subject,
)
from pilotlight.common.messages.room import Release, Released, Reserve, Reserved
from pilotlight.common.service import Application
from pilotlight.common.testing import until
from pilotlight.policy.cluster import Copy, HeldStage, HeldState, NodeFacts
from pilotlight.policy.ids import (
    Epoch,
    GatewayId,
    GrantId,
    InstanceId,
    ModelName,
    NodeId,
    RequestId,
    WorkerId,
)
from pilotlight.policy.instance import SERVING
from pilotlight.policy.model import Model
from pilotlight.policy.phase import Moment, Phase, PhaseName
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.policy.request import Demand
from pilotlight.policy.testing import copy, demand, node, worker

GATEWAY = GatewayId("gw-1")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DEADLINE_S = 20.0
"""Far beyond what anything here takes."""
TURN_S = 0.3
"""Longer than the scheduler lets pass between two turns."""
LINK = 10.0
"""Of a fleet's node, bytes a second: a model of 60 bytes takes 6 s over it."""
IDLE_S = 1.0
"""What a fleet's workers say of stages while nothing waits."""


@dataclass
class Rig:
    """The world around the scheduler, and what it was seen to do."""

    bus: Bus
    clock: ManualClock
    owner: Database
    application: Application
    shown: dict[str, Instance | None] = field(default_factory=dict[str, Instance | None])
    states: list[tuple[str, InstanceState | None]] = field(
        default_factory=list[tuple[str, InstanceState | None]]
    )
    worker_hold: WorkerHold | None = None
    node_hold: NodeHold | None = None
    sent: dict[str, Moment | None] = field(default_factory=dict[str, Moment | None])
    """When the last of each was."""
    reserved: list[Reserve] = field(default_factory=list[Reserve])
    released: list[GrantId] = field(default_factory=list[GrantId])
    events: list[Event] = field(default_factory=list[Event])
    refusal: PilotlightError | None = None
    full: Mapping[WorkerId, PilotlightError] = field(
        default_factory=dict[WorkerId, PilotlightError]
    )
    """Workers on which the cache refuses room, and how."""
    promises: bool = False
    """The cache promises room where it may; a test says what becomes of that."""
    remembers: bool = True
    """It knows a grant when it is asked for it again."""
    grants: dict[tuple[InstanceId, WorkerId, int], GrantId] = field(
        default_factory=dict[tuple[InstanceId, WorkerId, int], GrantId]
    )
    answers_from: int = 0
    """The cache answers nobody until it was asked so often."""
    incarnation: str = "a"
    epoch: Epoch = field(default=Epoch(0))
    held: dict[InstanceId, HeldStage] = field(default_factory=dict[InstanceId, HeldStage])
    memory_bytes: int = 1000
    """Of the worker's device."""
    others: tuple[NodeFacts, ...] = ()
    """Nodes beside the worker's own."""
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, predicate: Callable[[], Any], at_most_s: float = DEADLINE_S) -> Any:
        """Wait for something to have been seen."""
        async with asyncio.timeout(at_most_s), self._changed:
            await self._changed.wait_for(predicate)
        return predicate()

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # the parts that are played

    async def on_shown(self, key: str, told: Timed[Instance] | None) -> None:
        """The bucket ``instances`` says so."""
        instance = told.message if told is not None else None
        self.shown[key] = instance
        self.sent["instance"] = told.sent if told is not None else None
        self.states.append((key, instance.state if instance is not None else None))
        await self._note()

    async def on_worker_hold(self, told: Timed[WorkerHold]) -> None:
        """The worker's commands."""
        self.worker_hold, self.sent["worker"] = told.message, told.sent
        self.epoch = self.worker_hold.epoch
        await self._note()

    async def on_node_hold(self, told: Timed[NodeHold]) -> None:
        """The loader's commands."""
        self.node_hold, self.sent["node"] = told.message, told.sent
        await self._note()

    async def on_event(self, event: Event) -> None:
        """What every service may hear."""
        self.events.append(event)
        await self._note()

    async def on_reserve(self, ask: Reserve) -> Reserved:
        """The cache grants what is asked for, or refuses it."""
        self.reserved.append(ask)
        fresh, stage = GrantId(f"grant-{len(self.reserved)}"), (ask.instance_id, ask.worker_id)
        known = self.grants if self.remembers else {}
        grant_id = known.setdefault((*stage, ask.generation), fresh)
        await self._note()
        await self.until(lambda: len(self.reserved) >= self.answers_from)
        refusal = self.full.get(ask.worker_id, self.refusal)
        if refusal is not None:
            raise refusal
        return Reserved(
            grant_id=grant_id,
            evicted_instances=(InstanceId("evicted"),),
            written=not (self.promises and ask.promise),
        )

    async def on_release(self, ask: Release) -> Released:
        """The cache takes a grant back."""
        self.released.append(ask.grant_id)
        await self._note()
        return Released()

    async def report(self) -> None:
        """Every report is a moment later than what went before."""
        self.clock.advance(0.01)
        facts = worker(0, memory_bytes=self.memory_bytes, held_stages=tuple(self.held.values()))
        message = WorkerReport(facts=facts, incarnation=self.incarnation, epoch_seen=self.epoch)
        await self.bus.publish(worker_report_subject(facts.worker_id), message)
        for facts in (
            replace(node(), dataplane_host="10.0.0.1", dataplane_port=7000),
            *self.others,
        ):
            loader = LoaderReport(facts=facts, incarnation="l", epoch_seen=self.epoch)
            await self.bus.publish(loader_report_subject(facts.node_id), loader)

    async def hold(self, instance_id: InstanceId, state: HeldState, **more: Any) -> None:
        """The worker takes up what it was told, and says so."""
        assert self.worker_hold is not None
        order = next(one for one in self.worker_hold.holds if one.instance_id == instance_id)
        self.held[instance_id] = HeldStage(
            instance_id=instance_id,
            generation=order.generation,
            model=order.model.name,
            digest=order.model.digest,
            stage=order.stage,
            state=state,
            device_bytes=order.device_bytes,
            **more,
        )
        await self.report()

    async def demand(self, name: str = "m", waiting: int = 1) -> None:
        """The gateway's demand: one request for a model, or none at all."""
        await self.demands(**({name: 0.1} if waiting else {}))

    async def demands(self, **ages_s: float) -> None:
        """The gateway's whole demand: one request for each model, of that age."""
        demands = tuple(
            replace(demand(name), trace_parent=TRACE, oldest_age_s=age_s)
            for name, age_s in ages_s.items()
        )
        await self.bus.publish(
            demand_subject(GATEWAY), DemandVector(gateway_id=GATEWAY, demands=demands)
        )

    async def later(self, seconds: float) -> None:
        """Let time pass for all services: reports go on, and what is held is held."""
        self.clock.advance(seconds)
        await self.report()

    async def passing(
        self,
        step: Callable[[], Awaitable[None]],
        condition: Callable[[], Any],
        at_most_s: float = 60.0,
    ) -> None:
        """Take a step again and again until a condition holds.

        Between two of them the scheduler has the time for a turn.

        Raises:
            TimeoutError: it did not hold, however often.
        """
        async with asyncio.timeout(at_most_s):
            while True:
                await step()
                with suppress(DeadlineExceeded):
                    return await until(condition, deadline_s=TURN_S)

    async def waited(self, name: str = "m", seconds: float = 0.3) -> None:
        """Let time pass, with a request that waits."""
        await self.later(seconds)
        await self.demand(name)

    async def tried(self, times: int) -> None:
        """Let time pass, with a request that waits, until room was asked for this many times."""
        await self.passing(self.waited, lambda: len(self.reserved) >= times)

    # shorthand

    def instances(self, *states: InstanceState) -> list[Instance]:
        """What is shown in one of these states."""
        return [one for one in self.shown.values() if one is not None and one.state in states]

    async def shown_as(self, state: InstanceState, but: InstanceId | None = None) -> Instance:
        """Wait until an instance is shown in a state; ``but`` is one that does not count."""
        found: list[Instance] = await self.until(
            lambda: [one for one in self.instances(state) if one.instance_id != but]
        )
        return found[0]

    async def ordered(self, instance_id: InstanceId) -> None:
        """Wait until the worker has heard that it is to hold the instance."""

        def told() -> bool:
            return self.worker_hold is not None and any(
                one.instance_id == instance_id for one in self.worker_hold.holds
            )

        await self.until(told)

    async def ready(self) -> Instance:
        """A cold start, all the way."""
        await self.demand()
        instance = await self.shown_as(InstanceState.FETCHING)
        await self.ordered(instance.instance_id)
        await self.hold(instance.instance_id, HeldState.LOADING)
        await self.shown_as(InstanceState.LOADING)
        await self.hold(instance.instance_id, HeldState.READY)
        ready = await self.shown_as(InstanceState.READY)
        await self.demand(waiting=0)
        return ready

    async def rows(self, statement: Any) -> list[Any]:
        """What the database answers."""
        async with self.owner.reading() as connection:
            return list((await connection.execute(statement)).all())

    async def register(self, *models: Model) -> None:
        """These are the models, as the gateway writes them."""
        async with self.owner.unit_of_work() as work:
            await work.connection.execute(delete(tables.models))
            for one in models:
                row = {
                    "name": one.name,
                    "digest": one.digest,
                    "body": to_row_json(one),
                    "created_at": func.now(),
                }
                await work.connection.execute(
                    insert(tables.models).values(**row, updated_at=func.now())
                )
        event = Event(event_id=f"e{len(self.events)}", kind="model_registered", entity="m", at="")
        await self.bus.publish("v1.event.gateway.model_registered", event)


@dataclass
class Fleet:
    """Nodes with a worker each, which hold what they are told to hold."""

    rig: Rig
    links: Mapping[str, float]
    """What each node says of its link, in bytes a second."""
    copies: Mapping[str, str] = field(default_factory=dict[str, str])
    """Models that are whole in host pools, by node."""
    told: dict[WorkerId, WorkerHold] = field(default_factory=dict[WorkerId, WorkerHold])
    state: HeldState = HeldState.LOADING

    async def on_hold(self, hold: WorkerHold) -> None:
        """A worker's command."""
        self.told[hold.worker_id] = hold

    async def later(self, seconds: float = 0.1, **waiting: int) -> None:
        """Let time pass; workers obey and report, the gateway says what waits."""
        self.rig.clock.advance(seconds)
        for at, (name, link) in enumerate(self.links.items()):
            worker_id = WorkerId(f"w{at}")
            told = self.told.get(worker_id)
            stages = tuple(
                HeldStage(
                    instance_id=one.instance_id,
                    generation=one.generation,
                    model=one.model.name,
                    digest=one.model.digest,
                    stage=one.stage,
                    state=self.state,
                    device_bytes=one.device_bytes,
                    idle_s=0.0 if waiting else IDLE_S,
                )
                for one in (told.holds if told is not None else ())
                if not one.draining
            )
            epoch = told.epoch if told is not None else self.rig.epoch
            facts = replace(worker(at, held_stages=stages), node_id=NodeId(name))
            report = WorkerReport(facts=facts, incarnation="a", epoch_seen=epoch)
            await self.rig.bus.publish(worker_report_subject(worker_id), report)
            copies = (self.copy_on(name),) if name in self.copies else ()
            here = replace(
                node(copies=copies), node_id=NodeId(name), host=name, nic_bytes_per_s=link
            )
            loader = LoaderReport(facts=here, incarnation="l", epoch_seen=epoch)
            await self.rig.bus.publish(loader_report_subject(NodeId(name)), loader)
        demands = tuple(
            Demand(model=ModelName(name), waiting=many, oldest_age_s=0.1, deadline_in_s=60.0)
            for name, many in waiting.items()
        )
        vector = DemandVector(gateway_id=GATEWAY, demands=demands)
        await self.rig.bus.publish(demand_subject(GATEWAY), vector)

    def copy_on(self, node: str) -> Copy:
        """All parts of the model that a node has."""
        parts = tuple(range(6))
        return replace(copy(self.copies[node]), node_id=NodeId(node), parts=parts)

    async def go_on(self, condition: Any, seconds: float = 0.1, **waiting: int) -> None:
        """Let time pass, with requests that wait, until a condition holds."""
        await self.rig.passing(lambda: self.later(seconds, **waiting), condition)

    def under_way(self, *models: str) -> list[Instance]:
        """Instances that start or serve."""
        found = self.rig.instances(InstanceState.FETCHING, InstanceState.LOADING, *SERVING)
        return [one for one in found if not models or one.model in models]

    def places(self) -> list[str]:
        """Nodes of the instances that start or serve."""
        return sorted(one.placements[0].node_id for one in self.under_way())


async def first_token(rig: Rig, instance: Instance, fetch_s: float) -> None:
    """Its fetch and its first token are reported."""
    now_s = rig.clock.monotonic_s()
    offset_s = rig.clock.wall().timestamp() - now_s
    fetch = Phase(
        name=PhaseName.FETCH,
        start_s=now_s,
        end_s=now_s + fetch_s,
        wall_offset_s=offset_s,
        process="loader",
    )
    first = FirstToken(
        request_id=RequestId("r"),
        at_s=now_s + fetch_s,
        wall_offset_s=offset_s,
        arrived_s=now_s,
    )
    report = PhaseReport(instance_id=instance.instance_id, phases=(fetch,), first_token=first)
    await rig.bus.request(PHASES_SUBJECT, report, PhasesKept, deadline_s=DEADLINE_S)
