"""Registration: read a checkpoint's headers, pin its source, store manifest and text bundle, insert
the model.

Parameters are not read: registration takes seconds whatever the model's size, and the model can be
served as soon as it returns.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog

from pilotlight.checkpoint.checkpoint import Checkpoint, read_checkpoint
from pilotlight.checkpoint.errors import CheckpointError
from pilotlight.checkpoint.manifest import encode as encode_manifest
from pilotlight.checkpoint.reader import read_small
from pilotlight.common.db.session import Database
from pilotlight.common.errors import (
    BadCheckpoint,
    PilotlightError,
    SourceMissing,
    UnprocessableInput,
    error_of,
)
from pilotlight.common.service import Context
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.sources.opening import PinnedSource, Sources
from pilotlight.common.store import manifest_key, text_key
from pilotlight.common.waiting import within
from pilotlight.gateway.models.catalog import Catalog
from pilotlight.gateway.models.repository import ModelRepository, StoredModel
from pilotlight.gateway.models.schemas import ModelChanges, NewModel, SloChanges
from pilotlight.gateway.records.audit import SYSTEM, Actor
from pilotlight.gateway.texts.model_text import ModelText
from pilotlight.gateway.texts.texts import Texts
from pilotlight.policy.builds import MaterializePolicy
from pilotlight.policy.ids import ModelName
from pilotlight.policy.model import Dtype, Model, ScalingBounds, Slo
from pilotlight.text.bundle import MAX_TOKENIZER_BYTES, digest_of

log = structlog.get_logger()

T = TypeVar("T")

READ_DEADLINE_S = 30.0
MAX_CONCURRENT = 4
"""Registrations at a time: each reads headers of up to 100 MiB."""


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read from a source."""

    uri: str
    revision: str | None
    checkpoint: Checkpoint
    text_files: dict[str, bytes]


class Registration:
    """Adds, changes and removes models."""

    def __init__(
        self,
        database: Database,
        context: Context[ServiceSettings],
        sources: Sources,
        catalog: Catalog,
        texts: Texts,
    ) -> None:
        self.models = ModelRepository(database, context.clock)
        self._store = context.store
        self._sources = sources
        self._catalog = catalog
        self._texts = texts
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def register(self, body: NewModel, actor: Actor = SYSTEM) -> StoredModel:
        """Register a model.

        Raises:
            UriNotAllowed, BadCheckpoint, UnsupportedModel: the source will not do.
            AlreadyExists: the name is taken.
            UnprocessableInput: bounds contradict each other.
            SourceUnavailable, SourceChanged, DeadlineExceeded, DatabaseUnavailable: nothing was
            registered; try again.
        """
        scaling = ScalingBounds(
            min_instances=body.min_instances,
            max_instances=body.max_instances,
            keep_alive_s=body.keep_alive_s,
        )
        _check(scaling)
        read = await within(READ_DEADLINE_S, self._read(body), f"reading {body.uri}")
        checkpoint = read.checkpoint
        bundle = await self._bundle(read)
        model = Model(
            name=ModelName(body.name),
            uri=read.uri,
            revision=read.revision,
            source_version=checkpoint.source_version,
            digest=checkpoint.manifest.digest(),
            text_digest=digest_of(bundle),
            dtype=checkpoint.run_dtype if body.dtype == "auto" else Dtype(body.dtype),
            spec=checkpoint.spec,
            slo=Slo(
                ttft_ms=body.slo.ttft_ms, tpot_ms=body.slo.tpot_ms, attainment=body.slo.attainment
            ),
            scaling=scaling,
            pinned=body.pinned,
        )
        # Blobs first: a row must never name an object that is not there. A blob without a row does
        # no harm.
        await self._store.put_if_absent(
            manifest_key(model.digest), encode_manifest(checkpoint.manifest)
        )
        await self._store.put_if_absent(text_key(model.text_digest), bundle)
        stored = await self.models.add(model, actor, MaterializePolicy(body.materialize))
        await self._show()
        log.info(
            "model registered",
            action="model_registered",
            model=model.name,
            digest=model.digest,
            uri=model.uri,
        )
        return stored

    async def change(self, name: str, body: ModelChanges, actor: Actor = SYSTEM) -> StoredModel:
        """Change SLO, bounds or pin of a model.

        Raises:
            ModelNotFound: there is none of that name.
            UnprocessableInput: bounds contradict each other.
        """
        stored = await self.models.change(name, lambda model: _changed(model, body), actor)
        await self._show()
        log.info("model changed", action="model_changed", model=name)
        return stored

    async def remove(self, name: str, actor: Actor = SYSTEM) -> None:
        """Delete a model.

        Raises:
            ModelNotFound: there is none of that name.
        """
        await self.models.remove(name, actor)
        await self._show()
        log.info("model deleted", action="model_deleted", model=name)

    async def _show(self) -> None:
        """Let this gateway serve what was committed, at once.

        That it is committed does not depend on it.
        """
        try:
            await self._catalog.refresh()
        except PilotlightError as error:
            log.warning(
                "a change is shown a little later", action="catalog_deferred", error=error.message
            )

    async def _bundle(self, read: _Read) -> bytes:
        """The text bundle, encoded: made, and looked at, where foreign code may run.

        Raises:
            BadCheckpoint: the model's text files cannot be used.
        """
        bundle, facts = await self._texts.make(read.text_files)
        text = await asyncio.to_thread(ModelText.of, facts)
        known, of_model = text.tokenizer.vocab_size, read.checkpoint.spec.vocab_size
        if known > of_model:
            raise BadCheckpoint(
                f"tokenizer.json has {known} tokens and config.json's vocab_size is {of_model}: they belong to different models"
            )
        return bundle

    async def _read(self, body: NewModel) -> _Read:
        """Read in a thread.

        Its slot is free when the thread has ended, which may be long after its client has given up.
        """
        await self._slots.acquire()
        reading = asyncio.get_running_loop().run_in_executor(
            None, _open_and_read, self._sources, body
        )
        reading.add_done_callback(self._on_read)
        return await asyncio.shield(reading)

    def _on_read(self, reading: asyncio.Future[_Read]) -> None:
        self._slots.release()
        if not reading.cancelled():
            reading.exception()


def _check(scaling: ScalingBounds) -> None:
    if scaling.min_instances > scaling.max_instances:
        raise UnprocessableInput(
            f"min_instances {scaling.min_instances} is more than max_instances {scaling.max_instances}",
            param="min_instances",
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
    wanted = body.slo or SloChanges()  # pyright: ignore[reportCallIssue] - its defaults are in the fields
    slo = Slo(
        ttft_ms=given(wanted.ttft_ms, model.slo.ttft_ms),
        tpot_ms=given(wanted.tpot_ms, model.slo.tpot_ms),
        attainment=given(wanted.attainment, model.slo.attainment),
    )
    return replace(model, slo=slo, scaling=scaling, pinned=given(body.pinned, model.pinned))


def _open_and_read(sources: Sources, body: NewModel) -> _Read:
    """Open, read, close; errors of the lower library become those of the taxonomy, by code."""
    try:
        pinned = sources.pin(body.uri, body.revision)
        try:
            return _read(pinned)
        finally:
            pinned.source.close()
    except CheckpointError as error:
        found = error_of(error.code, str(error))
    except SourceMissing as error:
        found = error
    if isinstance(found, SourceMissing):
        # Of a registered model it may come back; here it is a name that was written wrongly.
        raise BadCheckpoint(found.message, param="uri") from found
    raise found


def _read(pinned: PinnedSource) -> _Read:
    checkpoint = read_checkpoint(pinned.source)
    files = {
        file.name: read_small(pinned.source, file, MAX_TOKENIZER_BYTES)
        for file in checkpoint.text_files
    }
    return _Read(pinned.uri, pinned.revision, checkpoint, files)
