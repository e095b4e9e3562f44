"""What the gateway and a text helper say to each other: msgpack behind a header of eight bytes, one
reply to each job.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pilotlight.gateway.texts.model_text import TextFacts
from pilotlight.policy.ids import Digest

_HEADER = struct.Struct("<II")
HEADER_BYTES = _HEADER.size


class Read(msgspec.Struct, tag="read", frozen=True, kw_only=True):
    """Decode and check a request's body. ``Request`` follows."""

    kind: str
    """A name of ``schema.kinds``."""
    body: bytes


class Make(msgspec.Struct, tag="make", frozen=True, kw_only=True):
    """Make a bundle of a checkpoint's text files, by their names. ``Made`` follows."""

    files: dict[str, bytes]


class Describe(msgspec.Struct, tag="describe", frozen=True, kw_only=True):
    """Look at a bundle. ``Described`` follows."""

    digest: Digest


class Conversation(msgspec.Struct, frozen=True):
    """What a chat template is given. It goes to a text helper as it is."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None
    variables: Mapping[str, Any] = {}
    """More of what the template may know, as the client says."""
    add_generation_prompt: bool = True
    """The prompt ends with the beginning of the assistant's answer."""
    continue_final_message: bool = False
    """The prompt ends with the last message, unfinished: the answer goes on with it."""


class Chat(msgspec.Struct, tag="chat", frozen=True, kw_only=True):
    """Render a conversation and encode it. ``Encoded`` follows."""

    digest: Digest
    model: str
    context_tokens: int
    conversation: Conversation
    add_special_tokens: bool = False


class Completion(msgspec.Struct, tag="completion", frozen=True, kw_only=True):
    """Encode a plain prompt. ``Encoded`` follows."""

    digest: Digest
    model: str
    context_tokens: int
    prompt: str
    add_special_tokens: bool = True


class Several(msgspec.Struct, tag="several", frozen=True, kw_only=True):
    """Encode texts, or pairs of them. ``EncodedSeveral`` follows."""

    digest: Digest
    context_tokens: int
    firsts: list[str]
    seconds: list[str] = []
    """As many as there are first ones; empty: texts come alone."""
    before: str = ""
    after: str = ""
    """Put around each first text, in the place of special tokens; both empty: these are."""
    truncate_to: int | None = None
    """Most tokens of a text; None: it is not cut."""
    answers: tuple[str, ...] = ()
    """Tokens whose ids are asked for, too."""
    param: str
    """The request's field that the texts came in."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Whether it can work. ``Ready`` follows."""


class Give(msgspec.Struct, tag="give", frozen=True, kw_only=True):
    """A bundle for the job after it. Nothing follows."""

    digest: Digest
    bundle: bytes


Job = Hello | Read | Make | Describe | Chat | Completion | Several
ToHelper = Job | Give


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """It can."""


class Request(msgspec.Struct, tag="request", frozen=True):
    """A request's body, as msgpack: large texts are copied, and little is left to be looked at."""

    data: bytes


class Made(msgspec.Struct, tag="made", frozen=True):
    """A new bundle, encoded."""

    bundle: bytes
    facts: TextFacts


class Described(msgspec.Struct, tag="described", frozen=True):
    """What there is to know of a bundle."""

    facts: TextFacts


class Encoded(msgspec.Struct, tag="encoded", frozen=True):
    """Token ids: 4 bytes each."""

    token_ids: bytes


class EncodedSeveral(msgspec.Struct, tag="encoded_several", frozen=True):
    """Token ids of each text, 4 bytes each; where the token types of its second one begin; ids of
    the answers.
    """

    token_ids: list[bytes]
    second_starts: list[int | None]
    answers: list[int]


class Missing(msgspec.Struct, tag="missing", frozen=True):
    """The helper does not hold the job's bundle: ``Give`` it first."""


class Failed(msgspec.Struct, tag="failed", frozen=True, kw_only=True):
    """Why there is no answer: an error of the taxonomy."""

    code: str
    message: str
    param: str | None = None


Reply = Ready | Request | Made | Described | Encoded | EncodedSeveral | Missing | Failed

_encoder = msgspec.msgpack.Encoder()
_jobs: msgspec.msgpack.Decoder[ToHelper] = msgspec.msgpack.Decoder(ToHelper)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encoded(message: ToHelper | Reply) -> bytes:
    """A message, without its header."""
    return _encoder.encode(message)


def header(data: bytes, cpu_s: float = 0.0) -> bytes:
    """What goes before an encoded message: with a job, the processor time that it may take; with a
    reply, all that the helper has taken so far.
    """
    return _HEADER.pack(len(data), round(cpu_s * 1000))


def header_of(data: bytes | bytearray) -> tuple[int, float]:
    """How many bytes follow, and the processor time in seconds."""
    length, cpu_ms = _HEADER.unpack(data)
    return length, cpu_ms / 1000


def job_of(data: bytes) -> ToHelper:
    """What the gateway asks for."""
    return _jobs.decode(data)


def reply_of(data: bytes | bytearray) -> Reply:
    """What a helper answers."""
    return _replies.decode(data)
