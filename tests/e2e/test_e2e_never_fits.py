"""A model that no device can hold: its requests are told at once, and others go on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, running
from openai import APIStatusError

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEVICE_BYTES = 20 * 2**20
"""The demo model has room in bfloat16, and not in float32."""
HOLD_TIMEOUT_S = 900
"""Ten times as long as a client of the test waits."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """One small worker."""
    home: Path = tmp_path_factory.mktemp("never")
    home.chmod(0o711)
    environment = {
        "PILOTLIGHT_MODEL_ROOTS": str(DEMO_FOLDER),
        "PILOTLIGHT_DEVICE_BYTES": str(DEVICE_BYTES),
        "PILOTLIGHT_HOLD_TIMEOUT_S": str(HOLD_TIMEOUT_S),
    }
    with running(home / "home", environment=environment) as up:
        for dtype in ("float32", "bfloat16"):
            up.cli("model", "add", dtype, str(DEMO_FOLDER), "--dtype", dtype)
        yield up


def test_a_request_for_it_is_told_at_once(system: RunningSystem) -> None:
    with system.openai() as client:
        with pytest.raises(APIStatusError, match="more than any worker has") as refused:
            client.completions.create(model="float32", prompt=[0, 5, 6, 7], max_tokens=4)
        assert refused.value.status_code == 429
        assert refused.value.code == "no_worker"
        assert refused.value.response.headers["x-should-retry"] == "false"
        answer = client.completions.create(model="bfloat16", prompt=[0, 5, 6, 7], max_tokens=4)
        assert answer.usage is not None
