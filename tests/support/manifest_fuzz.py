"""Manifests of artifacts, mutated: ``make fuzz-manifests`` tries a million of them in each test."""

import os
import random

MUTATIONS = int(os.environ.get("PILOTLIGHT_FUZZ_MUTATIONS", "5000"))
"""Of each test."""
TOKENS = (
    b"null", b"-1", b"1e999", b"{}", b"[]", b'""', b"[" * 200, b"9" * 400, b"\xff\xfe", b"true",
)  # fmt: skip


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The same bytes with something changed, cut, doubled or put in."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        match rng.randrange(5):
            case 0:
                made[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del made[at : at + rng.randint(1, 40)]
            case 2:
                made[at:at] = made[at : at + rng.randint(1, 40)]
            case 3:
                made[at:at] = rng.choice(TOKENS)
            case _:
                made[at : at + 1] = rng.choice(TOKENS)
        if not made:
            return b""
    return bytes(made)
