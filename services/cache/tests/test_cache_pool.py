"""The bucket ``copies`` follows what loaders report."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from pilotlight.cache.pool import PublishedCopies
from pilotlight.common.errors import BusUnavailable
from pilotlight.common.waiting import cancel_all
from pilotlight.policy.cluster import Tier
from pilotlight.policy.ids import Digest
from pilotlight.policy.phase import Moment
from pilotlight.policy.testing import copy, node

pytestmark = pytest.mark.anyio
KEY = "n0.host.d-a"


def unheard(digest: Digest, tier: Tier) -> None:
    """Hears of copies, and does nothing."""


class Written:
    """A bucket that remembers what was written to it, and may be out of reach."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.writes = 0
        self.reachable = True
        self.watched = asyncio.Event()
        self.on_change: Any = None

    async def put(self, key: str, value: object, *, sent: Moment | None = None) -> None:
        if not self.reachable:
            raise BusUnavailable
        self.writes += 1
        self.values[key] = value

    async def delete(self, key: str) -> None:
        if not self.reachable:
            raise BusUnavailable
        del self.values[key]
        if self.on_change is not None:
            await self.on_change(key, None)

    async def watch(self, value_type: Any, on_change: Any) -> None:
        for key, value in list(self.values.items()):
            await on_change(key, value)
        self.on_change = on_change
        self.watched.set()
        await asyncio.Event().wait()


async def test_a_copy_is_written_when_its_extent_changes_and_removed_when_it_is_gone() -> None:
    bucket = Written()
    copies = PublishedCopies(bucket, unheard)
    held = copy("a")
    await copies.follow(node(copies=(held,)))
    await copies.follow(node(copies=(replace(held, idle_s=9.0),)))
    assert (list(bucket.values), bucket.writes) == ([KEY], 1)
    await copies.follow(node(copies=(replace(held, parts=(0, 1)),)))
    assert (bucket.values[KEY].parts, bucket.writes) == ((0, 1), 2)
    await copies.follow(node())
    assert bucket.values == {}


async def test_what_could_not_be_written_is_written_with_the_next_report() -> None:
    bucket = Written()
    copies = PublishedCopies(bucket, unheard)
    bucket.reachable = False
    await copies.follow(node(copies=(copy("a"),)))
    bucket.reachable = True
    await copies.follow(node(copies=(copy("a"),)))
    assert list(bucket.values) == [KEY]
    bucket.reachable = False
    await copies.follow(node())
    bucket.reachable = True
    await copies.follow(node())
    assert bucket.values == {}


async def test_what_an_earlier_cache_left_there_is_removed() -> None:
    bucket = Written()
    await PublishedCopies(bucket, unheard).follow(node(copies=(copy("a"), copy("b"))))
    copies = PublishedCopies(bucket, unheard)
    sweeping = asyncio.create_task(copies.sweep())
    await bucket.watched.wait()
    await copies.follow(node(copies=(copy("a"),)))
    await cancel_all((sweeping,))
    assert list(bucket.values) == [KEY]


async def test_what_somebody_else_removed_is_written_anew() -> None:
    bucket = Written()
    copies = PublishedCopies(bucket, unheard)
    sweeping = asyncio.create_task(copies.sweep())
    await bucket.watched.wait()
    await copies.follow(node(copies=(copy("a"),)))
    await bucket.delete(KEY)
    await copies.follow(node(copies=(copy("a"),)))
    assert list(bucket.values) == [KEY]
    await copies.follow(node())
    assert bucket.values == {}
    await cancel_all((sweeping,))


async def test_an_emptied_bucket_is_filled_after_a_reconnect() -> None:
    bucket = Written()
    copies = PublishedCopies(bucket, unheard)
    await copies.follow(node(copies=(copy("a"),)))
    bucket.values.clear()
    copies.write_anew()
    await copies.follow(node(copies=(copy("a"),)))
    assert list(bucket.values) == [KEY]


async def test_what_an_earlier_cache_wrote_is_known_to_have_been_there() -> None:
    bucket = Written()
    await PublishedCopies(bucket, unheard).follow(node(copies=(copy("a"),)))
    heard: list[tuple[Digest, Tier]] = []
    copies = PublishedCopies(bucket, lambda digest, tier: heard.append((digest, tier)))
    sweeping = asyncio.create_task(copies.sweep())
    await bucket.watched.wait()
    assert heard == [(Digest("d-a"), Tier.HOST)]
    await cancel_all([sweeping])
