"""A small whole system in one process, every service of it on its own ``FaultyBus``: gateway,
scheduler, cache, loader, simulated workers.

Real NATS and real PostgreSQL; what is simulated is the engine alone, whose tokens follow from
prompt, output so far and seed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from sqlalchemy import func, insert, select
from system_parts import Part, Surroundings
from system_watch import Watch

from pilotlight.cache import app as cache_app
from pilotlight.cache.settings import CacheSettings
from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.manifest import encode
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.buckets import INSTANCES
from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.db.session import Database
from pilotlight.common.fault_schedule import FaultSchedule
from pilotlight.common.faulty_bus import FaultyBus
from pilotlight.common.ids import new_incarnation, worker_id_of
from pilotlight.common.messages.reports import WORKER_REPORTS, WorkerReport
from pilotlight.common.messages.tokens import Resend, Submit, resend_subject, submit_subject
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.nats_streams import ensure_events
from pilotlight.common.service import Application, Background, Context
from pilotlight.common.store import ObjectStore, manifest_key
from pilotlight.common.testing import EVENTS_BYTES, until
from pilotlight.gateway.app import Serving, build_serving
from pilotlight.gateway.limits.limiter import Limiter
from pilotlight.gateway.openai.choice import ExchangeParts
from pilotlight.gateway.records.usage import UsageRecorder
from pilotlight.gateway.serving.measures import Measures
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.testing import KnownBudgets, NoDecisions
from pilotlight.loader import app as loader_app
from pilotlight.loader.identity import node_id_of
from pilotlight.loader.settings import LoaderSettings
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import ModelName, WorkerId
from pilotlight.policy.instance import ENDED
from pilotlight.policy.model import Model, ScalingBounds, Slo
from pilotlight.policy.plan import Instance
from pilotlight.scheduler import app as scheduler_app
from pilotlight.scheduler.settings import SchedulerSettings
from pilotlight.worker import app as worker_app
from pilotlight.worker.requests import FINISHED_KEPT_S
from pilotlight.worker.settings import WorkerSettings
from pilotlight.worker.worker import Worker

MODELS = ("ash", "elm")
WORKERS = 2
HOLD_TIMEOUT_S = 90.0
KEEP_ALIVE_S = 0.3
LOAD_S = 0.03
CONTEXT_TOKENS = 256
POOL_BYTES = 16 * 1024 * 1024


@dataclass
class FaultySystem:
    """Started once, it goes through many schedules, and must be empty after each."""

    around: Surroundings
    schedule: FaultSchedule = field(default_factory=FaultSchedule)
    parts: dict[str, Part] = field(default_factory=dict[str, Part])
    models: dict[ModelName, Model] = field(default_factory=dict[ModelName, Model])
    _store: ObjectStore = field(default_factory=lambda: ObjectStore.from_url("memory://"))
    _clear: NatsBus | None = None
    _owner: Database | None = None
    _watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register the models, start every service, wait until a model could be started."""
        self._clear = await NatsBus.connect(self.around.bus_settings, user="test", name="clear")
        await ensure_events(self._clear.client, self.around.bus_settings.prefix, EVENTS_BYTES)
        await self._register()
        await self.start_cache()
        await self.start_scheduler()
        await self.start_loader()
        for index in range(WORKERS):
            await self.start_worker(index)
        await self.start_gateway()
        self.watch = Watch(self.models, self.device_bytes)
        bucket = await self._clear.bucket(INSTANCES)
        self._watching = asyncio.create_task(bucket.watch(Instance, self.watch.on_instance))
        await self._clear.subscribe(WORKER_REPORTS, WorkerReport, self.watch.on_report)
        every = WorkerId("*")
        await self._clear.subscribe(submit_subject(every), Submit, self.watch.on_submit)
        await self._clear.subscribe(resend_subject(every), Resend, self.watch.on_resend)
        fleet = self.serving.fleet
        await until(lambda: len(fleet.workers()) == WORKERS and len(fleet.nodes()) == 1)

    async def stop(self) -> None:
        """End everything."""
        for name in ("gateway", *self.worker_names, "loader", "scheduler", "cache"):
            if name in self.parts:
                await self.parts.pop(name).stop()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        if self._clear is not None:
            await self._clear.close()
        if self._owner is not None:
            await self._owner.stop()

    # What is inside.

    @property
    def worker_names(self) -> tuple[str, ...]:
        return tuple(f"worker-{index}" for index in range(WORKERS))

    def worker(self, index: int) -> Worker:
        """One worker's own object."""
        return next(
            one for one in self.parts[f"worker-{index}"].components if isinstance(one, Worker)
        )

    @property
    def workers(self) -> list[Worker]:
        return [self.worker(index) for index in range(WORKERS)]

    @property
    def streaming(self) -> set[int]:
        """Workers from which a request has got a part of its tokens."""
        attempts = self.serving.relay._attempts.values()
        busy = {
            attempt.worker_id
            for attempt in attempts
            if attempt.first_heard_s is not None and attempt.finish is None
        }
        return {index for index, worker in enumerate(self.workers) if worker.core.worker_id in busy}

    @property
    def device_bytes(self) -> int:
        """Room for one model and a half."""
        one = self.models[ModelName(MODELS[0])]
        return stage_room(one, one.spec.whole).least_bytes * 3 // 2

    # Parts.

    async def start_gateway(self) -> None:
        async def build(context: Context[Any]) -> Application:
            self.serving: Serving = build_serving(context, NoDecisions())
            database = Database(context.settings, "gateway", context.clock)
            self.usage = UsageRecorder(database, context.clock, context.background)
            measures = Measures(context.metrics, self.serving.queue, self.serving.relay)
            self.exchanges = ExchangeParts(
                requests=self.serving.requests,
                starts=self.serving.starts,
                usage=self.usage,
                limiter=Limiter(context.clock, KnownBudgets(), self.serving.gateway_id),
                measures=measures,
                clock=context.clock,
            )
            serving = self.serving
            return Application(
                components=[
                    database,
                    self.usage,
                    serving.fleet,
                    serving.relay,
                    serving.demand,
                    serving.arrivals,
                ]
            )

        await self._start(
            "gateway",
            GatewaySettings(**self._settings("gateway"), hold_timeout_s=HOLD_TIMEOUT_S),
            build,
        )

    async def start_scheduler(self) -> None:
        settings = SchedulerSettings(
            **self._settings("scheduler"), min_residency_s=0.05, hold_deadline_s=3.0
        )
        await self._start("scheduler", settings, scheduler_app.build)

    async def start_cache(self) -> None:
        await self._start(
            "cache", CacheSettings(**self._settings("cache"), min_residency_s=0.05), cache_app.build
        )

    async def start_loader(self) -> None:
        folder = self.around.folder
        settings = LoaderSettings(
            run_dir=folder / "run",
            state_dir=folder / "state",
            log_dir=folder / "logs",
            pool_path=folder / "pool",
            pool_bytes=POOL_BYTES,
            model_roots=str(folder / "models"),
            workers=0,
        )
        await self._start("loader", settings, loader_app.build)

    async def start_worker(self, index: int) -> None:
        folder = self.around.folder
        model = self.models[ModelName(MODELS[0])]
        node_id = node_id_of(folder / "state")
        settings = WorkerSettings(
            run_dir=folder / "run",
            log_dir=folder / "logs",
            node_id=node_id,
            worker_id=worker_id_of(node_id, index),
            device="sim",
            workers=WORKERS,
            device_bytes=self.device_bytes,
            threads=1,
            pool_socket=folder / "run" / "pool.sock",
            sim_load_bytes_per_s=model.spec.total_bytes / LOAD_S,
            sim_decode_step_s=0.004,
        )
        await self._start(f"worker-{index}", settings, worker_app.build)

    async def _start(
        self, name: str, settings: Any, build: Callable[[Context[Any]], Awaitable[Application]]
    ) -> None:
        raw = await NatsBus.connect(self.around.bus_settings, user=name, name=name)
        bus = FaultyBus(raw, name, self.schedule)
        context = Context(
            service=name,
            settings=settings,
            clock=SystemClock(),
            bus=bus,
            store=self._store,
            background=Background(),
            metrics=CollectorRegistry(),
            incarnation=new_incarnation(),
        )
        application = await build(context)
        for component in application.components:
            await component.start()
        self.parts[name] = Part(
            name=name, bus=bus, raw=raw, context=context, components=application.components
        )

    def _settings(self, service: str) -> dict[str, Any]:
        return {
            "run_dir": self.around.folder / "run",
            "database_url": self.around.database_settings(service).database_url,
        }

    async def _register(self) -> None:
        owner = self.around.database_settings("owner")
        self._owner = Database(owner, "scheduler", SystemClock())
        (self.around.folder / "run").mkdir()
        for name in MODELS:
            folder = self.around.folder / "models" / name
            folder.mkdir(parents=True)
            config = tiny_config(
                vocab_size=self.around.vocab_size,
                max_position_embeddings=CONTEXT_TOKENS,
                rope_theta=10000.0 + len(self.models),
            )
            for file, content in tiny_files(config).items():
                (folder / file).write_bytes(content)
            checkpoint = read_checkpoint(FolderSource(folder))
            digest = checkpoint.manifest.digest()
            await self._store.put_if_absent(manifest_key(digest), encode(checkpoint.manifest))
            model = Model(
                name=ModelName(name),
                uri=folder.as_uri(),
                revision=None,
                source_version=checkpoint.source_version,
                digest=digest,
                text_digest=digest,
                dtype=checkpoint.run_dtype,
                spec=checkpoint.spec,
                slo=Slo(ttft_ms=1000, tpot_ms=100),
                scaling=ScalingBounds(keep_alive_s=KEEP_ALIVE_S),
            )
            self.models[model.name] = model
            row = {
                "name": name,
                "digest": digest,
                "body": to_row_json(model),
                "created_at": func.now(),
            }
            async with self._owner.unit_of_work() as work:
                await work.connection.execute(
                    insert(tables.models).values(**row, updated_at=func.now())
                )

    # After a schedule.

    async def left(self) -> list[str]:
        """What is still somewhere in memory or in the database, of requests and instances that are
        over.
        """
        found = [*self._left_in_gateway(), *self._left_in_workers(), *self._left_in_node()]
        cache = next(
            one for one in self.parts["cache"].components if type(one).__name__ == "Handlers"
        )
        if cache._books.grants:
            found.append(f"grants in the cache's books: {sorted(cache._books.grants)}")
        assert self._owner is not None
        instances = tables.instances.c
        living = select(instances.instance_id, instances.state).where(
            instances.state.not_in([state.value for state in ENDED])
        )
        async with self._owner.reading() as connection:
            grants = (
                await connection.execute(select(func.count()).select_from(tables.grants))
            ).scalar_one()
            rows = (await connection.execute(living)).all()
        return [
            *found,
            *([f"{grants} rows of grants"] if grants else []),
            *(f"{row.state} {row.instance_id}" for row in rows),
        ]

    async def usage_rows(self, request_ids: list[str]) -> list[Any]:
        """What was billed."""
        assert self._owner is not None
        wanted = select(tables.usage).where(tables.usage.c.request_id.in_(request_ids))
        async with self._owner.reading() as connection:
            return list((await connection.execute(wanted)).all())

    def _left_in_gateway(self) -> list[str]:
        serving = self.serving
        counts = {
            "held": serving.queue.held,
            "demand": len(serving.queue.demand()),
            "running": serving.relay.running,
            "live": serving.requests.live,
            "post": len(serving.relay._post),
            "unconfirmed submits": sum(
                load.unconfirmed for load in serving.requests._parts.router._loads.values()
            ),
        }
        return [f"{count} {what} in the gateway" for what, count in counts.items() if count]

    def _left_in_workers(self) -> list[str]:
        found: list[str] = []
        for worker in self.workers:
            table, engine = worker.core.table, worker.core.engine
            if table.running == 0:
                # An acknowledgement that was lost leaves a finished request behind: time takes it.
                table.expire(worker.core.clock.monotonic_s() + FINISHED_KEPT_S)
            counts = {
                "stages": len(tuple(worker.stages.held)),
                "running": table.running,
                "requests": len(table),
                "routes to engines": len(engine._routes),
                "stages in the engine": len(engine.main._stages),
                "requests in the engine": len(engine.main._requests),
                "tokens to send": len(worker._delivery._publisher._unsent),
            }
            found += [
                f"{count} {what} in {worker.core.worker_id}"
                for what, count in counts.items()
                if count
            ]
        return found

    def _left_in_node(self) -> list[str]:
        components = self.parts["loader"].components
        agent = next(one for one in components if type(one).__name__ == "Handlers")._agent
        server = next(one for one in components if type(one).__name__ == "PoolServer")
        found = [f"orders of the loader: {list(agent._orders)}"] if agent._orders else []
        if server.connections > WORKERS:
            found.append(f"{server.connections - WORKERS} leases in the loader")
        return found

    def died(self) -> list[str]:
        """Background tasks that died, by part: a service would have ended with them."""
        parts = [part for part in self.parts.values() if part.context.background.failed.done()]
        return [f"{part.name}: {part.context.background.failed.result()}" for part in parts]
