"""What came of one fetch: from which origins, and how fast. For the event loop alone."""

from pilotlight.dataplane.chunk_fetch import OriginObserver
from pilotlight.policy.cluster import OriginKind, OriginShare

SAMPLE_S = 0.5
"""Between two measurements: a report is due more often than a chunk is whole."""
SMOOTHING = 0.5
"""Weight of the newest one."""


class Rate:
    """Bytes per second of a count that is looked at now and then."""

    def __init__(self, start_s: float) -> None:
        """Nothing was counted before ``start_s``."""
        self._at_s = start_s
        self._bytes = 0
        self._bytes_per_s: float | None = None

    def of(self, done_bytes: int, now_s: float) -> float | None:
        """What came lately, when so much has come by now; None until it was measured for the first
        time.
        """
        seconds = now_s - self._at_s
        if seconds >= SAMPLE_S:
            # Bytes that turn out to be wrong are taken back.
            newest = max(0, done_bytes - self._bytes) / seconds
            known = self._bytes_per_s
            self._bytes_per_s = newest if known is None else known + SMOOTHING * (newest - known)
            self._at_s, self._bytes = now_s, done_bytes
        return self._bytes_per_s


class Shares:
    """Counts what each origin gave to a fetch, and passes on what it hears."""

    def __init__(self, observer: OriginObserver) -> None:
        self._observer = observer
        self._bytes: dict[tuple[OriginKind, str], int] = {}

    def on_chunk(self, kind: OriginKind, name: str, size_bytes: int) -> None:
        """As ``OriginObserver.on_chunk``."""
        self._bytes[kind, name] = self._bytes.get((kind, name), 0) + size_bytes
        self._observer.on_chunk(kind, name, size_bytes)

    def on_origin_failed(self, kind: OriginKind, name: str, code: str) -> None:
        """As ``OriginObserver.on_origin_failed``."""
        self._observer.on_origin_failed(kind, name, code)

    @property
    def given(self) -> tuple[OriginShare, ...]:
        """By origin, in the order in which they gave the first chunk."""
        return tuple(
            OriginShare(kind=kind, name=name, size_bytes=count)
            for (kind, name), count in self._bytes.items()
        )

    def of_kind(self, kind: OriginKind) -> int:
        """Bytes that came from origins of a kind."""
        return sum(count for (one, _), count in self._bytes.items() if one is kind)
