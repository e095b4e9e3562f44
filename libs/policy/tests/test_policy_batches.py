"""Lines of batches take what clients leave."""

import pytest

from pilotlight.policy.batches import BatchLoad, lines_to_start


@pytest.mark.parametrize(
    ("lines", "live", "held", "started"),
    [
        (0, 0, 0, 8),
        (3, 3, 3, 5),
        (8, 8, 0, 0),
        (3, 4, 4, 0),
        (0, 1, 1, 0),
        (0, 45, 0, 5),
        (0, 50, 0, 0),
        (8, 99, 0, 0),
    ],
    ids=[
        "idle",
        "its own lines wait",
        "as many as may",
        "a client waits beside them",
        "a client waits",
        "half of the places, nearly",
        "half of the places",
        "more than that",
    ],
)
def test_lines_take_what_clients_leave(lines, live, held, started):
    load = BatchLoad(lines=lines, limit=8, live=live, held=held, places=100)
    assert lines_to_start(load) == started
