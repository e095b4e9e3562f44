"""Grants that grew for a generation that no leader wrote down.

A grant grows before its instance's row says so. If the leader dies in between, its successor knows
the old generation alone, and the added room would stay promised until the instance ends.
"""

from dataclasses import replace

import structlog

from pilotlight.cache.books import Books
from pilotlight.cache.grants import Grant
from pilotlight.cache.repository import CacheRepository
from pilotlight.cache.room import UNPLANNED_S
from pilotlight.common.clock import Clock
from pilotlight.policy.cluster import HeldStage

log = structlog.get_logger()


async def take_back_growth(books: Books, repository: CacheRepository, clock: Clock) -> None:
    """Has such grants be what their stages have, at the generation that is written down.

    Raises:
        DatabaseUnavailable: nothing has changed.
    """
    now_s = clock.monotonic_s()
    late = [
        (grant, held)
        for grant in books.grants.values()
        if (held := _behind(books, grant)) is not None
        and (0 < grant.epoch < books.epoch or now_s - grant.since_s >= UNPLANNED_S)
    ]
    if not late:
        return
    planned = await repository.generations(tuple(grant.instance_id for grant, _ in late))
    for grant, held in late:
        generation = planned.get(grant.instance_id, grant.generation)
        if generation >= grant.generation:
            continue
        smaller = replace(grant, device_bytes=held.device_bytes, generation=generation)
        await repository.change_grant(smaller)
        if books.grants.get(grant.grant_id) is grant:
            books.grants[grant.grant_id] = smaller
        log.warning(
            "a grant that grew is taken back",
            action="growth_taken_back",
            instance_id=grant.instance_id,
            device_bytes=held.device_bytes,
        )


def _behind(books: Books, grant: Grant) -> HeldStage | None:
    """The granted stage, if it is held at an older generation."""
    view = books.roster.worker(grant.worker_id)
    held = view.held(grant.instance_id) if view is not None else None
    return held if held is not None and 0 < held.generation < grant.generation else None
