"""The parameter pool as others see it: the bucket ``copies``, kept by what loaders report."""

from collections import defaultdict
from collections.abc import Callable

import structlog

from pilotlight.common.buckets import Bucket
from pilotlight.common.errors import BusUnavailable
from pilotlight.policy.cluster import Copy, NodeFacts, Tier
from pilotlight.policy.ids import Digest

log = structlog.get_logger()


class PublishedCopies:
    """Writes a copy when its extent changed, removes it when its loader no longer has it."""

    def __init__(self, bucket: Bucket, had: Callable[[Digest, Tier], None]) -> None:
        """``bucket``: where they are published; ``had`` hears of each that is, or was, there."""
        self._bucket = bucket
        self._had = had
        self._published: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
        """By node, then by key: which parts."""

    def write_anew(self) -> None:
        """The bucket may have been emptied: take nothing for written."""
        for published in self._published.values():
            published.update(dict.fromkeys(published, ()))

    async def sweep(self) -> None:
        """Watch the bucket for ever: what an earlier cache wrote there is ours to remove, once its
        loader no longer has it.
        """
        await self._bucket.watch(Copy, self._on_value)

    async def _on_value(self, key: str, value: Copy | None) -> None:
        if value is None:
            # Removed by another process: if the loader still has the copy the next report writes it
            # anew.
            self._published[_node_of(key)].pop(key, None)
        else:
            self._had(value.digest, value.tier)
            self._published[_node_of(key)].setdefault(key, value.parts)

    async def follow(self, node: NodeFacts) -> None:
        """Bring the bucket to what one report says.

        What could not be written is tried again with the next report.
        """
        present = {_key(copy): copy for copy in node.copies}
        published = self._published[node.node_id]
        gone = [key for key in published if key not in present]
        try:
            for key, copy in present.items():
                if published.get(key) != copy.parts:
                    await self._bucket.put(key, copy)
                    published[key] = copy.parts
            for key in gone:
                await self._bucket.delete(key)
                published.pop(key, None)
        except BusUnavailable as error:
            log.warning("copies are published later", action="copies_deferred", error=error.message)


def _key(copy: Copy) -> str:
    return f"{copy.node_id}.{copy.tier.value}.{copy.digest}"


def _node_of(key: str) -> str:
    return key.partition(".")[0]
