"""Registration: read a checkpoint's headers, pin its source, store manifest and text bundle, insert the model.

Parameters are not read: registration takes seconds whatever the model's size, and the model can be served as soon as it returns.
"""

import asyncio
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import structlog

from pilotlight.checkpoint.checkpoint import Checkpoint, read_checkpoint
from pilotlight.checkpoint.errors import CheckpointError
from pilotlight.checkpoint.manifest import encode as encode_manifest
from pilotlight.checkpoint.reader import FolderSource, read_small
from pilotlight.common.clock import Clock
from pilotlight.common.db.session import Database
from pilotlight.common.errors import (
    BadCheckpoint,
    PilotlightError,
    SourceUnavailable,
    UnprocessableInput,
    UriNotAllowed,
    error_of,
)
from pilotlight.common.model_roots import ModelRoots
from pilotlight.common.service import Context
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.store import manifest_key, text_key
from pilotlight.common.waiting import within
from pilotlight.gateway.admin.schemas import ModelChanges, NewModel, SloBody
from pilotlight.gateway.catalog import Catalog, ModelText
from pilotlight.gateway.repository import ModelRepository, StoredModel
from pilotlight.policy.types import Dtype, Model, ModelName, ScalingBounds, Slo
from pilotlight.text.bundle import MAX_TOKENIZER_BYTES, TextBundle, bundle_from_files
from pilotlight.text.bundle import encode as encode_bundle

log = structlog.get_logger()

T = TypeVar("T")

READ_DEADLINE_S = 30.0
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
        self._clock = context.clock
        self._roots = roots
        self._catalog = catalog
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def register(self, body: NewModel) -> StoredModel:
        """Register a model.

        Raises:
            UriNotAllowed, BadCheckpoint, UnsupportedModel: the source will not do.
            AlreadyExists: the name is taken.
            UnprocessableInput: bounds contradict each other.
            SourceUnavailable, SourceChanged, DeadlineExceeded, DatabaseUnavailable: nothing was registered; try again.
        """
        scaling = ScalingBounds(
            min_instances=body.min_instances, max_instances=body.max_instances, keep_alive_s=body.keep_alive_s
        )
        _check(scaling)
        if body.revision is not None:
            raise UnprocessableInput("a folder has no revisions: leave `revision` out", param="revision")
        try:
            folder = self._roots.folder_of(body.uri)
        except SourceUnavailable as error:
            # Of a registered model it may come back; here it is a name that was written wrongly.
            raise BadCheckpoint(error.message, param="uri") from error
        read = await within(READ_DEADLINE_S, self._read(folder), f"reading {folder}")
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
            slo=_slo(body.slo),
            scaling=scaling,
            pinned=body.pinned,
        )
        # Blobs first: a row must never name an object that is not there. A blob without a row does no harm.
        await self._store.put_if_absent(manifest_key(model.digest), encode_manifest(checkpoint.manifest))
        await self._store.put_if_absent(text_key(model.text_digest), encode_bundle(read.text))
        stored = await self.models.add(model)
        await self._show()
        log.info("model registered", action="model_registered", model=model.name, digest=model.digest, uri=model.uri)
        return stored

    async def change(self, name: str, body: ModelChanges) -> StoredModel:
        """Change SLO, bounds or pin of a model.

        Raises:
            ModelNotFound: there is none of that name.
            UnprocessableInput: bounds contradict each other.
        """
        stored = await self.models.change(name, lambda model: _changed(model, body))
        await self._show()
        log.info("model changed", action="model_changed", model=name)
        return stored

    async def remove(self, name: str) -> None:
        """Delete a model.

        Raises:
            ModelNotFound: there is none of that name.
        """
        await self.models.remove(name)
        await self._show()
        log.info("model deleted", action="model_deleted", model=name)

    async def _show(self) -> None:
        """Let this gateway serve what was committed, at once. That it is committed does not depend on it."""
        try:
            await self._catalog.refresh()
        except PilotlightError as error:
            log.warning("a change is shown a little later", action="catalog_deferred", error=error.message)

    async def _read(self, folder: Path) -> _Read:
        """Read in a thread. Its slot is free when the thread has ended, which may be long after whoever waits has given up."""
        await self._slots.acquire()
        reading = asyncio.get_running_loop().run_in_executor(None, _read, folder, self._roots, self._clock)
        reading.add_done_callback(self._on_read)
        return await asyncio.shield(reading)

    def _on_read(self, reading: asyncio.Future[_Read]) -> None:
        self._slots.release()
        if not reading.cancelled():
            reading.exception()


def _check(scaling: ScalingBounds) -> None:
    if scaling.min_instances > scaling.max_instances:
        raise UnprocessableInput(
            f"min_instances {scaling.min_instances} is more than max_instances {scaling.max_instances}", param="min_instances"
        )


def _changed(model: Model, body: ModelChanges) -> Model:
    def given(value: T | None, otherwise: T) -> T:
        return otherwise if value is None else value

    scaling = ScalingBounds(
        min_instances=given(body.min_instances, model.scaling.min_instances),
        max_instances=given(body.max_instances, model.scaling.max_instances),
        keep_alive_s=given(body.keep_alive_s, model.scaling.keep_alive_s),
    )
    _check(scaling)
    slo = model.slo if body.slo is None else _slo(body.slo)
    return replace(model, slo=slo, scaling=scaling, pinned=given(body.pinned, model.pinned))


def _slo(body: SloBody) -> Slo:
    return Slo(ttft_ms=body.ttft_ms, tpot_ms=body.tpot_ms, attainment=body.attainment)


def _read(folder: Path, roots: ModelRoots, clock: Clock) -> _Read:
    """Read headers and text files; errors of the lower library become those of the taxonomy, by code."""
    source = FolderSource(folder)
    try:
        for file in source.list_files():
            _check_place(folder / file.name, roots)
        checkpoint = read_checkpoint(source)
        files = {file.name: read_small(source, file, MAX_TOKENIZER_BYTES) for file in checkpoint.text_files}
    except CheckpointError as error:
        raise error_of(error.code, str(error)) from error
    text = bundle_from_files(files)
    known = ModelText.of(text, clock).tokenizer.vocab_size
    if known > checkpoint.spec.vocab_size:
        raise BadCheckpoint(
            f"tokenizer.json has {known} tokens and config.json's vocab_size is {checkpoint.spec.vocab_size}: they belong to "
            "different models"
        )
    return _Read(checkpoint, text)


def _check_place(path: Path, roots: ModelRoots) -> None:
    """Hub caches are made of links, so links are followed; but not to what no root allows."""
    if path.is_symlink() and not roots.hold(Path(os.path.realpath(path))):
        raise UriNotAllowed(f"{path} is a link to a file that is not below an allowed root", param="uri")
