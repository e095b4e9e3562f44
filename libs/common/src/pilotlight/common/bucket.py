"""Makes the object store's bucket where there is none: ``python -m pilotlight.common.bucket``; does
nothing for a folder.

For an S3 server of one's own, such as the one beside the services in a container. At a provider,
make the bucket as the provider says.
"""

import asyncio
import random
import sys
import urllib.error
import urllib.request
from datetime import timedelta
from typing import Literal

import obstore
import structlog
from obstore.exceptions import BaseError
from obstore.store import S3Store

from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import PilotlightError, SourceUnavailable
from pilotlight.common.s3 import s3_store
from pilotlight.common.settings import S3Settings, ServiceSettings
from pilotlight.common.telemetry import configure_logging
from pilotlight.common.waiting import Backoff, pause

log = structlog.get_logger()

DEADLINE_S = 60.0
"""A server that is just starting may take as long to answer."""
REQUEST_DEADLINE_S = 10.0
_BACKOFF = Backoff(first_s=0.2, limit_s=3.0)


async def ensure_bucket(url: str, settings: S3Settings) -> bool:
    """Make the bucket of ``s3://bucket/prefix`` unless it is there; whether it was made.

    Raises:
        SourceUnavailable: the server does not answer, or refuses.
        SettingsInvalid: the S3 settings cannot be used.
    """
    scheme, _, rest = url.partition("://")
    if scheme != "s3":
        return False
    name = rest.partition("/")[0]
    store = s3_store(settings, name)
    clock, rng, attempt = SystemClock(), random.Random(), 0
    until_s = clock.monotonic_s() + DEADLINE_S
    while True:
        try:
            return await asyncio.to_thread(_ensure, store)
        except (BaseError, OSError) as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if refused or clock.monotonic_s() > until_s:
                raise SourceUnavailable(
                    f"the bucket {name} cannot be made: {_first_line(error)}"
                ) from error
        await pause(_BACKOFF.delay_s(attempt, rng))
        attempt += 1


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _ensure(store: S3Store) -> bool:
    """Ask for the bucket, and for its making.

    The store's client has no calls for either, but signs whatever is asked for.
    """
    if _status(store, "HEAD") != 404:
        return False
    # 409: another process made it since we looked.
    return _status(store, "PUT") != 409


def _status(store: S3Store, method: Literal["HEAD", "PUT"]) -> int:
    where = obstore.sign(store, method, "", timedelta(minutes=1))
    try:
        with urllib.request.urlopen(
            urllib.request.Request(where, method=method), timeout=REQUEST_DEADLINE_S
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        if error.code in (404, 409):
            return error.code
        raise


def main() -> int:
    """Make the bucket of PILOTLIGHT_OBJECT_STORE_URL; the process's exit status."""
    configure_logging("bucket")
    try:
        settings = ServiceSettings()
        url = settings.object_store_url
        made = asyncio.run(ensure_bucket(url, settings))
    except (PilotlightError, ValueError) as error:
        log.error("cannot make the bucket", action="bucket_failed", error=str(error))
        return 1
    log.info("the object store is ready", action="bucket_ready", url=url, made=made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
