"""Which whole states are news: where each message replaces the last one, an old one that comes late
must replace nothing.

NATS keeps the order of one connection; a sender that reconnects to another server of a cluster can
overtake itself. So senders of whole states count them.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_SENDERS = 16_384
"""Senders that are remembered, the latest heard."""
PAST_LIVES = 4


@dataclass(slots=True)
class _Heard:
    life: str
    seq: int
    past: dict[str, int] = field(default_factory=dict[str, int])
    """Earlier lives, the latest heard last, each with the last number that was heard of it."""

    def turn_to(self, life: str, seq: int) -> None:
        """Hear another life from now on."""
        self.past.pop(life, None)
        self.past[self.life] = self.seq
        self.life, self.seq = life, seq
        if len(self.past) > PAST_LIVES:
            del self.past[next(iter(self.past))]


class Newest:
    """What was heard last of each sender."""

    def __init__(self) -> None:
        self._heard: OrderedDict[str, _Heard] = OrderedDict()

    def is_news(self, sender: str, life: str, seq: int) -> bool:
        """Take note of a message; False when it was overtaken by a later one, or is a repetition.

        Args:
            sender: The service that it is from, in whichever of its lives.
            life: Its incarnation, or whatever else it counts anew in. A past life that goes on
                counting has not ended: it was a late message of an earlier one that made it past.
            seq: Its number in that life, from 1. 0 is that of a release that does not count: always
                news.
        """
        heard = self._heard.get(sender)
        if heard is None:
            self._heard[sender] = _Heard(life, seq)
            if len(self._heard) > MAX_SENDERS:
                self._heard.popitem(last=False)
            return True
        self._heard.move_to_end(sender)
        if life != heard.life:
            if seq and seq <= heard.past.get(life, 0):
                return False
            heard.turn_to(life, seq)
            return True
        if seq and seq <= heard.seq:
            return False
        heard.seq = seq
        return True

    def forget(self, sender: str) -> None:
        """Whatever it says next is news."""
        self._heard.pop(sender, None)
