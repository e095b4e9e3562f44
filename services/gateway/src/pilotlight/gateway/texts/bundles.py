"""Text bundles for helpers that lack them: out of the object store, the latest ones out of
memory.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from pilotlight.common.waiting import within
from pilotlight.policy.ids import Digest

KEPT_BYTES = 64 * 1024 * 1024
FETCH_DEADLINE_S = 30.0

Fetch = Callable[[Digest], Awaitable[bytes]]


class Bundles:
    """Bundles by digest; of those asked for at the same time, each is fetched once."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._kept: OrderedDict[Digest, bytes] = OrderedDict()
        self._fetching: dict[Digest, asyncio.Future[bytes]] = {}

    async def get(self, digest: Digest) -> bytes:
        """A bundle's bytes.

        Raises:
            NotFound, SourceUnavailable, DeadlineExceeded: it cannot be had.
        """
        while digest not in self._kept:
            under_way = self._fetching.get(digest)
            if under_way is None:
                return await self._fetched(digest)
            # The other fetch may be cancelled, or fail: then this one tries.
            await asyncio.wait((under_way,))
        self._kept.move_to_end(digest)
        return self._kept[digest]

    async def _fetched(self, digest: Digest) -> bytes:
        done = self._fetching[digest] = asyncio.get_running_loop().create_future()
        try:
            data = await within(FETCH_DEADLINE_S, self._fetch(digest), "reading a text bundle")
            self._kept[digest] = data
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_BYTES:
                self._kept.popitem(last=False)
            return data
        finally:
            del self._fetching[digest]
            done.cancel()
