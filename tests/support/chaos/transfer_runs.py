"""One schedule of ``transfer_plans``, carried out, and everything that must hold after it."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress

from gated_link import GatedLink
from loader_processes import LoaderProcess, fetch_of

from chaos.engine_reads import RIGHT, EngineRead, Expected, read_model
from chaos.transfer_plans import FULL_DISK, STALL_S, Edge, Fault, Kind, Plan
from chaos.transfers import Stored, Transfers
from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import DeadlineExceeded, PilotlightError
from pilotlight.common.messages.hold import Peer
from pilotlight.common.messages.room import Drop, Dropped, drop_subject
from pilotlight.common.testing import until
from pilotlight.common.waiting import cancel_all, every, pause, within
from pilotlight.dataplane.pool_client import PoolClient
from pilotlight.policy.ids import InstanceId, WorkerId
from pilotlight.policy.model import Model

ORDERS_S = 0.3
"""Between two repetitions of all nodes' orders, as the scheduler's."""
END_S = 60.0
"""For each worker to have the right bytes or a typed error, from when it asked."""
FAULT_S = 80.0
CLEAN_S = 30.0
"""For the pools to be empty, once nothing is wanted any more."""
GRACE_S = 10.0
"""How long a worker waits for its loader to come back."""
DEATHS = (Kind.SOURCE_DIES, Kind.MIDDLE_DIES)


class Run:
    """A schedule."""

    def __init__(self, transfers: Transfers, plan: Plan) -> None:
        self.plan = plan
        self.problems: list[str] = []
        self.reads: dict[str, EngineRead] = {}
        self._transfers = transfers
        self._processes = transfers.processes
        self._rng = random.Random(f"run {plan.seed}")
        self._gates: dict[Edge, GatedLink] = {}
        self._behind: dict[Edge, Peer] = {}
        """Where a gate stands, for as long as the node behind it stays where it is."""
        self._ordered: set[str] = set()
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._dirty: set[str] = set()
        self._restarted: set[str] = set()
        self._over = asyncio.Event()
        self._filled = asyncio.Event()
        self._stored: Stored | None = None
        self._model: Model | None = None
        self._expected: Expected = {}

    @property
    def model(self) -> Model:
        assert self._model is not None
        return self._model

    @property
    def stored(self) -> Stored:
        assert self._stored is not None
        return self._stored

    @property
    def dead(self) -> set[str]:
        """Nodes that die in it."""
        return {fault.node for fault in self.plan.of(*DEATHS)}

    def node(self, name: str) -> LoaderProcess:
        return self._transfers.nodes[name]

    async def go(self) -> None:
        """All of it; what is wrong is told in ``problems``."""
        plan, transfers = self.plan, self._transfers
        if plan.of(Kind.DISK_FULL) and FULL_DISK in transfers.used:
            await transfers.renew(FULL_DISK)
        self._stored, self._model, self._expected = await transfers.register(plan)
        transfers.used.update(plan.nodes)
        helpers: list[asyncio.Task[None]] = []
        try:
            await self._before()
            helpers.append(asyncio.create_task(self._order_for_ever(), name="orders"))
            helpers += [
                asyncio.create_task(self._fill_pool(fault.node), name="filler")
                for fault in plan.of(Kind.POOL_FULL)
            ]
            if plan.of(Kind.POOL_FULL):
                await within(END_S, self._filled.wait(), "filling a pool")
            for name in plan.receivers:
                self._reading[name] = asyncio.create_task(
                    self._read(name), name=f"engine of {name}"
                )
            befalling = [
                asyncio.create_task(self._befall(fault), name=str(fault.kind))
                for fault in plan.faults
            ]
            await asyncio.gather(*self._reading.values())
            self._over.set()
            for task in befalling:
                try:
                    await within(FAULT_S, task, task.get_name())
                except (PilotlightError, AssertionError, OSError) as error:
                    self.problems.append(f"{task.get_name()}: {error}")
        finally:
            self._over.set()
            await cancel_all([*helpers, *self._reading.values()])
            await self._clean()
        self._judge()

    async def _before(self) -> None:
        """The node that has the model beforehand gets it, what is wrong from the begin goes wrong,
        and gates are put up.
        """
        plan = self.plan
        if plan.head is not None:
            loader = self.node(plan.head)
            await self._processes.order(loader, fetch_of(loader, self.model))
            read = await read_model(
                loader.socket, plan.head, self.model, self._expected, grace_s=GRACE_S
            )
            if read.outcome != RIGHT or read.wrong:
                self.problems.append(f"{plan.head}, undisturbed: {read}")
            for fault in plan.of(Kind.PEER_LIES):
                if fault.how == "memory":
                    self._alter(read, fault)
        for fault in plan.of(Kind.OBJECT_CORRUPTED, Kind.OBJECT_REPLACED):
            if fault.how == "before":
                await self._change_object(fault)
        size_bytes = sum(self.model.spec.part_bytes)
        for fault in plan.faults:
            if fault.edge is not None and fault.how != "before":
                lies = fault.kind is Kind.PEER_LIES
                gate = GatedLink(None if lies else int(fault.at_share * size_bytes))
                gate.flipped_at = int(fault.at_share * size_bytes) if lies else None
                self._gates[fault.edge] = gate
                self._behind[fault.edge] = await gate.start(
                    self._processes.peer(self.node(fault.edge[0]))
                )
        self._dirty |= {fault.node for fault in plan.of(Kind.PEER_LIES, *DEATHS)}

    def _alter(self, read: EngineRead, fault: Fault) -> None:
        """A bit of the pool of a node that has the model changes, as in memory that fails."""
        places = sorted(read.places.values())
        offset, size_bytes = places[int(fault.byte_share * len(places))]
        at = offset + self._rng.randrange(size_bytes)
        descriptor = os.open(read.pool_path, os.O_RDWR)
        try:
            os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 0x04]), at)
        finally:
            os.close(descriptor)

    async def _change_object(self, fault: Fault) -> None:
        if fault.kind is Kind.OBJECT_CORRUPTED:
            await asyncio.to_thread(self.stored.corrupt, fault.byte_share)
        else:
            await asyncio.to_thread(self.stored.replace)

    async def _order_for_ever(self) -> None:
        async for _ in every(ORDERS_S):
            for name in sorted(self._ordered):
                await self._order(name)

    async def _order(self, name: str) -> None:
        def place_of(sender: str) -> Peer:
            return self._behind.get((sender, name)) or self._processes.peer(self.node(sender))

        loader = self.node(name)
        if loader.is_alive:
            upstreams = [place_of(sender) for sender in self.plan.upstreams[name]]
            await self._processes.order(loader, fetch_of(loader, self.model, *upstreams))

    async def _read(self, name: str) -> None:
        """What a worker does: it is told to load a model, about when its loader is told to fetch
        it.
        """
        await pause(self.plan.starts_s[name])
        self._ordered.add(name)
        await self._order(name)
        await pause(self._rng.choice((0.0, 0.05)))
        clock = SystemClock()
        began_s, grace_s = clock.monotonic_s(), 1.0 if name in self.dead else GRACE_S
        reading = read_model(
            self.node(name).socket, name, self.model, self._expected, grace_s=grace_s
        )
        try:
            self.reads[name] = await within(END_S, reading, f"the model on {name}")
        except DeadlineExceeded as error:
            self.reads[name] = EngineRead(outcome=error.code, message=error.message)
        self.reads[name].seconds = clock.monotonic_s() - began_s

    async def _fill_pool(self, name: str) -> None:
        """Hold another model in a node's pool, as a worker does, until the schedule is over."""
        filler = self._transfers.filler
        assert filler is not None
        client = PoolClient(self.node(name).socket, SystemClock(), grace_s=GRACE_S)
        parts = tuple(range(len(filler.spec.part_bytes)))
        async with await client.lease(
            WorkerId("filler"), InstanceId("filler"), filler, parts
        ) as lease:
            async for _ in lease:
                pass
            self._filled.set()
            await self._over.wait()

    async def _moment(self, fault: Fault) -> None:
        """Return when it is to happen: when so much has passed the link, or after a while; or when
        there is nothing to disturb.
        """
        gate = self._gates.get(fault.edge) if fault.edge is not None else None
        if gate is None:
            await pause(fault.after_s)
            return
        assert fault.edge is not None
        reading = self._reading[fault.edge[1]]
        await until(lambda: gate.is_held_up or reading.done(), deadline_s=END_S)

    async def _befall(self, fault: Fault) -> None:
        """Carry out a fault."""
        gate = self._gates.get(fault.edge) if fault.edge is not None else None
        open_gate: Callable[[], None] = gate.open if gate is not None else _nothing
        loader = self.node(fault.node) if fault.node else None
        if fault.how in ("before", "memory") or fault.kind in (
            Kind.PEER_LIES,
            Kind.DISK_FULL,
            Kind.POOL_FULL,
        ):
            return
        await self._moment(fault)
        if loader is None:
            await self._change_object(fault)
            open_gate()
        elif fault.kind in DEATHS:
            loader.signal(signal.SIGKILL)
            if fault.how == "at once":
                open_gate()
        elif fault.kind is Kind.LINK_STALLS and fault.how == "link":
            await pause(STALL_S)
            open_gate()
        elif fault.kind is Kind.LINK_STALLS:
            loader.signal(signal.SIGSTOP)
            open_gate()
            await pause(STALL_S)
            loader.signal(signal.SIGCONT)
        else:
            await self._restart(fault, loader, open_gate)

    async def _restart(
        self, fault: Fault, loader: LoaderProcess, open_gate: Callable[[], None]
    ) -> None:
        self._restarted.add(fault.node)
        loader.signal(signal.SIGKILL if fault.how == "killed" else signal.SIGTERM)
        open_gate()
        await loader.ended()
        await self._processes.begin(loader)
        # It listens somewhere else now.
        for edge in [edge for edge in self._behind if edge[0] == fault.node]:
            del self._behind[edge]

    async def _clean(self) -> None:
        """Nothing is wanted any more: the pools are empty soon, in those nodes that go on."""
        for gate in self._gates.values():
            await gate.cut()
        for loader in self._transfers.nodes.values():
            loader.signal(signal.SIGCONT)
        if (
            self.plan.of(Kind.DISK_FULL)
            and self.reads.get(FULL_DISK, EngineRead()).outcome == RIGHT
            # One that was killed or stopped may not have come to write, also if it runs again.
            and not (self.node(FULL_DISK).killed or FULL_DISK in self._restarted)
        ):
            with suppress(DeadlineExceeded):
                await until(lambda: self.node(FULL_DISK).said("disk_tier_off"), deadline_s=CLEAN_S)
            if not self.node(FULL_DISK).said("disk_tier_off"):
                self.problems.append("the disk was never full")
        honest = {self.node(name).node_id for name in self._transfers.nodes} - {
            self.node(fault.node).node_id for fault in self.plan.of(Kind.PEER_LIES)
        }
        for name, loader in self._transfers.nodes.items():
            if not loader.is_alive and not (name in self._dirty and loader.killed):
                self.problems.append(f"{name} has died: {loader.log.read_text()[-1000:]}")
                self._dirty.add(name)
            facts = self._processes.facts(loader)
            if facts is not None and honest & set(facts.distrusted):
                self.problems.append(f"{name} takes {honest & set(facts.distrusted)} for liars")
        await asyncio.gather(*(self._clean_node(name) for name in self._transfers.nodes))
        for name, loader in self._transfers.nodes.items():
            self.problems += [f"{name} says: {line}" for line in loader.news() if _is_bad(line)]
        await asyncio.gather(*(self._transfers.renew(name) for name in sorted(self._dirty)))
        await asyncio.to_thread(self.stored.remove)

    async def _clean_node(self, name: str) -> None:
        loader, filler = self.node(name), self._transfers.filler
        if name in self._dirty or filler is None:
            return
        digests = (self.model.digest, filler.digest)

        async def is_empty() -> bool:
            # A loader that has just come back does not listen yet.
            with suppress(PilotlightError):
                await self._processes.bus.request(
                    drop_subject(loader.node_id), Drop(digests=digests), Dropped, deadline_s=5
                )
            await pause(0.02)
            facts = self._processes.facts(loader)
            return facts is not None and facts.pool_free_bytes == facts.pool_bytes

        await self._processes.order(loader)
        try:
            await until(is_empty, deadline_s=CLEAN_S)
        except PilotlightError as error:
            self.problems.append(
                f"the pool of {name} does not become empty: {error}; {self._processes.facts(loader)}"
            )
            self._dirty.add(name)

    def _judge(self) -> None:
        for name, read in self.reads.items():
            self.problems += [f"{name} was given wrong bytes: {why}" for why in read.wrong]
            if (
                name not in self.dead
                and read.outcome != RIGHT
                and read.outcome not in self.plan.errors_of(name)
            ):
                self.problems.append(
                    f"{name} ended with {read.outcome}: {read.message}, after {read.seconds:.1f} s"
                )


def _nothing() -> None:
    """There is no gate."""


def _is_bad(line: str) -> bool:
    """Whether a loader tells of a bug."""
    try:
        told = json.loads(line)
    except ValueError:
        return True
    return told.get("level") in ("error", "critical") or "exception" in told
