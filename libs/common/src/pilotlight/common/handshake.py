"""Two nodes prove to each other that they know the cluster's key, before a link or a channel.

Pure: a message in, a message out.

::

    initiator                                     responder
    Hello(version, a, nonce_a)         ->
                                       <-         Welcome(version, g, nonce_g, proof "gives" of both ids and nonces)
    Proof("asks" of the same)          ->
                                       <-         Accepted

Nonces are fresh, so no proof is of use a second time; a proof names its side, so neither side's can
be sent back as the other's. Links and channels have keys of their own, so a proof for one is none
for the other; what a channel is about is proved with the rest. What follows is authenticated by the
connection alone and not encrypted: bytes are verified by their recorded digests, and parameters can
be read by everyone who can read the network's packets. "gives" and "asks" are on the wire, so they
stay as they are.
"""

import secrets
from dataclasses import dataclass, field

from pilotlight.common.cluster_key import ClusterKey
from pilotlight.common.errors import PeerRefused
from pilotlight.common.messages.link import LINK_VERSION, Accepted, Hello, Proof, Refused, Welcome
from pilotlight.policy.ids import NodeId

NONCE_BYTES = 32
LINK_PURPOSE, CHANNEL_PURPOSE = "link", "channel"
"""What the cluster's key is used for: a key of its own for each."""


def new_nonce() -> bytes:
    """Random bytes, for one handshake."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node says of itself."""

    node_id: NodeId
    key: ClusterKey


@dataclass(slots=True)
class Initiator:
    """The side of the node that makes the connection."""

    me: Identity
    expected: NodeId
    """The node that it means to reach. Where another node has its address by now, nothing is asked
    of that one."""
    beat_s: float = 1.0
    """How often it wants to hear that what it asked for is on its way."""
    nonce: bytes = field(default_factory=new_nonce)
    about: str = ""
    """What the connection is for, where a node has several of one kind."""
    one_sided: bool = False
    """Whether it can read the other node's memory."""
    device_at: str = ""
    """See ``Hello``."""

    def hello(self) -> Hello:
        """What it says first."""
        return Hello(
            version=LINK_VERSION,
            node_id=self.me.node_id,
            nonce=self.nonce,
            beat_s=self.beat_s,
            about=self.about,
            one_sided=self.one_sided,
            device_at=self.device_at,
        )

    def on_welcome(self, answer: Welcome | Refused) -> Proof:
        """The proof that it answers with.

        Raises:
            PeerRefused: the other node refuses, or is not the one that it should be.
        """
        if isinstance(answer, Refused):
            raise PeerRefused(f"{self.expected} refuses this node: {answer.message}")
        _check_version(answer.version, self.expected)
        _check_nonce(answer.nonce, self.expected)
        if answer.node_id != self.expected:
            raise PeerRefused(f"{answer.node_id} answers where {self.expected} should")
        fields = _fields(self.me.node_id, self.nonce, answer.node_id, answer.nonce, self.about)
        if not self.me.key.is_proved(answer.proof, b"gives", *fields):
            raise PeerRefused(f"{self.expected} has another cluster key")
        return Proof(proof=self.me.key.proof(b"asks", *fields))

    def on_end(self, answer: Accepted | Refused) -> Accepted:
        """The other node has seen the proof; its last word.

        Raises:
            PeerRefused: it did not take it.
        """
        if isinstance(answer, Refused):
            raise PeerRefused(f"{self.expected} refuses this node: {answer.message}")
        return answer


@dataclass(slots=True)
class Responder:
    """The side of the node that listens."""

    me: Identity
    nonce: bytes = field(default_factory=new_nonce)
    peer: NodeId | None = None
    """The node that claims to connect; proved once ``on_proof`` has returned."""
    about: str = ""
    """What that node says the connection is for; proved then, too."""
    device_at: str = ""
    """See ``Hello``. No part of the proof: what goes there is only of use to who reads this
    connection."""
    _fields: tuple[bytes, ...] = ()

    def on_hello(self, hello: Hello) -> Welcome:
        """The answer to a first frame.

        Raises:
            PeerRefused: the other node speaks another version.
        """
        _check_version(hello.version, hello.node_id)
        _check_nonce(hello.nonce, hello.node_id)
        self.peer, self.about, self.device_at = hello.node_id, hello.about, hello.device_at
        self._fields = _fields(hello.node_id, hello.nonce, self.me.node_id, self.nonce, hello.about)
        proof = self.me.key.proof(b"gives", *self._fields)
        return Welcome(version=LINK_VERSION, node_id=self.me.node_id, nonce=self.nonce, proof=proof)

    def on_proof(self, proof: Proof) -> Accepted:
        """The answer to a proof.

        Raises:
            PeerRefused: it is none.
        """
        if self.peer is None or not self.me.key.is_proved(proof.proof, b"asks", *self._fields):
            raise PeerRefused(f"{self.peer} has another cluster key")
        return Accepted()


def _fields(
    initiator: NodeId, initiator_nonce: bytes, responder: NodeId, responder_nonce: bytes, about: str
) -> tuple[bytes, ...]:
    fields = (
        LINK_VERSION.to_bytes(4, "big"),
        initiator.encode(),
        initiator_nonce,
        responder.encode(),
        responder_nonce,
    )
    return (*fields, about.encode()) if about else fields


def _check_version(version: int, peer: NodeId) -> None:
    if version != LINK_VERSION:
        raise PeerRefused(f"{peer} speaks version {version} of the link, this node {LINK_VERSION}")


def _check_nonce(nonce: bytes, peer: NodeId) -> None:
    if len(nonce) != NONCE_BYTES:
        raise PeerRefused(f"{peer} gave a nonce of {len(nonce)} bytes; it needs {NONCE_BYTES}")
