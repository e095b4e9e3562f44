"""More models than room: they take turns on a device and in a host pool while the cache is killed,
and no request fails; what went says why, and pins in the way are named.
"""

import os
import random
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, eventually, running
from openai import APIStatusError

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODELS = tuple(f"model-{number}" for number in range(5))
PLACES = 2
DEVICE_BYTES = 96 * 2**20
"""In float32 two of them have room, and no third one."""
POOL_BYTES = 48 * 2**20
"""Three checkpoints in bfloat16."""
CLIENTS, ASKED = 4, 6


def pad(path: Path, number: int) -> None:
    """Make the file another checkpoint with the same parameters, by spaces after its header."""
    content, spaces = path.read_bytes(), b" " * (8 * number)
    length = int.from_bytes(content[:8], "little")
    header, tensors = content[8 : 8 + length], content[8 + length :]
    path.write_bytes((length + len(spaces)).to_bytes(8, "little") + header + spaces + tensors)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """One worker, and five checkpoints of their own."""
    home: Path = tmp_path_factory.mktemp("cache")
    home.chmod(0o711)
    for number, name in enumerate(MODELS):
        shutil.copytree(DEMO_FOLDER, home / "copies" / name)
        pad(home / "copies" / name / "model.safetensors", number)
    environment = {
        "PILOTLIGHT_MODEL_ROOTS": str(home / "copies"),
        "PILOTLIGHT_DEVICE_BYTES": str(DEVICE_BYTES),
        "PILOTLIGHT_POOL_BYTES": str(POOL_BYTES),
        "PILOTLIGHT_HOLD_TIMEOUT_S": "45",
    }
    with running(home / "home", environment=environment) as started:
        for name in MODELS:
            source = str(home / "copies" / name)
            started.cli("model", "add", name, source, "--dtype", "float32", "--ttft-ms", "2000")
        yield started


def complete(system: RunningSystem, model: str) -> str:
    with system.openai() as client:
        answer = client.completions.create(
            model=model, prompt=[0, 5, 6, 7], max_tokens=8, temperature=0, seed=1
        )
    return answer.choices[0].text


def pids_of(system: RunningSystem, service: str) -> set[int]:
    found = {int(path.stem.rpartition("-")[2]) for path in system.home.glob(f"**/{service}-*.sock")}
    return {pid for pid in found if Path(f"/proc/{pid}").exists()}


def test_no_request_fails_while_models_take_turns_and_the_cache_is_killed(
    system: RunningSystem,
) -> None:
    expected = complete(system, MODELS[0])
    rng = random.Random(18)
    asked = [[rng.choice(MODELS) for _ in range(ASKED)] for _ in range(CLIENTS)]
    asked[0][: len(MODELS)] = MODELS

    def ask_all(models: list[str]) -> list[str]:
        return [complete(system, model) for model in models]

    (first,) = pids_of(system, "cache")
    with ThreadPoolExecutor(CLIENTS) as clients:
        running_ones = [clients.submit(ask_all, models) for models in asked]
        os.kill(first, signal.SIGKILL)
        answers = [one.result() for one in running_ones]
    assert answers == [[expected] * ASKED] * CLIENTS, "the parameters are the same"
    assert eventually(lambda: pids_of(system, "cache") - {first})
    with system.admin() as admin:
        evicted = admin.get("/evictions").json()["evictions"]
    assert {one["kind"] for one in evicted} == {"instance", "copy"}
    last = evicted[0]["inputs"]["model"]
    why = system.cli("why-evicted", last)["evictions"]
    assert why[0]["inputs"]["model"] == last
    assert why[0]["reason"].startswith("pilotlight: ")


def test_pins_in_the_way_are_named(system: RunningSystem) -> None:
    pinned, other = MODELS[:PLACES], MODELS[PLACES]
    for name in pinned:
        system.cli("model", "pin", name)

    for name in pinned:
        complete(system, name)
    with pytest.raises(APIStatusError, match="unpin model-") as refused:
        complete(system, other)
    assert refused.value.status_code == 503
    system.cli("model", "unpin", pinned[0])
    assert complete(system, other) == complete(system, pinned[1])
