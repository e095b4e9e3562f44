"""Through whom a worker reports: its loader while that passes it on, else itself."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.common.messages.codec import decode_json
from pilotlight.common.messages.pool import Relayed, WorkerHere, WorkerSaid
from pilotlight.common.messages.reports import WorkerReport
from pilotlight.policy.cluster import WorkerFacts
from pilotlight.policy.ids import Epoch
from pilotlight.policy.testing import worker
from pilotlight.worker.reporting import LOADER_PATIENCE_S, Reporter

pytestmark = pytest.mark.anyio


class Connection:
    """To a loader."""

    def __init__(self) -> None:
        self.sent = list[WorkerSaid | WorkerHere]()
        self.reads = True

    def send(self, message: WorkerSaid | WorkerHere) -> bool:
        if self.reads:
            self.sent.append(message)
        return self.reads


class Rig:
    """A reporter whose turns the test takes."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.facts: WorkerFacts = worker(0)
        self.epoch = Epoch(1)
        self.published = list[WorkerReport]()
        self.loader = Connection()
        core: Any = SimpleNamespace(
            worker_id=self.facts.worker_id, clock=self.clock, bus=self, changed=asyncio.Event()
        )
        bucket: Any = SimpleNamespace()
        self.reporter = Reporter(core, bucket, "a", lambda: self.facts, lambda: self.epoch)

    async def publish(self, subject: str, report: WorkerReport) -> None:
        self.published.append(report)

    async def turn(self, after_s: float = 0.2) -> tuple[int, list[WorkerSaid | WorkerHere]]:
        """How many reports it published in one turn, and what it said to its loader."""
        self.clock.advance(after_s)
        published, sent = len(self.published), len(self.loader.sent)
        await self.reporter.tell(self.facts)
        return len(self.published) - published, self.loader.sent[sent:]

    def relayed(self, seq: int) -> None:
        self.reporter.on_relayed(Relayed(seq=seq))

    def opened(self) -> None:
        connection: Any = self.loader
        self.reporter.opened(connection)


async def through_its_loader() -> Rig:
    rig = Rig()
    rig.opened()
    rig.relayed(0)
    published, sent = await rig.turn()
    assert published == 1, "until the loader has said it"
    (said,) = sent
    assert isinstance(said, WorkerSaid)
    rig.relayed(said.seq)
    return rig


async def test_without_a_word_of_its_loader_it_reports_itself() -> None:
    rig = Rig()
    assert await rig.turn() == (1, [])
    rig.opened()
    assert await rig.turn() == (1, []), "a loader of the release before asks for nothing"
    assert [one.seq for one in rig.published] == [1, 2]


async def test_a_loader_that_passes_reports_on_gets_changes_and_signs_of_life() -> None:
    rig = await through_its_loader()
    assert await rig.turn() == (0, [WorkerHere()])
    rig.facts = replace(rig.facts, queue_requests=3)
    published, (said,) = await rig.turn()
    assert published == 0
    assert isinstance(said, WorkerSaid)
    report = decode_json(said.report, WorkerReport)
    assert (report.facts, report.seq) == (rig.facts, said.seq)
    assert await rig.turn() == (0, [WorkerHere()])
    rig.epoch = Epoch(2)
    _, (said,) = await rig.turn(0.0)
    assert isinstance(said, WorkerSaid), "another leader was obeyed"


async def test_a_loader_that_stands_still_is_not_waited_for() -> None:
    rig = await through_its_loader()
    assert (await rig.turn(LOADER_PATIENCE_S - 0.01))[0] == 0
    assert (await rig.turn(0.02))[0] == 1
    rig.relayed(1)
    assert (await rig.turn())[0] == 0, "it goes on"


async def test_a_loader_that_is_gone_is_not_waited_for_either() -> None:
    rig = await through_its_loader()
    rig.reporter.closed()
    assert await rig.turn(0.0) == (1, [])
    rig.opened()
    rig.relayed(0)
    _, (said,) = await rig.turn(0.0)
    assert isinstance(said, WorkerSaid), "the next loader knows nothing yet"


async def test_what_a_loader_does_not_read_is_said_again() -> None:
    rig = await through_its_loader()
    rig.loader.reads = False
    rig.facts = replace(rig.facts, queue_requests=3)
    assert await rig.turn() == (0, [])
    rig.loader.reads = True
    _, (said,) = await rig.turn()
    assert isinstance(said, WorkerSaid)
