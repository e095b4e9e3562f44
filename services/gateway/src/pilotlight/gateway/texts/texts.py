"""What the gateway has text helpers do: read bodies, make and describe bundles, encode prompts."""

import asyncio
import os
from array import array
from typing import TypeVar

import msgspec
import structlog

from pilotlight.common.errors import (
    BadCheckpoint,
    BadRequest,
    CallerError,
    PilotlightError,
    TextFailed,
    TextUnavailable,
    TooLarge,
    error_of,
)
from pilotlight.common.service import Context
from pilotlight.common.store import text_key
from pilotlight.gateway.schema.kinds import KIND_OF
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.texts.bundles import Bundles
from pilotlight.gateway.texts.frames import (
    Chat,
    Completion,
    Describe,
    Described,
    Encoded,
    EncodedSeveral,
    Failed,
    Give,
    Job,
    Made,
    Make,
    Missing,
    Read,
    Reply,
    Request,
    Several,
)
from pilotlight.gateway.texts.model_text import ModelText, TextFacts
from pilotlight.gateway.texts.pool import HelperPool, PoolBounds
from pilotlight.gateway.texts.process import HelperLauncher, HelperLost, Launcher
from pilotlight.gateway.texts.strikes import Strikes
from pilotlight.policy.ids import Digest

log = structlog.get_logger()

MAX_DEFAULT_HELPERS = 8
ADMIN = "admin"
"""Owner of jobs that belong to no client's request."""
RETRY_AFTER_S = 1.0

R = TypeVar("R", bound=msgspec.Struct)


class Texts:
    """Text handling that is done elsewhere; a component."""

    def __init__(self, pool: HelperPool, bundles: Bundles, strikes: Strikes) -> None:
        self._pool = pool
        self._bundles = bundles
        self._strikes = strikes

    async def start(self) -> None:
        """Start helpers."""
        await self._pool.start()

    async def stop(self) -> None:
        """End them."""
        await self._pool.stop()

    def wait_s(self, owner: str) -> float:
        """See ``HelperPool.wait_s``."""
        return self._pool.wait_s(owner)

    async def read(self, body: bytes, as_type: type[R], owner: str) -> R:
        """Decode and check a large body.

        Raises:
            BadRequest: it is not what the API takes.
            QueueFull, TextUnavailable: not now.
        """
        reply = await self._done(Read(kind=KIND_OF[as_type], body=body), owner)
        assert isinstance(reply, Request)
        return msgspec.msgpack.decode(reply.data, type=as_type)

    async def make(self, files: dict[str, bytes]) -> tuple[bytes, TextFacts]:
        """A bundle of a checkpoint's text files, encoded, and what there is to know of it.

        Raises:
            BadCheckpoint: no bundle can be made of them, or its template or tokenizer cannot be
                used.
            QueueFull, TextUnavailable: not now.
        """
        try:
            reply = await self._done(Make(files=files), ADMIN)
        except CallerError as error:
            raise _bad(error) from error
        assert isinstance(reply, Made)
        return reply.bundle, reply.facts

    async def text_of(self, digest: Digest) -> ModelText:
        """The text handling of a bundle that is stored.

        Raises:
            BadCheckpoint: it cannot be used.
            NotFound, SourceUnavailable, DeadlineExceeded: it cannot be had.
            QueueFull, TextUnavailable: not now.
        """
        try:
            reply = await self._done(Describe(digest=digest), ADMIN, digest)
        except (TextFailed, TooLarge) as error:
            raise _bad(error) from error
        assert isinstance(reply, Described)
        return await asyncio.to_thread(ModelText.of, reply.facts)

    async def encode(self, job: Chat | Completion, owner: str) -> list[int]:
        """Token ids of a prompt.

        Raises:
            BadRequest, ContextTooLong, TooLarge: of the prompt.
            TextFailed: the model's template or tokenizer fails on it.
            QueueFull, TextUnavailable: not now.
        """
        try:
            reply = await self._done(job, owner, job.digest)
        except OverflowError as error:
            raise BadRequest("the body holds a number beyond 64 bits") from error
        assert isinstance(reply, Encoded)
        return array("I", reply.token_ids).tolist()

    async def encode_several(self, job: Several, owner: str) -> EncodedSeveral:
        """Token ids of many texts.

        Raises:
            BadRequest, ContextTooLong: of a text.
            TextFailed: the model's tokenizer fails on one.
            QueueFull, TextUnavailable: not now.
        """
        reply = await self._done(job, owner, job.digest)
        assert isinstance(reply, EncodedSeveral)
        return reply

    async def _done(self, job: Job, owner: str, digest: Digest | None = None) -> Reply:
        """Have a job done, with its bundle where the helper lacks that."""
        if digest is not None:
            self._strikes.check(digest)
        reply = await self._asked(job, owner, digest)
        while isinstance(reply, Missing) and digest is not None:
            # More than once where a helper has let go of what it was given.
            bundle = await self._bundles.get(digest)
            reply = await self._asked(job, owner, digest, Give(digest=digest, bundle=bundle))
        if isinstance(reply, Failed):
            raise _error(reply, digest)
        return reply

    async def _asked(
        self, job: Job, owner: str, digest: Digest | None, give: Give | None = None
    ) -> Reply:
        try:
            return await self._pool.do(job, owner=owner, model=digest or "", give=give)
        except HelperLost as lost:
            # Not tried again: what ended one helper may end the next.
            if not lost.blamed:
                raise TextUnavailable(
                    f"the process that prepared this prompt ended: {lost.reason}",
                    retry_after_s=RETRY_AFTER_S,
                ) from lost
            if digest is not None and not lost.long:
                self._strikes.add(digest)
            raise TextFailed(
                f"the model's chat template or tokenizer fails on this: {lost.reason}"
            ) from lost


def default_helpers(cores: int) -> int:
    """One for each core, within bounds: with fewer than three, a model's short prompts wait for its
    long ones (``policy.lanes``).
    """
    return min(max(3, cores), MAX_DEFAULT_HELPERS)


def build_texts(context: Context[GatewaySettings], launcher: Launcher | None = None) -> Texts:
    """The text helpers; by default they are started, and ended, by this gateway."""
    settings, store = context.settings, context.store
    bounds = PoolBounds(
        helpers=max(2, settings.text_helpers or default_helpers(len(os.sched_getaffinity(0)))),
        short_cpu_s=settings.text_short_timeout_s,
        long_cpu_s=settings.text_timeout_s,
        max_waiting_bytes=settings.text_queue_bytes,
    )
    bundles = Bundles(lambda digest: store.get(text_key(digest)))
    strikes = Strikes(context.clock)
    pool = HelperPool(
        launcher or HelperLauncher(settings.text_helper_memory_bytes),
        context.background,
        bounds,
        bundles,
        strikes,
    )
    return Texts(pool, bundles, strikes)


def _error(failed: Failed, digest: Digest | None) -> PilotlightError:
    if failed.code == TextFailed.code:
        log.warning(
            "text handling failed", action="text_failed", text_digest=digest, error=failed.message
        )
    error = error_of(failed.code, failed.message)
    error.param = failed.param
    return error


def _bad(error: PilotlightError) -> BadCheckpoint:
    return error if isinstance(error, BadCheckpoint) else BadCheckpoint(error.message)
