"""Bodies that are almost requests get a right status, and leave nothing behind. Many more of them,
on a whole system: ``make fuzz-bodies``.
"""

import json
from collections import Counter

import pytest
from fuzzed_bodies import fuzzed

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

COUNT, SEED = 480, 20
RIGHT = frozenset({200, 400, 404, 413, 503})
"""503: nobody keeps files for batches here."""


async def test_no_body_is_a_bug(world):
    await world.worker(answer="ok")
    statuses = Counter()
    for one in fuzzed("fox", SEED, COUNT):
        answer = await world.http.post(one.path, content=one.body)
        statuses[answer.status_code] += 1
        assert answer.status_code in RIGHT, (one, answer.text)
        assert answer.status_code != 503 or one.path == "/v1/batches", (one, answer.text)
        if answer.status_code != 200:
            assert json.loads(answer.content)["error"], one
    assert statuses[200] > COUNT / 20
    assert statuses[400] > COUNT / 4
    assert world.serving.requests.live == 0
