"""What other gateways told of the limits that all share."""

from dataclasses import dataclass, field

from pilotlight.common.messages.limits import LimitTotal
from pilotlight.policy.ids import GatewayId

SILENT_S = 3.0
"""A gateway that is silent for longer is gone: it tells something every second. A bus that is away
is known to be sooner (``common.pulse``).
"""
KEPT_S = 900.0
"""What a gateway told is known for longer than that one itself remembers it: what it forgot and
meets again is a new life. One that was only slow goes on where it was.
"""
FIRST_WORD_S = 2.0
"""A gateway is heard of within this time of its start."""


@dataclass(frozen=True, slots=True)
class News:
    """What another gateway has let in since it was heard before."""

    subject: str
    known: bool
    """False: what it told before is not known; requests and tokens are what is owed by all."""
    requests: float
    tokens: float


@dataclass(slots=True)
class _Peer:
    first_s: float
    """When it was heard first."""
    seq: int = 0
    heard_s: float = 0.0
    gone: bool = False
    totals: dict[str, tuple[LimitTotal, float]] = field(
        default_factory=dict[str, tuple[LimitTotal, float]]
    )
    """By subject, with when they were told."""


class Peers:
    """The other gateways."""

    def __init__(self, own: GatewayId, now_s: float) -> None:
        self._own = own
        self._listens_since_s = now_s
        self._cut_off = False
        self._peers: dict[GatewayId, _Peer] = {}

    def __len__(self) -> int:
        return sum(not peer.gone for peer in self._peers.values())

    def hear(
        self, gateway_id: GatewayId, seq: int, totals: tuple[LimitTotal, ...], now_s: float
    ) -> list[News]:
        """What is new of it.

        Args:
            gateway_id: who tells.
            seq: of its message.
            totals: what it tells.
            now_s: the time.
        """
        if gateway_id == self._own:
            return []
        peer = self._peers.setdefault(gateway_id, _Peer(now_s))
        if seq <= peer.seq:
            return []
        peer.seq, peer.heard_s, peer.gone = seq, now_s, False
        # What began since then was heard of from its beginning.
        listened_s = min(now_s - self._listens_since_s, max(FIRST_WORD_S, now_s - peer.first_s))
        news: list[News] = []
        for total in totals:
            before, _ = peer.totals.get(total.subject, (None, 0.0))
            peer.totals[total.subject] = (total, now_s)
            if before is not None and before.life == total.life:
                requests, tokens = total.requests - before.requests, total.tokens - before.tokens
                news.append(News(total.subject, True, requests, tokens))
            elif total.age_s < listened_s:
                news.append(News(total.subject, True, total.requests, total.tokens))
            else:
                news.append(News(total.subject, False, total.requests_owed, total.tokens_owed))
        return news

    def running(self, subject: str) -> int:
        """Requests of a key or project that run on the others."""
        return sum(
            peer.totals[subject][0].running
            for peer in self._peers.values()
            if subject in peer.totals and not peer.gone
        )

    def owed(self, subject: str, now_s: float) -> list[tuple[float, float, float]]:
        """Requests and tokens that were owed by all, as each told, and how long ago."""
        found = [peer.totals[subject] for peer in self._peers.values() if subject in peer.totals]
        return [(total.requests_owed, total.tokens_owed, now_s - told_s) for total, told_s in found]

    def look(self, now_s: float, *, connected: bool) -> bool:
        """Forget who is gone; whether anyone is. Without a bus nobody is heard, and all stay.

        What the others let in while nothing was heard is not charged when it is: each had a share
        of its own then.
        """
        if not connected:
            self._cut_off = True
            return False
        if self._cut_off:
            self._cut_off = False
            self._listens_since_s = now_s
            for peer in self._peers.values():
                peer.totals.clear()
                peer.heard_s = now_s
            return True
        anyone = False
        for who, peer in list(self._peers.items()):
            if now_s - peer.heard_s > KEPT_S:
                del self._peers[who]
            elif now_s - peer.heard_s > SILENT_S and not peer.gone:
                peer.gone = anyone = True
            old = [one for one, (_, told_s) in peer.totals.items() if now_s - told_s > KEPT_S]
            for subject in old:
                del peer.totals[subject]
        return anyone
