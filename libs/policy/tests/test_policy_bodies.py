"""Which owner gets memory for a body, and how much one takes."""

import pytest

from pilotlight.policy.bodies import SMALL_BYTES, BodiesHeld, admit_body, decoded_bytes, part_bytes

MIB = 1024 * 1024


def test_the_two_parts_are_the_whole() -> None:
    assert part_bytes(256 * MIB, SMALL_BYTES) + part_bytes(256 * MIB, SMALL_BYTES + 1) == 256 * MIB


def admitted(owners: int, each_bytes: int, total_bytes: int) -> list[int]:
    """What owners get that ask in turn until none gets more."""
    held = [0] * owners
    grew = True
    while grew:
        grew = False
        for owner in range(owners):
            facts = BodiesHeld(
                part_bytes=total_bytes, held_bytes=sum(held), owner_bytes=held[owner]
            )
            if admit_body(facts, each_bytes):
                held[owner] += each_bytes
                grew = True
    return held


def test_one_key_gets_half() -> None:
    assert admitted(1, 1, 1000) == [500]


@pytest.mark.parametrize("owners", [2, 3, 9])
def test_keys_share_and_leave_room_for_one_more(owners: int) -> None:
    held = admitted(owners, 1, 1000)
    assert max(held) - min(held) <= 1
    assert 1000 - sum(held) >= min(held)


def test_a_single_body_may_take_all() -> None:
    nothing = BodiesHeld(part_bytes=1000, held_bytes=0, owner_bytes=0)
    assert admit_body(nothing, 1000)
    assert not admit_body(nothing, 1001)


def test_what_decoding_makes_is_counted() -> None:
    text = b'"' + b"a" * 1000 + b'"'
    assert 2 * len(text) <= decoded_bytes(text) < 3 * len(text)
    assert decoded_bytes('"😀'.encode() + text[1:]) >= 5 * len(text)
    assert decoded_bytes(b'"\\ud83d\\ude00' + text[1:]) >= 5 * len(text)
    # As measured with msgspec: 64 bytes a list or a short string, 192 an object with a value, 32 a
    # number.
    assert decoded_bytes(b"[" + b"[]," * 1000 + b"[]]") >= 64_000
    assert decoded_bytes(b"[" + b'{"":1},' * 1000 + b"{}]") >= 192_000
    assert decoded_bytes(b"[" + b"300," * 1000 + b"1]") >= 32_000
    assert decoded_bytes(b"[" + b'"ab",' * 1000 + b'""]') >= 64_000
