"""Models that take each other's places are found, once."""

from pilotlight.policy.eviction.thrash import Thrash, ThrashRules, ThrashWatch
from pilotlight.policy.ids import ModelName

A, B, C = ModelName("a"), ModelName("b"), ModelName("c")
RULES = ThrashRules(soon_s=100.0, window_s=200.0, reloads=3, again_s=150.0)


def in_turn(watch: ThrashWatch, names: list[ModelName], gap_s: float) -> list[tuple[int, Thrash]]:
    """One place: each load evicts the model before."""
    found: list[tuple[int, Thrash]] = []
    for at, name in enumerate(names):
        now_s = at * gap_s
        if at:
            watch.evicted(names[at - 1], 1 << 30, now_s)
        one = watch.loaded(name, now_s)
        if one is not None:
            found.append((at, one))
    return found


def test_models_in_turn_over_one_place_are_told_of() -> None:
    found = in_turn(ThrashWatch(RULES), [A, B, C] * 3, 10.0)
    assert [at for at, _ in found] == [5], "the third reload, and no word again within 150 s"
    thrash = found[0][1]
    assert set(thrash.models) == {A, B, C}
    assert thrash.reloads_per_hour == 3 * 3600 / 200
    assert thrash.missing_bytes == 2 << 30, "two of three are out at any time"
    assert "54 reloads an hour" in thrash.advice
    assert "2.00 GiB more device memory" in thrash.advice


def test_the_word_is_repeated_as_long_as_it_goes_on() -> None:
    found = in_turn(ThrashWatch(RULES), [A, B] * 20, 10.0)
    assert [at for at, _ in found] == [4, 19, 34]


def test_first_loads_and_late_ones_are_no_thrash() -> None:
    names = [ModelName(f"m{at}") for at in range(30)]
    assert in_turn(ThrashWatch(RULES), names, 10.0) == []
    assert in_turn(ThrashWatch(RULES), [A, B, C] * 10, 80.0) == []
