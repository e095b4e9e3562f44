"""More models than places, each of them wanted all the time: no model waits for ever, and the
places do not only load.
"""

import json
import subprocess
import sys
from typing import Any

import pytest
from embedded_system import ROOT

pytestmark = pytest.mark.hostile

SLO_S = 2.0


def load(*arguments: str) -> dict[str, Any]:
    """What ``bench/starvation.py`` says of a load."""
    command = [
        sys.executable,
        str(ROOT / "bench" / "starvation.py"),
        "--slo-ms",
        str(SLO_S * 1000),
        *arguments,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_every_model_is_served_within_ten_times_its_slo() -> None:
    # With so many clients no instance is idle by chance.
    found = load("--duration-s", "45", "--models", "4", "--places", "3", "--clients", "4")
    assert found["errors"] == {}
    assert found["ttft_s"]["max"] <= 10 * SLO_S
    # A load serves more, on average, than the four requests that waited for it.
    assert found["requests"] > 4 * found["loads"]


def test_long_answers_do_not_keep_their_places_for_ever() -> None:
    """They outlast the drain: they go on when it is their turn again, and every token is there."""
    found = load(
        "--duration-s",
        "45",
        "--models",
        "4",
        "--places",
        "3",
        "--max-tokens",
        "900",
        "--clients",
        "3",
    )
    assert found["errors"] == {}
    assert found["ttft_s"]["max"] <= 10 * SLO_S
