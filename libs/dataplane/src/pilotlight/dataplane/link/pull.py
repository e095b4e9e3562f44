"""A request to another node, between the thread that waits for it and the one that receives."""

import threading
from dataclasses import dataclass, field

from pilotlight.common.messages.link import Ask
from pilotlight.dataplane.chunk_fill import ChunkWork


@dataclass(slots=True, eq=False)
class Pull:
    """One such request. Only ``ended`` and ``error`` are looked at by the thread that waits."""

    ask: Ask
    work: ChunkWork
    number: int = 0
    """On its connection; another one when it is asked for again."""
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        """It is over, once."""
        if not self.ended.is_set():
            self.error = error
            self.ended.set()
