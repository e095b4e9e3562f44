"""The bucket ``leader``: the newest epoch, written before the first command under it, and never replaced by an older one.

Whoever hears a command refuses those that are older than what it heard before. A loader that was away while leaders changed has heard
nothing of it: it asks here before it listens.
"""

import random
from collections.abc import Callable

import structlog

from pilotlight.common.buckets import Bucket
from pilotlight.common.errors import BusUnavailable, Conflict, MessageUndecodable
from pilotlight.common.messages.hold import LEADING_KEY, Leading
from pilotlight.common.waiting import Backoff, pause
from pilotlight.policy.types import Epoch

log = structlog.get_logger()


async def announce(bucket: Bucket, epoch: Epoch, check: Callable[[], None]) -> Epoch:
    """Make a term known, however long NATS needs for it; the newest epoch that is known then, which is another's if it is not this one.

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
            # Somebody else's is there now: it may be newer.
            continue
        except BusUnavailable as error:
            log.warning("the term is not known yet", action="announcement_deferred", epoch=epoch, error=error.message)
        await pause(backoff.delay_s(failures, rng))
        failures += 1


async def _announce(bucket: Bucket, epoch: Epoch) -> Epoch:
    try:
        found = await bucket.get(LEADING_KEY, Leading)
    except MessageUndecodable as error:
        log.error("nonsense in the bucket is replaced", action="announcement_undecodable", error=error.message)
        await bucket.put(LEADING_KEY, Leading(epoch=epoch))
        return epoch
    if found.value is not None and found.value.epoch >= epoch:
        return found.value.epoch
    await bucket.replace(LEADING_KEY, Leading(epoch=epoch), found.revision)
    return epoch
