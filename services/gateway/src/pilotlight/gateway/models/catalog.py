"""The registered models as this gateway serves them: each with its tokenizer and template, ready to
use.

A view of ``gateway.models``: listed at start, after each event of a gateway, and every few seconds
whatever was heard. When the database is gone the last view stays: warm models must not stop with
it.
"""

import asyncio
from dataclasses import dataclass

import structlog

from pilotlight.common.bus import Subscription
from pilotlight.common.db.session import Database
from pilotlight.common.errors import (
    BadCheckpoint,
    ControlPlaneUnavailable,
    DatabaseUnavailable,
    DeadlineExceeded,
    ModelNotFound,
    PilotlightError,
)
from pilotlight.common.messages.events import Event
from pilotlight.common.service import Context
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.waiting import cancel_all, within, woken
from pilotlight.gateway.models.repository import ModelRepository, StoredModel
from pilotlight.gateway.models.schemas import may_be_registered
from pilotlight.gateway.texts.model_text import ModelText
from pilotlight.gateway.texts.texts import Texts
from pilotlight.policy.ids import Digest
from pilotlight.policy.model import Model

log = structlog.get_logger()

REFRESH_INTERVAL_S = 5.0
FIND_DEADLINE_S = 1.0
"""How long a request for a model that is not known waits for a database that does not answer."""
MAX_LOADING = 16
"""Bundles that are asked for at a time."""
REFUSED_S = 300.0
"""After so long a bundle that could not be used is tried again: the fault may have been the
machine's."""
GATEWAY_EVENTS = "v1.event.gateway.>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One model, ready to be asked."""

    model: Model
    text: ModelText
    created_unix_s: int


class Catalog:
    """The view; a component."""

    def __init__(
        self,
        database: Database,
        context: Context[ServiceSettings],
        texts: Texts,
        *,
        refresh_interval_s: float = REFRESH_INTERVAL_S,
    ) -> None:
        self._context = context
        self._texts = texts
        self._refresh_interval_s = refresh_interval_s
        self._models = ModelRepository(database, context.clock)
        self._listed: tuple[StoredModel, ...] = ()
        self._entries: dict[str, CatalogEntry] = {}
        self._refused_until_s: dict[Digest, float] = {}
        """Bundles that could not be used, and when they are tried again."""
        self._stale = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._loading = asyncio.Semaphore(MAX_LOADING)
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """List once, then follow.

        Raises:
            DatabaseUnavailable: the models cannot be listed.
        """
        if self._subscription is not None:
            return
        # Listened to before the list is read, so that no change falls between the two.
        self._subscription = await self._context.bus.subscribe(
            GATEWAY_EVENTS, Event, self._on_event
        )
        await self.refresh()
        self._task = self._context.background.spawn("follow models", self._follow())

    async def stop(self) -> None:
        """Follow no more."""
        if self._subscription is not None:
            await self._subscription.end()
            self._subscription = None
        if self._task is not None:
            await cancel_all((self._task,))
            self._task = None

    def get(self, name: str) -> CatalogEntry | None:
        """One model, or None."""
        return self._entries.get(name)

    async def find(self, name: str) -> CatalogEntry | None:
        """One model, or None.

        Looked up where it is not known: another gateway may have registered it a moment ago. What
        cannot be a model's name is not, so that such names cost the database nothing.

        Raises:
            ControlPlaneUnavailable: it is not known, and the database does not say whether it is
                registered.
        """
        entry = self.get(name)
        if entry is not None or not may_be_registered(name):
            return entry
        try:
            await within(FIND_DEADLINE_S, self._models.get(name), "looking up a model")
            await self.refresh()
        except ModelNotFound:
            return None
        except (DatabaseUnavailable, DeadlineExceeded) as error:
            raise ControlPlaneUnavailable(
                f"whether {name!r} is registered cannot be said now: {error.message}"
            ) from error
        return self.get(name)

    def names(self) -> tuple[str, ...]:
        """Every model's name, sorted."""
        return tuple(sorted(self._entries))

    async def refresh(self) -> None:
        """Bring the view to what the database says now.

        Raises:
            DatabaseUnavailable: the models cannot be listed.
        """
        async with self._refreshing:
            listed = await self._models.all()
            if listed is self._listed and len(self._entries) == len(listed):
                return
            self._listed = listed
            # By digest: fine-tuned models share their tokenizer, which may take 100 MB.
            texts = {entry.model.text_digest: entry.text for entry in self._entries.values()}
            missing = {
                stored.model.text_digest: stored.model.name
                for stored in listed
                if stored.model.text_digest not in texts
            }
            # At a time: one that takes long holds up no other.
            found = await asyncio.gather(
                *(self._text_of(digest, name) for digest, name in missing.items())
            )
            texts |= {
                digest: text
                for digest, text in zip(missing, found, strict=True)
                if text is not None
            }
            self._entries = {
                stored.model.name: CatalogEntry(
                    model=stored.model,
                    text=texts[stored.model.text_digest],
                    created_unix_s=int(stored.created_at.timestamp()),
                )
                for stored in listed
                if stored.model.text_digest in texts
            }

    async def _text_of(self, digest: Digest, name: str) -> ModelText | None:
        now_s = self._context.clock.monotonic_s()
        if self._refused_until_s.get(digest, now_s) > now_s:
            return None
        try:
            async with self._loading:
                text = await self._texts.text_of(digest)
        except PilotlightError as error:
            # One model's missing bundle must not hide the others; it is tried again with the next
            # refresh.
            log.error(
                "model cannot be served",
                action="text_bundle_failed",
                model=name,
                error=error.message,
            )
            if isinstance(error, BadCheckpoint):
                self._refused_until_s[digest] = now_s + REFUSED_S
            return None
        self._refused_until_s.pop(digest, None)
        return text

    async def _on_event(self, _: Event) -> None:
        self._stale.set()

    async def _follow(self) -> None:
        while True:
            await woken(self._stale, self._refresh_interval_s)
            try:
                await self.refresh()
            except PilotlightError as error:
                log.warning(
                    "models are kept as they are", action="catalog_deferred", error=error.message
                )
