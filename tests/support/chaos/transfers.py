"""Four loaders that stay from one schedule to the next, a folder and an S3 server with models: real
processes and a real bus.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3
from loader_processes import MIB, LoaderProcess, LoaderProcesses, SmallDisk, may_have_small_disks
from standin_s3 import ACCESS_KEY, SECRET_KEY, StandinS3

from chaos.engine_reads import Expected, expected_of
from chaos.transfer_plans import FULL_DISK, HANDING_OVER, NODES, PATIENT, Plan
from pilotlight.checkpoint.digests import chunk_digest
from pilotlight.checkpoint.manifest import Chunk, decode
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.model_roots import ModelRootsSettings
from pilotlight.common.sources.opening import Sources
from pilotlight.common.sources.ranged import Patience
from pilotlight.common.store import manifest_key
from pilotlight.loader.manifests import all_digests_key
from pilotlight.policy.model import Model

BUCKET = "models"
POOL_BYTES = 64 * MIB
LINK = "600mbit"
"""Of each node to a source: a model takes some tenths of a second."""
DISK = "3m"
"""Of the small disk: less than one chunk of the largest model."""
CONFIGS = (
    tiny_config(hidden_size=256, intermediate_size=1024, vocab_size=512, num_hidden_layers=4),
    tiny_config(hidden_size=384, intermediate_size=2400, vocab_size=512, num_hidden_layers=3),
    tiny_config(hidden_size=512, intermediate_size=4096, vocab_size=512, num_hidden_layers=2),
)
"""8 to 29 MB: layers of two units, of seven, and of two chunks."""
FILLER = tiny_config(hidden_size=512, intermediate_size=4096, vocab_size=512, num_hidden_layers=3)
"""43 MB."""


class Stored:
    """The files of one model, where its source has them."""

    def __init__(
        self, name: str, files: Mapping[str, bytes], folder: Path, s3: StandinS3 | None
    ) -> None:
        self.name = name
        self.files = dict(files)
        self._folder = folder / name
        self._s3 = s3
        self._largest = max(self.files, key=lambda file: len(self.files[file]))

    def register(self, processes: LoaderProcesses) -> Model:
        """What the gateway does."""
        if self._s3 is None:
            self._folder.mkdir(parents=True)
            for file, content in self.files.items():
                (self._folder / file).write_bytes(content)
            return processes.register_source(
                FolderSource(self._folder), self._folder.as_uri(), self.name
            )
        for file, content in self.files.items():
            self._put(file, content, f'"{self.name}-{file}"')
        secrets = processes.folder / "secrets"
        settings = ModelRootsSettings(
            model_roots=f"s3://{BUCKET}",
            s3_endpoint=self._s3.url,
            s3_allow_http=True,
            secrets_dir=secrets,
        )
        pinned = Sources(settings, Patience(stall_timeout_s=5.0)).pin(f"s3://{BUCKET}/{self.name}")
        try:
            return processes.register_source(pinned.source, pinned.uri, self.name)
        finally:
            pinned.source.close()

    def corrupt(self, share: float) -> None:
        """Alter a byte, and nothing that would tell of it."""
        content = bytearray(self.files[self._largest])
        # Behind its header.
        start = 8 + int.from_bytes(content[:8], "little")
        at = start + int(share * (len(content) - start - 1))
        content[at] ^= 0x20
        if self._s3 is not None:
            self._put(self._largest, bytes(content), f'"{self.name}-{self._largest}"')
            return
        path = self._folder / self._largest
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content[at : at + 1])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def replace(self) -> None:
        """Put something else in the place of the largest file, of the same size."""
        content = its_own(self.files[self._largest], "replaced")
        if self._s3 is not None:
            self._put(self._largest, content, f'"{self.name}-replaced"')
            return
        making = self._folder / "making"
        making.write_bytes(content)
        making.rename(self._folder / self._largest)

    def remove(self) -> None:
        """It is needed no more."""
        if self._s3 is None:
            shutil.rmtree(self._folder)
            return
        for file in self.files:
            del self._s3.buckets[BUCKET][f"{self.name}/{file}"]

    def _put(self, file: str, content: bytes, etag: str) -> None:
        assert self._s3 is not None
        key = f"{self.name}/{file}"
        self._s3.etags[BUCKET, key] = etag
        self._s3.buckets[BUCKET][key] = content


def its_own(content: bytes, name: str) -> bytes:
    """A file of tensors that has the same layout, and chunks that no other one has: each tensor
    begins with bytes of its own.
    """
    own, size_bytes = bytearray(content), int.from_bytes(content[:8], "little")
    for tensor, told in json.loads(content[8 : 8 + size_bytes]).items():
        if tensor != "__metadata__":
            start, stop = told["data_offsets"]
            data = blake3(f"{name} {tensor}".encode()).digest(length=min(32, stop - start))
            own[8 + size_bytes + start : 8 + size_bytes + start + len(data)] = data
    return bytes(own)


class Transfers:
    """The nodes, and what they are given to fetch."""

    def __init__(self, processes: LoaderProcesses, s3: StandinS3) -> None:
        self.processes = processes
        self.nodes: dict[str, LoaderProcess] = {}
        self.used: set[str] = set()
        """Nodes that have fetched something since they began."""
        self.filler: Model | None = None
        self._s3 = s3
        self._made = 0
        self._templates = [
            tiny_files(config, shards=1 + (at == 0)) for at, config in enumerate(CONFIGS)
        ]

    async def start(self) -> None:
        """Start every node."""
        secrets = self.processes.folder / "secrets"
        secrets.mkdir()
        (secrets / "s3-access-key").write_text(ACCESS_KEY)
        (secrets / "s3-secret-key").write_text(SECRET_KEY)
        await self.processes.listen()
        self.filler = self.processes.register(tiny_files(FILLER), "filler")
        await asyncio.gather(*(self._start(name) for name in NODES))

    async def renew(self, name: str) -> None:
        """Another node in a node's place."""
        await self.processes.end(self.nodes[name])
        await self._start(name)

    async def renew_all(self) -> None:
        """Other nodes in the place of all, also of those that are gone already."""
        for loader in list(self.processes.loaders):
            await self.processes.end(loader)
        await asyncio.gather(*(self._start(name) for name in NODES))

    async def register(self, plan: Plan) -> tuple[Stored, Model, Expected]:
        """A model that no node has ever seen, and what an engine has to be given of it."""
        name, template = f"s{plan.seed}", self._templates[plan.shape]

        def make() -> tuple[Stored, Model, Expected]:
            files = {
                file: its_own(data, name) if file.endswith(".safetensors") else data
                for file, data in template.items()
            }
            stored = Stored(
                name,
                files,
                self.processes.folder / "models",
                self._s3 if plan.store == "s3" else None,
            )
            model = stored.register(self.processes)
            if plan.recorded and plan.head is None:
                self._record(model, files)
            return stored, model, expected_of(files)

        return await asyncio.to_thread(make)

    def _record(self, model: Model, files: Mapping[str, bytes]) -> None:
        """As a node does that has read all of the model."""
        objects = self.processes.folder / "objects"
        manifest = decode((objects / manifest_key(model.digest)).read_bytes())

        def content(chunk: Chunk) -> bytearray:
            data = bytearray(chunk.size_bytes)
            for segment in chunk.segments:
                start, file_start = segment.image_offset - chunk.image_offset, segment.file_offset
                stored = files[manifest.files[segment.file].name]
                data[start : start + segment.size_bytes] = stored[
                    file_start : file_start + segment.size_bytes
                ]
            return data

        digests = [
            [chunk_digest(content(chunk)) for chunk in part.chunks] for part in manifest.parts
        ]
        path = objects / all_digests_key(model.digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(digests))

    async def _start(self, name: str) -> None:
        self._made += 1
        self.used.discard(name)
        small: SmallDisk | None = None
        changes = {
            "PILOTLIGHT_POOL_BYTES": str(POOL_BYTES),
            "PILOTLIGHT_LINK": LINK,
            "PILOTLIGHT_STALL_TIMEOUT_S": "6.0" if name == PATIENT else "2.0",
            "PILOTLIGHT_HANDOVER": str(name == HANDING_OVER).lower(),
            "PILOTLIGHT_S3_ENDPOINT": self._s3.url,
            "PILOTLIGHT_S3_ALLOW_HTTP": "true",
        }
        if name == FULL_DISK:
            disk = self.processes.folder / f"disk{self._made}"
            if may_have_small_disks():
                disk.mkdir()
                small = disk, DISK
            else:
                # A file where the folder should be: nothing can be written there either.
                disk.touch()
            changes["PILOTLIGHT_DISK_TIER_DIR"] = str(disk / "tier")
        loader = self.nodes[name] = self.processes.make(
            f"{name}{self._made}", disk=small, **changes
        )
        await self.processes.begin(loader)
