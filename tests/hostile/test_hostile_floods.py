"""Floods of bodies against the gateway of a whole system: what they do to its memory and to another
client.

Prints figures as JSON.
"""

import asyncio
import json
from collections import Counter

import pytest
from embedded_system import RunningSystem
from gateway_watch import DEADLINE_S, MB, Watch, key_of, send

from pilotlight.gateway.settings import GatewaySettings

pytestmark = [pytest.mark.hostile, pytest.mark.anyio]

BODY_BYTES = 8 * MB
BUDGET_BYTES = GatewaySettings.model_fields["bodies_bytes"].default
OVERHEAD_BYTES = 96 * MB
"""Beside the budget: what 400 connections take, buffers, one body that is being copied, and what is
left between blocks that are used."""
SETTLED_S = 4.0


def head(system: RunningSystem, length: int | None) -> bytes:
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {key_of(system)['authorization']}\r\n"
        f"content-type: application/json\r\n{framing}\r\n\r\n"
    ).encode()


async def settled(watch: Watch) -> int:
    """The memory some time after a flood: longer than the gateway takes to give back what it
    freed.
    """
    await asyncio.sleep(SETTLED_S)
    return watch.now_bytes


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
async def test_400_bodies_of_8_mb_that_never_end(
    fresh_system: RunningSystem, announced: bool
) -> None:
    part = b" " * (MB // 4)
    if announced:
        pieces = [head(fresh_system, BODY_BYTES), *[part] * (BODY_BYTES // len(part) - 1), part[1:]]
    else:
        pieces = [
            head(fresh_system, None),
            *[b"%x\r\n%b\r\n" % (len(part), part)] * (BODY_BYTES // len(part)),
        ]
    watch = Watch(fresh_system)
    async with watch.watching():
        statuses = Counter(
            await asyncio.wait_for(
                asyncio.gather(*[send(fresh_system, *pieces) for _ in range(400)]), DEADLINE_S
            )
        )
        after_bytes = await settled(watch)
    name = f"400 unfinished bodies of 8 MiB, {'announced' if announced else 'chunked'}"
    print(json.dumps(watch.figures(name, statuses, after_bytes)))
    assert watch.peak_bytes - watch.before_bytes < BUDGET_BYTES + OVERHEAD_BYTES
    assert after_bytes - watch.before_bytes < OVERHEAD_BYTES
    assert set(watch.answers) == {200}
    assert sum(watch.answers.values()) > 10
    # 0: a client that goes on sending for long after its answer is cut off, and may not have read
    # it.
    assert set(statuses) <= {0, 408, 429}
    assert statuses[408]
    assert statuses[429]


async def test_6_bodies_of_8_mb_of_spaces(fresh_system: RunningSystem) -> None:
    """Their tokens are far more than any context has: they are refused, and what they took is given
    back.
    """
    prompt = b'{"model": "ember-7m", "max_tokens": 1, "prompt": "%b"}' % (b" " * (BODY_BYTES - 64))
    watch = Watch(fresh_system)
    async with watch.watching():
        asked = [send(fresh_system, head(fresh_system, len(prompt)), prompt) for _ in range(6)]
        statuses = Counter(await asyncio.wait_for(asyncio.gather(*asked), DEADLINE_S))
        after_bytes = await settled(watch)
    print(json.dumps(watch.figures("6 bodies of 8 MiB of spaces", statuses, after_bytes)))
    assert set(statuses) <= {400, 429}
    assert statuses[400]
    assert watch.peak_bytes - watch.before_bytes < BUDGET_BYTES + OVERHEAD_BYTES
    assert after_bytes - watch.before_bytes < OVERHEAD_BYTES
    assert set(watch.answers) == {200}
