"""Loader and loader, over TCP: who is there, and which bytes of which chunk are wanted.

The node that makes a connection is its receiver, the other one its sender.
``pilotlight.dataplane.link.wire`` describes the frames; these are the bodies of those that hold no
parameters.

::

    receiver                         sender
    Hello                     ->                     who I am, my nonce
                              <-     Welcome         who I am, my nonce; I know the key
    Proof                     ->                     so do I
                              <-     Accepted        or Refused, at any time before
    Ask (request 1)           ->
    Ask (request 2)           ->
                              <-     Units (1)       the digests of all units of the chunk
                              <-     bytes (1) ...   each unit once it is verified here
                              <-     Waiting         nothing to send at the moment, and all is well
                              <-     Sent (1)
    Enough (1)                ->                     received, or not wanted any more: let go of it
                              <-     NotHeld (2)

Between two nodes that can, bytes go another way: the sender tells how its memory can be read, and,
instead of sending them, where they lie.

::

                              <-     Region          what has to be known to read this node's host pool
    Ask (3, one_sided)        ->
                              <-     Units (3)
                              <-     Placed (3) ...  each unit once it is verified here
                              <-     Sent (3)
    Enough (3)                ->                     all of it was read
"""

from pilotlight.common.messages.codec import Message
from pilotlight.policy.cluster import FetchPriority
from pilotlight.policy.ids import Digest, NodeId

LINK_VERSION = 1
"""Of the handshake and the frames. Another one is refused."""


class Hello(Message, tag="hello", frozen=True, kw_only=True):
    """The first frame of a connection, by the node that made it."""

    version: int
    node_id: NodeId
    nonce: bytes
    beat_s: float = 1.0
    """The longest time without bytes or ``Waiting`` that the receiver accepts."""
    about: str = ""
    """What the connection is for: which channel. A link is for everything, and says nothing."""
    one_sided: bool = False
    """Whether it can read the other node's memory, and so wants to hear of its ``Region``."""
    device_at: str = ""
    """Of a channel: where on its host a descriptor of device memory can be sent to it, behind the
    host's boot id; empty where it maps none."""


class Welcome(Message, tag="welcome", frozen=True, kw_only=True):
    """The answer, with the proof that the node that listens knows the cluster's key."""

    version: int
    node_id: NodeId
    nonce: bytes
    proof: bytes


class Proof(Message, tag="proof", frozen=True, kw_only=True):
    """The proof that the node that connects knows it, too."""

    proof: bytes


class Accepted(Message, tag="accepted", frozen=True, kw_only=True):
    """Requests are taken from now on."""

    device_at: str = ""
    """As in ``Hello``: told to a peer of the same host that has told its own."""


class Refused(Message, tag="refused", frozen=True, kw_only=True):
    """The connection ends: a code of the error taxonomy and a sentence."""

    code: str
    message: str


class Ask(Message, tag="ask", frozen=True, kw_only=True):
    """Give the bytes of one chunk, from one of them on."""

    model: Digest
    part: int
    chunk: int
    """Within the part."""
    digest: Digest | None
    """The chunk's, as recorded. None: it is not known to be recorded; nothing is sent, and
    ``Recorded`` says when it is."""
    from_byte: int
    priority: FetchPriority = FetchPriority.COLD_START
    one_sided: bool = False
    """The receiver reads the bytes itself: say where they lie. Bytes are sent all the same where
    the sender's memory cannot be read."""


class Enough(Message, tag="enough", frozen=True, kw_only=True):
    """All that was asked for came, or it is not wanted any more.

    What still comes of it is thrown away.
    """


class Region(Message, tag="region", frozen=True, kw_only=True):
    """From now on the sender's host pool can be read by one-sided reads.

    Said only to receivers that can, and again when it changes.
    """

    agent: bytes
    """What NIXL has to know of the sender."""
    address: int
    """Where the pool's images begin, as the sender's process sees them."""
    size_bytes: int


class Placed(Message, tag="placed", frozen=True, kw_only=True):
    """The next bytes of the chunk lie there, and stay until ``Enough``: up to the end of one unit,
    never beyond.
    """

    offset: int
    """From the region's address on."""
    size_bytes: int


class Units(Message, tag="units", frozen=True, kw_only=True):
    """The chunk's list: the digests of all its units, 32 bytes each, one after the other.

    Its bytes follow.
    """

    digests: bytes


class Sent(Message, tag="sent", frozen=True, kw_only=True):
    """The chunk's last byte was sent."""


class NotHeld(Message, tag="not_held", frozen=True, kw_only=True):
    """The node has not got this chunk and does not expect it, or not any more."""


class Recorded(Message, tag="recorded", frozen=True, kw_only=True):
    """The part is whole here, and its digests were recorded or are at this moment."""


class Waiting(Message, tag="waiting", frozen=True, kw_only=True):
    """A sign of life: what was asked for is on its way here."""


FromReceiver = Hello | Proof | Ask | Enough
FromSender = (
    Welcome | Accepted | Refused | Region | Units | Placed | Sent | NotHeld | Recorded | Waiting
)
