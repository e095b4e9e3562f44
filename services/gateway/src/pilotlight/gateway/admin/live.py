"""The live view: rows of nodes, models, transfers, links, groups and cold starts, and what changed
in them since a client heard of them last.

There is one view for all clients of a gateway, made once a second while there is one. A client
holds no queue here: it remembers the version that it has seen and is sent the rows that are newer,
so a slow one gets fewer and larger events, and its memory is bounded by the rows that there are.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import structlog

from pilotlight.common.errors import DatabaseUnavailable, QueueFull
from pilotlight.common.service import Background
from pilotlight.common.waiting import Signal, cancel_all, pause, woken
from pilotlight.gateway.admin.live_links import GroupRow, LinkRow, group_rows, link_rows
from pilotlight.gateway.admin.live_rows import (
    StartState,
    TransferRow,
    model_row,
    node_row,
    transfer_row,
)
from pilotlight.gateway.edge import sse
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.records.recent import StartRow
from pilotlight.gateway.serving.fleet import FailedStart, Seen, StartProgress
from pilotlight.policy.cluster import Liveness, NodeFacts, WorkerFacts
from pilotlight.policy.ids import Digest, ModelName
from pilotlight.policy.instance import STARTING
from pilotlight.policy.plan import Instance

log = structlog.get_logger()

REFRESH_S = 1.0
HEARTBEAT_S = 10.0
MAX_CLIENTS = 64
"""Streams of one gateway; more get 429."""
RETRY_AFTER_S = 5.0
ROWS_OF_EVENT = 250
MAX_GONE = 10_000
"""Rows that are remembered as gone; a client that missed more begins anew."""
SLICE = 100
"""Rows made in a row before other work of the event loop has its turn."""


Keyed = TransferRow | LinkRow | GroupRow | StartRow


class Topic(StrEnum):
    """What can be followed."""

    NODES = "nodes"
    MODELS = "models"
    TRANSFERS = "transfers"
    LINKS = "links"
    GROUPS = "groups"
    COLD_STARTS = "cold_starts"


class RowsEvent(msgspec.Struct, kw_only=True):
    """One event of the stream: rows of a topic that are new or changed, and keys of those that are
    gone.
    """

    topic: Topic
    reset: bool
    """Forget every row of this topic: what follows is all that there is."""
    more: bool
    """Another event follows at once; draw after the last."""
    rows: list[Any]
    gone: list[str]


class View(Protocol):
    """What reports say (``Fleet``)."""

    def workers(self) -> tuple[WorkerFacts, ...]:
        """Every worker."""
        ...

    def nodes(self) -> tuple[NodeFacts, ...]:
        """Every node."""
        ...

    def instances(self, model: ModelName | None = None) -> tuple[Seen, ...]:
        """Instances of one model, or all."""
        ...

    def failed_start(self, model: ModelName, digest: Digest) -> FailedStart | None:
        """The last start of a model, when it failed."""
        ...

    def progress(self, model: ModelName, digest: Digest) -> StartProgress:
        """How far a model's start is."""
        ...


class Models(Protocol):
    """Which models there are (``Catalog``)."""

    def names(self) -> tuple[str, ...]:
        """Every model's name."""
        ...

    def get(self, name: str) -> CatalogEntry | None:
        """One model."""
        ...


class Starts(Protocol):
    """The newest cold starts (``RecentReader``)."""

    async def cold_starts(self) -> list[StartRow]:
        """The newest first."""
        ...


class Table:
    """Rows of one topic, each encoded once, with the version at which it changed."""

    def __init__(self) -> None:
        self.version = 0
        """Counts fillings; 0: it was never filled."""
        self._rows: dict[str, tuple[int, msgspec.Raw]] = {}
        self._made_of: dict[str, object] = {}
        self._gone: dict[str, int] = {}
        self._forgotten = 0

    def unchanged(self, key: str, made_of: object) -> bool:
        """Whether the row is there and was made of the same facts."""
        return key in self._rows and self._made_of.get(key) == made_of

    def put(self, key: str, made_of: object, row: msgspec.Struct) -> None:
        """Set a row of the next version."""
        self._made_of[key] = made_of
        encoded = msgspec.Raw(msgspec.json.encode(row))
        before = self._rows.get(key)
        if before is None or bytes(before[1]) != bytes(encoded):
            self._rows[key] = (self.version + 1, encoded)
            self._gone.pop(key, None)

    def filled(self, keys: Iterable[str]) -> None:
        """Every row is there: the next version can be sent."""
        self.version += 1
        for key in self._rows.keys() - set(keys):
            del self._rows[key]
            self._made_of.pop(key, None)
            self._gone[key] = self.version
        while len(self._gone) > MAX_GONE:
            oldest = next(iter(self._gone))
            self._forgotten = max(self._forgotten, self._gone.pop(oldest))

    def events(self, topic: Topic, seen: int) -> list[RowsEvent]:
        """What a client that has seen a version has to hear; nothing when that is the newest
        change.
        """
        reset = seen == 0 or seen < self._forgotten
        rows = [row for version, row in self._rows.values() if reset or version > seen]
        gone = [] if reset else [key for key, version in self._gone.items() if version > seen]
        if not (reset or rows or gone):
            return []
        pieces = [
            rows[start : start + ROWS_OF_EVENT] for start in range(0, len(rows), ROWS_OF_EVENT)
        ] or [[]]
        return [
            RowsEvent(
                topic=topic,
                reset=reset and number == 0,
                more=number < len(pieces) - 1,
                rows=list[Any](piece),
                gone=gone if number == 0 else [],
            )
            for number, piece in enumerate(pieces)
        ]


class LiveView:
    """The view; a component."""

    def __init__(self, fleet: View, models: Models, starts: Starts, background: Background) -> None:
        self._fleet = fleet
        self._models = models
        self._starts = starts
        self._background = background
        self._tables = {topic: Table() for topic in Topic}
        self._followed: Counter[Topic] = Counter()
        self._clients = 0
        self._wanted = asyncio.Event()
        self._changed = Signal()
        self._stopped = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Be ready for clients."""
        if self._task is None:
            self._task = self._background.spawn("live view", self._run())

    async def stop(self) -> None:
        """End every stream."""
        self._stopped = True
        self._changed.send()
        if self._task is not None:
            await cancel_all((self._task,))
            self._task = None

    def check_room(self) -> None:
        """Refuse a client when there are too many.

        Raises:
            QueueFull: there are.
        """
        if self._clients >= MAX_CLIENTS:
            raise QueueFull(
                f"{MAX_CLIENTS} live streams are open at this gateway",
                retry_after_s=RETRY_AFTER_S,
            )

    async def events(self, topics: Sequence[Topic]) -> AsyncGenerator[bytes, None]:
        """The stream of one client, until it leaves or the gateway stops.

        It begins with every row, goes on with those that change, and has a comment when nothing
        was sent for ``HEARTBEAT_S``.

        Raises:
            QueueFull: too many clients are there.
        """
        self.check_room()
        with self._following(topics):
            seen = dict.fromkeys(topics, 0)
            yield sse.comment("live")
            while not self._stopped:
                silent = True
                for topic, table in ((topic, self._tables[topic]) for topic in topics):
                    if table.version == 0:
                        continue
                    version = table.version
                    for one in table.events(topic, seen[topic]):
                        silent = False
                        yield sse.event(one)
                    seen[topic] = version
                if not await self._moved(topics, seen) and silent:
                    yield sse.comment("live")

    async def refresh(self) -> None:
        """Bring every table that is followed to what is known now."""
        nodes, workers = self._fleet.nodes(), self._fleet.workers()
        if self._followed[Topic.NODES]:
            await self._fill_nodes(nodes, workers)
        if self._followed[Topic.MODELS]:
            await self._fill_models(workers)
        if self._followed[Topic.TRANSFERS]:
            alive = [node for node in nodes if node.liveness is not Liveness.DEAD]
            self._fill(
                Topic.TRANSFERS,
                [transfer_row(node, one) for node in alive for one in node.transfers],
            )
        if self._followed[Topic.LINKS]:
            self._fill(Topic.LINKS, list(link_rows(nodes)))
        if self._followed[Topic.GROUPS]:
            instances = (seen.instance for seen in self._fleet.instances())
            self._fill(Topic.GROUPS, list(group_rows(instances)))
        if self._followed[Topic.COLD_STARTS]:
            await self._fill_starts()
        self._changed.send()

    @contextmanager
    def _following(self, topics: Sequence[Topic]) -> Generator[None]:
        self._clients += 1
        for topic in topics:
            if not self._followed[topic]:
                # What was kept since the last client left is old.
                self._tables[topic] = Table()
            self._followed[topic] += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._clients -= 1
            for topic in topics:
                self._followed[topic] -= 1

    async def _moved(self, topics: Sequence[Topic], seen: dict[Topic, int]) -> bool:
        """Wait for a newer version of any of these; False when ``HEARTBEAT_S`` passed first."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                while not self._stopped and all(
                    self._tables[topic].version == seen[topic] for topic in topics
                ):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _run(self) -> None:
        while True:
            if not self._clients:
                self._wanted.clear()
                await self._wanted.wait()
            await self.refresh()
            self._wanted.clear()
            # A new client is not made to wait for its first rows.
            await woken(self._wanted, REFRESH_S)

    async def _fill_nodes(self, nodes: Sequence[NodeFacts], workers: Sequence[WorkerFacts]) -> None:
        table = self._tables[Topic.NODES]
        of_node: dict[str, list[WorkerFacts]] = defaultdict(list)
        for worker in workers:
            of_node[worker.node_id].append(worker)
        known: dict[str, NodeFacts | None] = {node.node_id: node for node in nodes}
        keys = sorted(known.keys() | of_node.keys())
        for number, key in enumerate(keys):
            if number % SLICE == SLICE - 1:
                await pause(0)
            node, its_workers = known.get(key), of_node.get(key, [])
            # Facts are replaced with each report, never changed: the same ones make the same row.
            made_of = (node, *its_workers)
            if not table.unchanged(key, made_of):
                table.put(key, made_of, node_row(key, node, its_workers))
        table.filled(keys)

    async def _fill_models(self, workers: Sequence[WorkerFacts]) -> None:
        table = self._tables[Topic.MODELS]
        in_flight = Counter[str]()
        for worker in workers:
            for held in worker.held:
                if held.in_flight and worker.liveness is not Liveness.DEAD:
                    in_flight[held.model] += held.in_flight
        names = self._models.names()
        for number, name in enumerate(names):
            if number % SLICE == SLICE - 1:
                await pause(0)
            entry = self._models.get(name)
            if entry is None:
                continue
            model = entry.model
            instances = tuple(seen.instance for seen in self._fleet.instances(model.name))
            start = self._start_of(model.name, model.digest, instances)
            made_of = (model, instances, in_flight[name], start)
            if not table.unchanged(name, made_of):
                table.put(name, made_of, model_row(model, instances, in_flight[name], start))
        table.filled(names)

    def _start_of(
        self, name: ModelName, digest: Digest, instances: Sequence[Instance]
    ) -> StartState:
        if any(instance.state in STARTING for instance in instances):
            progress = self._fleet.progress(name, digest)
            return StartState(phase=progress.phase, fetched=progress.fetched)
        failed = self._fleet.failed_start(name, digest)
        return StartState(failure=failed.reason if failed is not None else "")

    def _fill(self, topic: Topic, rows: Sequence[Keyed]) -> None:
        table = self._tables[topic]
        for row in rows:
            table.put(row.key, None, row)
        table.filled([row.key for row in rows])

    async def _fill_starts(self) -> None:
        try:
            rows = await self._starts.cold_starts()
        except DatabaseUnavailable as error:
            # The rows that are shown stay; the page says by itself that they do not move.
            log.warning("cold starts are not shown", action="live_deferred", error=error.message)
            return
        self._fill(Topic.COLD_STARTS, rows)
