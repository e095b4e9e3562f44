"""Builds a worker process: one worker of a device, or any number of simulated ones."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from pilotlight.common.buckets import WORKERS
from pilotlight.common.cluster_key import SECRET
from pilotlight.common.errors import BadRequest
from pilotlight.common.faults import Faults
from pilotlight.common.ids import worker_id_of
from pilotlight.common.machine import log_file, memory_bytes
from pilotlight.common.nvml import NvmlReader
from pilotlight.common.phase_reports import reported_phases
from pilotlight.common.secret_files import read_secret
from pilotlight.common.service import Application, Component, Context
from pilotlight.dataplane.pool_client import PoolClient
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.cost import EngineSpeed
from pilotlight.policy.hang import Patience
from pilotlight.policy.ids import NodeId, WorkerId
from pilotlight.policy.model import EngineKind
from pilotlight.worker.artifacts import Artifacts
from pilotlight.worker.builds import Builds
from pilotlight.worker.core import StartSteps, WorkerCore
from pilotlight.worker.device_watch import DeviceWatch, WatchTimes
from pilotlight.worker.engines.child_ahead import ChildAhead
from pilotlight.worker.engines.child_process import end_ahead
from pilotlight.worker.engines.client import EngineClient
from pilotlight.worker.engines.options import child_options, cuda_device, graph_ways, worker_name
from pilotlight.worker.engines.process import ProcessEngine
from pilotlight.worker.engines.sim import SimEngine
from pilotlight.worker.engines.spare import Spare
from pilotlight.worker.engines.switch import EngineSwitch
from pilotlight.worker.graph_uses import FOLDER, GraphUses
from pilotlight.worker.groups import Groups
from pilotlight.worker.leasing import EveryPart, PartSource
from pilotlight.worker.loader_link import LoaderLink
from pilotlight.worker.loading import StageLoader
from pilotlight.worker.metrics import WorkerMetrics
from pilotlight.worker.requests import RequestTable
from pilotlight.worker.settings import WorkerSettings
from pilotlight.worker.vocabularies import Vocabularies
from pilotlight.worker.worker import Worker


async def build(
    context: Context[WorkerSettings],
    simulated: int | None = None,
    ahead: ChildAhead | None = None,
) -> Application:
    """The process's worker.

    Args:
        context: of the process.
        simulated: the number of simulated workers to make instead.
        ahead: the worker's first engine, if it was started before.

    Raises:
        BadRequest: the settings do not fit each other.
    """
    settings = context.settings
    kind = DeviceKind.SIM if simulated else DeviceKind(settings.device)
    if settings.pool_socket is None and kind is not DeviceKind.SIM:
        raise BadRequest(
            "PILOTLIGHT_POOL_SOCKET is needed: a worker gets its models from the node's loader"
        )
    if ahead is not None and kind is DeviceKind.SIM:
        await end_ahead(ahead)
    node_id = NodeId(settings.node_id)
    names = [worker_id_of(node_id, index) for index in range(simulated or 1)]
    if simulated is None:
        names = [worker_name(settings)]
    place = names[0] if len(names) == 1 else ""
    builder = _Builder(context, kind, node_id, simulated or settings.workers, place, ahead)
    await builder.open()
    components: list[Component] = []
    builds: list[Builds] = []
    workers: list[Worker] = []
    for name in names:
        if settings.pool_socket is None:
            workers.append(builder.worker(name, EveryPart()))
            continue
        client = PoolClient(settings.pool_socket, context.clock, grace_s=settings.loader_grace_s)
        worker = builder.worker(name, client)
        workers.append(worker)
        components.append(LoaderLink(client, context.background, name, worker.reporter))
        if settings.builds and kind is not DeviceKind.SIM:
            builds.append(builder.builds(worker, client))
    components.extend(workers)
    components.extend(builds)
    return Application(
        components=components,
        ready=lambda: next(filter(None, (worker.not_ready() for worker in workers)), None),
    )


class _Builder:
    """Makes workers that share a process."""

    def __init__(
        self,
        context: Context[WorkerSettings],
        kind: DeviceKind,
        node_id: NodeId,
        sharing: int,
        place: str,
        ahead: ChildAhead | None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            context: Of the process.
            kind: Of its devices.
            node_id: Where it runs.
            sharing: Workers that share the machine.
            place: Of the phases that it reports.
            ahead: Of the one worker, if there is any.
        """
        self._ahead = ahead
        self._builder: ProcessEngine | None = None
        """The engine of a build, whose memory on the device is the worker's own, too."""
        settings = context.settings
        self._context = context
        self._kind = kind
        self._node_id = node_id
        # What a GPU has for models its engine finds out.
        self._device_bytes = settings.device_bytes or (
            0 if kind is DeviceKind.CUDA else memory_bytes() // 2 // sharing
        )
        self._uses_dir = settings.state_dir / FOLDER if settings.state_dir is not None else None
        self._faults = Faults.parse(settings.faults)
        self._steps = StartSteps(
            prefetch=settings.start_prefetch,
            stream=settings.start_stream,
            overlap=settings.start_overlap,
        )
        self._metrics = WorkerMetrics(context.metrics)
        self._vocabularies = Vocabularies(context.store)
        self._phases = reported_phases(
            context.bus, context.clock, context.background, "worker", place
        )

    async def open(self) -> None:
        self._bucket = await self._context.bus.bucket(WORKERS)

    def worker(self, worker_id: WorkerId, source: PartSource) -> Worker:
        context = self._context
        engine, watch = self._engines(worker_id)
        core = WorkerCore(
            worker_id=worker_id,
            node_id=self._node_id,
            device_bytes=self._device_bytes,
            engine=engine,
            table=RequestTable(context.settings.max_requests),
            bus=context.bus,
            clock=context.clock,
            background=context.background,
            metrics=self._metrics,
            phases=self._phases,
            vocabularies=self._vocabularies,
            steps=self._steps,
        )
        key = read_secret(context.settings.secrets_dir, SECRET)
        settings = context.settings
        artifacts = Artifacts(
            core,
            context.store,
            key,
            graphs=settings.artifact_graphs,
            launch_lists=settings.launch_lists,
            ways=graph_ways(settings),
            uses=GraphUses(context.background, self._uses_dir),
        )
        loader = StageLoader(core, source, context.settings.pool_path, artifacts)
        groups = Groups(core, context.settings.dataplane_host, context.settings.secrets_dir)
        return Worker(
            core,
            self._kind,
            loader,
            self._bucket,
            context.incarnation,
            watch,
            groups,
            artifacts=artifacts,
        )

    def builds(self, worker: Worker, source: PartSource) -> Builds:
        """What a worker does while there is no demand."""
        context, worker_id = self._context, worker.core.worker_id
        options = replace(
            child_options(self._context.settings, worker_id),
            log_path=log_file(context.settings.log_dir, f"build-{worker_id}.log"),
            faults="",
        )

        def make_engine(
            *, device_bytes: int, record_images: bool, note_kernels: bool, witness: bool
        ) -> EngineClient:
            made_for = replace(
                options,
                device_bytes=device_bytes,
                record_images=record_images,
                note_kernels=note_kernels,
                witness=witness,
            )
            self._builder = ProcessEngine(made_for, clock=context.clock)
            return self._builder

        return Builds(
            worker.core,
            lambda: worker.stages.held,
            worker.stages.lending,
            source,
            make_engine,
            worker.artifacts or Artifacts(worker.core, context.store, None),
            context.store,
            context.settings.build_idle_s,
            graphs=context.settings.artifact_graphs,
            ways=graph_ways(context.settings),
            ranges=context.settings.with_ranges,
        )

    def _engines(self, worker_id: WorkerId) -> tuple[EngineSwitch, DeviceWatch | None]:
        """The worker's engines, and the watch over their device."""
        context = self._context
        renew: Callable[[], Awaitable[None]] | None = None
        if self._kind is DeviceKind.SIM:
            native, watch = self._simulated(), None
        else:
            native, watch = self._native(worker_id)
            renew = None if context.settings.start_warm else native.renew
        factories: dict[EngineKind, Callable[[], EngineClient]] = {
            EngineKind.NATIVE: lambda: native,
            EngineKind.SIM: self._simulated,
        }
        return EngineSwitch(factories, context.background, renew=renew), watch

    def _simulated(self) -> EngineClient:
        settings = self._context.settings
        speed = EngineSpeed(
            load_bytes_per_s=settings.sim_load_bytes_per_s,
            prefill_tokens_per_s=settings.sim_prefill_tokens_per_s,
            decode_step_s=settings.sim_decode_step_s,
        )
        return SimEngine(speed, self._context.clock, self._faults, settings.sim_requests_per_step)

    def _native(self, worker_id: WorkerId) -> tuple[ProcessEngine, DeviceWatch | None]:
        """The engine of a device that computes, and the watch over that."""
        settings = self._context.settings
        options = child_options(settings, worker_id)
        engine = ProcessEngine(
            options,
            Spare(options) if settings.spare_engine and settings.start_warm else None,
            patience=Patience(floor_s=settings.hang_after_s),
            clock=self._context.clock,
            ahead=self._ahead,
        )
        if self._kind is not DeviceKind.CUDA:
            return engine, None
        context = self._context
        readers = (NvmlReader(cuda_device(context.settings)),)

        def pids() -> frozenset[int]:
            return engine.pids if self._builder is None else engine.pids | self._builder.pids

        return engine, DeviceWatch(readers, context.clock, context.background, pids, WatchTimes())
