"""Which of them sends when a cold start and something in the background want the link at once."""

import pytest

from pilotlight.dataplane.link.yielding import HOLD_S, Yielding
from pilotlight.policy.cluster import FetchPriority


def test_what_is_in_the_background_waits_for_a_cold_start_but_not_long() -> None:
    yielding = Yielding()
    assert yielding.delay_s(FetchPriority.PREFETCH, 10.0) == 0
    yielding.sent(FetchPriority.PREFETCH, 10.0)
    assert yielding.delay_s(FetchPriority.PREFETCH, 10.0) == 0
    yielding.sent(FetchPriority.COLD_START, 10.0)
    assert yielding.delay_s(FetchPriority.COLD_START, 10.0) == 0
    assert yielding.delay_s(FetchPriority.PREFETCH, 10.01) == pytest.approx(HOLD_S - 0.01)
    assert yielding.delay_s(FetchPriority.PREFETCH, 10.0 + HOLD_S) == 0
