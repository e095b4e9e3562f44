"""Wiring of the materializer."""

from pilotlight.common.bus import Bus, Subscription
from pilotlight.common.db.measures import measure
from pilotlight.common.db.outbox import Outbox
from pilotlight.common.db.retention import PruneMetrics, Pruner, keep_outbox
from pilotlight.common.db.session import Database
from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.messages.artifacts import (
    ASK_MATERIALS_SUBJECT,
    CLAIM_BUILD_SUBJECT,
    END_BUILD_SUBJECT,
    FIND_ARTIFACTS_SUBJECT,
    FINISH_BUILD_SUBJECT,
    MATERIALIZE_SUBJECT,
    PUBLISH_ARTIFACT_SUBJECT,
    REPORT_BUILD_SUBJECT,
    AskMaterials,
    ClaimBuild,
    EndBuild,
    FindArtifacts,
    FinishBuild,
    Materialize,
    PublishArtifact,
    ReportBuild,
)
from pilotlight.common.secret_files import read_secret
from pilotlight.common.service import Application, Context
from pilotlight.materializer.builds import BuildRepository
from pilotlight.materializer.coordination import BuildMetrics, Coordination, Upkeep
from pilotlight.materializer.handlers import Handlers
from pilotlight.materializer.repository import ArtifactRepository
from pilotlight.materializer.settings import MaterializerSettings
from pilotlight.policy.builds import KeepRules

QUEUE = "materializer"


class Serving:
    """The materializer's subjects. Several materializers share them: rows and blobs are the
    state.
    """

    def __init__(self, bus: Bus, handlers: Handlers, builds: Coordination) -> None:
        self._bus = bus
        self._handlers = handlers
        self._builds = builds
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Answer from now on."""
        if self._subscriptions:
            return
        bus, artifacts, builds = self._bus, self._handlers, self._builds
        self._subscriptions = [
            await bus.serve(FIND_ARTIFACTS_SUBJECT, FindArtifacts, artifacts.find, queue=QUEUE),
            await bus.serve(
                PUBLISH_ARTIFACT_SUBJECT, PublishArtifact, artifacts.publish, queue=QUEUE
            ),
            await bus.serve(CLAIM_BUILD_SUBJECT, ClaimBuild, builds.claim, queue=QUEUE),
            await bus.serve(REPORT_BUILD_SUBJECT, ReportBuild, builds.report, queue=QUEUE),
            await bus.serve(END_BUILD_SUBJECT, EndBuild, builds.end, queue=QUEUE),
            await bus.serve(FINISH_BUILD_SUBJECT, FinishBuild, builds.finish, queue=QUEUE),
            await bus.serve(MATERIALIZE_SUBJECT, Materialize, builds.materialize, queue=QUEUE),
            await bus.serve(ASK_MATERIALS_SUBJECT, AskMaterials, builds.ask, queue=QUEUE),
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
    key, settings = cluster_key.encode(), context.settings
    rows = BuildRepository(database)
    handlers = Handlers(ArtifactRepository(database), rows, context.store, key)
    builds = Coordination(rows, context.store, context.bus, key, BuildMetrics(context.metrics))
    rules = KeepRules(
        superseded_s=settings.artifact_keep_days * 86_400.0, total_bytes=settings.artifact_bytes
    )
    upkeep = Upkeep(
        rows, context.store, context.background, rules, settings.artifact_upkeep_interval_s
    )
    pruner = Pruner(
        (keep_outbox("materializer", context.settings),),
        database,
        context.clock,
        PruneMetrics(context.metrics),
        interval_s=context.settings.prune_interval_s,
        background=context.background,
    )
    serving = Serving(context.bus, handlers, builds)
    return Application(components=[database, outbox, serving, upkeep, pruner])
