"""``make demo-groups``, with a model of a few layers: the line that it ends with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEMO = Path(__file__).resolve().parents[2] / "bench" / "groups.py"
DEADLINE_S = 300.0
LAYERS = "4"
"""One for each stage: 100 MB."""
LINK = "100mbit"


def test_a_start_of_one_stage_and_of_four_say_the_same_and_how_soon() -> None:
    command = (sys.executable, str(DEMO), "--layers", LAYERS, "--link", LINK, "--tokens", "24")
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=DEMO.parent
    )
    assert ran.returncode == 0, ran.stderr
    *shown, last = ran.stdout.strip().splitlines()
    word, _, figures = last.partition(" ")
    result = json.loads(figures)
    assert word == "RESULT"
    assert (result["consolidated"], result["tokens_equal"]) == (True, True)
    assert result["ratio"] == pytest.approx(result["ttft_s1_s"] / result["ttft_s4_s"], rel=0.01)
    assert min(result["ttft_s1_s"], result["ttft_s4_s"]) > 0
    for stages in (1, 4):
        assert any(line.startswith(f"{stages} of 4 nodes bring") for line in shown), "a waterfall"
