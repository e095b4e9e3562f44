"""Loaders that give each other models: real processes, as nodes of one cluster."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gated_link import GatedLink

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.manifest import encode
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.bus import Bus
from pilotlight.common.messages.hold import Fetch, NodeHold, Peer, node_hold_subject
from pilotlight.common.messages.reports import LOADER_REPORTS, LoaderReport
from pilotlight.common.settings import BusSettings
from pilotlight.common.store import manifest_key
from pilotlight.common.testing import until
from pilotlight.loader.identity import node_id_of
from pilotlight.policy.types import (
    Digest,
    Epoch,
    FetchPriority,
    Generation,
    InstanceId,
    Model,
    ModelName,
    NodeFacts,
    NodeId,
    ScalingBounds,
    Slo,
)

pytestmark = pytest.mark.anyio

KEY = "the key of this cluster"
MIB = 1 << 20


@dataclass
class LoaderProcess:
    """One node's loader, as a process."""

    node_id: NodeId
    child: subprocess.Popen[bytes]
    log: Path

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def said(self, action: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if f'"{action}"' in line]


def spawn(environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        return subprocess.Popen([sys.executable, "-m", "pilotlight.loader"], env=environment, stdout=output, stderr=output)


@dataclass
class Cluster:
    """Loaders, their models, and the test in the place of the scheduler."""

    folder: Path
    bus: Bus
    settings: BusSettings
    reports: dict[NodeId, LoaderReport] = field(default_factory=dict)
    loaders: list[LoaderProcess] = field(default_factory=list)
    seq: int = 0

    async def on_report(self, report: LoaderReport) -> None:
        self.reports[report.facts.node_id] = report

    def facts(self, loader: LoaderProcess) -> NodeFacts | None:
        report = self.reports.get(loader.node_id)
        return report.facts if report is not None else None

    async def start(self, name: str, *, key: str | None = KEY, **changes: str) -> LoaderProcess:
        home = self.folder / name
        (home / "secrets").mkdir(parents=True)
        if key is not None:
            (home / "secrets" / "cluster-key").write_text(key)
        environment = {
            **os.environ,
            "PILOTLIGHT_NATS_URL": self.settings.nats_url,
            "PILOTLIGHT_PREFIX": self.settings.prefix,
            "PILOTLIGHT_SECRETS_DIR": str(home / "secrets"),
            "PILOTLIGHT_RUN_DIR": str(home / "run"),
            "PILOTLIGHT_STATE_DIR": str(home / "state"),
            "PILOTLIGHT_LOG_DIR": str(home / "logs"),
            "PILOTLIGHT_POOL_PATH": str(home / "pool"),
            "PILOTLIGHT_POOL_BYTES": str(64 * MIB),
            "PILOTLIGHT_OBJECT_STORE_URL": (self.folder / "objects").as_uri(),
            "PILOTLIGHT_MODEL_ROOTS": str(self.folder / "models"),
            "PILOTLIGHT_WORKERS": "0",
            "PILOTLIGHT_STALL_TIMEOUT_S": "1.0",
            **changes,
        }
        log = home / "loader.log"
        child = spawn(environment, log)
        await until(
            lambda: (home / "state" / "node-id").exists() and log.exists() and "service_ready" in log.read_text(), deadline_s=30
        )
        loader = LoaderProcess(node_id_of(home / "state"), child, log)
        self.loaders.append(loader)
        await until(lambda: self.facts(loader) is not None)
        return loader

    def peer(self, loader: LoaderProcess) -> Peer:
        facts = self.facts(loader)
        assert facts is not None
        return Peer(node_id=loader.node_id, host=facts.dataplane_host, port=facts.dataplane_port)

    async def order(self, loader: LoaderProcess, model: Model, *upstreams: Peer) -> None:
        self.seq += 1
        fetch = Fetch(
            instance_id=InstanceId(f"i-{loader.node_id}"),
            generation=Generation(1),
            model=model,
            parts=tuple(range(len(model.spec.part_bytes))),
            upstreams=upstreams,
            priority=FetchPriority.COLD_START,
        )
        hold = NodeHold(node_id=loader.node_id, epoch=Epoch(1), fetches=(fetch,), seq=self.seq)
        await self.bus.publish(node_hold_subject(loader.node_id), hold)

    async def has(self, loader: LoaderProcess, model: Model) -> None:
        """Wait until a node has all of a model: what it reports was verified."""
        parts = tuple(range(len(model.spec.part_bytes)))

        def reported() -> bool:
            facts = self.facts(loader)
            return facts is not None and any(copy.digest == model.digest and copy.parts == parts for copy in facts.copies)

        await until(reported, deadline_s=30)

    def register(self) -> Model:
        folder = self.folder / "models" / "m"
        folder.mkdir(parents=True)
        config = tiny_config(hidden_size=512, intermediate_size=4096, vocab_size=512, num_hidden_layers=2)
        for file, content in tiny_files(config).items():
            (folder / file).write_bytes(content)
        checkpoint = read_checkpoint(FolderSource(folder))
        digest = checkpoint.manifest.digest()
        path = self.folder / "objects" / manifest_key(digest)
        path.parent.mkdir(parents=True)
        path.write_bytes(encode(checkpoint.manifest))
        return Model(
            name=ModelName("m"),
            uri=folder.as_uri(),
            revision=None,
            source_version=checkpoint.source_version,
            digest=digest,
            text_digest=Digest("0" * 64),
            dtype=checkpoint.run_dtype,
            spec=checkpoint.spec,
            slo=Slo(ttft_ms=1000, tpot_ms=100),
            scaling=ScalingBounds(),
        )


@pytest.fixture
async def cluster(tmp_path: Path, bus: Bus, bus_settings: BusSettings) -> AsyncIterator[Cluster]:
    built = Cluster(tmp_path, bus, bus_settings)
    await bus.subscribe(LOADER_REPORTS, LoaderReport, built.on_report)
    yield built
    for loader in built.loaders:
        loader.signal(signal.SIGCONT)
        loader.child.terminate()
    for loader in built.loaders:
        await asyncio.to_thread(loader.child.wait, 20)


async def test_nodes_meet_and_pass_a_model_on(cluster: Cluster) -> None:
    model = cluster.register()
    first, second, third = [await cluster.start(name) for name in ("first", "second", "third")]
    # Nobody has said a word of a model yet: they have met.
    for loader in (first, second, third):
        await until(lambda loader=loader: len(loader.said("link_up")) == 2)
    await cluster.order(first, model)
    await cluster.has(first, model)
    # The folder is gone: what the others get, they get from one another.
    (cluster.folder / "models" / "m").rename(cluster.folder / "models" / "gone")
    await cluster.order(third, model, cluster.peer(second), cluster.peer(first))
    await cluster.order(second, model, cluster.peer(first))
    await cluster.has(second, model)
    await cluster.has(third, model)
    assert not third.said("origin_set_aside")


@pytest.mark.parametrize(("does", "seed"), [("dies", 1), ("dies", 2), ("hangs", 3), ("hangs", 4)])
async def test_a_node_whose_upstream_dies_or_hangs_goes_on_at_the_byte(cluster: Cluster, does: str, seed: int) -> None:
    model = cluster.register()
    first, second = await cluster.start("first"), await cluster.start("second")
    await cluster.order(first, model)
    await cluster.has(first, model)
    gate = GatedLink(random.Random(seed).randrange(MIB, 24 * MIB))
    behind = await gate.start(cluster.peer(first))
    await cluster.order(second, model, behind)
    await until(lambda: gate.is_held_up)
    first.signal(signal.SIGKILL if does == "dies" else signal.SIGSTOP)
    # A connection that is up to somebody who hangs passes nothing on.
    if does == "dies":
        gate.open()
    await cluster.has(second, model)
    named = second.said("origin_set_aside")
    assert len(named) == 1
    assert first.node_id in named[0]
    await gate.cut()


async def test_nodes_of_two_clusters_have_nothing_to_say_to_each_other(cluster: Cluster) -> None:
    model = cluster.register()
    first, stranger = await cluster.start("first"), await cluster.start("stranger", key="the key of another cluster")
    silent = await cluster.start("silent", key=None)
    await cluster.order(first, model)
    await cluster.has(first, model)
    facts = cluster.facts(silent)
    assert facts is not None
    assert (facts.dataplane_host, facts.dataplane_port) == ("", 0)
    await until(lambda: first.said("link_down") and stranger.said("link_down") and first.said("link_refused"))
    assert all("peer_refused" in line for line in (*first.said("link_down"), *stranger.said("link_down")))
    # Each takes the model from its source.
    await cluster.order(stranger, model, cluster.peer(first))
    await cluster.has(stranger, model)
    assert not stranger.said("link_up")
