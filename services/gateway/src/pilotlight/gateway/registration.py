"""Registration: read a checkpoint's headers, pin its source, store manifest and text bundle, insert the model.

Parameters are not read: registration takes seconds whatever the model's size, and the model can be served as soon as it returns.
"""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from pilotlight.checkpoint.checkpoint import Checkpoint, read_checkpoint
from pilotlight.checkpoint.errors import CheckpointError
from pilotlight.checkpoint.manifest import encode as encode_manifest
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.common.db.session import Database
from pilotlight.common.errors import UnprocessableInput, error_of
from pilotlight.common.model_roots import ModelRoots
from pilotlight.common.service import Context
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.store import manifest_key, text_key
from pilotlight.common.waiting import within
from pilotlight.gateway.admin.schemas import ModelChanges, NewModel
from pilotlight.gateway.catalog import Catalog
from pilotlight.gateway.repository import ModelRepository, StoredModel
from pilotlight.policy.types import Dtype, Model, ModelName, ScalingBounds, Slo
from pilotlight.text.bundle import TextBundle, bundle_from_files
from pilotlight.text.bundle import encode as encode_bundle

log = structlog.get_logger()

READ_DEADLINE_S = 60.0
MAX_CONCURRENT = 4
"""Registrations at a time: each reads headers of up to 100 MiB."""


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read from a source."""

    checkpoint: Checkpoint
    text: TextBundle


class Registration:
    """Adds, changes and removes models."""

    def __init__(self, database: Database, context: Context[ServiceSettings], roots: ModelRoots, catalog: Catalog) -> None:
        self.models = ModelRepository(database, context.clock)
        self._store = context.store
        self._roots = roots
        self._catalog = catalog
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def register(self, body: NewModel) -> StoredModel:
        """Register a model.

        Raises:
            UriNotAllowed, SourceUnavailable, BadCheckpoint, UnsupportedModel: the source will not do.
            AlreadyExists: the name is taken.
            UnprocessableInput: bounds contradict each other.
            SourceUnavailable, DatabaseUnavailable: nothing was registered; try again.
        """
        scaling = ScalingBounds(
            min_instances=body.min_instances, max_instances=body.max_instances, keep_alive_s=body.keep_alive_s
        )
        _check(scaling)
        if body.revision is not None:
            raise UnprocessableInput("a folder has no revisions: leave `revision` out", param="revision")
        folder = self._roots.folder_of(body.uri)
        async with self._slots:
            read = await within(READ_DEADLINE_S, asyncio.to_thread(_read, folder), f"reading {folder}")
        checkpoint = read.checkpoint
        model = Model(
            name=ModelName(body.name),
            uri=folder.as_uri(),
            revision=body.revision,
            source_version=checkpoint.source_version,
            digest=checkpoint.manifest.digest(),
            text_digest=read.text.digest(),
            dtype=checkpoint.run_dtype if body.dtype == "auto" else Dtype(body.dtype),
            spec=checkpoint.spec,
            slo=Slo(ttft_ms=body.slo.ttft_ms, tpot_ms=body.slo.tpot_ms, attainment=body.slo.attainment),
            scaling=scaling,
            pinned=body.pinned,
        )
        # Blobs first: a row must never name an object that is not there. A blob without a row does no harm.
        await self._store.put_if_absent(manifest_key(model.digest), encode_manifest(checkpoint.manifest))
        await self._store.put_if_absent(text_key(model.text_digest), encode_bundle(read.text))
        stored = await self.models.add(model)
        await self._catalog.refresh()
        log.info("model registered", action="model_registered", model=model.name, digest=model.digest, uri=model.uri)
        return stored

    async def change(self, name: str, body: ModelChanges) -> StoredModel:
        """Change SLO, bounds or pin of a model.

        Raises:
            ModelNotFound: there is none of that name.
            UnprocessableInput: bounds contradict each other.
        """
        model = (await self.models.get(name)).model
        if body.slo is not None:
            model = replace(model, slo=Slo(ttft_ms=body.slo.ttft_ms, tpot_ms=body.slo.tpot_ms, attainment=body.slo.attainment))
        if body.pinned is not None:
            model = replace(model, pinned=body.pinned)
        bounds = {
            key: value
            for key, value in (
                ("min_instances", body.min_instances),
                ("max_instances", body.max_instances),
                ("keep_alive_s", body.keep_alive_s),
            )
            if value is not None
        }
        model = replace(model, scaling=replace(model.scaling, **bounds))
        _check(model.scaling)
        await self.models.replace(model)
        await self._catalog.refresh()
        return await self.models.get(name)

    async def remove(self, name: str) -> None:
        """Delete a model.

        Raises:
            ModelNotFound: there is none of that name.
        """
        await self.models.remove(name)
        await self._catalog.refresh()
        log.info("model deleted", action="model_deleted", model=name)


def _check(scaling: ScalingBounds) -> None:
    if scaling.min_instances > scaling.max_instances:
        raise UnprocessableInput(
            f"min_instances {scaling.min_instances} is more than max_instances {scaling.max_instances}", param="min_instances"
        )


def _read(folder: Path) -> _Read:
    """Read headers and text files; errors of the lower library become those of the taxonomy, by code."""
    source = FolderSource(folder)
    try:
        checkpoint = read_checkpoint(source)
        files = {file.name: source.read(file, 0, file.size_bytes) for file in checkpoint.text_files}
    except CheckpointError as error:
        raise error_of(error.code, str(error)) from error
    return _Read(checkpoint, bundle_from_files(files))
