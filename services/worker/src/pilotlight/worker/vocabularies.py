"""Tokenizers for the engine's grammars: fetched when a model's first grammar comes, and handed on
as files that need no folder.
"""

import asyncio
import os
from collections import OrderedDict

from pilotlight.common.store import ObjectStore, text_key
from pilotlight.common.waiting import within
from pilotlight.policy.ids import Digest
from pilotlight.policy.request import Vocabulary
from pilotlight.text.bundle import TextBundle, decode

FETCH_S = 30.0
KEPT = 8
"""Models whose tokenizer is kept in memory; each takes as much as its ``tokenizer.json``, some
megabytes."""


class Vocabularies:
    """By text bundle: fine-tuned models share theirs. The files are gone with this process."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._kept: OrderedDict[Digest, tuple[int, Vocabulary]] = OrderedDict()
        self._fetching = asyncio.Lock()

    async def get(self, digest: Digest) -> Vocabulary:
        """A model's vocabulary, by the digest of its text bundle.

        Raises:
            NotFound, SourceUnavailable, BadCheckpoint: it cannot be had or used.
            DeadlineExceeded: the object store is too slow.
        """
        async with self._fetching:
            if digest not in self._kept:
                data = await within(
                    FETCH_S, self._store.get(text_key(digest)), "fetching a model's tokenizer"
                )
                self._kept[digest] = await asyncio.to_thread(lambda: _written(decode(data), digest))
            self._kept.move_to_end(digest)
            while len(self._kept) > KEPT:
                os.close(self._kept.popitem(last=False)[1][0])
            return self._kept[digest][1]

    def close(self) -> None:
        """Forget all."""
        while self._kept:
            os.close(self._kept.popitem()[1][0])


def _written(bundle: TextBundle, digest: Digest) -> tuple[int, Vocabulary]:
    """A file in memory, and how another process of this user reaches it."""
    descriptor = os.memfd_create("pilotlight-vocabulary")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(bundle.tokenizer_json.encode())
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    return descriptor, Vocabulary(
        path=path, eos_token_ids=bundle.generation.eos_token_ids, text_digest=digest
    )
