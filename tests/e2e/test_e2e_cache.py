"""More models than room: they take turns on a device and in a host pool while the cache is killed,
and no request fails; what went says why, and pins in the way are named.
"""

import os
import random
import shutil
import signal
import threading
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


def complete(system: RunningSystem, model: str, tokens: int = 8) -> str:
    with system.openai() as client:
        answer = client.completions.create(
            model=model, prompt=[0, 5, 6, 7], max_tokens=tokens, temperature=0, seed=1
        )
    return answer.choices[0].text


def streamed(system: RunningSystem, model: str, tokens: int) -> str:
    with system.openai() as client:
        chunks = client.completions.create(
            model=model,
            prompt=[0, 5, 6, 7],
            max_tokens=tokens,
            temperature=0,
            seed=1,
            stream=True,
        )
        return "".join(one.choices[0].text for one in chunks if one.choices)


def pids_of(system: RunningSystem, service: str) -> set[int]:
    found = {int(path.stem.rpartition("-")[2]) for path in system.home.glob(f"**/{service}-*.sock")}
    return {pid for pid in found if Path(f"/proc/{pid}").exists()}


def test_no_request_fails_while_models_take_turns_and_the_cache_is_killed(
    system: RunningSystem,
) -> None:
    """Whole answers and streams, short and long ones. The cache is killed before anything is
    loaded, and once more when a third of the answers are there.
    """
    lengths = (8, 64)
    expected = {tokens: complete(system, MODELS[0], tokens) for tokens in lengths}
    rng = random.Random(18)
    asked = [[rng.choice(MODELS) for _ in range(ASKED)] for _ in range(CLIENTS)]
    asked[0][: len(MODELS)] = MODELS
    answered = threading.Semaphore(0)

    def ask_all(client: int, models: list[str]) -> list[tuple[int, str]]:
        answers: list[tuple[int, str]] = []
        for at, model in enumerate(models):
            tokens = lengths[at % 2]
            ask = complete if (client + at) % 3 else streamed
            answers.append((tokens, ask(system, model, tokens)))
            answered.release()
        return answers

    (first,) = pids_of(system, "cache")
    with ThreadPoolExecutor(CLIENTS) as clients:
        running_ones = [clients.submit(ask_all, *each) for each in enumerate(asked)]
        os.kill(first, signal.SIGKILL)
        for _ in range(CLIENTS * ASKED // 3):
            answered.acquire(timeout=120.0)
        assert eventually(lambda: pids_of(system, "cache") - {first})
        next_ones = pids_of(system, "cache")
        for pid in next_ones:
            os.kill(pid, signal.SIGKILL)
        found = [one.result() for one in running_ones]
    for answers in found:
        assert len(answers) == ASKED
        assert all(text == expected[tokens] for tokens, text in answers), "equal parameters"
    assert eventually(lambda: pids_of(system, "cache") - {first, *next_ones})
    with system.admin() as admin:
        evicted = admin.get("/evictions").json()["evictions"]
    assert {one["kind"] for one in evicted} == {"instance", "copy"}
    last = evicted[0]["inputs"]["model"]
    why = system.cli("why-evicted", last)["evictions"]
    assert why[0]["inputs"]["model"] == last
    assert why[0]["reason"].startswith("pilotlight: ")
    chosen = [one["inputs"] for one in evicted if one["inputs"]["spared"]]
    assert chosen
    for one in chosen:
        assert one["score"] <= min(each["score"] for each in one["spared"])


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
