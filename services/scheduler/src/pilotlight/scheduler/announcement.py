"""The bucket ``leader``: the newest epoch, written before the first command under it, and never
replaced by an older one.

A receiver of commands refuses those that are older than what it heard before. A loader that was
away while leaders changed has heard nothing of it: it asks here before it listens.
"""

import asyncio
import random
from collections.abc import Callable

import structlog

from pilotlight.common.buckets import Bucket
from pilotlight.common.errors import BusUnavailable, Conflict, MessageUndecodable, NotLeader
from pilotlight.common.messages.hold import LEADING_KEY, Leading
from pilotlight.common.waiting import Backoff, pause
from pilotlight.policy.ids import Epoch

log = structlog.get_logger()


class Announcer:
    """Keeps one term announced."""

    def __init__(self, bucket: Bucket, epoch: Epoch, check: Callable[[], None]) -> None:
        """``bucket`` and ``check`` as for ``announce``."""
        self._bucket = bucket
        self._epoch = epoch
        self._check = check
        self._again = asyncio.Event()

    def again(self) -> None:
        """Announce it once more: the server may have come back without its memory."""
        self._again.set()

    async def run(self, on_known: Callable[[Epoch], None]) -> None:
        """For ever; ``on_known`` is told the newest epoch each time.

        Raises:
            NotLeader: the lease has run out, or a newer epoch was announced.
        """
        while True:
            self._again.clear()
            newest = await announce(self._bucket, self._epoch, self._check)
            on_known(newest)
            if newest > self._epoch:
                raise NotLeader(f"epoch {newest} has been announced already")
            await self._again.wait()


async def announce(bucket: Bucket, epoch: Epoch, check: Callable[[], None]) -> Epoch:
    """Make a term known, however long NATS needs for it; the newest epoch that is known then, which
    is another's if it is not this one.

    Args:
        bucket: ``leader``.
        epoch: of the term.
        check: raises ``NotLeader`` once the lease may have run out.

    Raises:
        NotLeader: the lease has run out.
    """
    backoff, rng, failures = Backoff(first_s=0.05, limit_s=2.0), random.Random(), 0
    while True:
        check()
        try:
            return await _announce(bucket, epoch)
        except Conflict:
            # Another leader's is there now: it may be newer.
            continue
        except BusUnavailable as error:
            log.warning(
                "the term is not known yet",
                action="announcement_deferred",
                epoch=epoch,
                error=error.message,
            )
        await pause(backoff.delay_s(failures, rng))
        failures += 1


async def _announce(bucket: Bucket, epoch: Epoch) -> Epoch:
    try:
        found = await bucket.get(LEADING_KEY, Leading)
    except MessageUndecodable as error:
        log.error(
            "nonsense in the bucket is replaced",
            action="announcement_undecodable",
            error=error.message,
        )
        await bucket.put(LEADING_KEY, Leading(epoch=epoch))
        return epoch
    if found.value is not None and found.value.epoch >= epoch:
        return found.value.epoch
    await bucket.replace(LEADING_KEY, Leading(epoch=epoch), found.revision)
    return epoch
