"""Loaders as real processes, and the test in the place of the scheduler: forked from a process that
has imported everything already.
"""

import asyncio
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from confined import may_mount
from standin_s3 import ACCESS_KEY, SECRET_KEY

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.manifest import encode
from pilotlight.checkpoint.reader import FolderSource, Source
from pilotlight.common.buckets import NODES
from pilotlight.common.bus import Bus
from pilotlight.common.messages.hold import Fetch, NodeHold, Peer, node_hold_subject
from pilotlight.common.messages.reports import LOADER_REPORTS, LoaderReport
from pilotlight.common.service import run_service
from pilotlight.common.settings import BusSettings
from pilotlight.common.store import manifest_key
from pilotlight.common.testing import until
from pilotlight.loader.app import build
from pilotlight.loader.identity import node_id_of
from pilotlight.loader.settings import LoaderSettings
from pilotlight.policy.cluster import FetchPriority, NodeFacts
from pilotlight.policy.ids import Digest, Epoch, Generation, InstanceId, ModelName, NodeId
from pilotlight.policy.model import Model, ScalingBounds, Slo

KEY = "the key of this cluster"
MIB = 1 << 20
START_S = 120.0
STOP_S = 60.0
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000

_context = get_context("forkserver")
_context.set_forkserver_preload(["loader_processes", "killed_writers", "pytest"])

SmallDisk = tuple[Path, str]
"""A folder that is a disk of this size (``3m``), for one loader alone."""


def may_have_small_disks() -> bool:
    """Whether this process may make them."""
    return os.geteuid() == 0 and may_mount()


def _run_loader(environment: Mapping[str, str], log: str, disk: SmallDisk | None) -> None:
    """As ``python -m pilotlight.loader`` with this environment, in a process that was just
    forked.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if disk is not None:
        failed = libc.unshare(_CLONE_NEWNS) or libc.mount(
            None, b"/", None, _MS_REC | _MS_PRIVATE, None
        )
        failed = failed or libc.mount(
            b"tmpfs", str(disk[0]).encode(), b"tmpfs", 0, f"size={disk[1]}".encode()
        )
        assert not failed, os.strerror(ctypes.get_errno())
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    sys.exit(run_service("loader", LoaderSettings, build))


def _forked(environment: Mapping[str, str], log: Path, disk: SmallDisk | None) -> BaseProcess:
    process = _context.Process(
        target=_run_loader, args=(dict(environment), str(log), disk), daemon=True
    )
    path = os.environ.get("PYTHONPATH")
    # The server, which the first process starts, finds what it imports beforehand only so.
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        process.start()
    finally:
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)
    return process


@dataclass(eq=False)
class LoaderProcess:
    """One node's loader. Started again, it is the same node."""

    home: Path
    environment: dict[str, str]
    disk: SmallDisk | None = None
    child: BaseProcess | None = None
    killed: bool = False
    """By the test: it may be gone."""
    _read_bytes: int = 0

    @property
    def node_id(self) -> NodeId:
        return node_id_of(self.home / "state")

    @property
    def log(self) -> Path:
        return self.home / "loader.log"

    @property
    def socket(self) -> Path:
        return self.home / "run" / "pool.sock"

    @property
    def is_alive(self) -> bool:
        return self.child is not None and self.child.is_alive()

    def spawn(self) -> None:
        """Begin; ``LoaderProcesses.ready`` tells when it is there."""
        self.killed = False
        self.child = _forked(self.environment, self.log, self.disk)

    def signal(self, number: int) -> None:
        if self.child is not None and self.child.pid is not None and self.child.is_alive():
            self.killed = self.killed or number in (signal.SIGKILL, signal.SIGTERM)
            # It may end at this moment.
            with suppress(ProcessLookupError):
                os.kill(self.child.pid, number)

    async def ended(self) -> None:
        await until(lambda: not self.is_alive, deadline_s=STOP_S)

    def said(self, action: str) -> list[str]:
        """The lines of its log with this action."""
        return [line for line in self.log.read_text().splitlines() if f'"{action}"' in line]

    def news(self) -> list[str]:
        """The lines of its log since this was last asked."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        self._read_bytes += len(data)
        return data.decode(errors="replace").splitlines()


@dataclass
class LoaderProcesses:
    """Loaders of one cluster, their models, and the test in the place of the scheduler."""

    folder: Path
    bus: Bus
    settings: BusSettings
    roots: str = ""
    """Where models may lie beside the folder ``models``."""
    reports: dict[NodeId, LoaderReport] = field(default_factory=dict)
    loaders: list[LoaderProcess] = field(default_factory=list)
    seq: int = 0

    async def listen(self) -> None:
        """Hear what they report."""
        await self.bus.subscribe(LOADER_REPORTS, LoaderReport, self._on_report)

    async def _on_report(self, report: LoaderReport) -> None:
        self.reports[report.facts.node_id] = report

    def facts(self, loader: LoaderProcess) -> NodeFacts | None:
        report = self.reports.get(loader.node_id)
        return report.facts if report is not None else None

    def make(
        self, name: str, *, key: str | None = KEY, disk: SmallDisk | None = None, **changes: str
    ) -> LoaderProcess:
        """A node that was never started."""
        home = self.folder / name
        (home / "secrets").mkdir(parents=True)
        secrets = {"cluster-key": key, "s3-access-key": ACCESS_KEY, "s3-secret-key": SECRET_KEY}
        for secret, value in secrets.items():
            if value is not None:
                (home / "secrets" / secret).write_text(value)
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PILOTLIGHT_", "AWS_"))
        }
        environment = {
            **kept,
            "PILOTLIGHT_NATS_URL": self.settings.nats_url,
            "PILOTLIGHT_PREFIX": self.settings.prefix,
            "PILOTLIGHT_SECRETS_DIR": str(home / "secrets"),
            "PILOTLIGHT_RUN_DIR": str(home / "run"),
            "PILOTLIGHT_STATE_DIR": str(home / "state"),
            "PILOTLIGHT_LOG_DIR": str(home / "logs"),
            "PILOTLIGHT_POOL_PATH": str(home / "pool"),
            "PILOTLIGHT_POOL_BYTES": str(64 * MIB),
            "PILOTLIGHT_OBJECT_STORE_URL": (self.folder / "objects").as_uri(),
            "PILOTLIGHT_MODEL_ROOTS": ",".join(
                filter(None, (str(self.folder / "models"), self.roots))
            ),
            "PILOTLIGHT_WORKERS": "0",
            "PILOTLIGHT_STALL_TIMEOUT_S": "1.0",
            **changes,
        }
        loader = LoaderProcess(home, environment, disk)
        self.loaders.append(loader)
        return loader

    async def start(self, name: str, *, key: str | None = KEY, **changes: str) -> LoaderProcess:
        """A node whose loader has reported."""
        loader = self.make(name, key=key, disk=None, **changes)
        await self.begin(loader)
        return loader

    async def begin(self, loader: LoaderProcess) -> None:
        """Start a loader, for the first time or again, and wait until this run of it has
        reported.
        """
        before = {report.incarnation for report in self.reports.values()}
        loader.spawn()

        def reported() -> bool:
            assert loader.is_alive, loader.log.read_text()[-2000:]
            if not (loader.home / "state" / "node-id").exists():
                return False
            report = self.reports.get(loader.node_id)
            return report is not None and report.incarnation not in before

        await until(reported, deadline_s=START_S)

    async def end(self, loader: LoaderProcess) -> None:
        """Kill a loader, and forget its node."""
        loader.signal(signal.SIGKILL)
        await loader.ended()
        self.loaders.remove(loader)
        self.reports.pop(loader.node_id, None)
        await (await self.bus.bucket(NODES)).delete(loader.node_id)
        await asyncio.to_thread(shutil.rmtree, loader.home)

    async def stop(self) -> None:
        """End all of them in order."""
        for loader in self.loaders:
            loader.signal(signal.SIGCONT)
            loader.signal(signal.SIGTERM)
        for loader in self.loaders:
            if loader.child is not None:
                await loader.ended()

    def peer(self, loader: LoaderProcess) -> Peer:
        facts = self.facts(loader)
        assert facts is not None
        return Peer(node_id=loader.node_id, host=facts.dataplane_host, port=facts.dataplane_port)

    async def order(self, loader: LoaderProcess, *fetches: Fetch) -> None:
        """All that a node is to fetch."""
        self.seq += 1
        hold = NodeHold(node_id=loader.node_id, epoch=Epoch(1), fetches=fetches, seq=self.seq)
        await self.bus.publish(node_hold_subject(loader.node_id), hold)

    async def has(self, loader: LoaderProcess, model: Model, *, deadline_s: float = 30.0) -> None:
        """Wait until a node has all of a model: what it reports was verified."""
        await until(lambda: self.is_held(loader, model), deadline_s=deadline_s)

    def is_held(self, loader: LoaderProcess, model: Model) -> bool:
        parts, facts = tuple(range(len(model.spec.part_bytes))), self.facts(loader)
        return facts is not None and any(
            copy.digest == model.digest and copy.parts == parts for copy in facts.copies
        )

    def register(self, files: Mapping[str, bytes], name: str = "m") -> Model:
        """A model in a folder below ``models``."""
        folder = self.folder / "models" / name
        folder.mkdir(parents=True)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        return self.register_source(FolderSource(folder), folder.as_uri(), name)

    def register_source(self, source: Source, uri: str, name: str) -> Model:
        """What the gateway does once it has looked at a model."""
        checkpoint = read_checkpoint(source)
        digest = checkpoint.manifest.digest()
        path = self.folder / "objects" / manifest_key(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(checkpoint.manifest))
        return Model(
            name=ModelName(name),
            uri=uri,
            revision=None,
            source_version=checkpoint.source_version,
            digest=digest,
            text_digest=Digest("0" * 64),
            dtype=checkpoint.run_dtype,
            spec=checkpoint.spec,
            slo=Slo(ttft_ms=1000, tpot_ms=100),
            scaling=ScalingBounds(),
        )


def fetch_of(loader: LoaderProcess, model: Model, *upstreams: Peer) -> Fetch:
    """All of a model, from these nodes before its source."""
    return Fetch(
        instance_id=InstanceId(f"i-{loader.node_id}-{model.name}"),
        generation=Generation(1),
        model=model,
        parts=tuple(range(len(model.spec.part_bytes))),
        upstreams=upstreams,
        priority=FetchPriority.COLD_START,
    )
