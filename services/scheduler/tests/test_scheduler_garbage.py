"""A leader looks for garbage between its turns, and at no other time."""

import gc
import weakref

from pilotlight.scheduler.garbage import ALL_S, YOUNG_S, between_turns


class _Ring:
    """Refers to itself: it goes when it is looked for."""

    def __init__(self) -> None:
        self.ring = self


def _dropped() -> weakref.ref[_Ring]:
    return weakref.ref(_Ring())


def test_what_is_new_is_looked_at_often_and_old_things_rarely() -> None:
    assert gc.isenabled()
    old = _Ring()
    gc.collect()
    seen = weakref.ref(old)
    with between_turns(0.0) as garbage:
        assert not gc.isenabled()
        one = _dropped()
        garbage.look(YOUNG_S / 2)
        assert one() is not None
        garbage.look(YOUNG_S)
        assert one() is None
        del old
        garbage.look(3 * YOUNG_S)
        assert seen() is not None
        garbage.look(ALL_S)
        assert seen() is None
    assert gc.isenabled()


def test_who_had_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with between_turns(0.0):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
