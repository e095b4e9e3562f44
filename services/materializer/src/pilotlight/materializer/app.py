"""Wiring of the materializer."""

from pilotlight.common.bus import Bus, Subscription
from pilotlight.common.db.measures import measure
from pilotlight.common.db.outbox import Outbox
from pilotlight.common.db.retention import PruneMetrics, Pruner, keep_outbox
from pilotlight.common.db.session import Database
from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.messages.artifacts import (
    FIND_ARTIFACTS_SUBJECT,
    PUBLISH_ARTIFACT_SUBJECT,
    FindArtifacts,
    PublishArtifact,
)
from pilotlight.common.service import Application, Context
from pilotlight.common.settings import read_secret
from pilotlight.materializer.handlers import Handlers
from pilotlight.materializer.repository import ArtifactRepository
from pilotlight.materializer.settings import MaterializerSettings

QUEUE = "materializer"


class Serving:
    """The materializer's subjects. Several materializers share them: rows and blobs are the
    state.
    """

    def __init__(self, bus: Bus, handlers: Handlers) -> None:
        self._bus = bus
        self._handlers = handlers
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Answer from now on."""
        if not self._subscriptions:
            self._subscriptions = [
                await self._bus.serve(
                    FIND_ARTIFACTS_SUBJECT, FindArtifacts, self._handlers.find, queue=QUEUE
                ),
                await self._bus.serve(
                    PUBLISH_ARTIFACT_SUBJECT, PublishArtifact, self._handlers.publish, queue=QUEUE
                ),
            ]

    async def stop(self) -> None:
        """Answer no more."""
        for subscription in self._subscriptions:
            await subscription.end()
        self._subscriptions = []


async def build(context: Context[MaterializerSettings]) -> Application:
    """Build the service.

    Raises:
        SettingsInvalid: the secret ``cluster-key`` is missing.
    """
    cluster_key = read_secret(context.settings.secrets_dir, "cluster-key")
    if cluster_key is None:
        raise SettingsInvalid(
            "the secret cluster-key is missing: PILOTLIGHT_SECRETS_DIR must hold a file of that name"
        )
    database = Database(context.settings, "materializer", context.clock)
    outbox = Outbox(database, context)
    measure(database, outbox, context.metrics)
    handlers = Handlers(ArtifactRepository(database), context.store, cluster_key.encode())
    pruner = Pruner(
        (keep_outbox("materializer", context.settings),),
        database,
        context.clock,
        PruneMetrics(context.metrics),
        interval_s=context.settings.prune_interval_s,
        background=context.background,
    )
    return Application(components=[database, outbox, Serving(context.bus, handlers), pruner])
