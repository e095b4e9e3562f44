"""The registered models as this gateway serves them: each with its tokenizer and template, ready to use.

A view of ``gateway.models``: listed at start, after each event of a gateway, and every few seconds whatever was heard. When the
database is gone the last view stays: warm models must not stop with it.
"""

import asyncio
from dataclasses import dataclass

import structlog

from pilotlight.common.bus import Subscription
from pilotlight.common.clock import Clock
from pilotlight.common.db.session import Database
from pilotlight.common.errors import (
    ControlPlaneUnavailable,
    DatabaseUnavailable,
    DeadlineExceeded,
    ModelNotFound,
    PilotlightError,
)
from pilotlight.common.messages.events import Event
from pilotlight.common.service import Context
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.store import ObjectStore, text_key
from pilotlight.common.waiting import cancel_all, within, woken
from pilotlight.gateway.admin.schemas import MAX_NAME_CHARS
from pilotlight.gateway.repository import ModelRepository, StoredModel
from pilotlight.policy.types import Digest, Model
from pilotlight.text.bundle import TextBundle, decode
from pilotlight.text.template import ChatTemplate
from pilotlight.text.tokenizer import TextTokenizer
from pilotlight.text.tools.probe import TemplateTools, template_tools

log = structlog.get_logger()

REFRESH_INTERVAL_S = 5.0
FIND_DEADLINE_S = 1.0
"""How long a request for a model that is not known waits for a database that does not answer."""
GATEWAY_EVENTS = "v1.event.gateway.>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """A model's text handling, built once from its bundle."""

    tokenizer: TextTokenizer
    template: ChatTemplate
    tools: TemplateTools
    """What the template does with tools."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output."""
        return self.tokenizer.eos_token_ids

    @classmethod
    def of(cls, bundle: TextBundle, clock: Clock) -> "ModelText":
        """Build from a bundle; takes a moment for large vocabularies, so callers use a thread."""
        template = ChatTemplate(bundle.chat_template, bundle.special_tokens, clock)
        tokenizer = TextTokenizer(bundle)
        return cls(tokenizer=tokenizer, template=template, tools=template_tools(template, tokenizer))


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One model, ready to be asked."""

    model: Model
    text: ModelText
    created_unix_s: int


class Catalog:
    """The view; a component."""

    def __init__(
        self, database: Database, context: Context[ServiceSettings], *, refresh_interval_s: float = REFRESH_INTERVAL_S
    ) -> None:
        self._context = context
        self._refresh_interval_s = refresh_interval_s
        self._models = ModelRepository(database, context.clock)
        self._entries: dict[str, CatalogEntry] = {}
        self._stale = asyncio.Event()
        self._refreshing = asyncio.Lock()
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
        self._subscription = await self._context.bus.subscribe(GATEWAY_EVENTS, Event, self._on_event)
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
        """One model, or None. Looked up where it is not known: another gateway may have registered it a moment ago.

        Raises:
            ControlPlaneUnavailable: it is not known, and the database does not say whether it is registered.
        """
        entry = self.get(name)
        if entry is not None or len(name) > MAX_NAME_CHARS or not name.isprintable():
            return entry
        try:
            await within(FIND_DEADLINE_S, self._models.get(name), "looking up a model")
            await self.refresh()
        except ModelNotFound:
            return None
        except (DatabaseUnavailable, DeadlineExceeded) as error:
            raise ControlPlaneUnavailable(f"whether {name!r} is registered cannot be said now: {error.message}") from error
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
            # By digest: fine-tuned models share their tokenizer, which may take 100 MB.
            texts = {entry.model.text_digest: entry.text for entry in self._entries.values()}
            entries: dict[str, CatalogEntry] = {}
            for stored in await self._models.all():
                model = stored.model
                text = texts.get(model.text_digest) or await self._text_of(stored)
                if text is not None:
                    texts[model.text_digest] = text
                    created_unix_s = int(stored.created_at.timestamp())
                    entries[model.name] = CatalogEntry(model=model, text=text, created_unix_s=created_unix_s)
            self._entries = entries

    async def _text_of(self, stored: StoredModel) -> ModelText | None:
        try:
            return await load_text(self._context.store, stored.model.text_digest, self._context.clock)
        except PilotlightError as error:
            # One model's missing bundle must not hide the others; it is tried again with the next refresh.
            log.error("model cannot be served", action="text_bundle_failed", model=stored.model.name, error=error.message)
            return None

    async def _on_event(self, _: Event) -> None:
        self._stale.set()

    async def _follow(self) -> None:
        while True:
            await woken(self._stale, self._refresh_interval_s)
            try:
                await self.refresh()
            except PilotlightError as error:
                log.warning("models are kept as they are", action="catalog_deferred", error=error.message)


async def load_text(store: ObjectStore, digest: Digest, clock: Clock) -> ModelText:
    """Read and build a text bundle.

    Raises:
        NotFound, SourceUnavailable, BadCheckpoint: it cannot be had or used.
    """
    data = await store.get(text_key(digest))
    return await asyncio.to_thread(lambda: ModelText.of(decode(data), clock))
