"""A system of several nodes on this machine, whose starts share workers."""

import asyncio
import shutil
from collections import Counter
from typing import Any

import httpx2

from chaos.clients import ASKS, ended, until
from chaos.processes import Found, Target
from chaos.system import ChaosSystem
from pilotlight.common.messages.room import GivenUp, GiveUp, give_up_subject
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.settings import BusSettings
from pilotlight.engine.device.arena import ARENA_ADDRESS, NUM_SLOTS, SLOT_BYTES
from pilotlight.policy.ids import InstanceId, WorkerId

NODES = 3
STAGES = 3
LINK = "40mbit"
"""The demo model's 14 MB take one node 2.8 s."""
SLO_MS = (1_500.0, 2_400.0)
"""Two that one node does not meet: of all groups the soonest, and the smallest that is in time."""
SOONEST_MS = 500.0
"""What no group meets: the start that is the soonest has as many stages as it may."""
ALONE_MS = 60_000.0
DEVICE_BYTES = {1: 256 << 20, 2: 28 << 20}
"""By the workers that the demo model takes, 35 MB with its KV."""
EVICT_DEADLINE_S = 10.0
EVICT_POLL_S = 0.05
FAULTS = "step=0.03"
"""Streams last for as long as stages take to grow, and a little longer."""
CALM_DEADLINE_S = 60.0
TIDY_DEADLINE_S = 60.0
"""Beyond the lease of a grant."""


class GroupSystem(ChaosSystem):
    """One ``pilotlight up`` of some nodes with a worker each."""

    def __init__(self, workers: int = 1) -> None:
        """Start it.

        Args:
            workers: on which the demo model lies when its group has become what it is to become.
        """
        super().__init__(
            "--nodes",
            str(NODES),
            workers=1,
            link=LINK,
            environment={
                "PILOTLIGHT_MAX_STAGES": str(STAGES),
                # Two requests are enough for a second instance, where a model may have one.
                "PILOTLIGHT_INSTANCE_REQUESTS": "1",
                "PILOTLIGHT_FAULTS": FAULTS,
                "PILOTLIGHT_THREADS": "1",
                "PILOTLIGHT_POOL_BYTES": str(64 << 20),
                "PILOTLIGHT_DEVICE_BYTES": str(DEVICE_BYTES[workers]),
            },
        )
        self.workers = workers
        self.evicted = 0
        """Stages that were given up when ``evict_stage`` asked for their room."""
        self.ttft_ms = ALONE_MS
        """Of the models that are registered next."""
        self.max_instances = 1
        """Likewise."""

    def registration(self, name: str, folder: Any) -> dict[str, Any]:
        slo = {"ttft_ms": self.ttft_ms, "tpot_ms": 5000.0}
        found = super().registration(name, folder)
        return {**found, "slo": slo, "max_instances": self.max_instances}

    async def calm_down(self) -> None:
        """Note what a model says that as few workers load as can, undisturbed; the same, where it
        is known what it says.
        """
        name = self.new_name("alone")
        self.ttft_ms, self.max_instances = ALONE_MS, 1
        await self.register(name)
        calm = [self.ask(index, name) for index in range(len(ASKS))]
        assert not await ended(calm, CALM_DEADLINE_S), "an undisturbed request did not end"
        for one in calm:
            assert one.answer.complete, str(one.answer)
            before = self.references.setdefault(one.ask.reference, one.answer)
            assert one.answer.same_as(before), f"undisturbed, and yet {before} and {one.answer}"
        (alone,) = await self.instances(name)
        assert len(alone["placements"]) == self.workers, alone
        assert self.memory_of_models(), "memory of a model that is served is seen"
        await self.forget(name)
        await until(self.untidy, TIDY_DEADLINE_S, "the system before the first schedule")
        self.census = self.processes.census()

    async def instances(self, model: str) -> list[dict[str, Any]]:
        """Instances of a model that have not ended, with their stages."""
        shown = [{**one["body"], **one} for one in await self.view("instances")]
        return [one for one in shown if one["model"] == model and one["state"] not in ENDED]

    def worker_at(self, node_id: str, workers: list[dict[str, Any]]) -> Found | None:
        """The process of a node's one worker; None while there is none."""
        ids = {one["worker_id"] for one in workers if one["node_id"] == node_id}
        return next(
            (
                one
                for one in self.processes.of(Target.WORKER)
                if one.environment().get("PILOTLIGHT_WORKER_ID") in ids
            ),
            None,
        )

    def engine_at(self, worker: Found) -> Found | None:
        """The engine that a worker uses; None while it has none."""
        has_one = any(one.parent == worker.pid for one in self.processes.of(Target.ENGINE))
        return self.processes.engine_of(worker) if has_one else None

    def memory_of_models(self) -> dict[int, int]:
        """Bytes that engines have behind places of models, by process, as the system counts."""
        stop = ARENA_ADDRESS + NUM_SLOTS * SLOT_BYTES
        found = {
            one.pid: one.backed_bytes(ARENA_ADDRESS, stop)
            for one in self.processes.of(Target.ENGINE)
        }
        return {pid: size_bytes for pid, size_bytes in found.items() if size_bytes}

    def requests_moved(self) -> int:
        """Requests that gateways had go on at instances that groups became, by their logs."""
        return sum(one["requests"] for one in self.logged("gateway*.log", "requests_spread"))

    def kv_came(self) -> int:
        """As many of them brought keys and values along, by their engines' logs."""
        return sum(1 for _ in self.logged("engine-*.log", "kv_came"))

    async def decided(self, model: str) -> Counter[str]:
        """Decisions on a model, by their kinds."""
        answer = await self.admin("GET", f"/decisions?model={model}")
        assert answer.status_code == 200, answer.text
        return Counter(one["kind"] for one in answer.json()["decisions"])

    async def untidy(self) -> str | None:
        """What is not as in a system that holds no model; None: nothing."""
        try:
            workers, nodes = await self.view("workers"), await self.view("nodes")
            instances = await self.view("instances")
        except (httpx2.HTTPError, AssertionError) as error:
            return repr(error)
        up = [one for one in workers if one["engine_up"] and one["liveness"] == "alive"]
        if len(up) != NODES:
            return f"{len(up)} workers are up"
        if holding := [(one["worker_id"], one["held"]) for one in up if one["held"]]:
            return f"stages are held: {holding}"
        if left := [one for one in instances if one["state"] not in ENDED]:
            return f"instances are left: {left}"
        if grants := await self.query("SELECT instance_id, worker_id FROM cache.grants"):
            return f"room is granted: {grants}"
        if kept := self.memory_of_models():
            return f"engines have memory of models: {kept}"
        alive = [one for one in nodes if one["liveness"] == "alive"]
        if len(alive) != NODES:
            return f"{len(alive)} nodes are up"
        for one in alive:
            if one["transfers"] or any(copy["leases"] for copy in one["copies"]):
                return f"a node still brings or lends parts: {one}"
        if orphans := self.processes.orphans():
            return f"orphans: {orphans}"
        if surplus := self.processes.census() - self.census:
            return f"too many: {dict(surplus)}" if self.census else None
        return None

    async def astray(self, model: str) -> str | None:
        """What is not as it should be when nothing is under way; None: nothing.

        Each instance of a model is one worker's, or as few workers' as can hold it; there are no
        more than it may have, and their workers alone hold it. What grew out of a group has no room
        granted to it: it has it.
        """
        try:
            workers, instances = await self.view("workers"), await self.instances(model)
            granted = await self.query("SELECT instance_id, worker_id FROM cache.grants")
        except (httpx2.HTTPError, AssertionError) as error:
            return repr(error)
        places = {
            (one["instance_id"], place["worker_id"])
            for one in instances
            for place in one["placements"]
        }
        grown = {
            (one["instance_id"], place["worker_id"])
            for one in instances
            for place in one["placements"]
            if place["grown_from"]
        }
        whole = all(len(one["placements"]) == self.workers for one in instances)
        serve = all(one["state"] == "ready" for one in instances)
        if not (whole and serve and len(instances) <= self.max_instances):
            return f"it is served by {instances}"
        held = {
            (stage["instance_id"], one["worker_id"]) for one in workers for stage in one["held"]
        }
        if held != places or set(granted) != places - grown:
            return f"held: {held}, granted: {granted}, placed: {places}"
        return None

    async def evict_stage(self, model: str, worker_id: str) -> None:
        """Have a worker give its stage of a model up, as the cache does that needs the room: when
        it is ready and has no requests of its own. The stage is waited for; one that has come and
        gone by itself is not.
        """
        (gateway, *_) = self.processes.of(Target.GATEWAY)
        url = gateway.environment()["PILOTLIGHT_NATS_URL"]
        settings = BusSettings(nats_url=url, secrets_dir=self.home.secrets)
        bus = await NatsBus.connect(settings, user="cache", name="evicts")
        subject, was_there = give_up_subject(WorkerId(worker_id)), False
        try:
            async with asyncio.timeout(EVICT_DEADLINE_S):
                while True:
                    ids = tuple(
                        InstanceId(one["instance_id"])
                        for one in await self.instances(model)
                        if worker_id in {place["worker_id"] for place in one["placements"]}
                    )
                    if was_there and not ids:
                        return
                    was_there = bool(ids)
                    reply = await bus.request(
                        subject, GiveUp(instance_ids=ids), GivenUp, deadline_s=EVICT_DEADLINE_S
                    )
                    if reply.instance_ids:
                        self.evicted += 1
                        return
                    await asyncio.sleep(EVICT_POLL_S)
        except TimeoutError:
            return
        finally:
            await bus.close()

    async def forget(self, name: str) -> None:
        """Delete a model and its files; what its instances hold goes with it."""
        answer = await self.admin("DELETE", f"/models/{name}")
        assert answer.status_code in (204, 404), answer.text
        shutil.rmtree(self.home.models / name, ignore_errors=True)


ENDED = ("gone", "failed")
