"""Puts files and batches together."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from pilotlight.common.clock import Clock
from pilotlight.common.db.session import Database
from pilotlight.common.service import Background
from pilotlight.common.store import ObjectStore
from pilotlight.gateway.auth import Authenticator
from pilotlight.gateway.batches.files import FileStore
from pilotlight.gateway.batches.lines import Embed, LineRunner
from pilotlight.gateway.batches.repository import BatchRepository
from pilotlight.gateway.batches.routes import BatchRoutes
from pilotlight.gateway.batches.runner import BatchParts, BatchRunner
from pilotlight.gateway.openai.api import OpenAiApi
from pilotlight.gateway.openai.prompt import PromptEncoder
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.policy.batches import BatchLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """What serves batches."""

    routes: BatchRoutes
    runner: BatchRunner


def build_batches(
    settings: GatewaySettings,
    api: OpenAiApi,
    keys: Authenticator,
    encoder: PromptEncoder,
    database: Database,
    store: ObjectStore,
    clock: Clock,
    background: Background,
    owner: str,
    busy: Callable[[], tuple[int, int]],
    embed: Embed,
) -> Batches:
    """Files, batches, and who works on them.

    Args:
        settings: the gateway's.
        api: what lines go to.
        keys: say what the keys of batches may do.
        encoder: reads their bodies.
        database: has rows.
        store: has content.
        clock: this process's.
        background: owns the work.
        owner: this gateway's name among others.
        busy: how many answers this gateway makes, and how many of them wait.
        embed: makes vectors.
    """

    def load(lines: int) -> BatchLoad:
        live, held = busy()
        return BatchLoad(
            lines=lines,
            limit=settings.batch_concurrency,
            live=live,
            held=held,
            places=settings.max_requests,
        )

    files = FileStore(database, store, clock, settings.files_max_per_key)
    repository = BatchRepository(database, clock, owner, settings.batches_max_open_per_key)
    runner = BatchRunner(
        BatchParts(
            repository=repository,
            files=files,
            store=store,
            lines=LineRunner(api, keys, encoder, random.SystemRandom(), embed),
            load=load,
            clock=clock,
            background=background,
            keep=timedelta(days=settings.files_keep_days),
        )
    )
    routes = BatchRoutes(
        api=api,
        files=files,
        batches=repository,
        runner=runner,
        max_file_bytes=settings.file_max_bytes,
    )
    return Batches(routes=routes, runner=runner)
