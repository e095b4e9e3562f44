"""A loader and the process that reads other nodes' memory for it: messages on a socket that keeps
them apart (SOCK_SEQPACKET).

::

    loader                          reader
    Begin             ->                        my host pool, and the memory that bytes are to land in
                      <-    Ready               others may read the pool with this
    Stir              ->                        they are about to
    Learn (1)         ->                        another node's pool
                      <-    Learned (1)
    Read (7), (8)     ->                        bytes of it, into a slot
                      <-    Done (8), (7)       in any order
    the end           ->                        the process ends

Both are of one release.
"""

from typing import Any

from pilotlight.common.messages.codec import Message, decode_msgpack

MAX_AGENT_BYTES = 12 * 1024
"""What NIXL says of a host, some hundred bytes for each interface; has to fit into a control
message of a link."""
MAX_MESSAGE_BYTES = 64 * 1024


class Begin(Message, tag="begin", frozen=True, kw_only=True):
    """The first message. Descriptors are numbers of files that the process was started with."""

    name: str
    """Never used for another."""
    pool_descriptor: int
    pool_start: int
    """Where the part begins that others may read."""
    pool_bytes: int
    """From the file's start on."""
    is_writable: bool
    """Whether the pool is mapped so that it could be written to: a network card registers memory in
    no other way."""
    landing_descriptor: int
    landing_bytes: int


class Ready(Message, tag="ready", frozen=True, kw_only=True):
    """Others may read: what they have to know for it, and where the pool's readable part lies."""

    agent: bytes
    address: int


class Unusable(Message, tag="unusable", frozen=True, kw_only=True):
    """There is no NIXL here, or it cannot use this host's memory. The process ends."""

    reason: str
    is_final: bool
    """It is not installed: another try would end as this one."""


class Learn(Message, tag="learn", frozen=True, kw_only=True):
    """Another node will be read from: what its ``Ready`` said."""

    peer: int
    agent: bytes


class Learned(Message, tag="learned", frozen=True, kw_only=True):
    """It can be read from; or why not."""

    peer: int
    error: str = ""


class Forget(Message, tag="forget", frozen=True, kw_only=True):
    """It will be read from no more. Reads that are under way go on."""

    peer: int


class Read(Message, tag="read", frozen=True, kw_only=True):
    """Read bytes at an address of another node's memory, to an offset of the landing memory."""

    number: int
    peer: int
    address: int
    offset: int
    size_bytes: int


class Done(Message, tag="done", frozen=True, kw_only=True):
    """The bytes are there, and nothing will be written to their place any more.

    With an error neither is sure.
    """

    number: int
    error: str = ""


class Stir(Message, tag="stir", frozen=True, kw_only=True):
    """Another node reads, or was told where: where no network card does that for it, this process
    has to answer.
    """


FromLoader = Begin | Learn | Forget | Read | Stir
FromReader = Ready | Unusable | Learned | Done


def decode(data: bytes, as_type: Any) -> Any:
    """One of these messages.

    Raises:
        MessageUndecodable: it is none.
    """
    return decode_msgpack(data, as_type)
