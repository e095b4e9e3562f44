"""Two engines' processes, each shown one device, that map each other's memory: what goes from one
device to the other, how fast, and what a pipeline of both says.

On a machine with several devices they are the first and the last one; with one, both processes have
that. ``devices`` says how many there were.
"""

import json
import os
from collections.abc import Callable

import pytest
import torch
from peer_child import MAX_TOKENS, PROMPTS
from peer_pair import pair

from pilotlight.engine.core.blocks import BLOCK_TOKENS

pytestmark = pytest.mark.gpu

Record = Callable[[str, object], None]
SIZES = [[64 << 10, 400], [1 << 20, 200], [8 << 20, 60], [64 << 20, 16]]
"""Bytes of payloads, and how many of them are timed."""


@pytest.fixture
def shown(device: torch.device, record_property: Record) -> tuple[str, str]:
    """What each of the two processes is shown."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(number) for number in range(count)]
    record_property("devices", count)
    return names[0], names[-1]


def test_payloads_arrive_bit_for_bit(shown: tuple[str, str], record_property: Record) -> None:
    sent, taken = pair(("sends", "takes"), shown, sizes=SIZES)
    assert sent["carries"]
    assert taken["payloads"] > 0
    assert (taken["wrong"], taken["on_host"]) == ([], 0)
    record_property("speeds", json.dumps(sent["speeds"]))
    print(json.dumps({"devices": len(set(shown)), "speeds": sent["speeds"]}))


def test_what_was_sent_is_there_when_the_sender_died(shown: tuple[str, str]) -> None:
    gone, here = pair(("vanishes", "remains"), shown)
    assert gone["carries"]
    assert here["equal"]


def test_a_pipeline_says_what_one_engine_says_and_becomes_one(shown: tuple[str, str]) -> None:
    lead, follower = pair(("leads", "follows"), shown)
    assert (lead["wrong"], lead["alone"]) == ([], True)
    assert len(PROMPTS) * 20 <= lead["in_pipeline"] < len(PROMPTS) * MAX_TOKENS
    for ways in (lead["ways"], follower["ways"]):
        assert ways[0] == "device memory"
        assert not ways[1].startswith("closed: 0 bytes")
        assert ways[1].endswith(" 0 had no room there")
    assert all(lead["by_device"]), lead["reasons"]


def test_kv_comes_by_its_tokens(shown: tuple[str, str]) -> None:
    giving, asking = pair(("gives", "asks"), shown)
    assert asking["devices"] == ["cuda"]
    assert asking["tokens"] == giving["tokens"]
    assert asking["kv_tokens"] == PROMPTS[3] // BLOCK_TOKENS * BLOCK_TOKENS
    assert not giving["ways"][1].startswith("closed: 0 bytes")
