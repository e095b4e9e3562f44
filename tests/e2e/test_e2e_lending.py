"""Two models on one device: the first takes the device's KV under load, the second has its room at
once, and the first goes on with the same tokens.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FIRST, SECOND = "first", "second"
DEVICE_BYTES = 128 * 2**20
"""Three times what one of them needs at least: each leaves half of what is free to others."""
PROMPTS = [[2 + number, *range(40, 640)] for number in range(14)]
OUTPUT_TOKENS = 120


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """One worker, and two models in a dtype in which batches do not matter."""
    home: Path = tmp_path_factory.mktemp("lending")
    home.chmod(0o711)
    folder = home / "copies"
    shutil.copytree(DEMO_FOLDER, folder)
    environment = {
        "PILOTLIGHT_MODEL_ROOTS": str(folder),
        "PILOTLIGHT_DEVICE_BYTES": str(DEVICE_BYTES),
    }
    with running(home / "home", environment=environment) as started:
        for name in (FIRST, SECOND):
            started.cli("model", "add", name, str(folder), "--dtype", "float32")
        yield started


def complete(system: RunningSystem, model: str, prompt: list[int], max_tokens: int) -> str:
    with system.openai() as client:
        answer = client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            seed=1,
            extra_body={"ignore_eos": True},
        )
    return answer.choices[0].text


def held(system: RunningSystem, model: str) -> dict[str, Any] | None:
    """The stage of a model, as its worker reported it last."""
    with system.admin() as admin:
        (worker,) = admin.get("/workers").json()["workers"]
    return next((one for one in worker["held"] if one["model"] == model), None)


def capacity_tokens(system: RunningSystem, model: str) -> int:
    stage = held(system, model)
    return stage["kv_capacity_tokens"] if stage is not None else 0


def test_a_model_gives_kv_back_to_the_next_one_and_loses_nothing(system: RunningSystem) -> None:
    expected = [complete(system, FIRST, prompt, OUTPUT_TOKENS) for prompt in PROMPTS]
    granted = held(system, FIRST)
    assert granted is not None
    assert granted["kv_capacity_tokens"] < sum(map(len, PROMPTS))
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        running_ones = [
            clients.submit(complete, system, FIRST, prompt, OUTPUT_TOKENS) for prompt in PROMPTS
        ]
        eventually(lambda: capacity_tokens(system, FIRST) > granted["kv_capacity_tokens"])
        assert complete(system, SECOND, [0, 5, 6, 7], 8) == complete(
            system, SECOND, [0, 5, 6, 7], 8
        )
        first, second = held(system, FIRST), held(system, SECOND)
        assert first is not None, "the newcomer took what was lent, and evicted nobody"
        assert second is not None
        taken = [one["device_bytes"] + one["loan"]["lent_bytes"] for one in (first, second)]
        assert sum(taken) <= DEVICE_BYTES
        assert [one.result() for one in running_ones] == expected
    with system.admin() as admin:
        instances = admin.get("/instances").json()["instances"]
    assert sorted(one["model"] for one in instances) == [FIRST, SECOND], "none was started twice"
