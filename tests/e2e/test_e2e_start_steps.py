"""Steps of a start that wait for each other or do not, as the waterfall shows it (ParaServe,
Fig. 9): each case has one more beside the others than the one before it.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from embedded_system import RunningSystem, copied, eventually, running

from pilotlight.cli.waterfall import is_whole

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LINK = "40mbit"
"""The demo model's 14 MB take 2.8 s."""
ROUNDED_S = 0.005
"""Moments are laid on one axis by way of the wall clock."""
STEPS = ("PREFETCH", "WARM", "STREAM", "OVERLAP")
"""A process may take longer than the link: with one of its own nothing streams then."""
Span = tuple[float, float]


def cold_start(system: RunningSystem, name: str) -> dict[str, Any]:
    """The record of a start of a model that no node has."""
    folder = copied(system.home / "models", name)
    system.cli("model", "add", name, str(folder), "--ttft-ms", "60000")
    with (
        system.openai() as client,
        client.completions.with_streaming_response.create(
            model=name, prompt="Once upon a time", max_tokens=4, stream=True
        ) as response,
    ):
        list(response.parse())
        trace_id = response.headers["x-trace-id"]

    def record() -> dict[str, Any] | None:
        found = admin.get(f"/traces/{trace_id}")
        records = found.json()["cold_starts"] if found.status_code == 200 else []
        return next(filter(is_whole, records), None)

    with system.admin() as admin:
        return eventually(record)


def spans(record: dict[str, Any]) -> dict[str, Span]:
    """From the first moment of each phase to its last; ``process`` is that of the engine."""
    found: dict[str, list[Span]] = {}
    for phase in record["phases"]:
        name = "process" if phase["detail"] == "process" else phase["name"]
        found.setdefault(name, []).append((phase["start_s"], phase["end_s"]))
    return {
        name: (min(start for start, _ in all_), max(end for _, end in all_))
        for name, all_ in found.items()
    }


def after(second: Span, first: Span) -> bool:
    return second[0] >= first[1] - ROUNDED_S


@pytest.mark.parametrize("on", range(len(STEPS) + 1), ids=("single", *STEPS))
def test_each_step_waits_for_the_one_before_it_until_it_is_switched_on(on: int) -> None:
    switched = {f"PILOTLIGHT_START_{name}": str(at < on).lower() for at, name in enumerate(STEPS)}
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        arguments = ("--workers", "1", "--link", LINK)
        with running(Path(folder) / "home", *arguments, environment=switched) as system:
            found = spans(cold_start(system, "cold"))
    prefetch, warm, stream, overlap = (at < on for at in range(len(STEPS)))
    assert warm is ("process" not in found)
    if not warm:
        assert prefetch is not after(found["fetch"], found["process"])
        assert after(found["load"], found["process"])
    assert stream is not after(found["load"], found["fetch"])
    assert overlap is not after(found["prefill"], found["load"])
