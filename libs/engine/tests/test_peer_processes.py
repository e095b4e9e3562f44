"""Two engines' processes with a fake device each, whose memory both of them map; with real ones:
tests/gpu/test_gpu_channels.py.
"""

import pytest
from fake_cuda import fake_cuda
from peer_child import MAX_TOKENS, PROMPTS
from peer_pair import pair

from pilotlight.engine.core.blocks import BLOCK_TOKENS

pytestmark = pytest.mark.slow

NO_DEVICES = ("", "")


@pytest.fixture
def driver():
    return fake_cuda().path


def test_payloads_arrive_bit_for_bit(driver):
    sent, taken = pair(("sends", "takes"), NO_DEVICES, driver=driver, sizes=[[1 << 20, 3]])
    assert sent["carries"]
    assert taken["payloads"] > 0
    assert (taken["wrong"], taken["on_host"]) == ([], 0)
    assert {speed["way"] for speed in sent["speeds"]} == {"device", "host"}


def test_what_was_sent_is_there_when_the_sender_died(driver):
    gone, here = pair(("vanishes", "remains"), NO_DEVICES, driver=driver)
    assert gone["carries"]
    assert here["equal"]


def test_a_pipeline_says_what_one_engine_says_and_becomes_one(driver):
    lead, follower = pair(("leads", "follows"), NO_DEVICES, driver=driver)
    assert (lead["wrong"], lead["alone"]) == ([], True)
    assert len(PROMPTS) * 20 <= lead["in_pipeline"] < len(PROMPTS) * MAX_TOKENS
    for ways in (lead["ways"], follower["ways"]):
        assert ways[0] == "device memory"
        assert not ways[1].startswith("closed: 0 bytes")
        assert ways[1].endswith(" 0 had no room there")
    assert all(lead["by_device"]), lead["reasons"]


def test_kv_comes_by_its_tokens(driver):
    giving, asking = pair(("gives", "asks"), NO_DEVICES, driver=driver)
    assert asking["tokens"] == giving["tokens"]
    assert asking["kv_tokens"] == PROMPTS[3] // BLOCK_TOKENS * BLOCK_TOKENS
    assert giving["ways"][0] == "device memory"
    assert not giving["ways"][1].startswith("closed: 0 bytes")


@pytest.mark.parametrize("dies", [False, True])
def test_parts_are_copied_from_another_process(driver, dies):
    """The last time when that has given its memory back, or was gone."""
    sizes = [2 << 20, 8 << 20]
    _, found = pair(("lends", "borrows"), NO_DEVICES, driver=driver, sizes=sizes, dies=dies)
    assert found["wrong"] == []
