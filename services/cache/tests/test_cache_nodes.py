"""Nodes that come, and what the cache does at once."""

import asyncio

import pytest
from sqlalchemy import URL, delete, func, insert

from pilotlight.cache import handlers, keeper
from pilotlight.cache.app import build
from pilotlight.cache.settings import CacheSettings, HostCopies
from pilotlight.cache.testing import (
    DEADLINE_S,
    NODE,
    Peers,
    change,
    on,
    start,
    stop,
)
from pilotlight.common.bus import Bus
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.messages.hold import NodePrefetch, prefetch_subject
from pilotlight.common.messages.reports import LoaderReport, loader_report_subject
from pilotlight.common.testing import MakeContext
from pilotlight.common.waiting import cancel_all, every
from pilotlight.policy.ids import Epoch, NodeId
from pilotlight.policy.testing import model

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
NEXT = NodeId("n1")
NEVER_S = 3600.0


async def test_a_node_that_comes_is_told_what_no_memory_has(
    settings: CacheSettings,
    make_context: MakeContext,
    bus: Bus,
    peers: Peers,
    module_database: URL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node fetches one model ahead at a time: the other one is for the next node."""
    monkeypatch.setattr(keeper, "LEARN_S", 0.0)
    monkeypatch.setattr(keeper, "INTERVAL_S", NEVER_S)
    monkeypatch.setattr(handlers, "SWEEP_INTERVAL_S", NEVER_S)
    for one in (model("a"), model("b")):
        row = {"name": one.name, "digest": one.digest, "body": to_row_json(one)}
        times = {"created_at": func.now(), "updated_at": func.now()}
        change(module_database, insert(tables.models).values(**row, **times))
    keeps_all = settings.model_copy(update={"host_copies": HostCopies.ALL})
    told: asyncio.Queue[NodePrefetch] = asyncio.Queue()
    for node_id in (NODE, NEXT):
        await bus.subscribe(prefetch_subject(node_id), NodePrefetch, told.put)
    there: list[NodeId] = []

    async def report() -> None:
        async for _ in every(0.2):
            for node_id in there:
                one = LoaderReport(facts=on(node_id), incarnation="i", epoch_seen=Epoch(1))
                await bus.publish(loader_report_subject(node_id), one)

    reporting = asyncio.create_task(report())
    application = await build(make_context("cache", keeps_all))
    await start(application)
    try:
        for node_id, name in ((NODE, "a"), (NEXT, "b")):
            there.append(node_id)
            async with asyncio.timeout(DEADLINE_S):
                fetched = await told.get()
            names = [one.model.name for one in fetched.fetches]
            assert (fetched.node_id, names) == (node_id, [name])
    finally:
        await cancel_all((reporting,))
        await stop(application)
        change(module_database, delete(tables.models))
