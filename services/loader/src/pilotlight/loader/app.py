"""Builds the loader: the pool first, then the parts that fill it, serve it, command it and report
it.
"""

import asyncio
import os
import random
import socket
from pathlib import Path

import structlog

from pilotlight.checkpoint.manifest import Manifest
from pilotlight.common.buckets import LEADER
from pilotlight.common.errors import BadRequest, BusUnavailable
from pilotlight.common.faults import Faults
from pilotlight.common.fitness import check_shared_memory
from pilotlight.common.ids import worker_id_of
from pilotlight.common.machine import DEVICES
from pilotlight.common.messages.hold import LEADING_KEY, Leading
from pilotlight.common.phase_reports import reported_phases
from pilotlight.common.service import Application, Context, check_or_warn
from pilotlight.common.sources.opening import Sources
from pilotlight.common.sources.ranged import Patience
from pilotlight.common.waiting import Backoff, cancel_all, pause
from pilotlight.dataplane.bandwidth import SourceLimits, parse_bandwidth
from pilotlight.dataplane.chunk_fetch import Distrusted
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.fetch_tools import FetchTools
from pilotlight.dataplane.file_reads import native_reads
from pilotlight.dataplane.lanes import LaneLimits, Lanes
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_pages import PoolPages
from pilotlight.dataplane.pool_server import PoolServer
from pilotlight.dataplane.readers import Readers
from pilotlight.dataplane.source_origin import ModelSource, SourceOrigin
from pilotlight.loader.agent import Agent
from pilotlight.loader.coalescing import Coalescing
from pilotlight.loader.devices import WorkerDevices, find_gpus, plan_workers
from pilotlight.loader.disk import DiskProbing, NodeDisk, open_disk
from pilotlight.loader.handlers import Handlers
from pilotlight.loader.identity import default_pool_bytes, load_epoch, node_id_of, save_epoch
from pilotlight.loader.links import NodeLinks, find_links
from pilotlight.loader.manifests import StoredManifests
from pilotlight.loader.metrics import LoaderMetrics
from pilotlight.loader.opening_ahead import OpeningAhead, record_path_of
from pilotlight.loader.reports import Changes, CopyObserver, NodeShape, Reporter
from pilotlight.loader.settings import LoaderSettings
from pilotlight.loader.supervise import WorkerPlan, WorkerSupervisor
from pilotlight.loader.verifications import Verifications
from pilotlight.loader.workers_ahead import (
    COMMAND,
    WorkersAhead,
    guessed,
    inherited,
    log_of,
    pid_path_of,
)
from pilotlight.native.library import Library
from pilotlight.policy.ids import Epoch, NodeId
from pilotlight.policy.model import Model

log = structlog.get_logger()

SHARED_MEMORY = Path("/dev/shm")
CORES_FOR_FILLING, MOST_FILLING = 4, 8
"""Threads that take the pool's memory ahead: one for so many cores, and so many at most."""
ASKS = 5
"""For the newest epoch, before a loader gives up; its supervisor starts it again."""
_BACKOFF = Backoff(first_s=0.1, limit_s=2.0)


class PoolKeeper:
    """The pool's life: its fetches end before it is unmapped."""

    def __init__(self, pool: HostPool, copies: HostCopies, settings: LoaderSettings) -> None:
        self._pool = pool
        self._copies = copies
        self._settings = settings

    async def start(self) -> None:
        """The pool is open already: others are built on it."""

    async def stop(self) -> None:
        """Leave the pool to the next loader, or give its memory back."""
        await self._copies.stop()
        remove = not self._settings.handover
        if remove:
            try:
                save_epoch(self._settings.state_dir, self._pool.highest_epoch)
            except OSError as error:
                # Without the epoch the next loader would obey a leader that is over: the pool,
                # which has it, stays.
                log.error(
                    "the pool stays: its epoch cannot be saved",
                    action="epoch_not_saved",
                    error=str(error),
                )
                remove = False
        self._pool.close(remove=remove)


async def build(
    context: Context[LoaderSettings],
    ahead: WorkersAhead | None = None,
    opening: OpeningAhead | None = None,
) -> Application:
    """Build the loader.

    Args:
        context: of the process.
        ahead: workers that have begun already.
        opening: a process in which torch opens a GPU, if one has begun already.

    Raises:
        HostPoolTaken, DiskTierTaken: another loader holds the node's pool, or its disk tier.
        BadRequest: the pool cannot be made as the settings say, or there are not the GPUs that they
            ask for.
        SettingsInvalid: other nodes cannot be listened to as they say.
        MachineUnfit: the state folder cannot be written to, there is not enough shared memory, or
            the driver does not say which GPUs there are.
        BusUnavailable, MessageUndecodable: the newest epoch cannot be learned.
    """
    settings = context.settings
    check_or_warn(settings.state_dir, "state folder", "PILOTLIGHT_STATE_DIR")
    node_id = node_id_of(settings.state_dir)
    # The driver takes a while to answer, and so does verifying what is adopted.
    looking = asyncio.create_task(
        find_gpus(settings.worker_kind, kept=record_path_of(settings.state_dir), opening=opening),
        name="look for GPUs",
    )
    metrics, changes = LoaderMetrics(context.metrics), Changes()
    pages: PoolPages | None = None
    try:
        pool = await _open_pool(context, node_id, await _announced_epoch(context))
        metrics.watch_pool(pool)
        observer = CopyObserver(changes, metrics)
        disk = await open_disk(context, pool, metrics)
        manifests = StoredManifests(context.store, context.background)
        links = find_links(context, node_id, metrics)
        native = await asyncio.to_thread(native_reads)
        tools = _tools(context, node_id, pool, disk, links, manifests, native)
        copies = HostCopies(tools, context.background, observer)
        ahead_of_fetches = settings.pool_ahead
        pages = _pages(tools, copies) if ahead_of_fetches is not False else None
        if pages is not None and (ahead_of_fetches or _may_have_gpus(settings)):
            # Not only when the GPUs are known, which takes seconds on a new node.
            await pages.start()
        found = await looking
        workers = plan_workers(settings.worker_kind, settings.workers, found)
        if pages is not None and ahead_of_fetches is None and workers.kind != "cuda":
            await pages.stop()
            pages = None
    except BaseException:
        if pages is not None:
            await pages.stop()
        raise
    finally:
        await cancel_all((looking,))
    if links is not None:
        links.listen(pool, tools, copies)
    agent = Agent(
        node_id=node_id,
        pool=pool,
        copies=copies,
        metrics=metrics,
        clock=context.clock,
        peers=links.peers if links is not None else None,
        prefetch=settings.start_prefetch,
    )
    log.info(
        "workers planned",
        action="workers_planned",
        kind=workers.kind,
        workers=len(workers.devices),
        no_gpus=found.why_none,
    )
    supervisor = WorkerSupervisor(
        plans=[_plan(settings, node_id, index, workers) for index in range(len(workers.devices))],
        handover=settings.handover,
        changes=changes,
        metrics=metrics,
        clock=context.clock,
        background=context.background,
        rng=random.Random(),
        ahead=ahead or WorkersAhead(),
    )
    shape = NodeShape(
        node_id=node_id,
        host=socket.gethostname(),
        nic_bytes_per_s=settings.nic_bytes_per_s,
        incarnation=context.incarnation,
        dataplane=links.address if links is not None else ("", 0),
    )
    coalescing = Coalescing(
        node_id, context.incarnation, context.clock, metrics, changes.report.set
    )
    reporter = Reporter(
        shape=shape,
        pool=pool,
        copies=copies,
        dead_workers=lambda: supervisor.dead_workers,
        changes=changes,
        coalescing=coalescing,
        leaving=not settings.handover,
        bus=context.bus,
        background=context.background,
        distrusted=tools.distrusted,
        disk=disk.tier if disk is not None else None,
    )
    server = PoolServer(settings.socket, pool, copies, supervisor, reports=coalescing)
    verifications = Verifications(node_id, tools, manifests, context.background)
    handlers = Handlers(context.bus, agent, verifications, disk.tier if disk is not None else None)
    first = [disk] if disk is not None else []
    second = [links] if links is not None else []
    filling = [pages] if pages is not None else []
    keeper = PoolKeeper(pool, copies, settings)
    probing = (
        [DiskProbing(disk, copies, tools.lanes, context.clock, changes.note)]
        if disk is not None
        else []
    )
    served = [server, reporter, handlers, supervisor]
    return Application(components=[*first, keeper, *filling, *second, *served, *probing])


def _pool_path(settings: LoaderSettings, node_id: NodeId) -> Path:
    return (settings.pool_path or SHARED_MEMORY / f"pilotlight-{node_id}.pool").absolute()


async def _open_pool(context: Context[LoaderSettings], node_id: NodeId, epoch: Epoch) -> HostPool:
    settings = context.settings
    path = _pool_path(settings, node_id)
    try:
        # Of a pool that is there already, what it takes is its own.
        if not path.exists():
            check_shared_memory(path.parent, settings.pool_bytes)
        size_bytes = settings.pool_bytes or default_pool_bytes(path.parent)
        # What is adopted is verified, which takes a second for a few gigabytes.
        pool = await asyncio.to_thread(HostPool.open, path, size_bytes, context.clock)
    except OSError as error:
        raise BadRequest(
            f"the host pool {path} cannot be made: {error.strerror}; see PILOTLIGHT_POOL_PATH"
        ) from error
    pool.raise_epoch(max(pool.highest_epoch, load_epoch(settings.state_dir), epoch))
    return pool


def _pages(tools: FetchTools, copies: HostCopies) -> PoolPages | None:
    """What gives the pool its memory ahead; None where the library for it is not there."""
    if tools.native is None:
        return None
    threads = min(MOST_FILLING, max(1, len(os.sched_getaffinity(0)) // CORES_FOR_FILLING))
    return PoolPages(tools.pool, tools.native, lambda: copies.is_fetching, threads=threads)


def _may_have_gpus(settings: LoaderSettings) -> bool:
    asked = {"PILOTLIGHT_WORKER_KIND": settings.worker_kind, "PILOTLIGHT_WORKERS": ""}
    kind, _ = guessed({**os.environ, **asked}, DEVICES)
    return kind == "cuda"


async def _announced_epoch(context: Context[LoaderSettings]) -> Epoch:
    """Leaders may have changed while no loader was here: one that is replaced must not be obeyed
    before the new one is heard.
    """
    bucket = await context.bus.bucket(LEADER)
    rng = random.Random()
    for attempt in range(ASKS):
        try:
            found = await bucket.get(LEADING_KEY, Leading)
        except BusUnavailable as error:
            log.warning("nobody says who leads", action="epoch_unknown", error=error.message)
            await pause(_BACKOFF.delay_s(attempt, rng))
        else:
            return found.value.epoch if found.value is not None else Epoch(0)
    raise BusUnavailable(
        f"the bucket {LEADER} was asked {ASKS} times which epoch is the newest, without an answer"
    )


def _tools(
    context: Context[LoaderSettings],
    node_id: NodeId,
    pool: HostPool,
    disk: NodeDisk | None,
    links: NodeLinks | None,
    manifests: StoredManifests,
    native: Library | None,
) -> FetchTools:
    settings = context.settings
    nearby = (
        *((disk.origin,) if disk is not None else ()),
        *((links.peers,) if links is not None else ()),
    )
    sources = Sources(settings, Patience(stall_timeout_s=settings.stall_timeout_s))

    def open_source(model: Model, manifest: Manifest) -> ModelSource:
        return SourceOrigin(sources.open(model.uri), manifest, model.uri)

    return FetchTools(
        pool=pool,
        readers=Readers(settings.fetch_threads, settings.stall_timeout_s),
        manifests=manifests,
        open_source=open_source,
        lanes=Lanes(
            LaneLimits(
                least=settings.fetch_reads,
                most=settings.fetch_threads,
                local=len(os.sched_getaffinity(0)),
            ),
            SourceLimits(parse_bandwidth(settings.link), context.clock),
            context.clock,
        ),
        distrusted=Distrusted(context.clock),
        faults=Faults.parse(settings.faults),
        clock=context.clock,
        phases=reported_phases(context.bus, context.clock, context.background, "loader", node_id),
        native=native,
        nearby=nearby,
        keepers=(disk.writer,) if disk is not None else (),
    )


def _plan(
    settings: LoaderSettings, node_id: NodeId, index: int, workers: WorkerDevices
) -> WorkerPlan:
    worker_id = worker_id_of(node_id, index)
    environment = inherited(os.environ)
    environment.update(
        PILOTLIGHT_WORKER_ID=worker_id,
        PILOTLIGHT_NODE_ID=node_id,
        PILOTLIGHT_POOL_SOCKET=str(settings.socket.absolute()),
        PILOTLIGHT_POOL_PATH=str(_pool_path(settings, node_id)),
        PILOTLIGHT_STATE_DIR=str(settings.state_dir.absolute()),
        PILOTLIGHT_DEVICE=workers.kind,
        PILOTLIGHT_WORKERS=str(len(workers.devices)),
    )
    if workers.devices[index]:
        (environment["PILOTLIGHT_CUDA_DEVICE"],) = workers.devices[index]
    return WorkerPlan(
        worker_id=worker_id,
        command=COMMAND,
        environment=environment,
        log_path=log_of(settings.log_dir, index),
        pid_path=pid_path_of(settings.state_dir, index),
    )
