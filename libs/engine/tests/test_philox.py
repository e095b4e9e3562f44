"""Philox4x32-10 against the known answers of its authors' library, Random123."""

import pytest

from pilotlight.engine.core.philox import philox_4x32, uniform

PI_COUNTER, PI_KEY = 0x0370734413198A2E85A308D3243F6A88, 0x299F31D0A4093822


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, 2**128 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI_KEY, PI_COUNTER, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(key, counter, words):
    assert philox_4x32(key, counter) == words


def test_any_integer_is_a_seed():
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert uniform(2**64, 3) == uniform(0, 3)


def test_noise_is_uniform_and_differs_by_seed_and_position():
    noise = [uniform(seed, position) for seed in range(50) for position in range(200)]
    assert len(set(noise)) == len(noise)
    assert all(0 <= value < 1 for value in noise)
    tenths = [sum(1 for value in noise if int(value * 10) == tenth) for tenth in range(10)]
    assert sum((count - 1000) ** 2 / 1000 for count in tenths) < 27.9, (
        "chi-square, 9 degrees of freedom, p = 0.001"
    )
