"""Whether one more body, or more of one, fits the memory that a gateway has for bodies."""

from dataclasses import dataclass

SMALL_BYTES = 256 * 1024
"""Bodies that take up to this many bytes have a part of the budget for themselves: large ones never
shut them out. Decoded, 64 KiB of JSON mostly take less."""
_SMALL_SHARE = 4
_COMMA_BYTES = 64
_LIST_BYTES = 64
_OBJECT_BYTES = 192
_WIDE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BodiesHeld:
    """What of one part of the budget is held, without the body that asks."""

    part_bytes: int
    """All of this part."""
    held_bytes: int
    """By all keys together."""
    owner_bytes: int
    """By the key that the body came with."""


def part_bytes(total_bytes: int, body_bytes: int) -> int:
    """How much of the budget is for bodies of this size."""
    small = total_bytes // _SMALL_SHARE
    return small if body_bytes <= SMALL_BYTES else total_bytes - small


def admit_body(held: BodiesHeld, body_bytes: int) -> bool:
    """Decide over a body that is to hold ``body_bytes``.

    A key may hold as much as all keys leave free: alone it gets half, and the next key finds room,
    however much one sends.
    """
    return held.owner_bytes + body_bytes <= held.part_bytes - held.held_bytes


def decoded_bytes(body: bytes) -> int:
    """About the memory of a body with what is decoded from it, from above: what JSON can make of
    its commas and brackets.

    Text takes four times its bytes as soon as one character of it is beyond the basic plane, and
    escapes can name such a character.
    """
    text = len(body) * (1 if body.isascii() and b"\\u" not in body else _WIDE)
    made = (
        body.count(b",") * _COMMA_BYTES
        + body.count(b"[") * _LIST_BYTES
        + body.count(b"{") * _OBJECT_BYTES
    )
    return len(body) + text + made
