"""A start of two stages that is cancelled when its client leaves, and the start behind it, in a
whole system of two nodes.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from embedded_system import RunningSystem, copied, eventually, running

from pilotlight.common.waiting import cancel_all

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LINK = "10mbit"
"""Of each node, which brings half of the demo model's 14 MB in 6 s: a client that leaves early in
them leaves a start that is noticed to have nobody who waits.
"""
SLO_MS = 500.0
"""No start meets it: that of two stages is the soonest."""
MODEL = "twice"


@pytest.fixture
def system() -> Iterator[RunningSystem]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        environment = {
            "PILOTLIGHT_MAX_STAGES": "2",
            "PILOTLIGHT_THREADS": "1",
            "PILOTLIGHT_POOL_BYTES": str(64 << 20),
        }
        arguments = ("--workers", "1", "--nodes", "2", "--link", LINK)
        with running(Path(folder) / "home", *arguments, environment=environment) as started:
            yield started


def instances(system: RunningSystem) -> list[dict[str, Any]]:
    with system.admin() as admin:
        found = admin.get("/instances").json()["instances"]
    return [{**one["body"], **one} for one in found if one["model"] == MODEL]


def parts_there(system: RunningSystem) -> dict[str, set[int]]:
    """Of a model that is being started or was, by the node whose host pool has them."""
    (digest,) = {one["digest"] for one in instances(system)} or {""}
    with system.admin() as admin:
        nodes = admin.get("/nodes").json()["nodes"]
    return {
        one["node_id"]: {part for copy in mine for part in copy["parts"]}
        for one in nodes
        if (
            mine := [
                copy
                for copy in one["copies"]
                if copy["digest"] == digest and copy["tier"] == "host" and copy["parts"]
            ]
        )
    }


async def leaves(system: RunningSystem, when: Callable[[], Any]) -> None:
    """A client asks, and goes without an answer."""
    headers = {"Authorization": f"Bearer {system.key('api')}"}
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8}
    async with httpx2.AsyncClient(base_url=system.url, headers=headers, timeout=60.0) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        try:
            await asyncio.to_thread(eventually, when)
            assert not asking.done(), "it waits for its first token"
        finally:
            await cancel_all((asking,))


def test_parts_that_a_cancelled_start_has_brought_are_used_by_the_next_one(
    system: RunningSystem,
) -> None:
    """Of each node; what had not come by then is all that is fetched."""
    folder = copied(system.home / "models", MODEL)
    system.cli("model", "add", MODEL, str(folder), "--ttft-ms", str(SLO_MS))
    asyncio.run(leaves(system, lambda: len(parts_there(system)) == 2))
    eventually(lambda: [one["state"] for one in instances(system)] == ["gone"])
    kept = parts_there(system)
    assert len(kept) == 2, "the start is cancelled, what came stays"
    with system.openai() as client:
        answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8)
    assert answer.choices[0].text
    with system.admin() as admin:
        decisions = admin.get("/decisions", params={"model": MODEL}).json()["decisions"]
        (model,) = admin.get("/models").json()["models"]
    starts = {
        one["instance_id"]: one["outcome"]["scheme"]["placements"]
        for one in decisions
        if one["kind"] == "cold_start"
    }
    (cancelled,) = (one for one in instances(system) if one["state"] == "gone")
    (first,) = (places for one, places in starts.items() if one == cancelled["instance_id"])
    (second,) = (places for one, places in starts.items() if one != cancelled["instance_id"])
    for place in first:
        assert place["fetch_bytes"] == bytes_of(model["spec"], place["stage"], set())
    for place in second:
        there = kept[place["node_id"]]
        missing = bytes_of(model["spec"], place["stage"], there)
        assert place["fetch_bytes"] <= missing < bytes_of(model["spec"], place["stage"], set())


def bytes_of(spec: dict[str, Any], stage: dict[str, int], without: set[int]) -> int:
    """Of the parts of a stage, but for some."""
    part_bytes, last = spec["part_bytes"], stage["stop"] == spec["num_layers"]
    parts = set(range(1 + stage["start"], 1 + stage["stop"]))
    if stage["start"] == 0 or (last and spec["tied_embeddings"]):
        parts.add(0)
    if last:
        parts.add(len(part_bytes) - 1)
    return sum(part_bytes[part] for part in parts - without)
